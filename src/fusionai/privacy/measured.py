"""The audit that ships with the product, measured on a small real model. `fusion privacy` and `fusion serve` print it.

Decides which figure represents a level: the most that any attack recovered from what peers see at that level. Loads no
framework. `findings` has the types, `fusion audit` creates the file (see `docs/privacy.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Literal, get_args

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.privacy.findings import BoundaryFindings, Findings

_SHIPPED: Final = "data/audit.json"
SENT: Final = ("clean", "int8", "int4")
"""How boundaries leave a job owner: unchanged, or packed by links."""


@dataclass(frozen=True, slots=True)
class MeasuredLeakage:
    """The boundaries that peers see at a level where the best attack recovered most and least."""

    most: BoundaryFindings
    least: BoundaryFindings

    @property
    def spelled(self) -> str:
        """The recovered share, or the range of shares."""
        low, high = f"{self.least.worst.top1:.0%}", f"{self.most.worst.top1:.0%}"
        return high if low == high else f"{low} to {high}"


@cache
def shipped() -> Findings:
    """Return the audit shipped with this version. Raises `StorageError` for a damaged installation."""
    try:
        return read((resources.files("fusionai.privacy") / _SHIPPED).read_bytes())
    except (OSError, msgspec.MsgspecError) as problem:
        raise StorageError(
            f"the measured audit of this installation can't be read: {problem}.", hint="Install fusionai again."
        ) from problem


def read(text: bytes) -> Findings:
    """Decode the output of `fusion audit --json`. Raises `msgspec.MsgspecError`."""
    written: dict[str, Any] = msgspec.json.decode(text)
    return msgspec.convert({name: value for name, value in written.items() if name != "schema"}, Findings)


def measured_leakage(level: PrivacyLevel, findings: Findings, packed: str = "clean") -> MeasuredLeakage:
    """Return the extreme boundaries at a level. `packed`: how boundaries are sent, one of `SENT`. At `split-k` the
    first depths are not seen."""
    first = findings.local_blocks if level == "split-k" else 0
    seen = [one for one in findings.boundaries if one.defence == packed and one.depth >= first]
    return MeasuredLeakage(max(seen, key=lambda one: one.worst.top1), min(seen, key=lambda one: one.worst.top1))


def sentence(level: PrivacyLevel) -> str:
    """Return a warning for a user about to send text to peers at `level`, with the figure of the shipped audit."""
    if level in ("open", "encrypted"):
        return "peers can read your text: one of them receives its token ids"
    found = measured_leakage(level, shipped())
    whom = "trusted peers" if level == "trusted" else "peers"
    return (
        f"{whom} can reconstruct your text: measured {found.spelled} of tokens ({found.most.worst.attack}, at depths "
        f"{found.least.depth if level == 'split-k' else 0} to {shipped().depths[-1]}); see `fusion privacy`"
    )


Adversary = Literal["A0", "A1", "A2", "A3", "A4", "A5"]
ADVERSARIES: Final[dict[Adversary, str]] = {
    "A0": "an attacker on the network, who reads, delays and changes traffic",
    "A1": "a curious peer, which computes as agreed, and keeps and reads all that it receives",
    "A2": "several peers that pool what they receive",
    "A3": "a malicious peer, which computes something else, and reads as A1 does",
    "A4": "a curious broker, which reads all data it stores",
    "A5": "a malicious broker, which lies about which peers are present and which are members",
}
Stand = Literal["promises nothing", "holds", "reads tokens", "reconstructs", "only those trusted"]
"""What a level promises against one adversary. "reads tokens": the adversary receives token ids. "reconstructs": what
it receives can be inverted to the extent that was measured. "only those trusted": as "reconstructs", but limited to
peers whose keys are signed by keys that the job owner trusts."""

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
