"""Adversaries, and what each privacy level promises against them, as data. Loads no framework.

`primitives.privacy` names the levels and what stays with the job owner, `measured` has what attacks recovered,
`docs/threat_model.md` explains the levels in detail.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from fusionai.primitives.privacy import PrivacyLevel

Adversary = Literal["A0", "A1", "A2", "A3", "A4", "A5"]
ADVERSARIES: Final[dict[Adversary, str]] = {
    "A0": "an attacker on the network, who reads, delays and changes traffic",
    "A1": "a curious peer, which computes as agreed, and keeps and reads all that it receives",
    "A2": "several peers that pool what they receive",
    "A3": "a malicious peer, which computes something else, and reads as A1 does",
    "A4": "a curious broker, which reads all that it has",
    "A5": "a malicious broker, which lies about which peers are present and which are members",
}
Stand = Literal["promises nothing", "holds", "reads tokens", "reconstructs", "only those trusted"]
"""What a level promises against one adversary.

"reads tokens": the adversary receives token ids. "reconstructs": what it receives can be inverted to the extent that
was measured. "only those trusted": as "reconstructs", but limited to peers whose keys are signed by keys that the job
owner trusts.
"""

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
"""A malicious broker can add a peer of its own, and then has what that peer has, unless peers must be endorsed."""
assert set(get_args(Adversary)) == set(ADVERSARIES)
