"""Plans of a simulated job after the first one: replacements for lost peers, and better plans.

Follows the rules of `client.pool.replanning` and `client.pool.watch` without their asynchronous broker:
`scheduling.standby` finds plans and says which lost machines may be used again.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from fusionai.client.pool.replanning import LOOK_S
from fusionai.client.pool.watch import LOOK_S as WATCH_S
from fusionai.client.pool.watch import PATIENCE_S
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.scheduling.standby import continuation
from fusionai.scheduling.standby.promotion import promoted
from fusionai.scheduling.standby.straggling import COOL_DOWN
from fusionai.scheduling.standby.takeover import Loss, WaitingForMachines, handed_over, lost, reinforced, sound
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.scenario import Scenario
from fusionai.wire.messages import Refused

if TYPE_CHECKING:
    from fusionai.simulator.driver import SimulatedDriver

ENDLESS: Final = 2**31
"""Number of steps of a simulated job: it never ends within the simulated time."""


class SimulatedReplanner:
    """Finds plans for one job and has the broker issue them."""

    def __init__(self, driver: SimulatedDriver, broker: SimulatedBroker, problem: Problem, scenario: Scenario) -> None:
        self.takeovers: Counter[str] = Counter()
        """Number of plans made after a loss, by what they kept: `exact`, `tolerant`, `recut`."""
        self._driver = driver
        self._agenda = driver.world.agenda
        self._broker = broker
        self._problem = problem
        self._scenario = scenario
        self._profiles = {peer.peer: peer for peer in problem.peers}
        self._missing: frozenset[str] = frozenset()
        """Lost peers of stages, until a plan without them is in force."""
        self._request = 0
        self._losses: dict[str, Loss] = {}
        self._offered: tuple[int, float] = (0, 0.0)
        """Version of the newest optional plan, and when it was offered."""
        self._looked_at: tuple[object, ...] = ()
        """State of the pool when the last search found no better plan."""
        self._wait_began_s: float | None = None
        self._waited_s = 0.0
        self._rests_until = 0
        """Until this step no stage moves by way of a checkpoint."""
        self._shrunk = False
        """Whether the model was cut again because machines were missing."""
        self._leaving: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._besides: tuple[object, continuation.Otherwise | continuation.Nothing] | None = None
        """The alternative when no machine can take over, and the machines for which it was found."""

    def issue(self, plan: Plan) -> Plan | Refused:
        return self._broker.mint(plan, ENDLESS)

    def usable(self) -> frozenset[str]:
        return frozenset(self._broker.usable())

    def note_loss(self, peer: str) -> None:
        self._losses[peer] = lost(self._losses.get(peer), self._agenda.now_s)

    def wait(self) -> None:
        if self._wait_began_s is None:
            self._wait_began_s = self._agenda.now_s

    def stop_waiting(self) -> None:
        self._waited_s = self.waited_s()
        self._wait_began_s = None

    def waited_s(self) -> float:
        """Seconds waited for machines up to now."""
        return self._waited_s + (0.0 if self._wait_began_s is None else self._agenda.now_s - self._wait_began_s)

    def adopted(self, before: Plan | None, plan: Plan, step: int, *, after_loss: bool) -> None:
        """Note a plan that the driver adopted."""
        self._missing = frozenset()
        self._request += 1
        self._rests_until = step + COOL_DOWN
        if before is not None and after_loss:
            recut = before.ranges != plan.ranges
            self._shrunk = self._shrunk or recut
            exact = continuation.keeps_bits(before, plan, self._problem)
            self.takeovers["recut" if recut else "exact" if exact else "tolerant"] += 1

    # ------------------------------------------------------------------------------------------------- replacements

    def ask(self, without: frozenset[str]) -> None:
        """Ask for a plan without these peers until there is one."""
        self._missing = without
        self._request += 1
        self._agenda.after(self._scenario.timings.plan_s, partial(self._ask, self._request))

    def _ask(self, request: int) -> None:
        if request != self._request:
            return
        found, why = self._replacement()
        minted = None if found is None else self.issue(found)
        if minted is None or isinstance(minted, Refused):
            self.wait()
            if why:
                self._driver.note_waiting(why)
            self._agenda.after(LOOK_S, partial(self._ask, request))
            return
        self.stop_waiting()
        self._driver.grant(minted, "")

    def _replacement(self) -> tuple[Plan | None, str]:
        """Return a plan as `client.pool.replanning` would make it; without one, the reason for waiting."""
        plan = msgspec.structs.replace(self._driver.current, version=0)
        present, usable = self._broker.present(), self._broker.usable()
        gone = self._missing | ({stage.peer for stage in plan.stages} - present - {plan.feed})
        gone |= {standby.peer for standby in plan.standbys} - present
        others = [self._profiles[peer] for peer in usable if peer not in gone]
        policy = self._scenario.takeover
        found = continuation.stand_in(plan, self._problem, gone, others, policy)
        returned = [self._profiles[peer] for peer in usable if peer in self._missing and self._is_there(peer)]
        if isinstance(found, WaitingForMachines) and returned:
            found = continuation.stand_in(plan, self._problem, gone, [*others, *returned], policy)
        if not isinstance(found, WaitingForMachines):
            return found, ""
        there, away = [*others, *returned], gone - {one.peer for one in returned}
        key = (plan, away, tuple(there))
        if self._besides is None or self._besides[0] != key:
            self._besides = (key, continuation.otherwise(plan, self._problem, away, there, policy))
        besides = self._besides[1]
        since_s = self._agenda.now_s if self._wait_began_s is None else self._wait_began_s
        over = self._agenda.now_s - since_s >= self._scenario.timings.grace_s
        return (besides.plan if isinstance(besides, continuation.Otherwise) and over else None), found.sentence

    def _is_back(self, peer: str) -> bool:
        loss = self._losses.get(peer)
        return loss is None or loss.is_over(self._broker.last_heard_s(peer), rejoined=True)

    def _is_there(self, peer: str) -> bool:
        loss = self._losses.get(peer)
        return loss is None or loss.is_there(self._broker.last_heard_s(peer))

    # ------------------------------------------------------------------------------------------------- better plans

    def watch(self) -> None:
        """Look for a better plan now and every few seconds."""
        self._agenda.after(WATCH_S, self.watch)
        version, offered_s = self._offered
        pending = version > self._driver.current.version and self._agenda.now_s - offered_s < PATIENCE_S
        if self._missing or pending or self._driver.is_stalled:
            return
        plan = msgspec.structs.replace(self._driver.current, version=0)
        warm_stages, step = self._driver.machine.warm_stages, self._driver.machine.step
        self._note_sound(plan, warm_stages)
        usable = tuple(peer for peer in self._broker.usable() if self._is_back(peer))
        members = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        leaving = frozenset(peer for peer in members if self._broker.phase(peer) == "draining")
        rested = step >= self._rests_until
        late = leaving == self._leaving[0] and self._agenda.now_s - self._leaving[1] >= self._scenario.timings.grace_s
        seen = (usable, leaving, late, self._driver.current.version, plan.standbys, warm_stages, rested)
        if seen == self._looked_at:
            return
        candidates = [self._profiles[peer] for peer in usable]
        found = (
            self._handed_over(plan, leaving, [one for one in candidates if one.peer not in leaving])
            or self._widened(plan, candidates, step, rested=rested)
            or self._with_standbys(plan, candidates)
            or self._promoted(plan, candidates, warm_stages, step, rested=rested)
        )
        if found is None:
            self._looked_at = seen
            return
        minted = self.issue(found[0])
        if not isinstance(minted, Refused):
            self._offered = (minted.version, self._agenda.now_s)
            self._driver.grant(minted, found[1])

    def _note_sound(self, plan: Plan, warm_stages: frozenset[int]) -> None:
        working = {stage.peer for stage in plan.stages} | {
            one.peer for one in plan.standbys if one.stage in warm_stages
        }
        for peer in working & self._losses.keys():
            self._losses[peer] = sound(self._losses[peer], self._agenda.now_s)

    def _handed_over(
        self, plan: Plan, leaving: frozenset[str], candidates: list[PeerProfile]
    ) -> tuple[Plan, str] | None:
        if not leaving:
            return None
        policy, now_s = self._scenario.takeover, self._agenda.now_s
        found = handed_over(plan, self._problem if policy == "tolerant" else self._strict, leaving, candidates)
        if self._leaving[0] != leaving:
            self._leaving = (leaving, now_s)
        if found is None and now_s - self._leaving[1] >= self._scenario.timings.grace_s:
            found = continuation.handed_on(plan, self._problem, leaving, candidates, policy)
        if found is None:
            return None
        names = ", ".join(self._driver.world.costs.name(peer) for peer in sorted(leaving))
        works = any(stage.peer in leaving for stage in plan.stages)
        return found, f"{names} leaves and hands its work over" if works else f"{names} leaves"

    def _widened(
        self, plan: Plan, candidates: list[PeerProfile], step: int, *, rested: bool
    ) -> tuple[Plan, str] | None:
        if not self._shrunk or not rested:
            return None
        found = continuation.widened(
            plan, self._problem, candidates, steps_left=ENDLESS - step, tolerant=self._is_tolerant
        )
        return None if found is None else (found.plan, "there are machines again: the model is cut anew")

    def _with_standbys(self, plan: Plan, candidates: list[PeerProfile]) -> tuple[Plan, str] | None:
        found = reinforced(plan, self._problem, candidates)
        if found is None:
            return None
        had = {(standby.stage, standby.peer) for standby in plan.standbys}
        stages = [str(standby.stage) for standby in found.standbys if (standby.stage, standby.peer) not in had]
        return found, f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} can have a standby now"

    def _promoted(
        self, plan: Plan, candidates: list[PeerProfile], warm_stages: frozenset[int], step: int, *, rested: bool
    ) -> tuple[Plan, str] | None:
        found = promoted(
            *(plan, self._problem if self._is_tolerant else self._strict, candidates),
            warm_stages=warm_stages,
            steps_left=ENDLESS - step,
            rested=rested,
            trust=1.0,  # simulated steps take exactly what is predicted
        )
        return None if found is None else (found.plan, found.reason)

    @property
    def _strict(self) -> Problem:
        return msgspec.structs.replace(self._problem, takeover="exact")

    @property
    def _is_tolerant(self) -> bool:
        """Whether bits already differ from the first plan's, or may differ."""
        first_plan = self._driver.history.first_plan
        assert first_plan is not None, "the job has begun"
        first = {stage.fingerprint for stage in first_plan.stages if stage.peer != first_plan.feed}
        changed = self.takeovers["tolerant"] + self.takeovers["recut"] * (len(first) > 1)
        return self._scenario.takeover == "tolerant" or (self._scenario.takeover == "any" and changed > 0)
