"""Looks for a better plan while a job runs: for machines that leave, could be standbys, are too slow, or are faster.

Requests one plan at a time, and none while a stage waits for a replacement. Renews tickets long before they expire, so
that the broker may be away for a while; while it is away, the next check tries again.

`client.pool.replanning` has plans adopted, and a job's driver changes over to them at a quiet moment.
`scheduling.standby.takeover`, `straggling` and `promotion` find better plans; `promises` tracks whether they were
better."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from fusionai.client.pool.job_trust import JobTrust, parts
from fusionai.client.pool.replanning import RETRIED, PoolReplanner
from fusionai.client.pool.session import PoolMember, near_links
from fusionai.execution.connections import Deployment
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.process import in_background
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.continuation import handed_on, keeps_bits, widened
from fusionai.scheduling.standby.promotion import GainHistory, Promotion, promoted, with_prediction, with_step
from fusionai.scheduling.standby.straggling import Better, Straggling, better_plan, observed, watching
from fusionai.scheduling.standby.takeover import handed_over, reinforced, with_profiles
from fusionai.training import progress
from fusionai.transport.security.signed import expiry_s

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
TRUST_LOOK_S: Final = 1.0
RENEW_S: Final = 240.0
"""Remaining validity at which tickets are renewed, in seconds (chosen); half of their full validity if that is less."""
COMPUTE: Final = ("forward", "backward", "weights")
PATIENCE_S: Final = 30.0
"""Time that an offered plan may wait for a quiet moment before another is offered, in seconds (chosen)."""


class Watched(Protocol):
    """A training driver or a serving engine, which follows plans."""

    @property
    def deployment(self) -> Deployment: ...

    @property
    def plan(self) -> Plan:
        """The plan in force without lost standbys, which the pool may replace."""
        ...

    @property
    def is_waiting(self) -> bool: ...

    @property
    def warm_stages(self) -> frozenset[int]:
        """Stages whose warm standby could take over now."""
        ...

    def offer(self, deployment: Deployment, reason: str) -> None: ...

    def renew(self, deployment: Deployment) -> None: ...

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat `peer` as lost."""
        ...


W = TypeVar("W", bound=Watched)


@dataclass
class PoolWatch(Generic[W]):
    """Checks the pool for a job. `run` lasts until cancelled; `see` must get the job's progress."""

    replanner: PoolReplanner
    driver: W
    owner: PeerId
    clock: Clock
    _offered: tuple[int, float] = (0, 0.0)
    """Latest version offered, and its time."""
    _fallen: set[str] = field(default_factory=set[str])
    """Standbys lost since the start of the last check."""
    _unsure: bool = False
    """Whether the broker may have a different plan in force: an answer was lost, or a standby was lost before it."""
    _compared: object = None
    """Plan, machines and standbys for which no faster peer for a stage was found."""
    _leaving: tuple[frozenset[str], float] = (frozenset(), 0.0)
    """Peers that leave, and since when."""
    _widest: object = None
    """Stages and machines for which no new cut was found that is worth the change."""
    _step: int = 0
    _slow: Straggling = field(default_factory=lambda: watching(0))
    _gains: GainHistory = field(default_factory=GainHistory)

    def __post_init__(self) -> None:
        self._lasts_s = self._left_s()

    def see(self, event: progress.Progress) -> None:
        match event:
            case progress.StepDone(record=record, spans=spans, replayed=False):
                self._step = record.step + 1
                busy_s = {
                    stage: sum(one.end_s - one.start_s for one in all_ if one.kind in COMPUTE)
                    for stage, all_ in spans.items()
                }
                plan = self.driver.deployment.plan
                self._slow = observed(self._slow, plan, busy_s)
                self._gains = with_step(self._gains, plan, event.step_s, self.clock.now_s())
            case progress.PlanChanged():
                self._slow = watching(self._step)
            case progress.FaultSeen(kind="standby", peer=peer):
                self.replanner.machines.note_lost(peer)
                self._fallen.add(peer)
            case _:
                return

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except RefusedError as error:
                if error.code not in (*RETRIED, "unknown_job"):
                    raise
                log.info("no better plan: %s", error)
            except FusionError as error:
                log.info("can't list the pool: %s", error)

    async def _look(self) -> None:
        if self.driver.is_waiting:
            return
        if self._unsure:
            await self._agree()
        await self._renew()
        version, offered_s = self._offered
        pending = version > self.driver.deployment.plan.version
        if pending and self.clock.now_s() - offered_s < PATIENCE_S:
            return
        self._fallen.clear()
        plan, warm_stages = self.driver.plan, self.driver.warm_stages
        self.replanner.machines.keep_in_mind(stage.peer for stage in plan.stages)
        self.replanner.machines.note_sound(stage.peer for stage in plan.stages)
        self.replanner.machines.note_sound(standby.peer for standby in plan.standbys if standby.stage in warm_stages)
        members = await self.replanner.pool.pool()
        found = self._handed_over(members) or await self._widened(members)
        found = found or self._with_standbys(members) or await self._faster(members)
        if found is not None:
            await self._offer(*found)
        elif (promotion := await self._promoted(members)) is not None:
            await self._offer(promotion.plan, promotion.reason)
            self._gains = with_prediction(self._gains, promotion.plan, promotion.gain)

    async def _offer(self, wanted: Plan, reason: str) -> None:
        try:
            deployment = await self.replanner.make_real(wanted)
        except TransportError:
            self._unsure = True
            raise
        plan = deployment.plan
        if self._fallen & {one.peer for one in (*plan.stages, *plan.standbys)}:
            self._unsure = True
            return
        self._offered = (plan.version, self.clock.now_s())
        if not self.driver.is_waiting:
            self.driver.offer(deployment, reason)

    async def _agree(self) -> None:
        """Agree with the broker on the plan in force. If it has one that the driver never adopted, offer the driver's
        plan as a new version."""
        try:
            self.driver.renew(await self.replanner.renewed(self.driver.deployment))
            self._unsure = False
        except RefusedError as error:
            if error.code != "stale_fence":
                raise
            self._unsure = False  # `_offer` sets it again if its answer is lost
            await self._offer(self._plan(), "the broker had another plan in force")

    async def _renew(self) -> None:
        if self._left_s() < min(RENEW_S, self._lasts_s / 2):
            self.driver.renew(await self.replanner.renewed(self.driver.deployment))
            self._lasts_s = self._left_s()

    def _left_s(self) -> float:
        deployment = self.driver.deployment
        ticket = deployment.tickets.get(self.owner)
        return 0.0 if ticket is None else expiry_s(ticket) - (self.clock.wall_s() - deployment.clock_ahead_s)

    def _plan(self) -> Plan:
        return msgspec.structs.replace(self.driver.plan, version=0)

    def _there(self, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        """Return the members that may be used, without lost ones that are not back."""
        return tuple(one for one in self.replanner.spare(members) if self.replanner.machines.is_back(one))

    def _handed_over(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        """Return a plan that replaces peers which leave cleanly. Such a peer works until it is replaced. The broker
        releases it with the first plan without it, so there is an intermediate plan in which its successors already run
        its stages and it is their standby."""
        plan = self._plan()
        parts = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        leaving = [one for one in members if one.view.state == "draining" and one.view.peer in parts]
        if not leaving:
            return None
        gone = frozenset(one.view.peer for one in leaving)
        candidates = [one.profile for one in self._there(members) if one.view.peer not in gone]
        found = handed_over(plan, self.replanner.unforced, gone, candidates)
        if self._leaving[0] != gone:
            self._leaving = (gone, self.clock.now_s())
        if found is None and self.clock.now_s() - self._leaving[1] >= self.replanner.grace_s:
            found = handed_on(plan, self.replanner.problem, gone, candidates, self.replanner.policy)
        if found is None:
            return None  # it stays; the next check may find a successor
        names = ", ".join(one.named for one in leaving)
        works = any(stage.peer in gone for stage in plan.stages)
        return found, f"{names} leaves and hands its work over" if works else f"{names} leaves"

    async def _widened(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        """If the model was cut anew over fewer machines, return a plan that includes machines that have joined
        since."""
        plan, step = self._plan(), self._step
        there = self._there(members)
        problem = msgspec.structs.replace(self.replanner.problem, links=near_links(there))
        seen = (plan.stages, tuple(one.profile for one in there), problem.links)
        if not self.replanner.is_shrunk or not self._slow.rested(step) or self._widest == seen:
            return None
        self._widest = seen
        profiles, left = [one.profile for one in there], self.replanner.steps - step
        search = partial(widened, plan, problem, profiles, steps_left=left, tolerant=self.replanner.is_tolerant)
        found = await in_background(search)
        if found is None:
            return None
        return found.plan, f"machines have joined: {found.words(with_profiles(problem, profiles))}"

    def _with_standbys(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        plan = self._plan()
        candidates = [one.profile for one in self._there(members)]
        # Tried even without new peers: a standby may also take the stage of a lost one.
        found = reinforced(plan, self.replanner.problem, candidates)
        if found is None:
            return None
        had = {(standby.stage, standby.peer) for standby in plan.standbys}
        stages = [str(standby.stage) for standby in found.standbys if (standby.stage, standby.peer) not in had]
        return found, f"a warm standby for stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} is available"

    async def _faster(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        if not self._slow.due(self._step):
            return None
        plan, watch, step = self._plan(), self._slow, self._step
        there = self._there(members)
        peers = tuple(one.profile for one in there)
        problem = msgspec.structs.replace(self.replanner.problem, peers=peers, links=near_links(there))
        better: Better | None = await in_background(lambda: better_plan(watch, plan, problem, step))
        self._slow = self._slow.asked(step)
        if better is None or not self._is_allowed(plan, better.plan):
            return None
        self.replanner.problem = better.problem
        self.replanner.machines.learn(better.slow)
        return better.plan, better.reason

    async def _promoted(self, members: tuple[PoolMember, ...]) -> Promotion | None:
        plan, problem, step = self._plan(), self.replanner.unforced, self._step
        there = tuple(one.profile for one in self._there(members))
        warm_stages, rested = self.driver.warm_stages, self._slow.rested(step)
        trust = self._gains.trust(self.clock.now_s())
        seen = (plan, there, warm_stages, rested, trust)
        if seen == self._compared:
            return None
        left = self.replanner.steps - step
        search = partial(
            *(promoted, plan, problem, there), warm_stages=warm_stages, steps_left=left, rested=rested, trust=trust
        )
        found = await in_background(search)
        if found is None or not self._is_allowed(plan, found.plan):
            self._compared = seen
            return None
        return found

    def _is_allowed(self, plan: Plan, better: Plan) -> bool:
        """Return whether stages may move as in `better`: only if the bits stay the same or already differ."""
        return self.replanner.is_tolerant or keeps_bits(plan, better, self.replanner.problem)


async def watch_trust(trust: JobTrust, driver: Watched) -> None:
    """Shut out members that are no longer trusted, until cancelled. Returns at once for a job that does not need
    trusted peers."""
    while trust.required:
        await asyncio.sleep(TRUST_LOOK_S)
        for peer in sorted(parts(driver.deployment.plan)):
            if (reason := trust.reason_against(peer)) is not None:
                log.warning("peer %s is shut out: %s", short(peer), reason)
                driver.shut_out(peer, f"it is not trusted (any more): {reason}")
