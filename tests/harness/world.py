"""A whole training job on the shipped machines, in virtual time and without a tensor, with faults where a test wants.

The shells here perform the machines' commands as `execution` and `training` do. After every event the invariants are
checked: no stage ahead of the journal, each step applied once and on exactly its sums, credit kept, nothing held,
retained or in transit beyond its bound.

Neighbours: `harness.topology` says what a job computes, `harness.network` moves time; `tests/property` runs it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fusionai.coordination import driver as driving
from fusionai.coordination import stage as staging
from fusionai.coordination.driver import DriverMachine
from fusionai.coordination.stage import StageMachine, Work
from fusionai.wire.messages import CommitRecord, Fence, Mode
from harness import topology as model
from harness.network import Network, Stream
from harness.topology import FEED, Topology

PLAN_VERSION = 1
EVENTS_AT_MOST = 200_000
OWNER = "driver"


@dataclass(frozen=True, slots=True)
class Tensor:
    """`sender` and `receiver` are stages, or `FEED`."""

    kind: Literal["forward", "backward", "partial", "total"]
    mode: Mode
    step: int
    microbatch: int
    sender: int
    value: str


@dataclass(frozen=True, slots=True)
class State:
    """Of one stage, in either direction."""

    stage: int
    step: int
    value: str


@dataclass(frozen=True, slots=True)
class Output:
    mode: Mode
    step: int
    microbatch: int
    loss: float


@dataclass(slots=True)
class Stage:
    """One stage in one process: what `execution.runtime` does, with digests for tensors."""

    world: World
    process: int
    number: int
    machine: StageMachine
    value: str = ""
    step: int = -1
    held: dict[tuple[Mode, int, int], dict[int, str]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    contexts: dict[int, str] = field(default_factory=dict)
    put_off: deque[tuple[int, str, dict[int, str]]] = field(default_factory=deque)
    """(microbatch, context, gradients) whose weight gradients wait."""
    sums: str = ""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """(step, microbatch) of everything in `sums`, in order."""
    parts: dict[int, str] = field(default_factory=dict)
    shared: str = ""
    waiting_state: State | None = None
    retained: dict[tuple[str, int, int, int], str] = field(default_factory=dict)
    """(kind, to, step, microbatch) -> what was sent."""

    # ---------------------------------------------------------------------------------------------------- arriving

    def receive(self, fence: Fence, message: object) -> None:
        if isinstance(message, staging.Attached):
            self.handle(message)
        elif not self.machine.accepts(fence):
            self.world.stale += 1
        else:
            self._take(message)

    def _take(self, message: object) -> None:
        match message:
            case State():
                self.waiting_state = message
            case Tensor(kind="forward", mode=mode, step=step, microbatch=microbatch, sender=sender, value=value):
                arrived = staging.ForwardArrived(mode, step, microbatch, sender)
                if self.machine.wants(arrived):
                    self.held.setdefault((mode, step, microbatch), {})[sender] = value
                self.handle(arrived)
            case Tensor(kind="backward", step=step, microbatch=microbatch, sender=sender, value=value):
                returned = staging.BackwardArrived(step, microbatch, sender)
                if self.machine.wants(returned):
                    self.gradients.setdefault((step, microbatch), {})[sender] = value
                self.handle(returned)
            case Tensor(kind="partial" | "total" as phase, step=step, sender=sender, value=value):
                part = staging.SharedArrived(step, sender, phase)
                if self.machine.wants(part):
                    if phase == "partial":
                        self.parts[sender] = value
                    else:
                        self.shared = value
                self.handle(part)
            case event:
                self.handle(event)  # pyright: ignore[reportArgumentType]
        self._offer_state()

    def _offer_state(self) -> None:
        """A state may overtake the resume that asks for it: it waits."""
        if self.waiting_state is not None and self.machine.expects_state:
            state, self.waiting_state = self.waiting_state, None
            self.value, self.step = state.value, state.step
            self.handle(staging.StateArrived(state.step))

    def handle(self, event: staging.StageEvent) -> None:
        for command in self.machine.handle(event):
            self.perform(command)

    # --------------------------------------------------------------------------------------------------- performing

    def perform(self, command: staging.StageCommand) -> None:
        match command:
            case staging.Compute(work=work):
                self.world.network.after(self.world.network.work_s(), lambda: self.finish(work))
            case staging.ReportStatus(applied=applied, prepared=prepared):
                self.tell(driving.StageReported(self.number, applied, prepared))
            case staging.ReportReady(applied=applied):
                assert applied == self.step, "says it is where it is not"
                self.tell(driving.StageReady(self.number, applied))
            case staging.ReportPrepared(step=step):
                self.tell(driving.StagePrepared(self.number, step, model.norm_of(self.number, self.sums, self.shared)))
            case staging.ReportApplied():
                pass
            case staging.DropSums():
                self.clear_step()
            case staging.DropHeld(below=below):
                self.held = {key: held for key, held in self.held.items() if below is not None and key[1] >= below}
            case staging.DropRetained(line=line):
                self.retained = {key: sent for key, sent in self.retained.items() if key[2] >= line}
            case staging.Refuse(reason=reason):
                # An attach of a driver that died may arrive after that of the next.
                assert "already obeys" in reason, reason

    def clear_step(self) -> None:
        self.sums, self.shared = "", ""
        self.counted.clear()
        self.contexts.clear()
        self.put_off.clear()
        self.gradients.clear()
        self.parts.clear()

    def finish(self, work: Work) -> None:
        """The compute thread is done: what it made goes out under the fence it began with."""
        if not self.alive:
            return
        match work.kind:
            case "initialise":
                self.value, self.step = model.first_state(self.number), 0
            case "forward":
                self.forward(work)
            case "backward":
                self.backward(work)
            case "weights":
                self.weigh(work)
            case "share":
                self.to_stage(self.topology.tied[0], "partial", work, model.shared_part(self.sums))
            case "total":
                parts = {**self.parts, self.number: model.shared_part(self.sums)}
                assert sorted(parts) == sorted(self.topology.tied), "every part once"
                self.shared = model.shared_total(parts)
                for stage in self.parts:
                    self.to_stage(stage, "total", work, self.shared)
            case "norms":
                pass
            case "apply":
                self.apply(work)
            case "export":
                assert work.step == self.step
                self.send("state", State(self.number, self.step, self.value))
        self.handle(staging.WorkDone(work))
        self._offer_state()

    def forward(self, work: Work) -> None:
        assert work.step == self.step, "on exactly its state"
        inputs = self.held.pop((work.mode, work.step, work.microbatch))
        assert inputs.keys() == self.topology.producers(self.number)
        context = model.run_forward(self.number, self.value, inputs)
        if work.mode == "train":
            self.contexts[work.microbatch] = context
        for consumer in self.topology.consumers(self.number):
            self.to_stage(consumer, "forward", work, model.output_for(context, consumer))
        if self.number == self.topology.last:
            self.send("tensors", Output(work.mode, work.step, work.microbatch, model.loss_of(context)))

    def backward(self, work: Work) -> None:
        gradients = self.gradients.pop((work.step, work.microbatch), {})
        assert gradients.keys() == self.topology.consumers(self.number)
        context = self.contexts.pop(work.microbatch)
        self.put_off.append((work.microbatch, context, gradients))
        if self.machine.shape.weight_lag == 0:
            self.weigh(work)
        for producer in self.topology.producers(self.number) - {FEED}:
            self.to_stage(producer, "backward", work, model.gradient_for(context, gradients, producer))

    def weigh(self, work: Work) -> None:
        """The microbatch's part of the sums, perhaps long after its backward."""
        microbatch, context, gradients = self.put_off.popleft()
        assert microbatch == work.microbatch, "in their order"
        self.sums = model.summed(self.sums, context, gradients)
        self.counted.append((work.step, microbatch))

    def apply(self, work: Work) -> None:
        record = work.record
        assert record is not None
        assert record.step == work.step == self.step, "applied twice, or out of order"
        assert record in self.world.journal, "applied before it was journalled"
        assert self.counted == [(self.step, m) for m in range(self.topology.microbatches)], "sums are not the step's"
        self.value = model.applied(self.value, self.sums, self.shared, record.scale, record.learning_rate)
        self.step += 1
        self.clear_step()

    # ------------------------------------------------------------------------------------------------------ sending

    def to_stage(
        self, stage: int, kind: Literal["forward", "backward", "partial", "total"], work: Work, value: str
    ) -> None:
        message = Tensor(kind, work.mode, work.step, work.microbatch, self.number, value)
        if work.mode == "train" and kind in ("forward", "backward"):
            self.retained[kind, stage, work.step, work.microbatch] = value
        self.world.to_stage(self.process, self.fence, stage, "tensors", message)

    def tell(self, event: object) -> None:
        self.send("control", event)

    def send(self, stream: Stream, message: object) -> None:
        self.world.to_driver(self.process, self.fence, stream, message)

    @property
    def fence(self) -> Fence:
        assert self.machine.fence is not None
        return self.machine.fence

    @property
    def topology(self) -> Topology:
        return self.world.topology

    @property
    def alive(self) -> bool:
        return self.world.stages[self.number] is self

    def check(self) -> None:
        assert self.machine.in_flight <= self.machine.shape.in_flight, "credit"
        assert self.step <= len(self.world.journal), "ahead of the journal"
        window = self.topology.feed_window
        trained = sum(mode == "train" for mode, _, _ in self.held)
        assert trained <= window, f"{trained} microbatches held, {window} may be under way"
        assert len(self.held) - trained <= self.topology.evaluations
        assert len(self.gradients) <= self.machine.shape.in_flight
        assert len(self.contexts) <= self.machine.shape.in_flight
        most = self.machine.shape.in_flight + self.machine.shape.weight_lag
        assert len(self.contexts) + len(self.put_off) <= most, "contexts beyond credit and what may be put off"
        steps = {step for _, _, step, _ in self.retained}
        assert all(step >= self.machine.line for step in steps), "kept below the line"
        assert len(steps) <= 2, f"retained steps {sorted(steps)}"


class Driver:
    """One start of the driver: what `training.driver` does."""

    def __init__(self, world: World, incarnation: int) -> None:
        self.world = world
        self.fence = Fence(PLAN_VERSION, incarnation, 0)
        self.base = max(world.checkpoints, default=0)
        self.ended: driving.EndJob | None = None
        self.collected: dict[int, dict[int, str]] = {}
        self.writing: int | None = None
        self.evaluated: dict[int, dict[int, float]] = {}
        self.unfed: deque[int] = deque()
        """Evaluation batches waiting for their turn."""
        self.machine = DriverMachine(
            shape=world.topology.job_shape(),
            fence=self.fence,
            learning_rate=model.learning_rate,
            journal=tuple(world.journal[self.base :]),
            base=self.base,
            source="import" if self.base else "initialise",
        )

    def start(self) -> None:
        self._perform_all(self.machine.start())

    def receive(self, fence: Fence, message: object) -> None:
        if fence != self.fence:
            self.world.stale += 1
            return
        match message:
            case State():
                self._collect(message)
            case Output(mode="train", step=step, microbatch=microbatch, loss=loss):
                self.handle(driving.LossArrived(step, microbatch, loss))
            case Output(step=step, microbatch=index, loss=loss):
                self._evaluated(step, index, loss)
            case event:
                self.handle(event)

    def handle(self, event: object) -> None:
        if self.ended is None and self.alive:
            self._perform_all(self.machine.handle(event))  # pyright: ignore[reportArgumentType]

    @property
    def alive(self) -> bool:
        return self.world.driver is self

    def _perform_all(self, commands: list[driving.DriverCommand]) -> None:
        for command in commands:
            self._perform(command)

    def _perform(self, command: driving.DriverCommand) -> None:
        match command:
            case driving.SendAttach(fence=fence):
                self._to_all(staging.Attached(fence))
            case driving.SendResume(stage=stage, committed=committed, source=source, record=record):
                self._send(stage, "control", staging.Resumed(committed, source, committed, record))
                if source == "import":
                    state = State(stage, self.base, self.world.checkpoints[self.base][stage])
                    self._send(stage, "state", state)
            case driving.SendProbe():
                self._later(lambda: self.handle(driving.ProbeAnswered((1.0, 1.0))))
            case driving.AnnounceReady(base=base):
                steps = {stage.step for stage in self.world.stages if stage.machine.accepts(self.fence)}
                assert steps <= {base}, f"ready at {base} while stages are at {steps}"
            case driving.Feed(step=step, microbatch=microbatch):
                self._feed("train", step, microbatch)
            case driving.DecideScale(step=step, norms=norms):
                total, scale = model.clip(norms)
                self._later(lambda: self.handle(driving.ScaleDecided(step, total, scale)))
            case driving.JournalCommit(record=record):
                self._later(lambda: self._journal(record))
            case driving.SendCommit(record=record, line=line, save=save):
                assert record in self.world.journal, "sent before it was journalled"
                self._to_all(staging.Committed(record, line, save))
            case driving.WriteCheckpoint(step=step, ask=ask):
                assert self.writing is None, "one checkpoint at a time: there is one reader of a stage's state"
                self.writing = step
                if ask:
                    self._to_all(staging.ExportAsked(step))
                self._complete(step)
            case driving.Evaluate(step=step):
                self.evaluated[step] = {}
                self.unfed = deque(range(self.world.topology.evaluations))
                for _ in range(2):
                    self._feed_evaluation(step)
            case driving.EndJob():
                self.ended = command
            case driving.StepCommitted(record=record, losses=losses):
                assert losses == self.world.expected.steps[record.step].losses
            case driving.WarnTolerant():
                raise AssertionError(command.detail)

    def _later(self, action: Callable[[], None]) -> None:
        """What the driver's own disk and backend answer; a driver that died meanwhile answers nothing."""
        self.world.network.after(self.world.network.work_s(), lambda: action() if self.alive else None)

    def _journal(self, record: CommitRecord) -> None:
        if self.ended is not None:
            return
        assert record.step == len(self.world.journal), "each step once, in order"
        self.world.journal.append(record)
        # The process may die right here: what is on disk is official, and nobody was told.
        self._later(lambda: self.handle(driving.CommitJournalled(record)))

    def _feed(self, mode: Mode, step: int, microbatch: int) -> None:
        for stage in sorted(self.world.topology.fed):
            value = model.fed_value(mode, step, microbatch)
            self._send(stage, "tensors", Tensor("forward", mode, step, microbatch, FEED, value))

    def _feed_evaluation(self, step: int) -> None:
        if self.unfed:
            self._feed("eval", step, self.unfed.popleft())

    def _evaluated(self, step: int, index: int, loss: float) -> None:
        assert loss == self.world.expected.evaluations[step][index], "evaluated another state"
        self.evaluated[step][index] = loss
        self._feed_evaluation(step)
        if len(self.evaluated[step]) == self.world.topology.evaluations:
            self.handle(driving.EvaluationDone(step))

    def _collect(self, state: State) -> None:
        assert state.value == self.world.expected.states[state.step][state.stage]
        states = self.collected.setdefault(state.step, {})
        assert state.stage not in states, "one state of a stage per checkpoint"
        states[state.stage] = state.value
        self._complete(state.step)

    def _complete(self, step: int) -> None:
        states = self.collected.get(step, {})
        if len(states) == self.world.topology.stages:
            self._later(lambda: self._write(step, states))

    def _write(self, step: int, states: dict[int, str]) -> None:
        if self.ended is None:
            self.world.checkpoints[step] = states
            self.writing = None
            self.handle(driving.CheckpointWritten(step))

    def _to_all(self, event: object) -> None:
        for stage in range(self.world.topology.stages):
            self._send(stage, "control", event)

    def _send(self, stage: int, stream: Stream, message: object) -> None:
        self.world.to_stage((OWNER, self.fence.incarnation), self.fence, stage, stream, message)


class World:
    """Journal and checkpoints outlive processes. `place[stage]` is the process that holds it; a lost one is replaced
    by a spare while there is any, afterwards by its own restart."""

    def __init__(self, topology: Topology, seed: int, *, spares: int = 0) -> None:
        self.topology = topology
        self.expected = model.reference(topology)
        self.choose = random.Random(seed)
        self.network = Network(self.choose)
        self.journal: list[CommitRecord] = []
        self.checkpoints: dict[int, dict[int, str]] = {}
        self.stale = 0
        """Messages dropped for their fence."""
        self.spares = deque(range(topology.stages, topology.stages + spares))
        self._processes = topology.stages + spares
        self.stages = [self._new_stage(number, number) for number in range(topology.stages)]
        self.incarnations = 0
        self.forgetful = self.choose.random() < 0.5
        """Whether a stage's process lets go of its state when another driver comes."""
        self.driver = self._new_driver()
        self.driver.start()

    # ------------------------------------------------------------------------------------------------------ running

    def run(self) -> driving.EndJob:
        """Until the job is done, driver after driver. Raises `AssertionError` where anything goes wrong."""
        for _ in range(EVENTS_AT_MOST):
            ended = self.driver.ended
            if ended is not None:
                if ended.failed is None and ended.stopped is None:
                    self._check_result()
                    return ended
                assert ended.failed is None or "was lost" in ended.failed, ended.failed
                self.restart_driver()
            assert self.network.advance(), f"nothing can happen any more: {self.stories()}"
            self._check()
        raise AssertionError("the job did not come to an end")

    def _check(self) -> None:
        for stage in self.stages:
            stage.check()
        # A tensor per microbatch under way and direction, a few words of control: never more on one channel.
        bound = 2 * self.topology.feed_window + 2 * self.topology.evaluations + 8
        assert all(count <= bound for count in self.network.in_transit.values()), self.network.in_transit

    def _check_result(self) -> None:
        steps = [(record.loss, record.scale, record.norms_hash) for record in self.journal]
        assert steps == [(step.loss, step.scale, step.norms_hash) for step in self.expected.steps]
        assert [record.step for record in self.journal] == list(range(self.topology.steps))
        final = self.expected.states[self.topology.steps]
        assert self.checkpoints[self.topology.steps] == dict(enumerate(final))
        attached = [stage for stage in self.stages if stage.machine.accepts(self.driver.fence)]
        assert all(stage.value == final[stage.number] for stage in attached)

    def stories(self) -> str:
        lines = [f"driver: {self.driver.machine.story[-6:]}"]
        lines += [f"stage {stage.number}: {stage.machine.story[-6:]}" for stage in self.stages]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------------- faults

    def restart_driver(self) -> None:
        """The driver's process dies (or has ended) and starts again with what is on its disk."""
        self.driver = self._new_driver()
        if self.forgetful:
            for number, stage in enumerate(self.stages):
                self.stages[number] = self._new_stage(number, stage.process)
        self.driver.start()

    def stop(self, reason: str) -> None:
        self.driver.handle(driving.StopAsked(reason))

    def kill_stage(self, number: int) -> None:
        """Its process is gone with all it held; the driver notices the broken connection after a while."""
        if self.spares:
            process = self.spares.popleft()
        else:
            process, self._processes = self._processes, self._processes + 1
        self.stages[number] = self._new_stage(number, process)
        driver = self.driver
        lost = driving.StageLost(number, "its connection broke")
        self.network.after(self.network.work_s(), lambda: driver.handle(lost))

    # ------------------------------------------------------------------------------------------------------- letters

    def to_stage(self, sender: object, fence: Fence, number: int, stream: Stream, message: object) -> None:
        target = self.stages[number]

        def deliver() -> None:
            if self.stages[number] is target:
                target.receive(fence, message)

        self.network.send((sender, target.process, stream), deliver)

    def to_driver(self, sender: int, fence: Fence, stream: Stream, message: object) -> None:
        target = self.driver
        self.network.send((sender, (OWNER, target.fence.incarnation), stream), lambda: target.receive(fence, message))

    def _new_stage(self, number: int, process: int) -> Stage:
        return Stage(self, process, number, StageMachine(self.topology.stage_shape(number)))

    def _new_driver(self) -> Driver:
        self.incarnations += 1
        return Driver(self, self.incarnations)
