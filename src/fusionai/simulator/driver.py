"""The driver of a simulated job: performs the commands of the shipped `DriverMachine` in virtual time.

The machine decides on commits, checkpoints, recovery rounds, replays, returns to the checkpoint, lost peers and the
adoption of plans, as in a real job. Here its commands take time: messages and states over the links of `world`, plans
and journal by `scenario.Timings`, steps by `pace`. Every step's votes and commit, every snapshot, checkpoint, fault and
round goes through the machine. Microbatches of a steady step are fast-forwarded: its single loss and all votes arrive
when `pace` says that the step is over. A step that a fault interrupts counts as not prepared by any stage.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import msgspec

from fusionai.coordination.round.interface import AskPlan, DriverEvent, PeerLost, ReportFault
from fusionai.coordination.training import interface
from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.driver import DriverMachine
from fusionai.coordination.training.state import DriverPhase, JobShape
from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.standby.assignment import without_standbys
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.machines import Cause, Machines
from fusionai.simulator.member import Attachment, SimulatedMember, norms_of
from fusionai.simulator.pace import Paces, SteadySteps
from fusionai.simulator.replanning import ENDLESS, LOOK_S, WATCH_S, SimulatedReplanner
from fusionai.simulator.scenario import Scenario
from fusionai.simulator.step import FEED, SimulationError
from fusionai.simulator.world import World
from fusionai.wire.messages import Fence, Refused


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


class History:
    """What has happened to a job so far."""

    def __init__(self, agenda: Agenda) -> None:
        self.first_plan: Plan | None = None
        self.undisturbed_step_s = 0.0
        self.why_no_plan = ""
        self.plans = 0
        self.commits_s: list[float] = []
        self.incidents: list[Incident] = []
        self.story: list[tuple[float, str]] = []
        self.lost_steps = 0
        self.redone_s = 0.0
        self.open: Incident | None = None
        """The incident after which no step was committed yet."""
        self._agenda = agenda

    def say(self, words: str) -> None:
        self.story.append((self._agenda.now_s, words))

    def lose(self, at_s: float, step: int, what: str) -> None:
        """Note that a stage lost its peer."""
        self.say(what)
        if self.open is None:
            self.open = Incident(at_s=at_s, step=step, causes=[])
            self.incidents.append(self.open)
        self.open.causes.append(what)

    def commit(self) -> None:
        self.commits_s.append(self._agenda.now_s)
        if self.open is not None:
            self.open.recovered_s = self._agenda.now_s
            self.open = None


class SimulatedDriver:
    """The driver's process."""

    machine: DriverMachine

    def __init__(
        self, world: World, broker: SimulatedBroker, machines: Machines, problem: Problem, scenario: Scenario
    ) -> None:
        machines.watcher = self
        world.to_driver, world.collect = self._hear, self._collect
        self.world = world
        self.plan: Plan | None = None
        self.history = History(world.agenda)
        self.replanner = SimulatedReplanner(self, broker, problem, scenario)
        paces = Paces(problem, scenario.weather, scenario.timings.journal_s, scenario.seed)
        self.steps = SteadySteps(world.agenda, paces, self._step_computed)
        self._problem = problem
        self._scenario = scenario
        self._members = {name: SimulatedMember(world, name, alive=False) for name in machines.names}
        self._members[world.owner] = SimulatedMember(world, world.owner)
        self._connected: dict[str, SimulatedMember] = {}
        """Processes that the current round began with."""
        self._queue: deque[DriverEvent] = deque()
        self._draining = False
        self._offers: dict[int, tuple[Plan, str]] = {}
        """Version -> a plan to be adopted, and why."""
        self._stopped_at_s: dict[str, float] = {}
        self._lost_stage = False
        """Whether a stage has lost its peer since the last plan was adopted."""
        self._committed: tuple[Fence, staging.Committed] | None = None
        self._collected: tuple[Fence, int, set[int]] | None = None
        self._fence = Fence(0, 0, 0)
        """Fence of the round in force. The machine is ahead of it while commands from before a round are performed."""
        self._checked: Fence | None = None
        """Round whose result was checked."""

    # ----------------------------------------------------------------------------------------------- the beginning

    def start(self) -> None:
        """Make the first plan as soon as enough machines are present."""
        if self.plan is not None:
            return
        usable = self.replanner.usable()
        peers = tuple(peer for peer in self._problem.peers if peer.peer in usable)
        try:
            found = planned(msgspec.structs.replace(self._problem, peers=peers))
        except PlanError as error:
            self.history.why_no_plan = error.message
            self.replanner.wait()
            return
        minted = self.replanner.issue(found)
        if isinstance(minted, Refused):
            self.history.why_no_plan = minted.reason
            self.world.agenda.after(LOOK_S, self.start)
            return
        self.history.first_plan, self.history.undisturbed_step_s = minted, self.steps.step_s(minted)
        self.replanner.stop_waiting()
        self._offers[minted.version] = (minted, "the job begins")
        shape = JobShape(
            steps=ENDLESS,
            microbatches=1,
            canonical_order=tuple(norms_of(0)),
            checkpoint_every=self._scenario.checkpoint_every,
        )
        roles = self.world.roles(minted)
        self.machine = DriverMachine(shape, roles=roles, incarnation=1, learning_rate=lambda _: 0.0)
        for command in self.machine.start():
            self._perform(command)
        self.world.agenda.after(WATCH_S, self.replanner.watch)

    @property
    def current(self) -> Plan:
        assert self.plan is not None, "the job has begun"
        return self.plan

    @property
    def is_stalled(self) -> bool:
        """Whether a peer of a stage has stopped, noticed or not."""
        return any(not self._connected[stage.peer].responds for stage in self.current.stages)

    def uses(self, peer: str) -> bool:
        """Whether the peer has a part in the plan in force."""
        plan = self.plan
        return plan is not None and any(peer == part.peer for part in (*plan.stages, *plan.standbys))

    # ------------------------------------------------------------------------------------------------------ events

    def _hear(self, fence: Fence, event: DriverEvent) -> None:
        if fence == self.machine.fence:
            self.handle(event)

    def handle(self, *given: DriverEvent) -> None:
        """Give the machine these events in turn, and perform what it commands."""
        self._queue.extend(given)
        if self._draining:
            return
        self._draining = True
        while self._queue:
            for command in self.machine.handle(self._queue.popleft()):
                self._perform(command)
        self._draining = False
        if self.machine.phase is DriverPhase.RUNNING:
            if self._checked != self.machine.fence:
                self._check_round()
            if not self.is_stalled:
                self.steps.begin(self.machine.step)

    def grant(self, plan: Plan, reason: str) -> None:
        self._offers[plan.version] = (plan, reason)
        self.handle(interface.PlanGranted(self.world.roles(plan)))

    def note_waiting(self, why: str) -> None:
        if self.history.open is not None:
            self.history.open.waited_for = why

    def _perform(self, command: interface.DriverCommand) -> None:
        match command:
            case interface.SendAttach():
                self._attach(command)
            case interface.SendSnapshot(stage=stage, step=step, holder=holder, peer=peer):
                fence, member = self.machine.fence, self._connected[holder]
                self._send(holder, partial(member.pass_snapshot, fence, stage, step, peer))
            case interface.SendResume():
                self._resume(command)
            case interface.SendProbe():
                self.world.agenda.after(self.steps.timing.probe_s, partial(self._probed, self.machine.fence))
            case interface.FeedMicrobatch(step=step, only=None):
                self.steps.feed(step)
            case interface.FeedMicrobatch(step=step, only=frozenset() as only):
                for stage in sorted(only):
                    self._to_stage(stage, staging.ForwardArrived("train", step, 0, FEED))
            case interface.DecideScale(step=step):
                self.handle(interface.ScaleDecided(step, 1.0, 1.0))
            case interface.JournalCommit(record=record):
                self.handle(interface.CommitJournalled(record))
            case interface.SendCommit():
                self._send_commit(command)
            case interface.StepCommitted(replayed=replayed):
                seconds = self.steps.commit()
                if replayed:
                    self.history.redone_s += seconds
                else:
                    self.history.commit()
            case interface.WriteCheckpoint(step=step, ask=ask):
                self._write_checkpoint(step, ask=ask)
            case AskPlan(without=without):
                self.replanner.ask(without)
            case ReportFault():
                self._note_fault(command)
            case interface.ReportRestored():
                self._note_restoration(command)
            case interface.AnnounceReady():
                pass
            case _:
                raise SimulationError(f"a simulated job can't perform {command}.")

    # ------------------------------------------------------------------------------------------------------ rounds

    def _attach(self, command: interface.SendAttach) -> None:
        fence, roles = command.fence, command.roles
        self._fence = fence
        self.history.redone_s += self.steps.drop()
        self._collected = None
        if self.plan is None or roles.version != self.plan.version:
            self._adopt(roles.version)
        self.plan = without_standbys(self.current, tuple(set(roles.standbys.values()) - set(command.standbys.values())))
        names = sorted({*roles.places.values(), *command.standbys.values()})
        for name in self._connected.keys() - set(names):
            self._members[name].clear()
        self._connected = {name: self._members[name] for name in names}
        attachment = Attachment(
            fence=fence,
            plan=self.current,
            roles=roles,
            standbys=command.standbys,
            committed=self._committed,
            connected=self._connected,
        )
        self._committed = None
        for name, member in self._connected.items():
            if not member.alive:  # the broker has not noticed its loss yet; the driver will
                notice = partial(self._notice, member, "fell silent", self.world.agenda.now_s)
                self.world.agenda.after(self._scenario.timings.silence_s, notice)
            else:
                self._send(name, partial(member.attach, attachment))

    def _adopt(self, version: int) -> None:
        before = self.plan
        plan, reason = self._offers[version]
        self._offers = {known: offer for known, offer in self._offers.items() if known > version}
        self.steps.adopt(plan)
        self.plan = plan
        self.history.plans += 1
        self.replanner.adopted(before, plan, self.machine.step, after_loss=self._lost_stage)
        if self._lost_stage:
            recut = before is not None and before.ranges != plan.ranges
            reason = "the model is cut anew" if recut else "others stand in"
            if self.history.open is not None:
                self.history.open.planned_s = self.world.agenda.now_s
        self._lost_stage = False
        self.history.say(f"plan {version}: {reason}")

    def _resume(self, command: interface.SendResume) -> None:
        resumed = command.resume
        stage, fence = command.stage, self.machine.fence
        self._to_stage(stage, resumed)
        if resumed.source == "import":
            placement = self.current.stages[stage]
            member = self._connected[placement.peer]
            arrive = partial(member.import_state, fence, stage, resumed.base)
            self._send(placement.peer, arrive, self.world.costs.state_bytes(placement))

    def _probed(self, fence: Fence) -> None:
        if fence != self.machine.fence:
            return
        if self.is_stalled:
            self.world.agenda.after(LOOK_S, partial(self._probed, fence))
        else:
            self._hear(fence, interface.ProbeAnswered((1.0, 1.0)))

    def _check_round(self) -> None:
        """Count official steps that a round lost, and the replay that it took."""
        self._checked = self.machine.fence
        places = [(self._connected[one.peer], one.stage) for one in self.current.stages]
        stages = [member.stages[stage] for member, stage in places if member.alive]
        applied = min((stage.machine.applied for stage in stages), default=self.machine.step)
        history = self.history
        history.lost_steps += max(0, self.machine.step - applied, len(history.commits_s) - self.machine.official)
        history.redone_s += max((stage.replayed_s for stage in stages), default=0.0)

    def _send(self, peer: str, action: partial[None], size_bytes: float = 0.0) -> None:
        self.world.send(self.world.owner, peer, size_bytes, partial(self._connected[peer].run, action))

    def _to_stage(self, stage: int, event: staging.StageEvent) -> None:
        member = self._connected[self.machine.roles.places[stage]]
        self._send(member.name, partial(member.to_stage, self.machine.fence, stage, event))

    # ------------------------------------------------------------------------------------------------------- steps

    def _step_computed(self, step: int) -> None:
        votes = [interface.StagePrepared(one.stage, step, norms_of(one.stage)) for one in self.current.stages]
        self.handle(interface.LossArrived(step, 0, 1.0), *votes)

    def _send_commit(self, command: interface.SendCommit) -> None:
        """Commit a step at the stages: at once if something follows from it, otherwise with the next such commit."""
        committed = staging.Committed(command.record, command.watermark, command.save)
        self._committed = (self._fence, committed)
        plan = self.current
        due = bool(plan.standbys) and (command.record.step + 1) % plan.snapshot_every == 0
        if due or command.save:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._committed is None:
            return
        for placement in self.current.stages:
            member = self._connected[placement.peer]
            if (stage := member.stages.get(placement.stage)) is not None:
                member.run(partial(stage.catch_up, *self._committed))

    def _write_checkpoint(self, step: int, *, ask: bool) -> None:
        self._collected = (self.machine.fence, step, set())
        if ask:
            self._catch_up()
            for placement in self.current.stages:
                self._to_stage(placement.stage, staging.ExportAsked(step))

    def _collect(self, fence: Fence, stage: int, step: int) -> None:
        if self._collected is None or self._collected[:2] != (fence, step):
            return
        stages = self._collected[2]
        stages.add(stage)
        if len(stages) == len(self.current.stages):
            self._collected = None
            self._hear(fence, interface.CheckpointWritten(step))

    # ------------------------------------------------------------------------------------------------------ losses

    def came(self, peer: str) -> None:
        self._members[peer].end()
        self._members[peer] = SimulatedMember(self.world, peer)
        if self.plan is None and self.world.agenda.now_s > 0:
            self.start()

    def stopped(self, peer: str, cause: Cause, noticed_after_s: float) -> None:
        """Note that the peer stopped, noticed after `noticed_after_s`. It loses its state unless it froze."""
        member = self._members[peer]
        member.frozen = cause == "froze"
        if not member.frozen:
            member.end()
        if self._connected.get(peer) is not member:
            return
        if self.is_stalled:
            self.steps.stop()
        notice = partial(self._notice, member, cause, self.world.agenda.now_s)
        self.world.agenda.after(noticed_after_s, notice)

    def woke(self, peer: str) -> None:
        """Resume a frozen peer. If its loss was noticed meanwhile, it keeps its state for a plan that includes it."""
        member = self._members[peer]
        if self._connected.get(peer) is not member:
            member.clear()
        member.wake()
        if self.plan is not None and self.machine.phase is DriverPhase.RUNNING and not self.is_stalled:
            self.steps.resume(self.machine.step)

    def _notice(self, member: SimulatedMember, cause: Cause, at_s: float) -> None:
        """Give up the peer, unless it is back in time or was given up already."""
        if self._connected.get(member.name) is member and not member.responds:
            self._stopped_at_s[member.name] = at_s
            self.handle(PeerLost(member.name, cause))

    def _note_fault(self, fault: ReportFault) -> None:
        name = self.world.costs.name(fault.peer)
        self.replanner.note_loss(fault.peer)
        if fault.kind == "standby":
            has_standby = ", ".join(
                str(standby.stage) for standby in self.current.standbys if standby.peer == fault.peer
            )
            self.history.say(f"{name} {fault.reason} (standby of stage {has_standby})")
            self.plan = without_standbys(self.current, (fault.peer,))
            return
        self._lost_stage = True
        what = f"{name} {fault.reason} (stage {', '.join(map(str, fault.stages))})"
        self.history.lose(self._stopped_at_s[fault.peer], self.machine.official, what)
        self.history.redone_s += self.steps.drop()

    def _note_restoration(self, report: interface.ReportRestored) -> None:
        incident = self.history.open
        if incident is not None and report.restored:
            incident.restored = tuple(stage for stage in report.restored if stage not in self.machine.roles.stateless)
            incident.replayed_steps += report.committed - report.base
            incident.rollback = incident.rollback or report.rollback
