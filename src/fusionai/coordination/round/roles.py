"""What one plan version says about who runs a job, who stands by and who owns it, for training and serving alike.

`coordination.training.roles` and `coordination.serving.roles` add what only their kind of job has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRoles:
    version: int
    owner: str
    places: Mapping[int, str]
    """Stage -> peer that runs it."""
    standbys: Mapping[int, str] = field(default_factory=dict[int, str])
    """Stage -> warm standby, which holds the stage's snapshots (training) or weights (serving)."""
    partition: str = ""
    """Name of the cut. State of another cut's stages can't be used."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.places.values()) | frozenset(self.standbys.values())

    def stages_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, place in sorted(self.places.items()) if place == peer)

    def moves(self, other: Self) -> bool:
        """Return whether a stage runs elsewhere, or is another one, under `other`."""
        return self.partition != other.partition or dict(self.places) != dict(other.places)
