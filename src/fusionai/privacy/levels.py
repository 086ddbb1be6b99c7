"""Adversaries and what each privacy level holds against them, as data. Decides the words; the figures are measured.

Loads no framework. Neighbours: `primitives.privacy` names the levels and what stays with the job owner, `measured` has
what was recovered, `docs/threat_model.md` says it at length.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from fusionai.primitives.privacy import PrivacyLevel

Adversary = Literal["A0", "A1", "A2", "A3", "A4", "A5"]
ADVERSARIES: Final[dict[Adversary, str]] = {
    "A0": "somebody on the network, who reads, delays and changes what passes",
    "A1": "a curious peer, who computes as agreed, and keeps and reads all that it is given",
    "A2": "several peers who pool what they are given",
    "A3": "a peer who computes something else, and reads as A1 does",
    "A4": "a curious broker, who reads all that it has",
    "A5": "a broker who lies: about who is there, and who is a member",
}
Stand = Literal["promises nothing", "holds", "reads tokens", "reconstructs", "only those trusted"]
"""Against one adversary. Reads tokens: they are sent to it. Reconstructs: what is sent to it can be inverted, how far
is measured. Only those trusted: as reconstructs, by peers whose keys the job owner's trusted keys have signed."""

_PEERS: Final[tuple[Adversary, ...]] = ("A1", "A2", "A3")


def _stands(network: Stand, peers: Stand, curious: Stand, lying: Stand) -> dict[Adversary, Stand]:
    return {"A0": network, **dict.fromkeys(_PEERS, peers), "A4": curious, "A5": lying}


STANDS: Final[dict[PrivacyLevel, dict[Adversary, Stand]]] = {
    "open": _stands("promises nothing", "reads tokens", "promises nothing", "promises nothing"),
    "encrypted": _stands("holds", "reads tokens", "holds", "reads tokens"),
    "split": _stands("holds", "reconstructs", "holds", "reconstructs"),
    "split-k": _stands("holds", "reconstructs", "holds", "reconstructs"),
    "trusted": _stands("holds", "only those trusted", "holds", "holds"),
}
"""A broker that lies can bring in a peer of its own, unless peers must be signed for: then it is as such a peer."""
assert set(get_args(Adversary)) == set(ADVERSARIES)
