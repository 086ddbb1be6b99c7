"""The machine of one training stage: which piece of work comes next, and when a step may change its state.

It decides the order of forward and backward work (1F1B with credit), when a step is prepared, when a commit is applied,
what is held back, what is retained for neighbours. It never touches a tensor, a clock or a connection: `execution`
feeds it events and performs its commands, the simulator does the same with virtual time.

Rules kept here (numbers of the recovery protocol, docs/recovery.md): only exactly the stage's own fence counts (1); a
step is applied only on commit, and only once (3); what is prepared survives an attach (4); partial sums die with the
fence (6); a tensor of step n+1 waits until commit n is applied (8); snapshots on the same steps at all stages (9);
retained tensors go only below the line (10); a snapshot at once after each recovery (11); replay retains what it
sends, like normal work (13); replayed steps use the journalled records (21).

Neighbours: `coordination.training.driver` is the other side; `wire.messages` has the fence and the commit record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from fusionai.coordination.machine import FollowUp, StatefulMachine, Table, Transition
from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges
from fusionai.wire.messages import CommitRecord, Fence, Mode


class StagePhase(StrEnum):
    DETACHED = "detached"
    ATTACHED = "attached"
    RESTORING = "restoring"
    """The stage gets a state or applies the last commit."""
    REPLAYING = "replaying"
    """The stage runs official steps again with their records, for itself and for other replaying stages."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The stage's place in the pipeline."""

    stage: int
    microbatches: int
    """Microbatches of a step that cross this stage."""
    in_flight: int
    producers: Mapping[Mode, frozenset[int]]
    """Stages that must deliver before a forward may run, per mode; -1 is the data feed."""
    consumers: frozenset[int]
    """Stages that must return gradients before a backward may run: stages that read this one's values, and later stages
    to whose gradient sums it adds. Empty: the backward follows its forward at once."""
    gradients_to: frozenset[int] = frozenset()
    """Stages that receive gradients from this stage."""
    weight_lag: int = 0
    """Microbatches whose weight gradients may be postponed until this stage would otherwise be idle."""
    sums_of: frozenset[int] = frozenset()
    """Other stages holding a parameter (tied weights, replicas) whose gradients this stage adds once per step."""
    totals_to: frozenset[int] = frozenset()
    """Other stages holding a parameter whose gradients are summed here, once per step or with each microbatch."""
    summed_by: frozenset[int] = frozenset()
    """Stages that sum gradients of parameters held here, and send the totals."""
    parts_to: frozenset[int] = frozenset()
    """Stages of `summed_by` that wait for this stage's sums once per step."""
    replica: int = 0
    replicas: int = 1
    """Microbatch m of a step crosses the stages of replica m mod `replicas`."""
    exchanges: Exchanges = NO_EXCHANGES
    """Exchanges with other jobs that train the same model (local updates)."""

    @property
    def shares_with(self) -> frozenset[int]:
        return self.totals_to | self.summed_by

    def turn(self, microbatch: int) -> int | None:
        """Return the position of a microbatch among those that cross this stage; None if it crosses another replica."""
        turn, foreign = divmod(microbatch - self.replica, self.replicas)
        return turn if not foreign and 0 <= turn < self.microbatches else None

    def microbatch(self, turn: int) -> int:
        """Return the number in the step of the microbatch at this position."""
        return turn * self.replicas + self.replica


Source = Literal["keep", "initialise", "import", "snapshot"]
"""Where a stage's state comes from at a resume."""

# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Attached:
    """`retain`: keep sent tensors for a neighbour's replay. `snapshot_every`: 0 if the stage has no guard."""

    fence: Fence
    retain: bool = False
    snapshot_every: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """See `wire.messages.Resume`."""

    committed: int
    source: Source
    base: int
    records: tuple[CommitRecord, ...] = ()
    replaying: frozenset[int] = frozenset()
    snapshot: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class StateArrived:
    """A complete state taken after `step` steps (imported, or from a snapshot) is in place."""

    step: int


@dataclass(frozen=True, slots=True)
class ForwardArrived:
    mode: Mode
    step: int
    microbatch: int
    producer: int


@dataclass(frozen=True, slots=True)
class BackwardArrived:
    step: int
    microbatch: int
    consumer: int


@dataclass(frozen=True, slots=True)
class SharedArrived:
    step: int
    sender: int
    phase: Literal["partial", "total"]


@dataclass(frozen=True, slots=True)
class Committed:
    """`save`: stream the resulting state before going on."""

    record: CommitRecord
    line: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class OuterUpdateArrived:
    """The agreement after this step has arrived completely."""

    step: int


@dataclass(frozen=True, slots=True)
class ExportAsked:
    step: int


@dataclass(frozen=True, slots=True)
class WorkDone:
    """`missing`: after `initialise`, entries without an initialisation rule are still to be imported."""

    work: StageWork
    missing: bool = False


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """A piece of work failed, and the driver has been informed. The stage can continue only after another attach."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class Detached:
    reason: str


StageEvent = (
    Attached
    | Resumed
    | StateArrived
    | ForwardArrived
    | BackwardArrived
    | SharedArrived
    | Committed
    | OuterUpdateArrived
    | ExportAsked
    | WorkDone
    | WorkFailed
    | Detached
)

# ----------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class StageWork:
    """One piece of work for the compute thread. `record` only for `apply`. `difference`: send how far this stage's
    parameters have changed since the last agreement. `adopt`: adopt the new agreement."""

    kind: Literal[
        "initialise",
        "forward",
        "backward",
        "weights",
        "share",
        "total",
        "norms",
        "apply",
        "difference",
        "adopt",
        "export",
    ]
    step: int = 0
    microbatch: int = 0
    mode: Mode = "train"
    record: CommitRecord | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this work now; at most one piece is under way. Answer with `WorkDone`."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """`retained_from`: first step whose sent tensors are still retained, up to the applied steps."""

    applied: int
    prepared: int
    retained_from: int


@dataclass(frozen=True, slots=True)
class ReportReady:
    applied: int


@dataclass(frozen=True, slots=True)
class ReportPrepared:
    step: int


@dataclass(frozen=True, slots=True)
class ReportApplied:
    step: int


@dataclass(frozen=True, slots=True)
class DropSums:
    """Forget contexts and partial gradient sums."""


@dataclass(frozen=True, slots=True)
class DropRetained:
    """Drop retained boundary tensors of steps below `line`."""

    line: int


@dataclass(frozen=True, slots=True)
class DropHeld:
    """Drop received but unused tensors: those of steps before `below`, or all, because their fence is over."""

    below: int | None = None


@dataclass(frozen=True, slots=True)
class SendRetained:
    """Stream the tensors that were sent in steps `first` to `below` - 1 to these neighbours again, in step order."""

    to: frozenset[int]
    first: int
    below: int


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Load the state from this machine's snapshot of `step` once it is complete; answer `StateArrived`."""

    step: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send the present state, of `step`, to the guard, in parallel with other work. A later apply must not change what
    is sent."""

    step: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Report to the driver that an event can't be obeyed."""

    reason: str


StageCommand = (
    Compute
    | ReportStatus
    | ReportReady
    | ReportPrepared
    | ReportApplied
    | DropSums
    | DropRetained
    | DropHeld
    | SendRetained
    | LoadSnapshot
    | TakeSnapshot
    | Refuse
)


@dataclass(frozen=True, slots=True)
class StateLoaded(FollowUp):
    """The state that the resume asked for is in place."""


@dataclass(frozen=True, slots=True)
class StateRestored(FollowUp):
    """The state is that of the official step."""


@dataclass(slots=True)
class StageMachine(StatefulMachine[StagePhase, StageCommand]):
    """See the module. `handle` takes an event and returns commands; `accepts` is the fence check for every message."""

    shape: StageShape
    phase: StagePhase = field(default=StagePhase.DETACHED, kw_only=True)
    fence: Fence | None = None
    applied: int = -1
    """Steps applied to the state; -1 without a state."""
    prepared: int = -1
    line: int = 0
    retain: bool = False
    snapshot_every: int = 0
    dropped: int = 0
    """Tensors refused because they belong to no step that this stage can still run."""
    _busy: StageWork | None = None
    _deferred: list[StageEvent] = field(default_factory=list)
    _forwarded: int = 0
    _returned: int = 0
    _weighted: int = 0
    """Microbatches whose weight gradients are summed; equal to `_returned` when none are postponed."""
    _backward_last: bool = False
    """Whether the last forward or backward of this step was a backward."""
    _summed: bool = False
    _shared_partials: dict[int, set[int]] = field(default_factory=dict)
    """Step -> stages that have sent their part of the shared gradients."""
    _shared_totals: dict[int, set[int]] = field(default_factory=dict)
    """Step -> stages whose sums of shared gradients have arrived, including this stage once it has summed."""
    _shared_sent: bool = False
    _arrived: dict[tuple[Mode, int, int], set[int]] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    _commit: CommitRecord | None = None
    _updated: bool = False
    """Whether the optimizer has run a step that counts only with an agreement, so that only the agreement is
    missing."""
    _differed: bool = False
    """Whether the outstanding difference was sent under this fence."""
    _agreements: set[int] = field(default_factory=set[int])
    """Steps whose agreement has arrived."""
    _exports: list[int] = field(default_factory=list)
    _initialise: bool = False
    _source: Source = "keep"
    _base: int = 0
    _target: int = 0
    """Official steps at the last resume, where a replay ends."""
    _records: Mapping[int, CommitRecord] = field(default_factory=dict[int, CommitRecord])
    _replaying: frozenset[int] = frozenset()
    _snapshot_due: bool = False
    _kept_from: int = 0
    """Everything sent in this step and later ones is retained."""

    # ------------------------------------------------------------------------------------------------ interface

    def accepts(self, fence: Fence) -> bool:
        """Return whether this is exactly the stage's fence, not an older or newer one (rule 1)."""
        return self.fence == fence

    def handle(self, event: StageEvent) -> list[StageCommand]:
        """Apply one event. A pair (phase, event) outside the table is refused, never ignored."""
        stale = isinstance(event, Attached) and self.fence is not None and event.fence <= self.fence
        if self._busy is not None and isinstance(event, Attached | Detached) and not stale:
            self._deferred.append(event)  # the work under way ends first: its result belongs to the old fence
            return []
        commands = self._transition(event)
        if self._deferred and self._busy is None:
            commands.clear()  # reports made under the old fence die with it
            while self._deferred:
                commands += self._transition(self._deferred.pop(0))
        return [*commands, *self._next()]

    def wants(self, event: ForwardArrived | BackwardArrived | SharedArrived) -> bool:
        """Return whether this tensor is for work still to be done and the first of its kind. Other tensors must not
        take memory. `handle` drops and counts unwanted tensors, and refuses them in a phase that takes no tensors."""
        if (self.phase, type(event)) not in TABLE:
            return False
        match event:
            case ForwardArrived(mode, step, microbatch, producer):
                past = mode == "train" and ((turn := self.shape.turn(microbatch)) is None or self._has_run(step, turn))
                known = self._arrived.get((mode, step, microbatch), set())
                fits = producer in self.shape.producers.get(mode, ()) and producer not in known
                return self._is_near(step) and not past and fits
            case BackwardArrived(step, microbatch, consumer):
                known = self._gradients.get((step, microbatch), set())
                turn = self.shape.turn(microbatch)
                if turn is None:
                    return False
                due = self._is_now(step) and turn < self._due_below()
                gone = step == self.applied and turn < self._returned
                return due and not gone and consumer in self.shape.consumers and consumer not in known
            case SharedArrived(step, sender, phase):
                totals = self._shared_totals.get(step, set())
                # A stage that does not wait for this one (another replica, or a home that already has this stage's
                # gradients with each microbatch) may have applied a commit and run the next step before this one has.
                ahead = phase == "partial" or sender not in self.shape.parts_to
                if not (self._is_near(step) if ahead else self._is_now(step)):
                    return False
                if phase == "partial":
                    known = self._shared_partials.get(step, set())
                    return sender in self.shape.sums_of - known and self.shape.stage not in totals
                asked = ahead or self._shared_sent or self.phase is StagePhase.REPLAYING
                return asked and sender in self.shape.summed_by - totals

    def wants_agreement(self, step: int) -> bool:
        """Return whether the agreement may still be adopted."""
        return step not in self._agreements and self.shape.exchanges.may_adopt(step, self.applied)

    @property
    def awaits_word(self) -> bool:
        """Return whether the stage is attached but not yet resumed. It can't take any tensors before."""
        return self.phase is StagePhase.ATTACHED

    def _is_near(self, step: int) -> bool:
        """Return whether inputs of this step may arrive. In a replay all retained tensors come at once."""
        if self.phase is StagePhase.REPLAYING:
            return self.applied <= step < self._target
        return 0 <= step - self.applied <= STEPS_AHEAD

    def _is_now(self, step: int) -> bool:
        """Return whether gradients of this step may arrive. They follow a forward, but a replay gets all that is
        retained."""
        return self._is_near(step) if self.phase is StagePhase.REPLAYING else step == self.applied

    def _due_below(self) -> int:
        """Return how many of the stage's microbatches may have gradients arriving, in a step that takes gradients."""
        return self.shape.microbatches if self.phase is StagePhase.REPLAYING else self._forwarded

    def sends_to(self, stage: int, step: int) -> bool:
        """Return whether a tensor of this step goes to that stage now. Replayed tensors go only to replaying stages."""
        return step >= self._target or stage in self._replaying

    def _has_run(self, step: int, turn: int) -> bool:
        """Return whether the training forward of the stage's microbatch in this turn is done or under way."""
        under_way = self._busy is not None and self._busy.kind == "forward" and self._busy.mode == "train"
        return step == self.applied and turn < self._forwarded + under_way

    def _transition(self, event: StageEvent) -> list[StageCommand]:
        commands = self.react(TABLE, event)
        if commands is None:
            return [Refuse(f"stage {self.shape.stage} is {self.phase.value} and can't take {self.brief(event)}")]
        return commands

    def brief(self, event: object) -> str:
        return f"Committed(step={event.record.step})" if isinstance(event, Committed) else repr(event)

    @property
    def in_flight(self) -> int:
        """Microbatches forwarded and not yet returned, which the credit limits."""
        return self._forwarded - self._returned

    @property
    def expects_state(self) -> bool:
        """Return whether a resume asked for a state from the driver that has not arrived."""
        given = self._source in ("initialise", "import")
        return self.phase is StagePhase.RESTORING and given and not self._initialise

    # ------------------------------------------------------------------------------------------- what comes next

    def _next(self) -> list[StageCommand]:
        """Return the next piece of work if the compute thread is free. Backwards and forwards alternate as far as their
        inputs are there, within the credit. Otherwise a burst of backwards would delay what later stages wait for."""
        if self._busy is not None or self.phase in (StagePhase.DETACHED, StagePhase.ATTACHED):
            return []
        work = self._restoring_work() if self.phase is StagePhase.RESTORING else self._running_work()
        if work is None:
            return []
        self._busy = work
        return [Compute(work)]

    def _restoring_work(self) -> StageWork | None:
        if self._initialise:
            return StageWork("initialise")
        return None if self._commit is None else self._applying_work(self._commit)

    def _applying_work(self, commit: CommitRecord) -> StageWork | None:
        """Return the optimizer's step or, with local updates, then the exchange. The step counts only after the
        exchange."""
        if not self._updated:
            return StageWork("apply", step=commit.step, record=commit)
        told = self.shape.exchanges.adopts(commit.step)
        assert told is not None, "other steps count as soon as they are applied"
        if told in self._agreements:
            return StageWork("adopt", step=told)
        return None if self._differed else StageWork("difference", step=told)

    def _running_work(self) -> StageWork | None:
        step = self.applied
        if self._commit is not None:
            return self._applying_work(self._commit)
        told = self.shape.exchanges.outstanding(step)
        if told is not None and not self._differed and told not in self._agreements:
            return StageWork("difference", step=told)
        if step in self._exports:  # asked for before anything of the step had begun
            return StageWork("export", step=step)
        numbered = self.shape.microbatch
        lagging, forward = self._returned - self._weighted, self._side_forward(step) or self._coming_forward(step)
        weights = StageWork("weights", step=step, microbatch=numbered(self._weighted)) if lagging else None
        if forward is not None and self._backward_last:
            return weights if lagging > self.shape.weight_lag else forward
        if self._returned < self._forwarded and self.shape.consumers <= self._gradients.get(
            (step, numbered(self._returned)), set()
        ):
            return StageWork("backward", step=step, microbatch=numbered(self._returned))
        if lagging > self.shape.weight_lag or (lagging and self._returned == self.shape.microbatches):
            return weights
        if self._returned == self.shape.microbatches and self.prepared < step:
            return self._closing_work(step)
        return forward or weights

    def _coming_forward(self, step: int) -> StageWork | None:
        """Return the next microbatch's forward, if its inputs are here and the credit is not used up."""
        if self._forwarded == self.shape.microbatches or self.in_flight >= self.shape.in_flight:
            return None
        needed, coming = self.shape.producers["train"], self.shape.microbatch(self._forwarded)
        whole = needed <= self._arrived.get(("train", step, coming), set())
        return StageWork("forward", step=step, microbatch=coming) if whole else None

    def _closing_work(self, step: int) -> StageWork | None:
        """When all microbatches are summed, reduce shared gradients, then compute norms."""
        if self.shape.parts_to and not self._shared_sent:
            return StageWork("share", step=step)
        totals = self._shared_totals.get(step, set())
        if self.shape.totals_to and self.shape.stage not in totals:
            complete = self._shared_partials.get(step, set()) >= self.shape.sums_of
            return StageWork("total", step=step) if complete else None
        return StageWork("norms", step=step) if totals >= self.shape.summed_by and not self._summed else None

    def _side_forward(self, step: int) -> StageWork | None:
        """Return evaluation or inference work for the present state, oldest first. It does not change the state."""
        for (mode, at_step, microbatch), arrived in self._arrived.items():
            if mode != "train" and at_step == step and self.shape.producers[mode] <= arrived:
                return StageWork("forward", step=step, microbatch=microbatch, mode=mode)
        return None

    # ----------------------------------------------------------------------------------------------- transitions

    def on_attached(self, event: Attached) -> list[StageCommand]:
        if self.fence is not None and event.fence <= self.fence:
            return [Refuse(f"stage {self.shape.stage} already obeys fence {tuple_of(self.fence)}")]
        self.fence = event.fence
        self.phase = StagePhase.ATTACHED
        is_prepared = self.prepared == self.applied and self.prepared >= 0
        self._clear_step(keep_sums=is_prepared)
        drop: list[StageCommand] = [] if is_prepared else [DropSums()]
        # What was retained stays although nothing more is to be: the round that begins may be for its sake.
        self.retain, self.snapshot_every = event.retain, event.snapshot_every
        return [*drop, DropHeld(), ReportStatus(self.applied, self.prepared, self._kept_from)]

    def on_resumed(self, event: Resumed) -> list[StageCommand]:
        self._source, self._base, self._target = event.source, event.base, event.committed
        self._replaying, self._snapshot_due = event.replaying, event.snapshot
        self._records = {record.step: record for record in event.records}
        if event.source == "keep":
            return self._resume_keeping(event)
        if missing := [step for step in range(event.base, event.committed) if step not in self._records]:
            return [Refuse(f"stage {self.shape.stage} can't replay steps {missing[:5]} without their records")]
        self.phase = StagePhase.RESTORING
        self._forget_state()
        self._initialise = event.source == "initialise"
        # What was sent on the way to a later state is nobody's base any more.
        self.line = event.base
        load: list[StageCommand] = [LoadSnapshot(event.base)] if event.source == "snapshot" else []
        return [DropSums(), DropRetained(EVERY_STEP), *load]

    def _resume_keeping(self, event: Resumed) -> list[StageCommand]:
        neighbours = self.shape.consumers.union(
            *self.shape.producers.values(), self.shape.gradients_to, self.shape.shares_with
        )
        to = event.replaying & neighbours
        retained: list[StageCommand] = []
        self._kept_from = min(self._kept_from, event.committed)  # from there on everything is done anew
        if to and event.base < self._kept_from:
            return [Refuse(f"stage {self.shape.stage} retains steps from {self._kept_from}, not from {event.base}")]
        if to:
            retained.append(SendRetained(to, event.base, event.committed))
        retained += self._raise_line(min(event.line, event.base) if to else event.line)
        if self.applied == event.committed:
            self.prepared = self.applied - 1
            self._shared_totals.clear()  # of the sums that were prepared and are dropped
            self.phase = StagePhase.RESTORING
            self.follow_ups.append(StateRestored())
            return [DropSums(), *retained]
        missed = self.applied == event.committed - 1 and self.prepared == self.applied
        if missed and self.applied in self._records:
            self.phase = StagePhase.RESTORING
            self._commit = self._records[self.applied]
            return retained
        return [
            Refuse(
                f"stage {self.shape.stage} has applied {self.applied} steps and prepared {self.prepared}; "
                f"it can't keep its state and be at {event.committed}"
            )
        ]

    def on_state_arrived(self, event: StateArrived) -> list[StageCommand]:
        if event.step != self._base:
            self.phase = StagePhase.ATTACHED
            return [Refuse(f"expected the state of step {self._base}, got that of step {event.step}")]
        self.follow_ups.append(StateLoaded())
        return []

    def on_loaded(self, _: StateLoaded) -> list[StageCommand]:
        """The base state is in place. Replay the steps between it and the official ones."""
        self.applied, self.prepared = self._base, self._base - 1
        self._kept_from = self._base
        if self.applied == self._target:
            return self._run()
        self.phase = StagePhase.REPLAYING
        self._clear_step(keep_sums=False)
        return [ReportReady(self.applied)]

    def on_restored(self, _: StateRestored) -> list[StageCommand]:
        return self._run()

    def _run(self) -> list[StageCommand]:
        self.phase = StagePhase.RUNNING
        self._clear_step(keep_sums=False)
        due = self._snapshot_due and self.snapshot_every > 0
        self._snapshot_due = False
        snapshot: list[StageCommand] = [TakeSnapshot(self.applied)] if due else []
        return [ReportReady(self.applied), *snapshot]

    def on_forward_arrived(self, event: ForwardArrived) -> list[StageCommand]:
        if not self.wants(event):
            self.dropped += 1
            return []
        key = (event.mode, event.step, event.microbatch)
        if event.mode != "train" and key not in self._arrived and self._side_held() >= MAX_SIDE_HELD:
            return [Refuse(f"stage {self.shape.stage} holds {MAX_SIDE_HELD} microbatches beside training already")]
        self._arrived.setdefault(key, set()).add(event.producer)
        return []

    def on_backward_arrived(self, event: BackwardArrived) -> list[StageCommand]:
        if not self.wants(event):
            self.dropped += 1
            return []
        self._gradients.setdefault((event.step, event.microbatch), set()).add(event.consumer)
        return []

    def on_shared_arrived(self, event: SharedArrived) -> list[StageCommand]:
        if not self.wants(event):
            self.dropped += 1
            return []
        if event.phase == "partial":
            self._shared_partials.setdefault(event.step, set()).add(event.sender)
        else:
            self._shared_totals.setdefault(event.step, set()).add(event.sender)
        return []

    def on_committed(self, event: Committed) -> list[StageCommand]:
        if event.record.step < self.applied or event.record == self._commit:
            return []  # applied, or being applied: a commit counts once
        if event.record.step != self.applied or self.prepared != self.applied or self._commit is not None:
            return [
                Refuse(
                    f"stage {self.shape.stage} prepared step {self.prepared} and has applied {self.applied} steps; "
                    f"it can't apply a commit of step {event.record.step}"
                )
            ]
        self._commit = event.record
        if event.save:
            self._exports.append(event.record.step + 1)
        return self._raise_line(event.line)

    def _raise_line(self, line: int) -> list[StageCommand]:
        if line <= self.line:
            return []
        self.line = line
        self._kept_from = max(self._kept_from, line)
        return [DropRetained(line)]

    def on_export_asked(self, event: ExportAsked) -> list[StageCommand]:
        coming = self.applied + (self._commit is not None)
        begun = self._commit is None and self._has_run(self.applied, 0)
        if event.step != coming or begun or event.step in self._exports:
            return [Refuse(f"stage {self.shape.stage} can't export step {event.step}: it is in step {self.applied}")]
        self._exports.append(event.step)
        return []

    def on_work_done(self, event: WorkDone) -> list[StageCommand]:
        work = event.work
        self._busy = None
        match work.kind:
            case "initialise":
                self._initialise = False
                if not event.missing and self.phase is StagePhase.RESTORING:
                    self.follow_ups.append(StateLoaded())
            case "forward":
                arrived_key = (work.mode, work.step, work.microbatch)
                self._arrived.pop(arrived_key, None)
                self._forwarded += work.mode == "train"
                self._backward_last = False
                if work.mode == "train" and not self.retain:
                    self._kept_from = max(self._kept_from, work.step + 1)
            case "backward":
                self._gradients.pop((work.step, work.microbatch), None)
                self._returned += 1
                self._backward_last = True
                self._weighted += self.shape.weight_lag == 0
            case "weights":
                self._weighted += 1
            case "share":
                self._shared_sent = True
            case "total":
                self._shared_totals.setdefault(work.step, set()).add(self.shape.stage)
            case "norms":
                self._summed = True
                self.prepared = work.step
                if self.phase is StagePhase.REPLAYING:
                    self._commit = self._records[work.step]
                return [ReportPrepared(work.step)]
            case "apply" if self.shape.exchanges.adopts(work.step) is not None:
                self._updated = True
            case "difference":
                self._differed = True
            case "apply":
                return self._apply_done(work.step)
            case "adopt":
                assert self._commit is not None, "an agreement is adopted before a commit counts"
                self._differed = False
                return self._apply_done(self._commit.step)
            case "export":
                self._exports.remove(work.step)
        return []

    def on_agreement(self, event: OuterUpdateArrived) -> list[StageCommand]:
        """An agreement arrived. It may come before the commit, because a replaying stage gets all its agreements
        early."""
        if self.wants_agreement(event.step):
            self._agreements.add(event.step)
        else:
            self.dropped += 1
        return []

    def _apply_done(self, step: int) -> list[StageCommand]:
        self.applied = step + 1
        self._updated = False
        self._clear_step(keep_sums=False)
        match self.phase:
            case StagePhase.RUNNING:
                due = self.snapshot_every > 0 and self.applied % self.snapshot_every == 0
                snapshot: list[StageCommand] = [TakeSnapshot(self.applied)] if due else []
                return [ReportApplied(step), *snapshot, *self._forget_past()]
            case StagePhase.REPLAYING if self.applied < self._target:
                return []
            case _:
                self.follow_ups.append(StateRestored())
                return []

    def on_work_failed(self, event: WorkFailed) -> list[StageCommand]:
        """Work failed. After an apply or an initialisation the state is unusable; other work leaves it intact."""
        self._busy = None
        self.phase = StagePhase.ATTACHED
        if event.work.kind not in ("apply", "adopt", "initialise"):
            return []
        self._forget_state()
        return [DropSums(), DropRetained(EVERY_STEP)]

    def _forget_past(self) -> list[StageCommand]:
        """Drop evaluation and inference requests for a state that no longer exists."""
        past = [key for key in self._arrived if key[1] < self.applied]
        for key in past:
            del self._arrived[key]
        return [DropHeld(below=self.applied)] if past else []

    def _side_held(self) -> int:
        return sum(mode != "train" for mode, _, _ in self._arrived)

    def on_detached(self, _: Detached) -> list[StageCommand]:
        self.phase = StagePhase.DETACHED
        self._forget_state()
        return [DropSums(), DropHeld(), DropRetained(EVERY_STEP)]

    # -------------------------------------------------------------------------------------------------- clearing

    def _clear_step(self, *, keep_sums: bool) -> None:
        """Reset the counters of the step under way. Tensors that arrived for it are kept only within one fence."""
        if self.phase is StagePhase.ATTACHED:
            self._arrived.clear()
            self._gradients.clear()
            self._shared_partials.clear()
            self._shared_totals.clear()
            self._exports.clear()
            self._agreements.clear()
            self._differed = self._initialise = False
        self._gradients = {key: by for key, by in self._gradients.items() if key[0] >= self.applied}
        self._shared_partials = {step: by for step, by in self._shared_partials.items() if step >= self.applied}
        self._shared_totals = {step: by for step, by in self._shared_totals.items() if step >= self.applied}
        self._agreements = {told for told in self._agreements if self.shape.exchanges.may_adopt(told, self.applied)}
        if keep_sums:
            self._shared_totals[self.applied] = {self.shape.stage, *self.shape.summed_by}
        self._commit = None
        self._forwarded = self._returned = self._weighted = self.shape.microbatches if keep_sums else 0
        self._summed = self._shared_sent = keep_sums
        self._backward_last = False

    def _forget_state(self) -> None:
        self.applied = self.prepared = -1
        self._updated = self._differed = False
        self._clear_step(keep_sums=False)
        self._shared_totals.clear()  # also of sums that were prepared


EVERY_STEP: Final = 2**62
"""Greater than any step: a line at this value retains nothing."""
STEPS_AHEAD: Final = 2
"""Tensors of later steps that may be held: the driver feeds one step ahead of its vote, and may itself be one commit
ahead of this stage."""
MAX_SIDE_HELD: Final = 1024
"""Most microbatches of evaluation and inference that may wait at once (chosen)."""


_D, _A, _R, _P, _G = (
    StagePhase.DETACHED,
    StagePhase.ATTACHED,
    StagePhase.RESTORING,
    StagePhase.REPLAYING,
    StagePhase.RUNNING,
)
_WORKING: Final = (_R, _P, _G)

_TRANSITIONS: Final[list[Transition[StageMachine, Any, list[StageCommand]]]] = [
    *(Transition((phase,), Attached, (phase, _A), StageMachine.on_attached) for phase in StagePhase),
    Transition((_A,), Resumed, (_A, _R), StageMachine.on_resumed),
    Transition((_R,), StateArrived, (_R, _A), StageMachine.on_state_arrived),
    Transition((_R,), StateLoaded, (_P, _G), StageMachine.on_loaded),
    Transition((_R, _P), StateRestored, (_G,), StageMachine.on_restored),
    *(Transition((phase,), WorkDone, (phase,), StageMachine.on_work_done) for phase in _WORKING),
    Transition(_WORKING, WorkFailed, (_A,), StageMachine.on_work_failed),
    *(Transition((phase,), ForwardArrived, (phase,), StageMachine.on_forward_arrived) for phase in _WORKING),
    *(Transition((phase,), BackwardArrived, (phase,), StageMachine.on_backward_arrived) for phase in (_P, _G)),
    *(Transition((phase,), SharedArrived, (phase,), StageMachine.on_shared_arrived) for phase in (_P, _G)),
    *(Transition((phase,), OuterUpdateArrived, (phase,), StageMachine.on_agreement) for phase in _WORKING),
    Transition((_G,), Committed, (_G,), StageMachine.on_committed),
    Transition((_G,), ExportAsked, (_G,), StageMachine.on_export_asked),
    Transition(tuple(StagePhase), Detached, (_D,), StageMachine.on_detached),
]
TABLE: Final = Table[StageMachine, list[StageCommand]]("stage", _TRANSITIONS, initial=(_D,))
"""Events without a row are refused."""


def tuple_of(fence: Fence) -> tuple[int, int, int]:
    """Return the fence as a tuple, for messages to users."""
    return (fence.plan_version, fence.incarnation, fence.attempt)
