"""One start of the driver on its shipped machine: what `training.driver` does, with digests for tensors.

Neighbours: `harness.virtual_member` answers it, `harness.virtual_broker` gives it plans, `harness.world` is its disk.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusionai.coordination.round.interface import AskPlan, EndJob, LinkBroken, PeerLost, ReportFault
from fusionai.coordination.round.liveness import PING_S, Silence
from fusionai.coordination.training import interface
from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.driver import DriverMachine
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.coordination.training.interface import Roles
from fusionai.coordination.training.state import DriverPhase
from fusionai.wire.messages import CommitRecord, Fence, Mode
from harness import topology as model
from harness.network import Process, Stream
from harness.topology import FEED, Layout
from harness.virtual_broker import OWNER, Candidates, stand_in
from harness.virtual_member import Attach, Detach, Enlist, Member, Pass
from harness.virtual_stage import Output, State, Tensor

if TYPE_CHECKING:
    from harness.world import World

RETRY_S = 1.0
"""How often a plan is asked for again, and whether a better one could be had."""


class Driver:
    """`process` also holds the owner's own member."""

    def __init__(self, world: World, process: Process, member: Member) -> None:
        self.world = world
        self.process = process
        self.member = member
        self.ended: EndJob | None = None
        self.version, self.layout = world.plan
        self.incarnation = world.incarnation
        self.connections: dict[str, Process] = {}
        self.silence = Silence()
        self.saving: int | None = None
        self.collected: dict[tuple[Fence, int], dict[int, str]] = {}
        self.writing: set[int] = set()
        """Steps whose states are all here and on their way to the disk."""
        self.evaluated: dict[int, dict[int, float]] = {}
        self.unfed: deque[int] = deque()
        """Evaluation batches waiting for their turn."""
        self.probed: list[float] = []
        self.without: frozenset[str] | None = None
        """Who must not be in the plan that is being asked for."""
        self.asked_s = -RETRY_S
        self.layouts: dict[int, Layout] = {self.version: self.layout}
        checkpoint = max(world.checkpoints, default=-1)
        self.machine = DriverMachine(
            shape=world.topology.job_shape(),
            roles=self._roles(self.version),
            incarnation=self.incarnation,
            learning_rate=model.learning_rate,
            official=len(world.journal),
            records={record.step: record for record in world.journal if record.step >= checkpoint - 1},
            saved=checkpoint,
            evaluations=tuple(world.evaluations),
        )

    def _roles(self, version: int) -> Roles:
        return self.layouts[version].roles(self.world.topology, version, OWNER)

    def start(self) -> None:
        self._perform_all(self.machine.start())
        self.world.network.timer(self.process, PING_S, self._tick)
        self.world.network.timer(self.process, RETRY_S, self._look_for_better)

    # ---------------------------------------------------------------------------------------------------- arriving

    @property
    def fence(self) -> Fence:
        return self.machine.fence

    @property
    def alive(self) -> bool:
        return self.process.alive and self.ended is None

    def receive(self, sender: Process, fence: Fence, message: object) -> None:
        if not self.alive:
            return
        self.silence.heard(sender.name, self.world.network.now_s)
        if fence != self.fence:
            self.world.stale += 1
            return
        match message:
            case State():
                self._collect(message)
            case Output(mode="train", step=step, microbatch=microbatch, loss=loss):
                self.handle(interface.LossArrived(step, microbatch, loss))
            case Output(microbatch=index, loss=loss) if index < 0:
                self._probed(loss)
            case Output(step=step, microbatch=index, loss=loss):
                self._evaluated(step, index, loss)
            case event:
                self.handle(event)

    def handle(self, event: object) -> None:
        if self.alive:
            self.world.before_event(self, event)
            line, standbys = self.machine.watermark, self.machine.standbys
            given = self.machine.handle(event)  # pyright: ignore[reportArgumentType]
            if self.machine.watermark > line and self.machine.standbys == standbys:
                self.world.check_line(self)
            self._perform_all(given)

    def lost_link(self, far: Process, stream: Stream) -> None:
        """Of the process: a connection with a member is the driver's, one between members its own member's."""
        if stream != "control":
            if self.member.linked.get(far.name) is far:
                del self.member.linked[far.name]
                self.handle(LinkBroken(OWNER, far.name, "broke"))
        elif self.connections.get(far.name) is far:
            del self.connections[far.name]
            self._lost(far.name, "its connection broke")

    def _lost(self, peer: str, reason: str) -> None:
        self.silence.forget(peer)
        self.connections.pop(peer, None)
        self.handle(PeerLost(peer, reason))

    def _tick(self) -> None:
        if not self.alive:
            return
        now_s = self.world.network.now_s
        for peer in self.silence.watched:
            if self.world.network.reaches(self.process, self.connections[peer]):
                self.silence.heard(peer, now_s)
        for peer in self.silence.tick(now_s):
            self.world.network.cut(self.process, self.connections[peer], members=False)
            self._lost(peer, "silent")
        self.world.network.timer(self.process, PING_S, self._tick)

    # -------------------------------------------------------------------------------------------------- performing

    def _perform_all(self, given: list[interface.DriverCommand]) -> None:
        for command in given:
            self._perform(command)

    def _perform(self, command: interface.DriverCommand) -> None:
        world = self.world
        match command:
            case interface.SendAttach(fence=fence, roles=roles, standbys=standbys):
                self._attach(fence, roles, dict(standbys))
            case interface.SendSnapshot(stage=stage, step=step, holder=holder, peer=peer):
                self._send(holder, "control", Pass(stage, step, peer))
            case interface.SendResume():
                self._resume(command)
            case interface.SendProbe(step=step):
                self.probed = []
                for index in (-1, -2):
                    self._feed("eval", step, index)
            case interface.AnnounceReady(base=base):
                world.check_ready(self, base)
            case interface.FeedMicrobatch(step=step, microbatch=microbatch, only=only):
                self._feed("train", step, microbatch, only)
            case interface.DecideScale(step=step, norms=norms):
                total, scale = model.clip(norms)
                self._later(lambda: self.handle(interface.ScaleDecided(step, total, scale)))
            case interface.JournalCommit(record=record):
                self._later(lambda: self._journal(record))
            case interface.SendCommit(record=record, watermark=line, save=save):
                assert record in world.journal, "sent before it was journalled"
                for stage, peer in self.layout.places.items():
                    self._send(peer, "control", (stage, staging.Committed(record, line, save)))
            case interface.WriteCheckpoint(step=step, ask=ask):
                self._write_checkpoint(step, ask=ask)
            case interface.Evaluate(step=step):
                self.evaluated[step] = {}
                self.unfed = deque(range(world.topology.evaluations))
                for _ in range(2):
                    self._feed_evaluation(step)
            case interface.NameBest(best=best):
                assert best.step in world.checkpoints, "named before it was complete"
                assert best == standing(world.evaluations).best
                world.best = best.step
            case interface.StepCommitted(record=record, losses=losses):
                assert losses == world.expected.steps[record.step].losses
            case AskPlan(without=without):
                self.without = without
                # A pause, or a machine that the broker has not missed yet would be tried a thousand times.
                pause_s = max(0.0, self.asked_s + RETRY_S - world.network.now_s)
                world.network.timer(self.process, pause_s, self._ask_plan)
            case ReportFault(kind=kind):
                world.told[f"fault: {kind}"] += 1
            case interface.ReportRestored():
                world.check_restored(self, command)
            case EndJob():
                self.ended = command
                self._report(done=command.failed is None and command.stopped is None)
            case interface.WarnTolerant():
                raise AssertionError(command.detail)

    def _attach(self, fence: Fence, roles: Roles, standbys: dict[int, str]) -> None:
        """What was under way for the old fence is dropped; states on their way to the disk get there."""
        self.member.linked.clear()
        self.saving = None
        self.collected.clear()
        self.evaluated.clear()
        self.unfed.clear()
        if roles.version != self.version:
            self.version, self.layout = roles.version, self.layouts[roles.version]
            self.without = None
        self.world.plan = (self.version, self.layout)
        members = sorted({*roles.places.values(), *standbys.values()})
        for peer in sorted(self.connections.keys() - set(members)):
            self._send(peer, "control", Detach(fence))
            del self.connections[peer]
            self.silence.forget(peer)
        now_s = self.world.network.now_s
        for peer in members:
            process = self.world.members[peer].process
            if self.connections.get(peer) is not process:
                if peer in self.connections:
                    self.world.connected_anew(peer)
                self.connections[peer] = process
                self.world.network.connect(self.process, process)
                self.silence.watch(peer, now_s)
            if not process.alive:
                self._later(lambda peer=peer, process=process: self._unreachable(peer, process))
                continue
            guarding = frozenset(stage for stage, standby in standbys.items() if standby == peer)
            self._send(peer, "control", Enlist(fence, roles.places, guarding, roles.partition))
            for stage in roles.stages_of(peer):
                standby = standbys.get(stage)
                every = roles.snapshot_every if standby is not None else 0
                attached = staging.Attached(fence, retain=bool(standbys), snapshot_every=every)
                self._send(peer, "control", Attach(stage, attached, standby))

    def _unreachable(self, peer: str, process: Process) -> None:
        if self.connections.get(peer) is process:
            self._lost(peer, "can't be reached")

    def _resume(self, command: interface.SendResume) -> None:
        peer = self.layout.places[command.stage]
        resumed = command.resume
        self._send(peer, "control", (command.stage, resumed))
        if resumed.source == "import":
            state = State(command.stage, resumed.base, self.world.checkpoints[resumed.base][command.stage])
            self._send(peer, "state", (command.stage, state))

    def _later(self, action: Callable[[], None]) -> None:
        """What the driver's own disk and backend answer; a driver that died meanwhile answers nothing."""
        self.world.network.work(self.process, lambda: action() if self.alive else None)

    def _journal(self, record: CommitRecord) -> None:
        assert record.step == len(self.world.journal), "each step once, in order"
        self.world.journal.append(record)
        # The process may die right here: what is on disk is official, and nobody was told.
        self._later(lambda: self.handle(interface.CommitJournalled(record)))

    def _feed(self, mode: Mode, step: int, microbatch: int, only: frozenset[int] | None = None) -> None:
        for stage in sorted(self.world.topology.fed if only is None else only):
            value = model.fed_value(mode, step, microbatch)
            tensor = Tensor("forward", mode, step, microbatch, FEED, stage, value)
            self._send(self.layout.places[stage], "feed", (stage, tensor))

    def _probed(self, loss: float) -> None:
        self.probed.append(loss)
        if len(self.probed) == 2:
            self.handle(interface.ProbeAnswered((self.probed[0], self.probed[0])))

    def _feed_evaluation(self, step: int) -> None:
        if self.unfed:
            self._feed("eval", step, self.unfed.popleft())

    def _evaluated(self, step: int, index: int, loss: float) -> None:
        assert loss == self.world.expected.evaluations[step][index], "evaluated another state"
        self.evaluated[step][index] = loss
        self._feed_evaluation(step)
        if len(self.evaluated[step]) == self.world.topology.evaluations:
            losses = [self.evaluated[step][number] for number in range(self.world.topology.evaluations)]
            found = Evaluation(step, sum(losses) / len(losses))
            self._later(lambda: self._journal_evaluation(found))

    def _journal_evaluation(self, found: Evaluation) -> None:
        if all(known.step != found.step for known in self.world.evaluations):
            self.world.evaluations.append(found)
        # As with a commit: what is on disk counts, whoever lives to hear of it.
        fence = self.machine.fence
        self._later(
            lambda: fence == self.machine.fence and self.handle(interface.EvaluationDone(found.step, found.loss))
        )

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _write_checkpoint(self, step: int, *, ask: bool) -> None:
        assert self.saving is None, "one checkpoint at a time: there is one reader of a stage's state"
        self.saving = step
        if ask and step not in self.writing:
            for stage, peer in self.layout.places.items():
                self._send(peer, "control", (stage, staging.ExportAsked(step)))
        self._complete(step)

    def _collect(self, state: State) -> None:
        assert state.value == self.world.expected.states[state.step][state.stage]
        states = self.collected.setdefault((self.fence, state.step), {})
        assert state.stage not in states, "one state of a stage per checkpoint"
        states[state.stage] = state.value
        self._complete(state.step)

    def _complete(self, step: int) -> None:
        states = self.collected.get((self.fence, step), {})
        if len(states) == self.world.topology.stages and step not in self.writing:
            self.writing.add(step)
            self._later(lambda: self._write(step, states))

    def _write(self, step: int, states: dict[int, str]) -> None:
        self.world.checkpoints[step] = states
        self.writing.discard(step)
        self.saving = None if self.saving == step else self.saving
        self.handle(interface.CheckpointWritten(step))
        if self.machine.phase is DriverPhase.RUNNING:  # otherwise somebody may still be loading an older one
            best = self.machine.standing.best if self.world.topology.keep_best else None
            kept = (self.machine.saved, None if best is None else best.step)
            for older in [other for other in self.world.checkpoints if other not in kept]:
                del self.world.checkpoints[older]

    # ------------------------------------------------------------------------------------------------------- plans

    def _ask_plan(self) -> None:
        """Until there is one. Each way to the broker and back takes its time, and the broker may be away."""
        if self.without is None or not self.alive or self.world.network.now_s < self.asked_s + RETRY_S:
            return
        self.asked_s = self.world.network.now_s
        self._request(self.without)
        self.world.network.timer(self.process, RETRY_S, self._ask_plan)

    def _request(self, without: frozenset[str], change: Callable[[Layout], Layout | None] | None = None) -> None:
        broker = self.world.broker

        def asked() -> None:
            pool = broker.candidates()
            self.world.network.send(broker.process, self.process, "control", lambda: chosen(pool))

        def chosen(pool: Candidates) -> None:
            if not self.alive or (change is None and self.without is None):
                return
            present = self._as_it_is()
            layout = present if change is None else change(present)
            if layout is not None:
                layout = stand_in(layout, without, pool, self.world.topology.stateless, self._pick)
            if layout is None or (change is not None and layout == present):
                self.world.told["nobody can be found" if layout is None else "nothing to change"] += 1
                return
            self.world.network.send(self.process, broker.process, "control", lambda: minted(layout))

        def minted(layout: Layout) -> None:
            version = broker.mint(self.process, layout)
            if version is not None:
                self.world.network.send(broker.process, self.process, "control", lambda: granted(version, layout))

        def granted(version: int, layout: Layout) -> None:
            if change is not None and self.without is not None:
                return  # nobody needs a better plan while a stage has nobody
            self.layouts[version] = layout
            self.handle(interface.PlanGranted(self._roles(version)))

        self.world.network.send(self.process, broker.process, "control", asked)

    def _as_it_is(self) -> Layout:
        """The plan in force, less the standbys that are lost."""
        return dataclasses.replace(self.layout, standbys=dict(self.machine.standbys))

    def _pick(self, count: int) -> int:
        return self.world.choose.randrange(count)

    def _look_for_better(self) -> None:
        """Standbys for those without, a way out for those that drain."""
        if not self.alive:
            return
        self._report(done=False)
        if self.machine.phase is DriverPhase.RUNNING and max(self.layouts) == self.version and self.world.improving:
            self.propose(lambda layout: layout)
        self.world.network.timer(self.process, RETRY_S, self._look_for_better)

    def propose(self, change: Callable[[Layout], Layout | None]) -> None:
        """A plan nobody needs: better standbys, a moved stage, another cut."""
        self._request(frozenset(), change)

    def _report(self, *, done: bool) -> None:
        broker, step = self.world.broker, self.machine.step
        self.world.network.send(
            self.process, broker.process, "control", lambda: broker.report(self.process, step, done=done)
        )

    def _send(self, peer: str, stream: Stream, message: object) -> None:
        """To a member, or to one of its stages: (stage, message)."""
        target, fence = self.connections.get(peer), self.fence
        if target is None:
            return
        if stream == "feed":
            self.member.linked[peer] = target

        def deliver() -> None:
            member = self.world.members[peer]
            if member.process is not target:
                return
            match message:
                case (int() as stage, inner):
                    if stage in member.stages:
                        member.stages[stage].receive(fence, inner)
                case _:
                    member.receive(self, fence, message)

        self.world.network.send(self.process, target, stream, deliver)

    @property
    def phase(self) -> DriverPhase:
        return self.machine.phase
