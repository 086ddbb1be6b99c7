"""The machine of a training job's driver: attach, resume, feed, vote, journal, commit, checkpoint, end.

It decides which microbatch is fed when, when a step is official, when a checkpoint or an evaluation is due and when the
job is over. It never touches a tensor, a file, a clock or a connection: `training` performs its commands.

Rules kept here (numbers of the recovery protocol, docs/recovery.md): journal, then send the commit (2); commit only
when every stage is prepared (3); resume carries the last record (5); all status, resume, all ready, only then new work
(7); retained tensors go below the line, which is the committed step while nobody is guarded (10); replayed steps use
the journalled record and are checked against it (21).

Neighbours: `coordination.stage` is the other side; `training.driver` is the shell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from fusionai.wire.messages import CommitRecord, Fence


class DriverPhase(Enum):
    ATTACHING = "attaching"
    RESUMING = "resuming"
    PROBING = "probing"
    """A microbatch crosses every stage twice, in evaluation mode, before anything counts."""
    RUNNING = "running"
    SAVING = "saving"
    """A last checkpoint before the end."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What the machine must know of its job. `canonical_order`: parameter keys in `model.parameters()` order."""

    stages: tuple[int, ...]
    steps: int
    microbatches: int
    feed_window: int
    """Microbatches that may be fed beyond those whose loss is known."""
    canonical_order: tuple[str, ...]
    checkpoint_every: int = 0
    """0: only at the end."""
    save_base: bool = False
    """Write a checkpoint of the state the run starts from, before anything is fed."""
    evaluate_every: int = 0
    takeover: Literal["exact", "tolerant"] = "exact"


# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StageReported:
    """Answer to an attach."""

    stage: int
    applied: int
    prepared: int


@dataclass(frozen=True, slots=True)
class StageReady:
    stage: int
    applied: int


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The losses of the same microbatch sent twice through all stages."""

    losses: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LossArrived:
    step: int
    microbatch: int
    loss: float


@dataclass(frozen=True, slots=True)
class StagePrepared:
    stage: int
    step: int
    norms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScaleDecided:
    """The backend's answer to `DecideScale`."""

    step: int
    total_norm: float
    scale: float


@dataclass(frozen=True, slots=True)
class CommitJournalled:
    """The record is on disk."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    step: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class StageLost:
    """A member is gone or can't go on."""

    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """The driver's own machine could not do what was commanded (disk full, data unreadable)."""

    reason: str


DriverEvent = (
    CommandFailed
    | StageReported
    | StageReady
    | ProbeAnswered
    | LossArrived
    | StagePrepared
    | ScaleDecided
    | CommitJournalled
    | CheckpointWritten
    | EvaluationDone
    | StopAsked
    | StageLost
)

# ----------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SendAttach:
    fence: Fence


@dataclass(frozen=True, slots=True)
class SendResume:
    stage: int
    committed: int
    source: Literal["keep", "initialise", "import"]
    record: CommitRecord | None


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send the first microbatch of `step` through all stages twice in evaluation mode; answer `ProbeAnswered`."""

    step: int


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Every stage is at `base`, every link is up, and a probe came back right; the first work follows."""

    base: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Give the microbatch's inputs to the stages that need them."""

    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class DecideScale:
    """Reduce per-parameter norms (canonical order) to the step's scale, in the backend's arithmetic."""

    step: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JournalCommit:
    """Make it official on disk; answer `CommitJournalled`. Nothing is sent before."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class SendCommit:
    """With `save`, stages stream the state this commit leads to before they go on (`WriteCheckpoint` collects it)."""

    record: CommitRecord
    line: int
    save: bool


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Collect all stages' state of `step`; answer `CheckpointWritten`. `ask`: the stages have not been told yet."""

    step: int
    ask: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the evaluation part through the state of `step`; the next step is not committed before."""

    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """For people: a step is official. `replayed`: it already was, and was computed again."""

    record: CommitRecord
    losses: tuple[float, ...]
    replayed: bool


@dataclass(frozen=True, slots=True)
class EndJob:
    """Nothing more to do. `failed` carries the reason when the job can't go on."""

    steps: int
    stopped: str | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class WarnTolerant:
    """A replayed step came out with other bits and the job allows that; said, never hidden."""

    step: int
    detail: str


DriverCommand = (
    SendAttach
    | SendResume
    | SendProbe
    | AnnounceReady
    | Feed
    | DecideScale
    | JournalCommit
    | SendCommit
    | WriteCheckpoint
    | Evaluate
    | StepCommitted
    | EndJob
    | WarnTolerant
)


def norms_hash(norms: Mapping[str, float]) -> str:
    """SHA-256 over the (parameter, norm) pairs in key order, norms as exact hexadecimal floats."""
    digest = hashlib.sha256()
    for key in sorted(norms):
        digest.update(f"{key}={norms[key].hex()}\n".encode())
    return digest.hexdigest()


@dataclass(slots=True)
class DriverMachine:
    """See the module. `start` gives the first commands; `handle` takes an event, returns commands."""

    shape: JobShape
    fence: Fence
    learning_rate: Callable[[int], float]
    """Step -> learning rate, pure."""
    journal: Sequence[CommitRecord]
    """Records of steps `base`, `base` + 1, ...: official already, to be replayed."""
    base: int
    """Steps applied in the state the stages start from."""
    source: Literal["initialise", "import"] = "initialise"
    phase: DriverPhase = DriverPhase.ATTACHING
    step: int = 0
    """The next step to be committed."""
    story: list[str] = field(default_factory=list)
    _reported: set[int] = field(default_factory=set)
    _ready: set[int] = field(default_factory=set)
    _fed: tuple[int, int] = (0, 0)
    _losses: dict[int, dict[int, float]] = field(default_factory=dict)
    _norms: dict[int, dict[int, Mapping[str, float]]] = field(default_factory=dict)
    _deciding: bool = False
    _saving: int | None = None
    _evaluating: bool = False
    _stop: str | None = None

    # ------------------------------------------------------------------------------------------------ interface

    def start(self) -> list[DriverCommand]:
        self.step = self.base
        self._fed = (self.base, 0)
        return [SendAttach(self.fence)]

    def handle(self, event: DriverEvent) -> list[DriverCommand]:
        """Apply one event; one that has no row for the present phase is late or void and changes nothing."""
        transition = TABLE.get((self.phase, type(event)))
        self.story.append(f"{self.phase.value}: {_brief(event)}")
        del self.story[:-STORY_LENGTH]
        if transition is None:
            return []
        commands = transition.act(self, event)
        assert self.phase in transition.targets, (self.phase, transition.targets, self.story)
        return commands

    # ----------------------------------------------------------------------------------------------- transitions

    def on_reported(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, StageReported)
        self._reported.add(event.stage)
        if not self._reported >= set(self.shape.stages):
            return []
        self.phase = DriverPhase.RESUMING
        return [SendResume(stage, self.base, self.source, None) for stage in self.shape.stages]

    def on_ready(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, StageReady)
        if event.applied != self.base:
            return self._fail(f"stage {event.stage} is at step {event.applied} instead of {self.base}")
        self._ready.add(event.stage)
        if not self._ready >= set(self.shape.stages):
            return []
        self.phase = DriverPhase.PROBING
        return [SendProbe(self.base)]

    def on_probed(self, event: DriverEvent) -> list[DriverCommand]:
        """Ready is said only now. Two passes over the same state must agree to the bit, or no replay ever will."""
        assert isinstance(event, ProbeAnswered)
        warnings: list[DriverCommand] = []
        first, second = event.losses
        if first.hex() != second.hex():
            detail = f"the same microbatch crossed the stages twice and gave {first!r} and {second!r}"
            if self.shape.takeover == "exact":
                return self._fail(f"the probe did not come back right: {detail}")
            warnings.append(WarnTolerant(self.base, detail))
        self.phase = DriverPhase.RUNNING
        return [*warnings, *self._begin()]

    def _begin(self) -> list[DriverCommand]:
        ready = AnnounceReady(self.base)
        if self.step >= self.shape.steps:
            return [ready, *self._end()]
        if self.shape.save_base:
            self._saving = self.base
            return [ready, WriteCheckpoint(self.base, ask=True)]
        return [ready, *self._feed()]

    def on_loss(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, LossArrived)
        if event.step < self.step:
            return []
        if event.microbatch >= self.shape.microbatches or (event.step, event.microbatch) >= self._fed:
            return self._fail(f"a loss came for microbatch {event.microbatch} of step {event.step}, which was not fed")
        self._losses.setdefault(event.step, {}).setdefault(event.microbatch, event.loss)
        return [*self._feed(), *self._decide()]

    def on_prepared(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, StagePrepared)
        if event.step != self.step or event.stage not in self.shape.stages:
            return []
        self._norms.setdefault(event.step, {}).setdefault(event.stage, event.norms)  # a vote can't be changed
        return self._decide()

    def on_scale(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, ScaleDecided)
        losses = self._step_losses()
        record = CommitRecord(
            step=event.step,
            scale=event.scale,
            learning_rate=self.learning_rate(event.step),
            total_norm=event.total_norm,
            norms_hash=norms_hash(self._all_norms()),
            data_cursor=(event.step + 1) * self.shape.microbatches,
            fence=self.fence,
            loss=sum(losses) / len(losses),
        )
        journalled = self._journalled(event.step)
        if journalled is None:
            return [JournalCommit(record)]
        return self._replay(record, journalled)

    def on_journalled(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, CommitJournalled)
        return self._commit(event.record, replayed=False)

    def on_checkpoint(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, CheckpointWritten)
        self._saving = None
        if self.phase is DriverPhase.SAVING:
            return self._end_if_settled()
        return [*self._feed(), *self._decide()]

    def on_evaluated(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, EvaluationDone)
        self._evaluating = False
        return self._end_if_settled() if self.phase is DriverPhase.SAVING else self._decide()

    def on_stop(self, event: DriverEvent) -> list[DriverCommand]:
        """Before anything ran there is nothing to save; in a step, the step is finished first."""
        assert isinstance(event, StopAsked)
        self._stop = event.reason
        return [] if self.phase is DriverPhase.RUNNING else self._end()

    def on_lost(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, StageLost)
        return self._fail(f"stage {event.stage} was lost: {event.reason}")

    def on_command_failed(self, event: DriverEvent) -> list[DriverCommand]:
        assert isinstance(event, CommandFailed)
        return self._fail(event.reason)

    # -------------------------------------------------------------------------------------------------- decisions

    def _feed(self) -> list[DriverCommand]:
        """Feed in order, never more than the window beyond the losses known, at most one step ahead of the vote."""
        if self._saving == self.base and self.shape.save_base:
            return []
        commands: list[DriverCommand] = []
        known = self.step * self.shape.microbatches + sum(len(losses) for losses in self._losses.values())
        last = self.step if self._stop is not None else min(self.step + 1, self.shape.steps - 1)
        while self._fed[0] <= last:
            step, microbatch = self._fed
            if step * self.shape.microbatches + microbatch >= known + self.shape.feed_window:
                break
            commands.append(Feed(step, microbatch))
            self._fed = (step, microbatch + 1) if microbatch + 1 < self.shape.microbatches else (step + 1, 0)
        return commands

    def _decide(self) -> list[DriverCommand]:
        """All losses and all votes are in, and no evaluation still needs the state: reduce the norms."""
        voted = set(self._norms.get(self.step, {})) == set(self.shape.stages)
        computed = len(self._losses.get(self.step, {})) == self.shape.microbatches
        if not (voted and computed) or self._deciding or self._evaluating or self._saving is not None:
            return []  # one checkpoint at a time: a commit never overtakes the state still being collected
        self._deciding = True
        norms = self._all_norms()
        unknown = norms.keys() - set(self.shape.canonical_order)
        if unknown:
            return self._fail(f"norms of parameters the model does not have: {', '.join(sorted(unknown)[:5])}")
        return [DecideScale(self.step, tuple(norms[key] for key in self.shape.canonical_order if key in norms))]

    def _replay(self, computed: CommitRecord, journalled: CommitRecord) -> list[DriverCommand]:
        same = computed.norms_hash == journalled.norms_hash and computed.loss.hex() == journalled.loss.hex()
        if same:
            return self._commit(journalled, replayed=True)
        detail = (
            f"step {computed.step} came out with loss {computed.loss!r} and norm {computed.total_norm!r}, "
            f"the journal has {journalled.loss!r} and {journalled.total_norm!r}"
        )
        if self.shape.takeover == "tolerant":
            return [WarnTolerant(computed.step, detail), *self._commit(journalled, replayed=True)]
        return self._fail(f"replay is not exact: {detail}")

    def _commit(self, record: CommitRecord, *, replayed: bool) -> list[DriverCommand]:
        losses = self._step_losses()
        self._losses.pop(record.step, None)
        self._norms.pop(record.step, None)
        self._deciding = False
        self.step = record.step + 1
        last = self.step >= self.shape.steps or self._stop is not None
        save = last or self._is_save_due()
        commands: list[DriverCommand] = [
            SendCommit(record, line=self.step, save=save),
            StepCommitted(record, losses, replayed),
        ]
        if save:
            self._saving = self.step
            commands.append(WriteCheckpoint(self.step, ask=False))
        commands += self._evaluate_if_due()
        if last:
            self.phase = DriverPhase.SAVING
            return commands
        return [*commands, *self._feed()]

    def _is_save_due(self) -> bool:
        """Replayed steps lie behind a checkpoint that is there already."""
        every = self.shape.checkpoint_every
        return every > 0 and self.step % every == 0 and self.step > self.base + len(self.journal)

    def _evaluate_if_due(self) -> list[DriverCommand]:
        if not self.shape.evaluate_every or self.step % self.shape.evaluate_every:
            return []
        self._evaluating = True
        return [Evaluate(self.step)]

    def _end_if_settled(self) -> list[DriverCommand]:
        return [] if self._evaluating or self._saving is not None else self._end()

    def _end(self) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        return [EndJob(self.step, stopped=self._stop)]

    def _fail(self, reason: str) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        return [EndJob(self.step, failed=reason)]

    def _all_norms(self) -> dict[str, float]:
        return {key: norm for norms in self._norms[self.step].values() for key, norm in norms.items()}

    def _step_losses(self) -> tuple[float, ...]:
        return tuple(self._losses[self.step][index] for index in range(self.shape.microbatches))

    def _journalled(self, step: int) -> CommitRecord | None:
        index = step - self.base
        return self.journal[index] if index < len(self.journal) else None


STORY_LENGTH: Final = 24


@dataclass(frozen=True, slots=True)
class DriverTransition:
    """One row of the table: what an event does in a phase, and where it may lead."""

    act: Callable[[DriverMachine, DriverEvent], list[DriverCommand]]
    targets: frozenset[DriverPhase]


def _row(act: Callable[[DriverMachine, DriverEvent], list[DriverCommand]], *targets: DriverPhase) -> DriverTransition:
    return DriverTransition(act, frozenset(targets))


_A, _R, _P, _G, _S, _E = (
    DriverPhase.ATTACHING,
    DriverPhase.RESUMING,
    DriverPhase.PROBING,
    DriverPhase.RUNNING,
    DriverPhase.SAVING,
    DriverPhase.ENDED,
)

TABLE: Final[dict[tuple[DriverPhase, type[DriverEvent]], DriverTransition]] = {
    (_A, StageReported): _row(DriverMachine.on_reported, _A, _R),
    (_R, StageReady): _row(DriverMachine.on_ready, _R, _P, _E),
    (_P, ProbeAnswered): _row(DriverMachine.on_probed, _G, _E),
    (_P, StopAsked): _row(DriverMachine.on_stop, _E),
    (_P, StageLost): _row(DriverMachine.on_lost, _E),
    (_P, CommandFailed): _row(DriverMachine.on_command_failed, _E),
    (_G, LossArrived): _row(DriverMachine.on_loss, _G, _E),
    (_G, StagePrepared): _row(DriverMachine.on_prepared, _G, _E),
    (_G, ScaleDecided): _row(DriverMachine.on_scale, _G, _S, _E),
    (_G, CommitJournalled): _row(DriverMachine.on_journalled, _G, _S),
    (_G, CheckpointWritten): _row(DriverMachine.on_checkpoint, _G, _E),
    (_S, CheckpointWritten): _row(DriverMachine.on_checkpoint, _S, _E),
    (_G, EvaluationDone): _row(DriverMachine.on_evaluated, _G, _E),
    (_S, EvaluationDone): _row(DriverMachine.on_evaluated, _S, _E),
    (_A, StopAsked): _row(DriverMachine.on_stop, _E),
    (_R, StopAsked): _row(DriverMachine.on_stop, _E),
    (_G, StopAsked): _row(DriverMachine.on_stop, _G),
    (_A, StageLost): _row(DriverMachine.on_lost, _E),
    (_A, CommandFailed): _row(DriverMachine.on_command_failed, _E),
    (_R, StageLost): _row(DriverMachine.on_lost, _E),
    (_R, CommandFailed): _row(DriverMachine.on_command_failed, _E),
    (_G, StageLost): _row(DriverMachine.on_lost, _E),
    (_G, CommandFailed): _row(DriverMachine.on_command_failed, _E),
    (_S, StageLost): _row(DriverMachine.on_lost, _E),
    (_S, CommandFailed): _row(DriverMachine.on_command_failed, _E),
}
"""(phase, event) -> transition. What is not here comes too late to matter and changes nothing."""


def _brief(event: DriverEvent) -> str:
    return repr(event) if not isinstance(event, StagePrepared) else f"StagePrepared({event.stage}, {event.step})"
