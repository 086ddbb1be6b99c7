"""The driver's and the stages' machines together, in a network that delays as it likes, with faults at any moment.

Whatever happens: the journal holds each step once and in order, no stage applies a step that is not journalled, none
twice, and every stage's final state is that of a run without faults. The shells here compute hashes instead of
gradients, so that any tensor lost, counted twice or taken from another attempt changes the result.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination import driver as driving
from fusionai.coordination import stage as staging
from fusionai.coordination.driver import DriverMachine, JobShape
from fusionai.coordination.stage import StageMachine, StageShape
from fusionai.wire.messages import CommitRecord, Fence

PLAN_VERSION = 1
EVENTS_AT_MOST = 20_000


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def number(text: str) -> float:
    """A float that stands for a loss or a norm."""
    return int(text[:8], 16) / 2**32


@dataclass(frozen=True)
class Size:
    stages: int
    steps: int
    microbatches: int
    in_flight: int
    checkpoint_every: int


@dataclass(frozen=True)
class Letter:
    """A message on its way. `event` None: an attach, which raises the fence."""

    fence: Fence
    to: int | Literal["driver"]
    event: object


@dataclass
class Stage:
    """The shell of one stage: what `execution` does, with hashes for tensors."""

    number: int
    world: World
    machine: StageMachine
    state: str = ""
    step: int = -1
    inputs: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], str] = field(default_factory=dict)
    contexts: dict[tuple[int, int], str] = field(default_factory=dict)
    sums: list[tuple[int, int, str, str]] = field(default_factory=list)
    work: staging.Work | None = None

    def receive(self, letter: Letter) -> None:
        match letter.event:
            case staging.Attached():
                self.perform(self.machine.handle(letter.event))
                return
            case _ if not self.machine.accepts(letter.fence):
                return
            case Imported(state=state, step=step):
                self.state, self.step = state, step
                self.perform(self.machine.handle(staging.StateArrived(step)))
            case Tensor(kind="forward", step=step, microbatch=microbatch, sender=sender, value=value):
                self.inputs.setdefault((step, microbatch), {})[sender] = value
                self.perform(self.machine.handle(staging.ForwardArrived("train", step, microbatch, sender)))
            case Tensor(kind="backward", step=step, microbatch=microbatch, sender=sender, value=value):
                self.gradients[step, microbatch] = value
                self.perform(self.machine.handle(staging.BackwardArrived(step, microbatch, sender)))
            case event:
                self.perform(self.machine.handle(event))  # pyright: ignore[reportArgumentType]

    def perform(self, commands: list[staging.StageCommand]) -> None:
        for command in commands:
            match command:
                case staging.Compute(work=work):
                    assert self.work is None, "one piece of work at a time"
                    self.work = work
                case staging.ReportStatus(applied=applied, prepared=prepared):
                    self.tell(driving.StageReported(self.number, applied, prepared))
                case staging.ReportReady(applied=applied):
                    assert applied == self.step
                    self.tell(driving.StageReady(self.number, applied))
                case staging.ReportPrepared(step=step):
                    self.tell(driving.StagePrepared(self.number, step, self.norms(step)))
                case staging.DropSums():
                    self.sums.clear()
                    self.contexts.clear()
                case staging.DropHeld():
                    self.inputs.clear()
                    self.gradients.clear()
                case staging.Refuse(reason=reason):
                    assert "already obeys" in reason, reason
                case staging.ReportApplied() | staging.DropRetained():
                    pass

    def finish(self) -> None:
        """The compute thread is done: what it computed goes out under the fence it began with."""
        work, self.work = self.work, None
        assert work is not None
        self.act(work)
        self.perform(self.machine.handle(staging.WorkDone(work)))

    def act(self, work: staging.Work) -> None:
        key = (work.step, work.microbatch)
        match work.kind:
            case "initialise":
                self.state, self.step = f"new {self.number}", 0
            case "forward":
                assert work.step == self.step
                value = digest("forward", self.number, self.state, sorted(self.inputs.pop(key).items()))
                self.contexts[key] = value
                if self.last:
                    self.tell(driving.LossArrived(work.step, work.microbatch, number(value)))
                else:
                    self.send(self.number + 1, Tensor("forward", *key, self.number, value))
            case "backward":
                gradient = "" if self.last else self.gradients.pop(key)
                context = self.contexts.pop(key)
                self.sums.append((*key, context, gradient))
                if self.number > 0:
                    value = digest("backward", self.number, context, gradient)
                    self.send(self.number - 1, Tensor("backward", *key, self.number, value))
            case "apply":
                self.apply(work)
            case "export":
                assert work.step == self.step
                self.send("driver", Imported(self.state, self.step, self.number))
            case "norms" | "share" | "total":
                pass

    def apply(self, work: staging.Work) -> None:
        record = work.record
        assert record is not None
        assert record.step == work.step == self.step, "applied twice, or out of order"
        assert record in self.world.journal, "applied before it was journalled"
        counted = [(step, microbatch) for step, microbatch, _, _ in self.sums]
        assert counted == [(self.step, m) for m in range(self.world.size.microbatches)], "sums are not the step's"
        self.state = digest(self.state, self.sums, record.scale, record.learning_rate)
        self.step += 1
        self.sums.clear()

    def norms(self, step: int) -> dict[str, float]:
        return {f"p{self.number}": number(digest(step, self.sums))}

    @property
    def last(self) -> bool:
        return self.number == self.world.size.stages - 1

    def tell(self, event: object) -> None:
        self.send("driver", event)

    def send(self, to: int | Literal["driver"], event: object) -> None:
        fence = self.machine.fence
        assert fence is not None
        self.world.post(self.number, Letter(fence, to, event))


@dataclass(frozen=True)
class Tensor:
    kind: Literal["forward", "backward"]
    step: int
    microbatch: int
    sender: int
    value: str


@dataclass(frozen=True)
class Imported:
    """A stage's state, in either direction."""

    state: str
    step: int
    stage: int


class Driver:
    """The shell of one start of the driver."""

    def __init__(self, world: World, incarnation: int) -> None:
        self.world = world
        self.fence = Fence(PLAN_VERSION, incarnation, 0)
        self.base = max(world.checkpoints, default=0)
        size = world.size
        self.machine = DriverMachine(
            shape=JobShape(
                stages=tuple(range(size.stages)),
                steps=size.steps,
                microbatches=size.microbatches,
                feed_window=size.in_flight + 1,
                canonical_order=tuple(f"p{stage}" for stage in range(size.stages)),
                checkpoint_every=size.checkpoint_every,
            ),
            fence=self.fence,
            learning_rate=lambda step: 1 / (step + 2),
            journal=tuple(world.journal[self.base :]),
            base=self.base,
            source="import" if self.base in world.checkpoints else "initialise",
        )
        self.ended: driving.EndJob | None = None
        self.collected: dict[int, dict[int, str]] = {}
        self.later: deque[Callable[[], object]] = deque()
        """What the driver's own disk and backend will answer, in order."""

    def start(self) -> None:
        self.perform(self.machine.start())

    def receive(self, letter: Letter) -> None:
        if letter.fence != self.fence or self.ended is not None:
            return
        if isinstance(letter.event, Imported):
            self.collect(letter.event)
        else:
            self.handle(letter.event)

    def handle(self, event: object) -> None:
        if self.ended is None:
            self.perform(self.machine.handle(event))  # pyright: ignore[reportArgumentType]

    def perform(self, commands: list[driving.DriverCommand]) -> None:
        for command in commands:
            match command:
                case driving.SendAttach(fence=fence):
                    self.to_all(staging.Attached(fence))
                case driving.SendResume(stage=stage, committed=committed, source=source, record=record):
                    self.send(stage, staging.Resumed(committed, source, self.base, record))
                    if source == "import":
                        self.send(stage, Imported(self.world.checkpoints[self.base][stage], self.base, stage))
                case driving.SendProbe():
                    self.later.append(lambda: driving.ProbeAnswered((1.0, 1.0)))
                case driving.Feed(step=step, microbatch=microbatch):
                    for stage in sorted({0, self.world.size.stages - 1}):
                        self.send(stage, Tensor("forward", step, microbatch, -1, digest("data", step, microbatch)))
                case driving.DecideScale(step=step, norms=norms):
                    total = sum(norms)
                    self.later.append(lambda s=step, t=total: driving.ScaleDecided(s, t, 1 / (1 + t)))
                case driving.JournalCommit(record=record):
                    self.later.append(lambda r=record: self.journal(r))
                case driving.SendCommit(record=record, line=line, save=save):
                    self.to_all(staging.Committed(record, line, save))
                case driving.WriteCheckpoint(step=step, ask=ask):
                    assert not ask
                    self.complete(step)
                case driving.EndJob():
                    self.ended = command
                case driving.StepCommitted() | driving.Evaluate() | driving.WarnTolerant():
                    pass

    def journal(self, record: CommitRecord) -> driving.CommitJournalled:
        self.world.journal.append(record)
        return driving.CommitJournalled(record)

    def collect(self, arrived: Imported) -> None:
        self.collected.setdefault(arrived.step, {})[arrived.stage] = arrived.state
        self.complete(arrived.step)

    def complete(self, step: int) -> None:
        states = self.collected.get(step, {})
        if len(states) == self.world.size.stages:
            self.later.append(lambda: self.checkpoint(step, states))

    def checkpoint(self, step: int, states: dict[int, str]) -> driving.CheckpointWritten:
        self.world.checkpoints[step] = states
        return driving.CheckpointWritten(step)

    def to_all(self, event: object) -> None:
        for stage in range(self.world.size.stages):
            self.send(stage, event)

    def send(self, stage: int, event: object) -> None:
        self.world.post(f"driver {self.fence.incarnation}", Letter(self.fence, stage, event))


class World:
    """Disks and connections outlive processes. Letters of one sender to one receiver keep their order; nothing else."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size = size
        self.choose = random.Random(seed)
        self.journal: list[CommitRecord] = []
        self.checkpoints: dict[int, dict[int, str]] = {}
        self.letters: dict[tuple[object, object], deque[Letter]] = {}
        self.stages = [Stage(k, self, self.machine(k)) for k in range(size.stages)]
        self.incarnation = 0
        self.driver = self.new_driver()

    def machine(self, stage: int) -> StageMachine:
        last = self.size.stages - 1
        producers = {-1} if stage == 0 else {stage - 1} | ({-1} if stage == last else set())
        return StageMachine(
            StageShape(
                stage=stage,
                microbatches=self.size.microbatches,
                in_flight=self.size.in_flight,
                producers={"train": frozenset(producers)},
                consumers=frozenset() if stage == last else frozenset({stage + 1}),
            )
        )

    def new_driver(self) -> Driver:
        self.incarnation += 1
        self.driver = Driver(self, self.incarnation)
        self.driver.start()
        return self.driver

    def post(self, sender: object, letter: Letter) -> None:
        self.letters.setdefault((sender, letter.to), deque()).append(letter)

    def run(self, faults: dict[int, int]) -> None:
        """`faults`: at this event, that stage's process dies (its number), or the driver's (any other number)."""
        for moment in range(EVENTS_AT_MOST):
            if (victim := faults.get(moment)) is not None:
                self.kill(victim)
            if self.driver.ended is not None:
                if self.driver.ended.failed is None:
                    return
                assert "was lost" in self.driver.ended.failed, self.driver.ended.failed
                self.new_driver()
            self.advance()
        raise AssertionError("the job did not come to an end")

    def kill(self, victim: int) -> None:
        if victim >= self.size.stages:
            self.new_driver()
            return
        self.stages[victim] = Stage(victim, self, self.machine(victim))
        # The driver notices the broken connection at once or later; either way under its present fence.
        self.post(f"line to {victim}", Letter(self.driver.fence, "driver", driving.StageLost(victim, "gone")))

    def advance(self) -> None:
        """One thing that could happen happens."""
        possible: list[Callable[[], None]] = [lambda q=q: self.deliver(q) for q in self.letters.values() if q]
        possible += [stage.finish for stage in self.stages if stage.work is not None]
        if self.driver.later:
            possible.append(self.answer)
        assert possible, "nothing can happen any more, and the job is not over"
        self.choose.choice(possible)()

    def deliver(self, queue: deque[Letter]) -> None:
        letter = queue.popleft()
        if letter.to == "driver":
            self.driver.receive(letter)
        else:
            self.stages[letter.to].receive(letter)

    def answer(self) -> None:
        driver = self.driver
        driver.handle(driver.later.popleft()())


def without_faults(size: Size) -> World:
    world = World(size, seed=0)
    world.run({})
    return world


sizes = st.builds(
    Size,
    stages=st.integers(1, 4),
    steps=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    in_flight=st.integers(1, 3),
    checkpoint_every=st.integers(0, 3),
)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    size=sizes,
    seed=st.integers(0, 2**32),
    faults=st.dictionaries(st.integers(0, 400), st.integers(0, 5), max_size=4),
)
def test_whatever_happens_the_result_is_that_of_a_run_without_faults(size: Size, seed: int, faults: dict[int, int]):
    world = World(size, seed)
    world.run(faults)
    expected = without_faults(size)
    assert [record.step for record in world.journal] == list(range(size.steps))
    assert [(r.loss, r.scale, r.norms_hash) for r in world.journal] == [
        (r.loss, r.scale, r.norms_hash) for r in expected.journal
    ]
    assert world.checkpoints[size.steps] == expected.checkpoints[size.steps]


def test_a_commit_counts_once_however_often_the_driver_dies_after_journalling():
    size = Size(stages=2, steps=2, microbatches=2, in_flight=2, checkpoint_every=0)
    expected = without_faults(size).checkpoints[2]
    for moment in range(120):
        world = World(size, seed=7)
        world.run({moment: 9, moment + 40: 9})
        assert world.checkpoints[2] == expected
        assert [record.step for record in world.journal] == [0, 1]


def running_stage() -> StageMachine:
    machine = World(Size(stages=1, steps=1, microbatches=1, in_flight=1, checkpoint_every=0), 0).machine(0)
    machine.handle(staging.Attached(Fence(1, 1, 0)))
    machine.handle(staging.Resumed(0, "initialise", 0, None))
    machine.handle(staging.WorkDone(staging.Work("initialise")))
    return machine


def test_an_older_or_equal_fence_is_refused_and_a_newer_one_drops_partial_sums():
    machine = running_stage()
    for stale in (Fence(1, 1, 0), Fence(1, 0, 9), Fence(0, 9, 9)):
        (refused,) = machine.handle(staging.Attached(stale))
        assert isinstance(refused, staging.Refuse)
        assert not machine.accepts(stale) or stale == Fence(1, 1, 0)
    commands = machine.handle(staging.Attached(Fence(1, 1, 1)))
    assert staging.DropSums() in commands
    assert staging.ReportStatus(applied=0, prepared=-1) in commands
    assert not machine.accepts(Fence(1, 1, 0))


def prepared_stage() -> StageMachine:
    machine = running_stage()
    machine.handle(staging.ForwardArrived("train", 0, 0, -1))
    machine.handle(staging.WorkDone(staging.Work("forward")))
    machine.handle(staging.WorkDone(staging.Work("backward")))
    assert staging.ReportPrepared(0) in machine.handle(staging.WorkDone(staging.Work("norms")))
    return machine


def record_of(step: int) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=0.1,
        total_norm=1.0,
        norms_hash="",
        data_cursor=step + 1,
        fence=Fence(1, 1, 0),
        loss=1.0,
    )


def test_what_is_prepared_survives_an_attach_and_the_resume_levels_it():
    machine = prepared_stage()
    commands = machine.handle(staging.Attached(Fence(1, 2, 0)))
    assert staging.DropSums() not in commands
    assert staging.ReportStatus(applied=0, prepared=0) in commands
    (compute,) = machine.handle(staging.Resumed(1, "keep", 0, record_of(0)))
    assert compute == staging.Compute(staging.Work("apply", step=0, record=record_of(0)))
    assert staging.ReportReady(1) in machine.handle(staging.WorkDone(compute.work))


def test_a_resume_that_did_not_commit_drops_what_was_prepared():
    machine = prepared_stage()
    machine.handle(staging.Attached(Fence(1, 2, 0)))
    commands = machine.handle(staging.Resumed(0, "keep", 0, None))
    assert commands[0] == staging.DropSums()
    assert staging.ReportReady(0) in commands
    assert machine.prepared == -1


@pytest.mark.parametrize("committed", [2, 5])
def test_a_stage_that_can_not_be_where_it_should_says_so(committed: int):
    machine = prepared_stage()
    machine.handle(staging.Attached(Fence(1, 2, 0)))
    (refused,) = machine.handle(staging.Resumed(committed, "keep", 0, record_of(committed - 1)))
    assert isinstance(refused, staging.Refuse)
    assert f"can't keep its state and be at {committed}" in refused.reason
