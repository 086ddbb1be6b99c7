"""The driver's side of a simulated job: steps, losses, new plans, recoveries.

It decides what the shipped rules leave to the code that performs them: when to ask for a plan and when to begin again.
A step in progress is lost with any of its peers and computed again. Plans come from `scheduling.standby.takeover` and
go through the broker, as in `client.pool.replanning` and `client.pool.watch`. `recovery` decides how stages get back to
the committed step and how long that takes. Guards get snapshots every K steps and after each recovery, and late
snapshots stop the feed (rule 12 of docs/recovery.md). A commit waits while a checkpoint is collected.

`machines` reports which machines stop and come, `pace` says how long steps take, `course` starts everything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import msgspec

from fusionai.client.pool.replanning import LOOK_S
from fusionai.client.pool.watch import LOOK_S as WATCH_S
from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Guard, Plan, Problem
from fusionai.scheduling.standby.assignment import without_guards
from fusionai.scheduling.standby.continuation import (
    Nothing,
    Otherwise,
    handed_on,
    keeps_bits,
    otherwise,
    stand_in,
    widened,
)
from fusionai.scheduling.standby.promotion import promoted
from fusionai.scheduling.standby.straggling import COOL_DOWN
from fusionai.scheduling.standby.takeover import Loss, Waiting, handed_over, lost, reinforced, sound
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.machines import Cause, Machines
from fusionai.simulator.pace import Pace, Paces
from fusionai.simulator.recovery import Holdings, Restoration, collecting_s, restoration
from fusionai.simulator.scenario import Scenario
from fusionai.wire.messages import Refused

ENDLESS: Final = 2**31
"""Number of steps of a simulated job: it never ends within the simulated time."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """An event that stopped the job. Times are in seconds since the start."""

    at_s: float
    step: int
    causes: list[str]
    """For example `gpu-3 crashed (stage 1)`."""
    planned_s: float | None = None
    """When the new plan was available; None while the job waits for one, and if none was needed."""
    recovered_s: float | None = None
    """When the next step was committed; None if the simulated time ended before."""
    restored: tuple[int, ...] = ()
    """Stages that restored their state from a snapshot or the checkpoint."""
    replayed_steps: int = 0
    rollback: bool = False
    """Whether all stages went back to the checkpoint."""
    waited_for: str = ""
    """Why no plan was found for a while."""

    @property
    def stopped_s(self) -> float | None:
        return None if self.recovered_s is None else self.recovered_s - self.at_s


@dataclass(slots=True)
class _Offer:
    """A better plan that waits for the end of a step."""

    plan: Plan
    reason: str


@dataclass(slots=True)
class _StepUnderWay:
    """The step being computed."""

    began_s: float
    due_s: float
    row: int
    """Number of steps since the pipeline was filled."""
    left_s: float = field(default=0.0)
    """Time that was left of the step when a peer fell silent."""


class SimulatedJob:
    """One simulated job; implements `machines.Watcher`."""

    def __init__(
        self, agenda: Agenda, broker: SimulatedBroker, machines: Machines, problem: Problem, scenario: Scenario
    ) -> None:
        assert problem.owner is not None, "a course has its owner's machine"
        machines.watcher = self
        self.plan: Plan | None = None
        self.first_plan: Plan | None = None
        self.undisturbed_step_s = 0.0
        self.why_no_plan = ""
        self.plans = 0
        self.commits_s: list[float] = []
        self.incidents: list[Incident] = []
        self.story: list[tuple[float, str]] = []
        self.lost_steps = 0
        self.redone_s = 0.0
        self.busy_s: Counter[str] = Counter()
        self._agenda = agenda
        self._broker = broker
        self._machines = machines
        self._problem = problem
        self._scenario = scenario
        self._timings = scenario.timings
        self._costs = StageCosts(problem)
        self._paces = Paces(problem, scenario.weather, scenario.timings.journal_s, scenario.seed)
        self._profiles = {peer.peer: peer for peer in problem.peers}
        self._holdings = Holdings()
        self._phase: Literal["starting", "running", "waiting", "restoring"] = "starting"
        self._turn = 0
        """Incremented to cancel scheduled events: those of earlier turns are ignored."""
        self._under_way: _StepUnderWay | None = None
        self._silent: set[str] = set()
        """Peers of stages that have stopped working, noticed or not."""
        self._missing: set[str] = set()
        """Lost peers that the driver knows of, until a plan without them is in force."""
        self._losses: dict[str, Loss] = {}
        self._open: Incident | None = None
        self._offer: _Offer | None = None
        self._looked_at: tuple[object, ...] = ()
        """State of the pool when the last search found no better plan."""
        self._wait_began_s: float | None = None
        self._waited_s = 0.0
        self._saved_at_s = 0.0
        """When the checkpoint being collected is complete; no commit happens before."""
        self._held = False
        """Whether feeding the next step must wait for a snapshot."""
        self._rests_until = 0
        """Until this step no stage moves by way of a checkpoint."""
        self._line = 0
        self._step = 0
        """Step that all stages have reached; below the committed one after a return to the checkpoint."""
        self._shrunk = False
        """Whether the model was cut again because machines were missing."""
        self._leaving: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._besides: tuple[object, Otherwise | Nothing] | None = None
        """The alternative when no machine can take over, and the machines for which it was found."""
        self.takeovers: Counter[str] = Counter()
        """Number of plans made after a loss, by what they kept: `exact`, `tolerant`, `recut`."""

    # ----------------------------------------------------------------------------------------------- the beginning

    def start(self) -> None:
        """Make the first plan as soon as enough machines are present."""
        if self._phase != "starting":
            return
        usable = frozenset(self._broker.usable())
        peers = tuple(peer for peer in self._problem.peers if peer.peer in usable)
        try:
            found = planned(msgspec.structs.replace(self._problem, peers=peers))
        except PlanError as error:
            self.why_no_plan = error.message
            self._wait()
            return
        minted = self._broker.mint(found, ENDLESS)
        if isinstance(minted, Refused):
            self.why_no_plan = minted.reason
            self._agenda.after(LOOK_S, self.start)
            return
        self.first_plan, self.undisturbed_step_s = minted, self._paces.of(minted).step_s
        self._holdings.states = {(stage.stage, stage.peer): 0 for stage in minted.stages}
        self._stop_waiting()
        self._adopt(minted, "the job begins")
        self._agenda.after(WATCH_S, self._watch)

    @property
    def _official(self) -> int:
        return len(self.commits_s)

    def waited_s(self) -> float:
        """Seconds waited for machines up to now."""
        return self._waited_s + (0.0 if self._wait_began_s is None else self._agenda.now_s - self._wait_began_s)

    # ------------------------------------------------------------------------------------------------------- steps

    def _begin_step(self, row: int) -> None:
        plan = self._current()
        if plan.guards and self._step >= self._line + 2 * plan.snapshot_every:
            self._held = True
            return
        pace = self._pace()
        seconds = pace.first_s if row == 0 else pace.gap_s(row - 1)
        now_s = self._agenda.now_s
        self._under_way = _StepUnderWay(now_s, max(now_s + seconds, self._saved_at_s), row)
        self._foresee_commit()

    def _foresee_commit(self) -> None:
        assert self._under_way is not None, "a step is under way"
        self._agenda.at(self._under_way.due_s, partial(self._commit, self._turn, self._under_way))

    def _commit(self, turn: int, done: _StepUnderWay) -> None:
        if turn != self._turn:
            return
        assert self._under_way is done, "one step at a time"
        plan, row = self._current(), done.row
        self._under_way = None
        self._step += 1
        self._holdings.states = {(stage.stage, stage.peer): self._step for stage in plan.stages}
        self.busy_s.update(self._pace().busy_s)
        if self._step > self._official:
            self.commits_s.append(self._agenda.now_s)
            self._close_incident()
        else:
            self.redone_s += self._agenda.now_s - done.began_s
        if plan.snapshot_every and self._step % plan.snapshot_every == 0:
            self._take_snapshots()
        every = self._scenario.checkpoint_every
        if every and self._step % every == 0:
            self._take_checkpoint()
        self._move_line()
        if self._offer is not None:
            self._change_plan(self._offer)
        else:
            self._begin_step(row + 1)

    def _close_incident(self) -> None:
        if self._open is not None:
            self._open.recovered_s = self._agenda.now_s
            self._open = None

    def _take_snapshots(self) -> None:
        """Send snapshots of all guarded stages to their guards, while other work goes on."""
        plan = self._current()
        stages = {stage.stage: stage for stage in plan.stages}
        for guard in plan.guards:
            seconds = self._costs.snapshot_s(stages[guard.stage], guard.peer)
            self._agenda.after(seconds, partial(self._snapshot_whole, self._turn, guard, self._step))

    def _snapshot_whole(self, turn: int, guard: Guard, step: int) -> None:
        if turn != self._turn or guard not in self._current().guards:
            return
        self._holdings.keep_snapshot(guard.stage, guard.peer, step)
        self._move_line()
        self._go_on_if_held()

    def _take_checkpoint(self) -> None:
        plan = self._current()
        seconds = collecting_s(plan.stages, plan.feed, self._costs, upwards=True)
        self._saved_at_s = self._agenda.now_s + seconds
        self._agenda.at(self._saved_at_s, partial(self._checkpoint_whole, self._turn, self._step))

    def _checkpoint_whole(self, turn: int, step: int) -> None:
        if turn == self._turn:
            self._holdings.checkpoint = step

    def _move_line(self) -> None:
        """Move the retention line to the oldest of the guarded stages' newest snapshots."""
        held = self._holdings.snapshots
        newest = [max(held.get((guard.stage, guard.peer), (0,))) for guard in self._current().guards]
        self._line = max(self._line, min(newest, default=self._step))

    # ------------------------------------------------------------------------------------------------------ losses

    def came(self, peer: str) -> None:
        self._holdings.forget(peer)
        if self._phase == "starting" and self._agenda.now_s > 0:
            self.start()

    def stopped(self, peer: str, cause: Cause, noticed_after_s: float) -> None:
        if cause != "froze":
            self._holdings.forget(peer)
        if self.plan is None:
            return
        stages = self._stages_of(peer)
        if stages and peer not in self._silent:
            self._silent.add(peer)
            self._stall()
        if stages or self._guards(peer):
            at_s = self._agenda.now_s
            self._agenda.after(noticed_after_s, partial(self._notice, peer, cause, at_s))

    def woke(self, peer: str) -> None:
        """Resume a frozen peer, either in time or after its loss was noticed; then it may return with what it still
        has."""
        if peer in self._missing or self.plan is None:
            return
        if not self._stages_of(peer) and not self._guards(peer):
            self._holdings.forget(peer)
        if peer not in self._silent:
            return
        self._silent.discard(peer)
        if self._silent or self._missing:
            return
        if self._phase == "running" and self._under_way is not None:
            self._under_way.due_s = self._agenda.now_s + self._under_way.left_s
            self._foresee_commit()
        elif self._phase in ("running", "restoring"):
            self._begin_round()

    def _stall(self) -> None:
        """Stop the current step. Whether it is lost is decided when the loss is noticed."""
        self._turn += 1
        if self._phase == "running" and self._under_way is not None:
            self._under_way.left_s = max(0.0, self._under_way.due_s - self._agenda.now_s)

    def _notice(self, peer: str, cause: Cause, at_s: float) -> None:
        """Give up the peer, unless it is back or was given up already."""
        guards, stages = self._guards(peer), self._stages_of(peer)
        back = self._machines.is_there(peer) and peer not in self._silent
        if peer in self._missing or back or not (guards or stages):
            return
        self._note_loss(peer)
        if not stages:
            self._strike_out(peer, cause)
            return
        self._missing.add(peer)
        what = f"{self._costs.name(peer)} {cause} (stage {', '.join(map(str, stages))})"
        self._say(what)
        if self._open is None:
            self._open = Incident(at_s=at_s, step=self._official, causes=[])
            self.incidents.append(self._open)
        self._open.causes.append(what)
        if self._phase == "running" and self._under_way is not None:
            self.redone_s += max(0.0, at_s - self._under_way.began_s)
        self._under_way, self._offer, self._held = None, None, False
        self._turn += 1
        self._phase = "waiting"
        self._agenda.after(self._timings.plan_s, partial(self._ask, self._turn))

    def _strike_out(self, peer: str, cause: Cause) -> None:
        """Handle a lost guard: continue the same plan without it, with no new round (rule 20)."""
        plan = self._current()
        guarded = ", ".join(str(guard.stage) for guard in plan.guards if guard.peer == peer)
        self._say(f"{self._costs.name(peer)} {cause} (guard of stage {guarded})")
        self.plan = without_guards(plan, (peer,))
        self._holdings.forget(peer)
        self._move_line()
        self._go_on_if_held()

    def _go_on_if_held(self) -> None:
        if self._held and self._phase == "running":
            self._held = False
            self._begin_step(0)

    def _note_loss(self, peer: str) -> None:
        self._losses[peer] = lost(self._losses.get(peer), self._agenda.now_s)

    def _note_sound(self, plan: Plan) -> None:
        sheltered = self._sheltered()
        working = {stage.peer for stage in plan.stages} | {one.peer for one in plan.guards if one.stage in sheltered}
        for peer in working & self._losses.keys() - self._missing:
            self._losses[peer] = sound(self._losses[peer], self._agenda.now_s)

    # --------------------------------------------------------------------------------------------------- other plans

    def _ask(self, turn: int) -> None:
        """Ask for a plan without the missing peers until there is one."""
        if turn != self._turn or self._phase != "waiting":
            return
        found, waiting = self._replacement()
        if found is None:
            self._wait()
            if self._open is not None:
                self._open.waited_for = waiting
            self._agenda.after(LOOK_S, partial(self._ask, turn))
            return
        minted = self._broker.mint(found, ENDLESS)
        if isinstance(minted, Refused):
            self._wait()
            self._agenda.after(LOOK_S, partial(self._ask, turn))
            return
        self._stop_waiting()
        if self._open is not None:
            self._open.planned_s = self._agenda.now_s
        before = self._current()
        recut = _ranges(before) != _ranges(minted)
        self._shrunk = self._shrunk or recut
        self.takeovers["recut" if recut else "exact" if keeps_bits(before, minted, self._problem) else "tolerant"] += 1
        self._adopt(minted, "the model is cut anew" if recut else "others stand in")

    def _replacement(self) -> tuple[Plan | None, str]:
        """Return a plan as `client.pool.replanning` would make it; without one, the reason for waiting."""
        plan = msgspec.structs.replace(self._current(), version=0)
        present, usable = self._broker.present(), self._broker.usable()
        gone = frozenset(self._missing) | ({stage.peer for stage in plan.stages} - present - {plan.feed})
        gone |= {guard.peer for guard in plan.guards} - present
        others = [self._profiles[peer] for peer in usable if peer not in gone]
        policy = self._scenario.takeover
        found = stand_in(plan, self._problem, gone, others, policy)
        returned = [self._profiles[peer] for peer in usable if peer in self._missing and self._is_there(peer)]
        if isinstance(found, Waiting) and returned:
            found = stand_in(plan, self._problem, gone, [*others, *returned], policy)
        if not isinstance(found, Waiting):
            return found, ""
        there, away = [*others, *returned], gone - {one.peer for one in returned}
        key = (plan, away, tuple(there))
        if self._besides is None or self._besides[0] != key:
            self._besides = (key, otherwise(plan, self._problem, away, there, policy))
        besides = self._besides[1]
        since_s = self._agenda.now_s if self._wait_began_s is None else self._wait_began_s
        over = self._agenda.now_s - since_s >= self._timings.grace_s
        return (besides.plan if isinstance(besides, Otherwise) and over else None), found.sentence

    def _is_back(self, peer: str) -> bool:
        loss = self._losses.get(peer)
        return loss is None or loss.is_over(self._broker.last_heard_s(peer), rejoined=True)

    def _is_there(self, peer: str) -> bool:
        loss = self._losses.get(peer)
        return loss is None or loss.is_there(self._broker.last_heard_s(peer))

    def _watch(self) -> None:
        """Look for better plans, as `client.pool.watch` does."""
        self._agenda.after(WATCH_S, self._watch)
        if self._phase not in ("running", "restoring") or self._offer is not None or self._silent:
            return
        plan = msgspec.structs.replace(self._current(), version=0)
        self._note_sound(plan)
        usable = tuple(peer for peer in self._broker.usable() if self._is_back(peer))
        members = {stage.peer for stage in plan.stages} | {guard.peer for guard in plan.guards}
        leaving = frozenset(peer for peer in members if self._broker.phase(peer) == "draining")
        rested = self._step >= self._rests_until
        late = leaving == self._leaving[0] and self._agenda.now_s - self._leaving[1] >= self._timings.grace_s
        seen = (usable, leaving, late, self._current().version, plan.guards, self._sheltered(), rested)
        if seen == self._looked_at:
            return
        found = (
            self._handed_over(plan, leaving, usable)
            or self._widened(plan, usable, rested)
            or self._guarded(plan, usable)
            or self._promoted(plan, usable, rested)
        )
        if found is None:
            self._looked_at = seen
            return
        minted = self._broker.mint(found.plan, ENDLESS)
        if not isinstance(minted, Refused):
            self._offer = _Offer(minted, found.reason)

    def _handed_over(self, plan: Plan, leaving: frozenset[str], usable: tuple[str, ...]) -> _Offer | None:
        if not leaving:
            return None
        candidates = [self._profiles[peer] for peer in usable if peer not in leaving]
        strict = msgspec.structs.replace(self._problem, takeover="exact")
        policy, now_s = self._scenario.takeover, self._agenda.now_s
        found = handed_over(plan, self._problem if policy == "tolerant" else strict, leaving, candidates)
        if self._leaving[0] != leaving:
            self._leaving = (leaving, now_s)
        if found is None and now_s - self._leaving[1] >= self._timings.grace_s:
            found = handed_on(plan, self._problem, leaving, candidates, policy)
        if found is None:
            return None
        names = ", ".join(self._costs.name(peer) for peer in sorted(leaving))
        works = any(stage.peer in leaving for stage in plan.stages)
        return _Offer(found, f"{names} leaves and hands its work over" if works else f"{names} leaves")

    def _widened(self, plan: Plan, usable: tuple[str, ...], rested: bool) -> _Offer | None:
        if not self._shrunk or not rested:
            return None
        candidates = [self._profiles[peer] for peer in usable]
        found = widened(plan, self._problem, candidates, steps_left=ENDLESS - self._step, tolerant=self._is_tolerant)
        return None if found is None else _Offer(found.plan, "there are machines again: the model is cut anew")

    @property
    def _is_tolerant(self) -> bool:
        """Whether bits already differ from the first plan's, or may differ."""
        assert self.first_plan is not None, "the job has begun"
        first = {stage.fingerprint for stage in self.first_plan.stages if stage.peer != self.first_plan.feed}
        changed = self.takeovers["tolerant"] + self.takeovers["recut"] * (len(first) > 1)
        return self._scenario.takeover == "tolerant" or (self._scenario.takeover == "any" and changed > 0)

    def _guarded(self, plan: Plan, usable: tuple[str, ...]) -> _Offer | None:
        found = reinforced(plan, self._problem, [self._profiles[peer] for peer in usable])
        if found is None:
            return None
        had = {(guard.stage, guard.peer) for guard in plan.guards}
        stages = [str(guard.stage) for guard in found.guards if (guard.stage, guard.peer) not in had]
        return _Offer(found, f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)} can be guarded now")

    def _promoted(self, plan: Plan, usable: tuple[str, ...], rested: bool) -> _Offer | None:
        candidates = [self._profiles[peer] for peer in usable]
        strict = msgspec.structs.replace(self._problem, takeover="exact")
        found = promoted(
            *(plan, self._problem if self._is_tolerant else strict, candidates),
            sheltered=self._sheltered(),
            steps_left=ENDLESS - self._step,
            rested=rested,
            trust=1.0,  # simulated steps take exactly what is predicted
        )
        return None if found is None else _Offer(found.plan, found.reason)

    def _sheltered(self) -> frozenset[int]:
        """Return the stages whose guard has a snapshot newer than the checkpoint."""
        held = self._holdings.snapshots
        newest = {guard.stage: max(held.get((guard.stage, guard.peer), (-1,))) for guard in self._current().guards}
        return frozenset(stage for stage, step in newest.items() if step > self._holdings.checkpoint)

    def _change_plan(self, offer: _Offer) -> None:
        """Adopt a plan between steps. State that moves goes by way of a checkpoint, unless its guard has it."""
        before = {stage.stage: stage.peer for stage in self._current().stages}
        guards = {guard.stage: guard.peer for guard in self._current().guards}
        recut = _ranges(self._current()) != _ranges(offer.plan)
        moved = [stage for stage in offer.plan.stages if recut or before[stage.stage] != stage.peer]
        kept = {(guard.stage, guard.peer) for guard in offer.plan.guards}
        exchanged = (
            len(moved) == 1
            and not recut
            and moved[0].stage in self._sheltered()
            and guards[moved[0].stage] == moved[0].peer
            and (moved[0].stage, before[moved[0].stage]) in kept
        )
        if moved and not exchanged and self._holdings.checkpoint < self._step:
            self._take_checkpoint()
            saved = partial(self._change_saved, self._turn, offer)
            self._agenda.at(self._saved_at_s, saved)
        else:
            self._offer = None
            self._adopt(offer.plan, offer.reason)

    def _change_saved(self, turn: int, offer: _Offer) -> None:
        if turn == self._turn:
            self._offer = None
            self._adopt(offer.plan, offer.reason)

    # ------------------------------------------------------------------------------------------------------ rounds

    def _adopt(self, plan: Plan, reason: str) -> None:
        if self.plan is not None and _ranges(self.plan) != _ranges(plan):
            # After a new cut only the checkpoint is usable.
            self._holdings.states.clear()
            self._holdings.snapshots.clear()
            self._line = self._step + 1
        self.plan = plan
        self.plans += 1
        self._rests_until = self._step + COOL_DOWN
        self._missing.clear()
        self._say(f"plan {plan.version}: {reason}")
        members = {stage.peer for stage in plan.stages} | {guard.peer for guard in plan.guards}
        gone = sorted(peer for peer in members if not self._machines.is_there(peer))
        self._silent = {peer for peer in gone if self._stages_of(peer)}
        for peer in gone:
            # The broker has not noticed its loss yet; the driver will.
            notice = partial(self._notice, peer, "fell silent", self._agenda.now_s)
            self._agenda.after(self._timings.silence_s, notice)
        self._begin_round()

    def _begin_round(self) -> None:
        self._phase = "restoring"
        self._turn += 1
        if self._silent:
            return  # a member will not answer
        plan = self._current()
        restored = restoration(
            plan,
            self._costs,
            self._holdings,
            self._machines.there(),
            step=self._step,
            retained_from=self._line,
        )
        self._agenda.after(restored.seconds, partial(self._restored, self._turn, restored))

    def _restored(self, turn: int, done: Restoration) -> None:
        if turn != self._turn:
            return
        plan = self._current()
        if not done.rollback:
            self.lost_steps += self._step - done.reached
        self.redone_s += done.replay_s
        if self._open is not None:
            self._open.restored = done.lost
            self._open.replayed_steps += self._step - done.base
            self._open.rollback = self._open.rollback or done.rollback
        self._step = done.reached
        self._line = min(self._line, self._step)
        self._holdings.states = {(stage.stage, stage.peer): self._step for stage in plan.stages}
        self._phase = "running"
        self._held = False
        self._take_snapshots()
        self._begin_step(0)

    # ------------------------------------------------------------------------------------------------------ little

    def _current(self) -> Plan:
        assert self.plan is not None, "the job has begun"
        return self.plan

    def _pace(self) -> Pace:
        return self._paces.of(self._current())

    def _stages_of(self, peer: str) -> list[int]:
        return [stage.stage for stage in self._current().stages if stage.peer == peer]

    def _guards(self, peer: str) -> bool:
        return any(guard.peer == peer for guard in self._current().guards)

    def _say(self, words: str) -> None:
        self.story.append((self._agenda.now_s, words))

    def _wait(self) -> None:
        if self._wait_began_s is None:
            self._wait_began_s = self._agenda.now_s

    def _stop_waiting(self) -> None:
        self._waited_s = self.waited_s()
        self._wait_began_s = None


def _ranges(plan: Plan) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((stage.replica, stage.blocks) for stage in plan.stages)
