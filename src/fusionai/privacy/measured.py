"""What was measured on a small real model and ships with the product: the figures that `fusion privacy` and
`fusion serve` print. Decides which figure tells a level: what the strongest attack recovered of what peers see at it.

Loads no framework. Neighbours: `findings` has the type, `fusion audit` makes the file anew (see `docs/privacy.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.privacy.findings import Boundary, Findings

_SHIPPED: Final = "data/audit.json"
SENT: Final = ("clean", "int8", "int4")
"""How boundaries leave a job owner: as they are, or as links pack them."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of the boundaries that peers see at a level: where the strongest attack recovered most, and where least."""

    most: Boundary
    least: Boundary

    @property
    def spelled(self) -> str:
        """One share, or from one to another."""
        low, high = f"{self.least.worst.top1:.0%}", f"{self.most.worst.top1:.0%}"
        return high if low == high else f"{low} to {high}"


@cache
def shipped() -> Findings:
    """The audit that came with this version. Raises `StorageError` for a damaged installation."""
    try:
        return read((resources.files("fusionai.privacy") / _SHIPPED).read_bytes())
    except (OSError, msgspec.MsgspecError) as problem:
        raise StorageError(
            f"the measured audit of this installation can't be read: {problem}.", hint="Install fusionai again."
        ) from problem


def read(text: bytes) -> Findings:
    """What `fusion audit --json` wrote. Raises `msgspec.MsgspecError`."""
    written: dict[str, Any] = msgspec.json.decode(text)
    return msgspec.convert({name: value for name, value in written.items() if name != "schema"}, Findings)


def told(level: PrivacyLevel, findings: Findings, packed: str = "clean") -> Told:
    """`packed`: how boundaries travel, one of `SENT`. At `split-k` not the first depths are seen, else all are."""
    first = findings.local_blocks if level == "split-k" else 0
    seen = [one for one in findings.boundaries if one.defence == packed and one.depth >= first]
    return Told(max(seen, key=lambda one: one.worst.top1), min(seen, key=lambda one: one.worst.top1))


def sentence(level: PrivacyLevel) -> str:
    """For whoever is about to send text to peers at `level`; the figure is the shipped audit's."""
    if level in ("open", "encrypted"):
        return "peers can read your text: one of them is given its token ids"
    found = told(level, shipped())
    whom = "trusted peers" if level == "trusted" else "peers"
    return (
        f"{whom} can reconstruct your text: measured {found.spelled} of tokens ({found.most.worst.attack}, at depths "
        f"{found.least.depth if level == 'split-k' else 0} to {shipped().depths[-1]}); see `fusion privacy`"
    )
