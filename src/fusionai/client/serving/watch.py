"""Checks the pool while a model is served: for machines that leave, that could be standbys, that would make it faster,
and for tickets that expire.

Works like `client.pool.watch`, except that the engine is notified of a leaving machine: it first moves sessions to the
stage's warm standby and then requests a plan without the machine. Machines that are back or new take stages while no
session runs; `scheduling.standby.continuation` decides when another cut is worth it. `client.serving.serve` runs this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from fusionai.client.pool.background import in_background
from fusionai.client.pool.replanning import PoolReplanner
from fusionai.client.pool.session import PoolMember, near_links
from fusionai.client.pool.watch import PoolWatch
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.scheduling.standby.continuation import Regrowth, regrown
from fusionai.scheduling.standby.takeover import WaitingForMachines, reinforced, with_profiles
from fusionai.serving.engine import ServingEngine


class ServingReplanner(PoolReplanner):
    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]) -> Plan | WaitingForMachines:
        found = super()._replaced(plan, lost, members)
        returned = [one.profile for one in self.usable(members) if one.view.peer in lost and self.is_there(one)]
        if isinstance(found, WaitingForMachines) or not returned:
            return found
        return reinforced(found, self.problem, returned) or found


Priced = Callable[[tuple[PeerProfile, ...]], tuple[PeerProfile, ...]]
"""Profiles as plans should see them."""


class ServingWatch(PoolWatch):
    """Checks the pool for a serving job. `run` lasts until cancelled."""

    def __init__(
        self, replanner: PoolReplanner, engine: ServingEngine, owner: PeerId, clock: Clock, *, priced: Priced
    ) -> None:
        super().__init__(replanner, engine, owner, clock)
        self._engine = engine
        self._priced = priced
        self._announced: frozenset[str] = frozenset()
        self._regrowth = Regrowth()
        self._served = (0, 0)
        """Tokens emitted and read at the last look."""

    def _handed_over(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        plan = self._engine.deployment.plan
        parts = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        leaving = {one.view.peer for one in members if one.view.state == "draining"} & parts
        for peer in sorted(leaving - self._announced):
            self._engine.leaving(peer)
        self._announced = frozenset(leaving)
        return None

    async def _widened(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        """Another plan over all that are there, where it is faster and no session runs."""
        there = [one for one in self._replanner.usable(members) if self._replanner.is_back(one)]
        idle, names = self._is_idle(), frozenset(one.view.peer for one in there)
        now_s = self._clock.now_s()
        self._regrowth = self._regrowth.seen(now_s, idle=idle, there=names)
        if not self._regrowth.is_due(now_s) or self._announced:
            return None
        plan = self._plan()
        profiles = self._priced(tuple(one.profile for one in there))
        problem = msgspec.structs.replace(self._replanner.problem, links=near_links(there))
        seen = (plan.stages, profiles, problem.links)
        if self._widest == seen:
            return None
        self._widest = seen
        found = await in_background(partial(regrown, plan, problem, profiles))
        if found is None or not self._is_idle():
            return None
        self._regrowth = self._regrowth.moved(self._clock.now_s())
        what = found.words(with_profiles(problem, profiles)) if found.recut else "stages move to faster machines"
        return found.plan, f"no session runs: {what}"

    def _is_idle(self) -> bool:
        """Whether the job is ready, no session runs or waits, and none has since this was last asked."""
        status = self._engine.status
        before, self._served = self._served, (status.emitted_tokens, status.prompt_tokens)
        return status.state == "ready" and not status.running and not status.queued and before == self._served
