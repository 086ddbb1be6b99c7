"""Checks the pool for one pipeline of a served model, and gets plans for it.

Like `client.pool.watch` for training, except that the engine is notified of a leaving machine: it first moves sessions
to the stage's warm standby and then requests a plan without the machine. Machines that are back or new take stages
while no session runs; `scheduling.standby.continuation` decides when another cut is worth it.
`client.serving.pipelines` runs the watch beside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from fusionai.client.pool.replanning import PoolReplanner
from fusionai.client.pool.session import PoolMember, near_links
from fusionai.client.pool.watch import PoolWatch
from fusionai.primitives.process import in_background
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.scheduling.standby.continuation import Regrowth, regrown
from fusionai.scheduling.standby.takeover import WaitingForMachines, reinforced, with_profiles
from fusionai.serving.engine import ServingEngine


class ServingReplanner(PoolReplanner):
    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]) -> Plan | WaitingForMachines:
        found = super()._replaced(plan, lost, members)
        returned = self._returned(lost, members)
        if isinstance(found, WaitingForMachines) or not returned:
            return found
        return reinforced(found, self.problem, returned) or found


Priced = Callable[[tuple[PeerProfile, ...]], tuple[PeerProfile, ...]]
"""Profiles as plans should see them."""


@dataclass(kw_only=True)
class ServingWatch(PoolWatch[ServingEngine]):
    """Checks the pool for a serving job. `run` lasts until cancelled. `stands_by`: whether free machines become
    standbys."""

    priced: Priced
    stands_by: bool
    _announced: frozenset[str] = frozenset()
    _regrowth: Regrowth = field(default_factory=Regrowth)
    _served: tuple[int, int] = (0, 0)
    """Tokens emitted and read at the last look."""

    def _handed_over(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        plan = self.driver.deployment.plan
        parts = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        leaving = {one.view.peer for one in members if one.view.state == "draining"} & parts
        for peer in sorted(leaving - self._announced):
            self.driver.leaving(peer)
        self._announced = frozenset(leaving)
        return None

    def _with_standbys(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        return super()._with_standbys(members) if self.stands_by else None

    async def _widened(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        """Another plan over all that are there, where it is faster and no session runs."""
        there = self._there(members)
        idle, names = self._is_idle(), frozenset(one.view.peer for one in there)
        now_s = self.clock.now_s()
        self._regrowth = self._regrowth.seen(now_s, idle=idle, there=names)
        if not self._regrowth.is_due(now_s) or self._announced:
            return None
        plan = self._plan()
        profiles = self.priced(tuple(one.profile for one in there))
        problem = msgspec.structs.replace(self.replanner.problem, links=near_links(there))
        seen = (plan.stages, profiles, problem.links)
        if self._widest == seen:
            return None
        self._widest = seen
        found = await in_background(partial(regrown, plan, problem, profiles))
        if found is None or not self._is_idle():
            return None
        self._regrowth = self._regrowth.moved(self.clock.now_s())
        what = found.words(with_profiles(problem, profiles)) if found.recut else "stages move to faster machines"
        return found.plan, f"no session runs: {what}"

    def _is_idle(self) -> bool:
        """Whether the job is ready, no session runs or waits, and none has since this was last asked."""
        status = self.driver.status
        before, self._served = self._served, (status.emitted_tokens, status.prompt_tokens)
        return status.state == "ready" and not status.running and not status.queued and before == self._served
