"""Who does what in one plan version of a serving job, as its machine sees it. Decides nothing.

Neighbours: `serving` makes it from a plan and its partition; `coordination.serving.driver` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRoles:
    """`places`: stage -> peer, for stages 0 to n-1 in pipeline order. `guards`: stage -> the warm spare that has its
    weights, at most one each."""

    version: int
    owner: str
    places: Mapping[int, str]
    guards: Mapping[int, str] = field(default_factory=dict[int, str])
    caching: frozenset[int]
    """Stages with attention layers: these have caches."""
    checkable: frozenset[int] = frozenset()
    """Stages of which others know what they got and what they gave."""
    partition: str = ""
    """Names the cut: programs and caches of another cut are of no use here."""
    predicted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """By stage, what the plan expects one token to take."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.places.values()) | frozenset(self.guards.values())

    @property
    def last_caching(self) -> int:
        """The last stage with a cache; -1 without any."""
        return max(self.caching, default=-1)

    def stages_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, place in sorted(self.places.items()) if place == peer)

    def guarded_by(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, guard in sorted(self.guards.items()) if guard == peer)

    def moves(self, other: ServingRoles) -> bool:
        """Whether some stage runs elsewhere, or is another one, under `other`."""
        return self.partition != other.partition or dict(self.places) != dict(other.places)
