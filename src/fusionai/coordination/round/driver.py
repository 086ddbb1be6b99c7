"""What the driver machines of training and serving jobs are made of: roles in force, rounds, lost peers, faults.

`training.state` and `serving.state` add what only their kind of job has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fusionai.coordination.machine import C, P, StatefulMachine
from fusionai.coordination.round.interface import DriverEvent, LinkBroken, PlanRoles
from fusionai.wire.base import Fence

R = TypeVar("R", bound=PlanRoles)


@dataclass(slots=True)
class Faults:
    """Faults of links and stages since the job last made progress: a link or stage that works is forgiven."""

    links: Counter[frozenset[str]] = field(default_factory=Counter[frozenset[str]])
    """Pair of peers -> breaks of their link."""
    stages: Counter[int] = field(default_factory=Counter[int])
    """Stage -> failures."""

    def link_broken(
        self, event: LinkBroken, roles: PlanRoles, peers: Set[str], has_standby: Collection[int]
    ) -> str | None:
        """Count a broken link. Returns the peer to remove if it is the second break; "" at the first, after which
        another round under the same plan tries the link again; None if these are not two of `peers`."""
        pair = frozenset((event.reporter, event.other))
        if len(pair) < 2 or not pair <= peers:
            return None
        self.links[pair] += 1
        return self.blamed(pair, roles, has_standby) if self.links[pair] > 1 else ""

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


@dataclass(slots=True, kw_only=True)
class JobState(StatefulMachine[P, C], Generic[P, C, R]):
    """State of a driver's machine that both kinds of job have. `incarnation`: number of the driver's process."""

    roles: R
    """Roles in force."""
    incarnation: int
    attempt: int = -1
    """Number of the round, which is part of its fence."""
    lost: set[str] = field(default_factory=set[str])
    """Peers of the plan that were lost. A later plan must not contain them unless they are back."""
    pending: R | None = None
    """A newer plan that is not in force yet."""
    faults: Faults = field(default_factory=Faults)

    def next_fence(self) -> Fence:
        """Return the fence of the roles and attempt that a round begins with."""
        return Fence(self.roles.version, self.incarnation, self.attempt)

    def counts(self, event: DriverEvent, fence: Fence) -> bool:
        """Return whether the event belongs to the round of `fence`, or to no round in particular."""
        return event.fence in (None, fence)
