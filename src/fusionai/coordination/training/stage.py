"""The machine of one training stage: which piece of work comes next, and when a step may change its state.

It decides the order of forward and backward work (1F1B with credit), when a step is prepared, when a commit is applied,
what is held back, what is retained for neighbours. It never touches a tensor, a clock or a connection: `execution`
feeds it events and performs its commands, the simulator does the same with virtual time.

Rules kept here (numbers of the recovery protocol, docs/recovery.md): only exactly the stage's own fence counts (1); a
step is applied only on commit, and only once (3); what is prepared survives an attach (4); partial sums die with the
fence (6); a tensor of step n+1 waits until commit n is applied (8); snapshots on the same steps at all stages (9);
retained tensors go only below the retention watermark (10); a snapshot at once after each recovery (11); replay retains
what it sends, like normal work (13); replayed steps use the journalled records (21).

Neighbours: `stage_interface` has the events and commands, `step` and `exchanges` the parts with the state of a step;
`coordination.training.driver` is the other side; `wire.messages` has the fence and the commit record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fusionai.coordination.machine import FollowUp, StatefulMachine, Table, Transition, in_each
from fusionai.coordination.training import stage_interface as interface
from fusionai.coordination.training.exchanges import OuterUpdates
from fusionai.coordination.training.stage_interface import StageCommand, StageEvent, StageWork
from fusionai.coordination.training.step import MAX_SIDE_HELD, Microbatches, RetainedSteps, SharedSums, StageShape
from fusionai.wire.messages import CommitRecord, Fence

EVERY_STEP: Final = 2**62
"""Greater than any step: a watermark at this value retains nothing."""
STEPS_AHEAD: Final = 2
"""Tensors of later steps that may be held: the driver feeds one step ahead of its vote, and may itself be one commit
ahead of this stage."""


NOT_RESUMED: Final = interface.Resumed(0, "keep", 0)


class StagePhase(StrEnum):
    DETACHED = "detached"
    ATTACHED = "attached"
    RESTORING = "restoring"
    """The stage gets a state or applies the last commit."""
    REPLAYING = "replaying"
    """The stage runs official steps again with their records, for itself and for other replaying stages."""
    RUNNING = "running"


class StateLoaded(FollowUp, frozen=True):
    """The state that the resume asked for is in place."""


class StateRestored(FollowUp, frozen=True):
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
    snapshot_every: int = 0
    dropped: int = 0
    """Tensors refused because they belong to no step that this stage can still run."""
    microbatches: Microbatches = field(init=False)
    sums: SharedSums = field(init=False)
    outer_updates: OuterUpdates = field(init=False)
    retained: RetainedSteps = field(default_factory=RetainedSteps)
    _busy: StageWork | None = None
    _deferred: list[StageEvent] = field(default_factory=list[StageEvent])
    _commit: CommitRecord | None = None
    """The commit that is being applied."""
    _exports: list[int] = field(default_factory=list[int])
    _resumed: interface.Resumed = NOT_RESUMED
    """The last resume. A replay ends at its `committed`."""
    _records: Mapping[int, CommitRecord] = field(default_factory=dict[int, CommitRecord])
    """The last resume's records by step."""
    _initialise: bool = False

    def __post_init__(self) -> None:
        self.microbatches = Microbatches(self.shape)
        self.sums = SharedSums(self.shape)
        self.outer_updates = OuterUpdates(self.shape.exchanges)

    # ------------------------------------------------------------------------------------------------ interface

    def accepts(self, fence: Fence) -> bool:
        """Return whether this is exactly the stage's fence, not an older or newer one (rule 1)."""
        return self.fence == fence

    def handle(self, event: StageEvent) -> list[StageCommand]:
        """Apply one event. A pair (phase, event) outside the table is refused, never ignored."""
        stale = isinstance(event, interface.Attached) and self.fence is not None and event.fence <= self.fence
        if self._busy is not None and isinstance(event, interface.Attached | interface.Detached) and not stale:
            self._deferred.append(event)  # the work under way ends first: its result belongs to the old fence
            return []
        commands = self._transition(event)
        if self._deferred and self._busy is None:
            commands.clear()  # reports made under the old fence die with it
            while self._deferred:
                commands += self._transition(self._deferred.pop(0))
        return [*commands, *self._next()]

    def wants(self, event: interface.ForwardArrived | interface.BackwardArrived | interface.SharedArrived) -> bool:
        """Return whether this tensor is for work still to be done and the first of its kind. Other tensors must not
        take memory. `handle` drops and counts unwanted tensors, and refuses them in a phase that takes no tensors."""
        if (self.phase, type(event)) not in TABLE:
            return False
        match event:
            case interface.ForwardArrived(mode, step, microbatch):
                past = mode == "train" and self._has_run(step, self.shape.local_index(microbatch))
                return self._is_near(step) and not past and self.microbatches.lacks_input(event)
            case interface.BackwardArrived(step, microbatch):
                index = self.shape.local_index(microbatch)
                return index is not None and self._is_due(step, index) and self.microbatches.lacks_gradient(event)
            case interface.SharedArrived(step, sender, phase):
                # A stage that does not wait for this one (another replica, or a home that already has this stage's
                # gradients with each microbatch) may have applied a commit and run the next step before this one has.
                ahead = phase == "partial" or sender not in self.shape.parts_to
                asked = ahead or self.sums.is_sent or self.phase is StagePhase.REPLAYING
                in_time = self._is_near(step) if ahead else self._is_now(step)
                return in_time and asked and self.sums.lacks(event)

    def sends_to(self, stage: int, step: int) -> bool:
        """Return whether a tensor of this step goes to that stage now. Replayed tensors go only to replaying stages."""
        return step >= self._resumed.committed or stage in self._resumed.replaying

    @property
    def expects_state(self) -> bool:
        """Return whether a resume asked for a state from the driver that has not arrived."""
        given = self._resumed.source in ("initialise", "import")
        return self.phase is StagePhase.RESTORING and given and not self._initialise

    def _transition(self, event: StageEvent) -> list[StageCommand]:
        commands = self.react(TABLE, event)
        if commands is None:
            return self._refuse(f"is {self.phase.value} and can't take {self.brief(event)}")
        return commands

    def _refuse(self, reason: str) -> list[StageCommand]:
        return [interface.Refuse(f"stage {self.shape.stage} {reason}")]

    def brief(self, event: object) -> str:
        return f"Committed(step={event.record.step})" if isinstance(event, interface.Committed) else repr(event)

    # ----------------------------------------------------------------------------------- steps and tensors in time

    def _is_near(self, step: int) -> bool:
        """Return whether inputs of this step may arrive. In a replay all retained tensors come at once."""
        if self.phase is StagePhase.REPLAYING:
            return self.applied <= step < self._resumed.committed
        return 0 <= step - self.applied <= STEPS_AHEAD

    def _is_now(self, step: int) -> bool:
        """Return whether gradients of this step may arrive. They follow a forward, but a replay gets all that is
        retained."""
        return self._is_near(step) if self.phase is StagePhase.REPLAYING else step == self.applied

    def _has_run(self, step: int, index: int | None) -> bool:
        """Return whether the training forward of the microbatch with this local index is done, under way, or another
        replica's."""
        under_way = self._busy is not None and self._busy.kind == "forward" and self._busy.mode == "train"
        return index is None or (step == self.applied and index < self.microbatches.forwarded + under_way)

    def _is_due(self, step: int, index: int) -> bool:
        """Return whether gradients of the microbatch with this local index may arrive and its backward is not done."""
        replaying, step_under_way = self.phase is StagePhase.REPLAYING, self.microbatches
        below = self.shape.microbatches if replaying else step_under_way.forwarded
        done = step == self.applied and index < step_under_way.returned
        return self._is_now(step) and index < below and not done

    # ------------------------------------------------------------------------------------------- what comes next

    def _next(self) -> list[StageCommand]:
        """Return the next piece of work if the compute thread is free."""
        if self._busy is not None or self.phase in (StagePhase.DETACHED, StagePhase.ATTACHED):
            return []
        self._busy = self._next_work()
        return [] if self._busy is None else [interface.Compute(self._busy)]

    def _next_work(self) -> StageWork | None:
        step, microbatches = self.applied, self.microbatches
        if self._initialise:
            return StageWork("initialise")
        if self._commit is not None:
            return self.outer_updates.applying(self._commit)
        if self.phase is StagePhase.RESTORING:
            return None
        if sending := self.outer_updates.sending(step):
            return sending
        if step in self._exports:  # asked for before anything of the step had begun
            return StageWork("export", step=step)
        if self.prepared < step and microbatches.are_summed:
            side = microbatches.side_forward(step) if microbatches.is_backward_last else None
            return side or self.sums.next_work(step)
        return microbatches.next_work(step)

    # ----------------------------------------------------------------------------------- attached, resumed, restored

    def on_attached(self, event: interface.Attached) -> list[StageCommand]:
        if self.fence is not None and event.fence <= self.fence:
            obeyed = (self.fence.plan_version, self.fence.incarnation, self.fence.attempt)
            return self._refuse(f"already obeys fence {obeyed}")
        self.fence = event.fence
        self.phase = StagePhase.ATTACHED
        is_prepared = self.prepared == self.applied and self.prepared >= 0
        self._begin_step(keep_sums=is_prepared)
        drop: list[StageCommand] = [] if is_prepared else [interface.DropSums()]
        # What is retained stays even if nothing more will be: the round that begins may need it.
        self.retained.is_wanted, self.snapshot_every = event.retain, event.snapshot_every
        return [
            *drop,
            interface.DropHeld(),
            interface.ReportStatus(self.applied, self.prepared, self.retained.whole_from),
        ]

    def on_resumed(self, event: interface.Resumed) -> list[StageCommand]:
        self._resumed = event
        self._records = {record.step: record for record in event.records}
        if event.source == "keep":
            return self._resume_keeping(event)
        if missing := [step for step in range(event.base, event.committed) if step not in self._records]:
            return self._refuse(f"can't replay steps {missing[:5]} without their records")
        self.phase = StagePhase.RESTORING
        self._forget_state()
        self._initialise = event.source == "initialise"
        # No replay can begin from what was sent on the way to a later state.
        self.retained.watermark = event.base
        load: list[StageCommand] = [interface.LoadSnapshot(event.base)] if event.source == "snapshot" else []
        return [interface.DropSums(), interface.DropRetained(EVERY_STEP), *load]

    def _resume_keeping(self, event: interface.Resumed) -> list[StageCommand]:
        retained, to = self.retained, event.replaying & self.shape.neighbours
        retained.whole_from = min(retained.whole_from, event.committed)  # from there on everything is done anew
        if to and event.base < retained.whole_from:
            return self._refuse(f"retains steps from {retained.whole_from}, not from {event.base}")
        commands: list[StageCommand] = [interface.SendRetained(to, event.base, event.committed)] if to else []
        commands += retained.raise_watermark(min(event.watermark, event.base) if to else event.watermark)
        if self.applied == event.committed:
            self.prepared = self.applied - 1
            self.sums.totals.clear()  # of the sums that were prepared and are dropped
            self.phase = StagePhase.RESTORING
            self.follow_ups.append(StateRestored())
            return [interface.DropSums(), *commands]
        missed = self.applied == event.committed - 1 and self.prepared == self.applied
        if missed and self.applied in self._records:
            self.phase = StagePhase.RESTORING
            self._commit = self._records[self.applied]
            return commands
        return self._refuse(
            f"has applied {self.applied} steps and prepared {self.prepared}; "
            f"it can't keep its state and be at {event.committed}"
        )

    def on_state_arrived(self, event: interface.StateArrived) -> list[StageCommand]:
        if event.step != self._resumed.base:
            self.phase = StagePhase.ATTACHED
            return [interface.Refuse(f"expected the state of step {self._resumed.base}, got that of step {event.step}")]
        self.follow_ups.append(StateLoaded())
        return []

    def on_loaded(self, event: StateLoaded) -> list[StageCommand]:
        """The base state is in place. Replay the steps between it and the official ones."""
        self.applied = self.retained.whole_from = self._resumed.base
        self.prepared = self.applied - 1
        if self.applied == self._resumed.committed:
            return self.on_restored(event)
        self.phase = StagePhase.REPLAYING
        self._begin_step()
        return [interface.ReportReady(self.applied)]

    def on_restored(self, _: StateLoaded | StateRestored) -> list[StageCommand]:
        self.phase = StagePhase.RUNNING
        self._begin_step()
        due = self._resumed.snapshot and self.snapshot_every > 0
        snapshot: list[StageCommand] = [interface.TakeSnapshot(self.applied)] if due else []
        return [interface.ReportReady(self.applied), *snapshot]

    def on_detached(self, _: interface.Detached) -> list[StageCommand]:
        self.phase = StagePhase.DETACHED
        self._forget_state()
        return [interface.DropSums(), interface.DropHeld(), interface.DropRetained(EVERY_STEP)]

    # ------------------------------------------------------------------------------------------ what arrives for steps

    def on_tensor(
        self, event: interface.ForwardArrived | interface.BackwardArrived | interface.SharedArrived
    ) -> list[StageCommand]:
        if not self.wants(event):
            self.dropped += 1
        elif isinstance(event, interface.SharedArrived):
            self.sums.keep(event)
        elif self.microbatches.is_full(event):
            return self._refuse(f"holds {MAX_SIDE_HELD} microbatches beside training already")
        else:
            self.microbatches.keep(event)
        return []

    def on_outer_update(self, event: interface.OuterUpdateArrived) -> list[StageCommand]:
        if self.outer_updates.wants(event.step, self.applied):
            self.outer_updates.arrived.add(event.step)
        else:
            self.dropped += 1
        return []

    # --------------------------------------------------------------------------------------------- commits and exports

    def on_committed(self, event: interface.Committed) -> list[StageCommand]:
        if event.record.step < self.applied or event.record == self._commit:
            return []  # applied, or being applied: a commit counts once
        if event.record.step != self.applied or self.prepared != self.applied or self._commit is not None:
            return self._refuse(
                f"prepared step {self.prepared} and has applied {self.applied} steps; "
                f"it can't apply a commit of step {event.record.step}"
            )
        self._commit = event.record
        if event.save:
            self._exports.append(event.record.step + 1)
        return self.retained.raise_watermark(event.watermark)

    def on_export_asked(self, event: interface.ExportAsked) -> list[StageCommand]:
        coming = self.applied + (self._commit is not None)
        begun = self._commit is None and self._has_run(self.applied, 0)
        if event.step != coming or begun or event.step in self._exports:
            return self._refuse(f"can't export step {event.step}: it is in step {self.applied}")
        self._exports.append(event.step)
        return []

    # ----------------------------------------------------------------------------------------------- work that ended

    def on_work_done(self, event: interface.WorkDone) -> list[StageCommand]:
        work = event.work
        self._busy = None
        match work.kind:
            case "initialise":
                self._initialise = False
                if not event.missing and self.phase is StagePhase.RESTORING:
                    self.follow_ups.append(StateLoaded())
            case "forward" | "backward" | "weights":
                self.microbatches.did(work)
                if work.kind == "forward" and work.mode == "train":
                    self.retained.sent(work.step)
            case "share":
                self.sums.is_sent = True
            case "total":
                self.sums.totals.setdefault(work.step, set()).add(self.shape.stage)
            case "norms":
                self.prepared = work.step
                if self.phase is StagePhase.REPLAYING:
                    self._commit = self._records[work.step]
                return [interface.ReportPrepared(work.step)]
            case "apply" if self.shape.exchanges.adopts(work.step) is not None:
                self.outer_updates.is_awaited = True
            case "difference":
                self.outer_updates.is_sent = True
            case "apply":
                return self._step_done(work.step)
            case "adopt":
                assert self._commit is not None, "an outer update is adopted before a commit counts"
                self.outer_updates.is_sent = False
                return self._step_done(self._commit.step)
            case "export":
                self._exports.remove(work.step)
        return []

    def _step_done(self, step: int) -> list[StageCommand]:
        self.applied = step + 1
        self.outer_updates.is_awaited = False
        self._begin_step()
        if self.phase is StagePhase.REPLAYING and self.applied < self._resumed.committed:
            return []
        if self.phase is not StagePhase.RUNNING:
            self.follow_ups.append(StateRestored())
            return []
        due = self.snapshot_every > 0 and self.applied % self.snapshot_every == 0
        snapshot: list[StageCommand] = [interface.TakeSnapshot(self.applied)] if due else []
        forgotten: list[StageCommand] = (
            [interface.DropHeld(self.applied)] if self.microbatches.forget_inputs(self.applied) else []
        )
        return [interface.ReportApplied(step), *snapshot, *forgotten]

    def on_work_failed(self, event: interface.WorkFailed) -> list[StageCommand]:
        """Work failed. After an apply or an initialisation the state is unusable; other work leaves it intact."""
        self._busy = None
        self.phase = StagePhase.ATTACHED
        if event.work.kind not in ("apply", "adopt", "initialise"):
            return []
        self._forget_state()
        return [interface.DropSums(), interface.DropRetained(EVERY_STEP)]

    # -------------------------------------------------------------------------------------------------- clearing

    def _begin_step(self, *, keep_sums: bool = False) -> None:
        """Reset what belongs to the step under way. What arrived for it or later ones is kept within one fence."""
        if self.phase is StagePhase.ATTACHED:
            self.microbatches.inputs.clear()
            self.microbatches.gradients.clear()
            self.sums.partials.clear()
            self.sums.totals.clear()
            self.outer_updates.arrived.clear()
            self.outer_updates.is_sent = self._initialise = False
            self._exports.clear()
        self.microbatches.forget_gradients(self.applied)
        self.microbatches.begin(self.shape.microbatches if keep_sums else 0)
        self.sums.begin(self.applied, keep_sums=keep_sums)
        self.outer_updates.forget_past(self.applied)
        self._commit = None

    def _forget_state(self) -> None:
        self.applied = self.prepared = -1
        self.outer_updates.is_awaited = self.outer_updates.is_sent = False
        self._begin_step()
        self.sums.totals.clear()  # also of sums that were prepared


DETACHED, ATTACHED, RESTORING, REPLAYING, RUNNING = StagePhase
_WORKING: Final = (RESTORING, REPLAYING, RUNNING)
_STEPPING: Final = (REPLAYING, RUNNING)


TABLE: Final = Table[StageMachine, list[StageCommand]](
    "stage",
    [
        *in_each(StagePhase, interface.Attached, (ATTACHED,), StageMachine.on_attached),
        Transition((ATTACHED,), interface.Resumed, (ATTACHED, RESTORING), StageMachine.on_resumed),
        Transition((RESTORING,), interface.StateArrived, (RESTORING, ATTACHED), StageMachine.on_state_arrived),
        Transition((RESTORING,), StateLoaded, (REPLAYING, RUNNING), StageMachine.on_loaded),
        Transition((RESTORING, REPLAYING), StateRestored, (RUNNING,), StageMachine.on_restored),
        *in_each(_WORKING, interface.WorkDone, (), StageMachine.on_work_done),
        Transition(_WORKING, interface.WorkFailed, (ATTACHED,), StageMachine.on_work_failed),
        *in_each(_WORKING, interface.ForwardArrived, (), StageMachine.on_tensor),
        *in_each(_STEPPING, interface.BackwardArrived, (), StageMachine.on_tensor),
        *in_each(_STEPPING, interface.SharedArrived, (), StageMachine.on_tensor),
        *in_each(_WORKING, interface.OuterUpdateArrived, (), StageMachine.on_outer_update),
        Transition((RUNNING,), interface.Committed, (RUNNING,), StageMachine.on_committed),
        Transition((RUNNING,), interface.ExportAsked, (RUNNING,), StageMachine.on_export_asked),
        Transition(tuple(StagePhase), interface.Detached, (DETACHED,), StageMachine.on_detached),
    ],
    initial=(DETACHED,),
)
"""Events without a row are refused."""
