"""One stage on its shipped machine, with digests for tensors: what `execution.training.runtime` does, and checks of
every step.

Neighbours: `harness.virtual_member` is the process around it, `harness.topology` says what is computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fusionai.coordination.round.interface import StageFailure
from fusionai.coordination.training import interface
from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.stage import StageMachine, StagePhase
from fusionai.coordination.training.stage_interface import StageWork
from fusionai.wire.messages import Fence, Mode
from harness import topology as model
from harness.topology import FEED, Topology

if TYPE_CHECKING:
    from harness.virtual_member import Member

Kind = Literal["forward", "backward", "partial", "total"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """`sender` and `receiver` are stages, or `FEED`."""

    kind: Kind
    mode: Mode
    step: int
    microbatch: int
    sender: int
    receiver: int
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


@dataclass(slots=True, eq=False)
class Stage:
    """Checks that each step is applied once, on exactly its sums, from the journal, and gives the reference's state."""

    member: Member
    number: int
    machine: StageMachine
    value: str = ""
    step: int = -1
    base: int = 0
    held: dict[tuple[Mode, int, int], dict[int, str]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    contexts: dict[int, str] = field(default_factory=dict)
    put_off: deque[tuple[int, str, dict[int, str]]] = field(default_factory=deque)
    """(microbatch, context, gradients) whose weight gradients wait."""
    sums: str = ""
    counted: list[tuple[int, int]] = field(default_factory=list)
    """(step, microbatch) of everything in `sums`, in order."""
    parts: dict[int, dict[int, str]] = field(default_factory=dict)
    """Step -> sender -> part of the shared sums."""
    shared: dict[int, str] = field(default_factory=dict)
    waiting_state: State | None = None
    awaited: int | None = None
    """Step of the snapshot that is to be loaded."""
    retained: dict[tuple[int, int, Kind, int], Tensor] = field(default_factory=dict)
    """(step, to, kind, microbatch) -> what was sent."""
    failing: bool = False
    """The next piece of work fails."""
    failed_at: Fence | None = None

    # ---------------------------------------------------------------------------------------------------- arriving

    def receive(self, fence: Fence, message: object) -> None:
        if isinstance(message, staging.Attached):
            self.handle(message)
        elif not self.machine.accepts(fence):
            self.member.world.stale += 1
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
                        self.parts.setdefault(step, {})[sender] = value
                    else:
                        self.shared[step] = value
                self.handle(part)
            case staging.Resumed():
                self.base = message.base
                self.handle(message)
            case event:
                self.handle(event)  # pyright: ignore[reportArgumentType]
        self.offer_state()

    def offer_state(self) -> None:
        """A state may overtake the resume that asks for it: it waits. A snapshot is loaded when it is whole."""
        if self.waiting_state is not None and self.machine.expects_state:
            state, self.waiting_state = self.waiting_state, None
            self.load(state.step, state.value)
        elif self.awaited is not None and (self.number, self.awaited) in self.member.snapshots:
            step, self.awaited = self.awaited, None
            self.load(step, self.member.snapshots[self.number, step])

    def load(self, step: int, value: str) -> None:
        assert value == self.member.world.expected.states[step][self.number], "not that state"
        self.value, self.step = value, step
        self.handle(staging.StateArrived(step))

    def handle(self, event: staging.StageEvent) -> None:
        for command in self.machine.handle(event):
            self.perform(command)

    # --------------------------------------------------------------------------------------------------- performing

    def perform(self, command: staging.StageCommand) -> None:
        match command:
            case staging.Compute(work=work):
                self.member.world.network.work(self.member.process, lambda: self.finish(work))
            case staging.ReportStatus(applied=applied, prepared=prepared, retained_from=retained_from):
                assert applied in (self.step, -1), "says it is where it is not"
                self.tell(interface.StageReported(self.number, applied, prepared, retained_from))
            case staging.ReportReady(applied=applied):
                assert applied == self.step, "says it is where it is not"
                self.tell(interface.StageReady(self.number, applied))
            case staging.ReportPrepared(step=step):
                norms = model.norm_of(self.topology, self.number, self.sums, self.shared.get(step, ""))
                self.tell(interface.StagePrepared(self.number, step, norms))
            case staging.ReportApplied():
                pass
            case staging.DropSums():
                self.clear_step()
                self.shared.clear()
            case staging.DropHeld(below=below):
                self.held = {key: held for key, held in self.held.items() if below is not None and key[1] >= below}
                if below is None:
                    self.gradients.clear()
                    self.parts.clear()
                    kept = self.shared.get(self.step)
                    self.shared = {} if kept is None else {self.step: kept}
                    self.waiting_state = self.awaited = None
            case staging.DropRetained(watermark=line):
                self.retained = {key: sent for key, sent in self.retained.items() if key[0] >= line}
                self.member.drop_own_snapshots(self.number, line)
            case staging.SendRetained(to=to, first=first, below=below):
                self.send_retained(to, first, below)
            case staging.LoadSnapshot(step=step):
                self.awaited = step
            case staging.TakeSnapshot(step=step):
                assert step == self.step
                self.member.give_snapshot(self.number, step, self.machine.retained.watermark, self.value)
            case staging.Refuse(reason=reason):
                # An attach of a driver that died may arrive after that of the next; what was on its way to a stage
                # that failed finds it not running. Nothing else may ever be refused.
                assert "already obeys" in reason or (self.failed_at == self.fence and "is attached" in reason), reason
                if self.failed_at == self.fence:
                    self.tell(StageFailure(self.number, reason))

    def clear_step(self) -> None:
        self.sums = ""
        self.counted.clear()
        self.contexts.clear()
        self.put_off.clear()

    def finish(self, work: StageWork) -> None:
        """The compute thread is done: what it made goes out under the fence it began with."""
        if not self.present:
            return
        if self.failing:
            self.failing = False
            self.failed_at = self.fence
            if work.kind in ("apply", "initialise"):
                self.value, self.step = "half done", -1
            self.tell(StageFailure(self.number, "made to fail"))
            self.handle(staging.WorkFailed(work))
            return
        match work.kind:
            case "initialise":
                assert self.base == 0 or self.number in self.topology.stateless, "made anew in the middle"
                self.value, self.step = model.first_state(self.number), self.base
            case "forward":
                self.forward(work)
            case "backward":
                self.backward(work)
            case "weights":
                self.weigh(work)
            case "share":
                self.to_stage(self.topology.tied[0], "partial", work, model.shared_part(self.sums))
            case "total":
                parts = {**self.parts.pop(work.step, {}), self.number: model.shared_part(self.sums)}
                assert sorted(parts) == sorted(self.topology.tied), "every part once"
                self.shared[work.step] = model.shared_total(parts)
                for stage in sorted(parts.keys() - {self.number}):
                    self.to_stage(stage, "total", work, self.shared[work.step])
            case "norms":
                pass
            case "apply":
                self.apply(work)
            case "export":
                assert work.step == self.step
                self.member.to_driver(self.fence, "state", State(self.number, self.step, self.value))
        self.handle(staging.WorkDone(work))
        self.offer_state()

    def forward(self, work: StageWork) -> None:
        assert work.step == self.step, "on exactly its state"
        inputs = self.held.pop((work.mode, work.step, work.microbatch))
        assert inputs.keys() == self.topology.producers(self.number)
        context = model.run_forward(self.number, self.value, inputs)
        if work.mode == "train":
            self.contexts[work.microbatch] = context
        for consumer in sorted(self.topology.consumers(self.number)):
            self.to_stage(consumer, "forward", work, model.output_for(context, consumer))
        if self.number == self.topology.last:
            output = Output(work.mode, work.step, work.microbatch, model.loss_of(context))
            self.member.to_driver(self.fence, "feed", output)

    def backward(self, work: StageWork) -> None:
        gradients = self.gradients.pop((work.step, work.microbatch), {})
        assert gradients.keys() == self.topology.consumers(self.number)
        context = self.contexts.pop(work.microbatch)
        self.put_off.append((work.microbatch, context, gradients))
        if self.machine.shape.weight_lag == 0:
            self.weigh(work)
        for producer in sorted(self.topology.producers(self.number) - {FEED}):
            self.to_stage(producer, "backward", work, model.gradient_for(context, gradients, producer))

    def weigh(self, work: StageWork) -> None:
        """The microbatch's part of the sums, perhaps long after its backward."""
        microbatch, context, gradients = self.put_off.popleft()
        assert microbatch == work.microbatch, "in their order"
        self.sums = model.summed(self.sums, context, gradients)
        self.counted.append((work.step, microbatch))

    def apply(self, work: StageWork) -> None:
        record = work.record
        assert record is not None
        assert record.step == work.step == self.step, "applied twice, or out of order"
        assert record in self.member.world.journal, "applied before it was journalled"
        assert self.counted == [(self.step, m) for m in range(self.topology.microbatches)], "sums are not the step's"
        sums = (self.sums, self.shared.pop(self.step, ""))
        self.value = model.applied(self.topology, self.number, self.value, sums, record.scale, record.learning_rate)
        self.step += 1
        assert self.value == self.member.world.expected.states[self.step][self.number], "another state than without"
        self.clear_step()

    # ------------------------------------------------------------------------------------------------------ sending

    def to_stage(self, stage: int, kind: Kind, work: StageWork, value: str) -> None:
        tensor = Tensor(kind, work.mode, work.step, work.microbatch, self.number, stage, value)
        if work.mode == "train" and self.machine.retained.is_wanted:
            self.retained[work.step, stage, kind, work.microbatch] = tensor
        if self.machine.sends_to(stage, work.step):
            self.member.to_stage(self.fence, tensor)

    def send_retained(self, to: frozenset[int], first: int, below: int) -> None:
        """All of it must be there, for whoever asked has nothing else to go on with."""
        microbatches = range(self.topology.microbatches)
        for step in range(first, below):
            for stage in sorted(to):
                for microbatch in microbatches:
                    if stage in self.topology.consumers(self.number):
                        self.member.to_stage(self.fence, self.retained[step, stage, "forward", microbatch])
                    if stage in self.topology.producers(self.number):
                        self.member.to_stage(self.fence, self.retained[step, stage, "backward", microbatch])
                if stage in self.machine.shape.shares_with:
                    home = self.topology.tied[0]
                    if home == self.number:
                        self.member.to_stage(self.fence, self.retained[step, stage, "total", 0])
                    elif home == stage:
                        self.member.to_stage(self.fence, self.retained[step, stage, "partial", 0])

    def tell(self, event: object) -> None:
        self.member.to_driver(self.fence, "control", event)

    @property
    def fence(self) -> Fence:
        assert self.machine.fence is not None
        return self.machine.fence

    @property
    def topology(self) -> Topology:
        return self.member.world.topology

    @property
    def present(self) -> bool:
        return self.member.stages.get(self.number) is self

    def check(self) -> None:
        machine = self.machine
        assert machine.microbatches.in_flight <= machine.shape.in_flight, "credit"
        assert self.step <= len(self.member.world.journal), "ahead of the journal"
        # Streamed for a replay, also for one that failed.
        replaying = machine.phase in (StagePhase.REPLAYING, StagePhase.ATTACHED)
        if len(self.held) > 2:  # which may always be: these checks follow every event
            window = self.topology.feed_window
            trained = sum(mode == "train" for mode, _, _ in self.held)
            assert replaying or trained <= window, f"{trained} microbatches held, {window} may be under way"
            assert len(self.held) - trained <= max(2, self.topology.evaluations)
        assert replaying or len(self.gradients) <= machine.shape.in_flight
        assert len(self.contexts) <= machine.shape.in_flight
        most = machine.shape.in_flight + machine.shape.weight_lag
        assert len(self.contexts) + len(self.put_off) <= most, "contexts beyond credit and what may be put off"
        if not self.retained:
            return
        steps = {key[0] for key in self.retained}
        assert min(steps) >= machine.retained.watermark, "kept below the line"
        bound = 2 * self.member.world.snapshot_every + 1
        assert len(steps) <= bound, f"retained steps {sorted(steps)}, {bound} may be"
        self.member.world.most_retained = max(self.member.world.most_retained, len(steps))
