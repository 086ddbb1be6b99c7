"""Places, caches and predicted times of one plan version, as the machine of a serving job sees them.

`serving.deployment` makes it from a plan and its partition; `coordination.serving.driver` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusionai.coordination.round.roles import PlanRoles


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRoles(PlanRoles):
    """Stages are numbered from 0 in pipeline order; each has at most one warm standby."""

    caching: frozenset[int]
    """Stages with attention layers, which have caches."""
    checkable: frozenset[int] = frozenset()
    """Stages that can be spot-checked, because other members know their inputs and outputs."""
    predicted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """Stage -> time that the plan expects one token to take."""

    @property
    def last_caching(self) -> int:
        """The last stage with a cache; -1 without any."""
        return max(self.caching, default=-1)

    def standby_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, standby in sorted(self.standbys.items()) if standby == peer)
