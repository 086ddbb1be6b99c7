"""Who does what in one plan version, as the driver's machine sees it. Decides nothing.

Neighbours: `training` makes it from a plan and its partition; `coordination.training.driver` and `restoring` use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """`places`: stage -> peer. `guards`: stage -> the peer that keeps its snapshots."""

    version: int
    owner: str
    places: Mapping[int, str]
    guards: Mapping[int, str] = field(default_factory=dict[int, str])
    snapshot_every: int = 0
    feed_window: int
    """Microbatches that may be fed beyond those whose loss is known."""
    neighbours: Mapping[int, frozenset[int]]
    """Stage -> stages it exchanges tensors with."""
    fed: frozenset[int]
    """Stages that take inputs from the data feed."""
    stateless: frozenset[int] = frozenset()
    """Stages without parameters and buffers (the loss): their state is known at every step."""
    partition: str = ""
    """Names the cut: stages and snapshots of another cut are of no use here."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.places.values()) | frozenset(self.guards.values())

    def stages_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, place in sorted(self.places.items()) if place == peer)

    def moves(self, other: Roles) -> bool:
        """Whether some stage's state has to go somewhere else under `other`."""
        return self.partition != other.partition or dict(self.places) != dict(other.places)
