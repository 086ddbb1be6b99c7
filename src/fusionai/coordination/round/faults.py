"""Counts the faults of a job's links and stages, and decides which peer of a broken link to remove.

The counts cover the time since the job last made progress: a link or stage that works is forgiven. The machines of
training and serving own one `Faults` each and decide what a count means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from fusionai.coordination.round.interface import PlanRoles


@dataclass(slots=True)
class Faults:
    links: Counter[frozenset[str]] = field(default_factory=Counter[frozenset[str]])
    """Pair of peers -> breaks of their link."""
    stages: Counter[int] = field(default_factory=Counter[int])
    """Stage -> failures."""

    def link_broke(self, pair: frozenset[str]) -> int:
        """Count a broken link. Returns how often it has broken."""
        self.links[pair] += 1
        return self.links[pair]

    def stage_failed(self, stage: int) -> int:
        """Count a failed stage. Returns how often it has failed."""
        self.stages[stage] += 1
        return self.stages[stage]

    def forgive_links(self, peers: frozenset[str]) -> None:
        """Reset the counts of links among these peers, because the links have carried their traffic."""
        self.links = Counter({pair: times for pair, times in self.links.items() if not pair <= peers})

    def clear(self) -> None:
        self.links.clear()
        self.stages.clear()

    def blamed(self, pair: Collection[str], roles: PlanRoles, has_standby: Collection[int]) -> str:
        """Return which peer of a broken link to remove. Never the job owner; otherwise in order: a peer that runs no
        stage, a peer that has trouble with most others, a peer that can be replaced at once because all its stages are
        in `has_standby`."""

        def weight(peer: str) -> tuple[bool, int, bool, str]:
            stages = roles.stages_of(peer)
            troubles = sum(peer in other for other in self.links)
            return (not stages, troubles, all(stage in has_standby for stage in stages), peer)

        return max((peer for peer in pair if peer != roles.owner), key=weight)
