"""State machine of a training job's driver: attaching, restoring, feeding, votes, commits, checkpoints.

It decides which microbatch is fed when, when a step is official, how stages return to that step after a fault, when a
checkpoint or an evaluation is due, when another plan is needed and when the job ends. It never touches a tensor, a
file, a clock or a connection: `training` performs its commands; in tests a virtual world does.

Any fault that touches a stage ends the *round*. The next round has a higher fence: all members report, lost state is
restored, the step in progress is repeated. The machine implements these rules of the recovery protocol
(docs/recovery.md): journal, then send the commit (2); commit only when every stage is prepared (3); resume carries the
last record (5); all status, resume, all ready, only then new work (7); the line is the oldest of the newest snapshots
kept (10); every guarded stage sends a snapshot after a recovery (11); nothing is fed beyond the line plus twice the
snapshot interval (12); a lost guard is removed under the same plan (20); replayed steps use the journalled record and
are checked against it (21); what a lying peer computed is taken back (26), and the line waits for checks (25).

Neighbours: `driver_events` and `driver_commands` define its inputs and outputs, `restoring` decides which stage starts
from which state, `coordination.training.stage` is the machine of a stage, `training.driver` performs the commands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from fusionai.coordination.machine import FollowUp, StatefulMachine, Table, Transition
from fusionai.coordination.round.faults import Faults
from fusionai.coordination.round.verification import Inspector
from fusionai.coordination.training.commands import (
    AnnounceReady,
    AskPlan,
    DecideScale,
    Distrust,
    DriverCommand,
    EndJob,
    Evaluate,
    FeedMicrobatch,
    JournalCommit,
    NameBest,
    PassSnapshot,
    ReportCheck,
    ReportFault,
    ReportRestored,
    Rewind,
    SendAttach,
    SendCommit,
    SendProbe,
    SendResume,
    StartCheck,
    StepCommitted,
    WarnTolerant,
    WriteCheckpoint,
)
from fusionai.coordination.training.evaluations import Evaluation, Standing, standing
from fusionai.coordination.training.events import (
    CheckpointWritten,
    CommandFailed,
    CommitJournalled,
    DriverEvent,
    EvaluationDone,
    LinkBroken,
    LossArrived,
    MemberEnlisted,
    PeerLost,
    PlanGranted,
    ProbeAnswered,
    ScaleDecided,
    SnapshotStored,
    StageChecked,
    StageFailed,
    StagePrepared,
    StageReady,
    StageReported,
    StopAsked,
)
from fusionai.coordination.training.restoring import Restoration, RestoringRound, StagePosition, decide
from fusionai.coordination.training.roles import Roles
from fusionai.coordination.training.saves import Saves
from fusionai.coordination.training.verifying import Verifying
from fusionai.coordination.training.votes import Votes
from fusionai.wire.messages import CommitRecord, Fence


class DriverPhase(StrEnum):
    ATTACHING = "attaching"
    LOADING = "loading"
    """Stages that lost their state load one. The other stages wait."""
    REPLAYING = "replaying"
    """Restored stages run official steps again. Their neighbours stream what they retained."""
    PROBING = "probing"
    """A microbatch crosses every stage twice in evaluation mode, before any work counts."""
    RUNNING = "running"
    SAVING = "saving"
    """A last checkpoint is written before the end."""
    WAITING = "waiting"
    """A stage has no peer to run it. The driver has asked for another plan."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Parameters of a job that never change. `canonical_order`: parameter keys in `model.parameters()` order."""

    steps: int
    microbatches: int
    canonical_order: tuple[str, ...]
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    save_base: bool = False
    """Write a checkpoint of the state that the run starts from, before anything is fed."""
    evaluate_every: int = 0
    keep_best: bool = False
    """Save every state whose evaluation is the best so far."""
    patience: int | None = None
    """End the job after this many evaluations without an improvement of at least `minimum_improvement`."""
    minimum_improvement: float = 0.0
    takeover: Literal["exact", "any", "tolerant"] = "exact"
    """When different bits end the job. `exact`: in any replay. `any`: only in the probe, where the same machines
    compute both passes. `tolerant`: never, differences are only reported."""


def norms_hash(norms: Mapping[str, float]) -> str:
    """Return the SHA-256 over the (parameter, norm) pairs in key order, norms as exact hexadecimal floats."""
    digest = hashlib.sha256()
    for key in sorted(norms):
        digest.update(f"{key}={norms[key].hex()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class AllAnswered(FollowUp):
    """All members have reported, and no commit is being journalled."""


@dataclass(frozen=True, slots=True)
class AllRestored(FollowUp):
    """All stages that lost their state have one again."""


@dataclass(frozen=True, slots=True)
class AllReady(FollowUp):
    """All stages are at the official step."""


@dataclass(frozen=True, slots=True)
class BetweenSteps(FollowUp):
    """Another plan is pending and nothing is in progress."""


@dataclass(frozen=True, slots=True)
class ExpulsionDue(FollowUp):
    """A peer was found to be lying, and no commit is being journalled any more."""


@dataclass(frozen=True, slots=True)
class Settled(FollowUp):
    """The last step is committed; no check, evaluation or checkpoint is outstanding."""


@dataclass(slots=True)
class DriverMachine(StatefulMachine[DriverPhase, DriverCommand]):
    """See the module. `start` returns the first commands; `handle` takes an event and returns commands."""

    shape: JobShape
    roles: Roles
    incarnation: int
    learning_rate: Callable[[int], float]
    """Pure function from step to learning rate."""
    official: int = 0
    """Number of journalled commits."""
    records: dict[int, CommitRecord] = field(default_factory=dict[int, CommitRecord])
    """Commit record of every official step from the one before the newest checkpoint on."""
    saved: int = -1
    """Step of the newest complete checkpoint, -1 without any."""
    older: list[int] = field(default_factory=list[int])
    """Steps of all complete checkpoints. Except for the one in `saved`, some may have been deleted from the disk."""
    inspector: Inspector | None = None
    """Decides on spot checks; None: the job's work is not checked."""
    evaluations: tuple[Evaluation, ...] = ()
    """All journalled evaluations, in order."""
    phase: DriverPhase = field(default=DriverPhase.ATTACHING, kw_only=True)
    step: int = 0
    """Next step to be committed. It is less than `official` while all stages replay from a checkpoint."""
    line: int = 0
    attempt: int = -1
    _guards: dict[int, str] = field(default_factory=dict[int, str])
    """Stage -> its guard, for guards of the plan that are still connected."""
    _acked: dict[int, int] = field(default_factory=dict[int, int])
    """Guarded stage -> step of the newest snapshot that its guard holds."""
    _lost: set[str] = field(default_factory=set[str])
    """Members of the plan that were lost."""
    _probed: bool = False
    _fed: tuple[int, int] = (0, 0)
    _round: RestoringRound = field(default_factory=RestoringRound)
    _votes: Votes = field(default_factory=Votes)
    _saves: Saves = field(default_factory=Saves)
    _verifying: Verifying = field(default_factory=Verifying)
    _pending: Roles | None = None
    """New plan to adopt as soon as nothing is in progress."""
    _faults: Faults = field(default_factory=Faults)
    """Faults since the last commit; for a guard's link, since its last snapshot."""
    _stop: str | None = None
    # ------------------------------------------------------------------------------------------------ interface

    @property
    def fence(self) -> Fence:
        return Fence(self.roles.version, self.incarnation, self.attempt)

    @property
    def guards(self) -> Mapping[int, str]:
        """Stage -> its guard, for guards that are still connected."""
        return self._guards

    def start(self) -> list[DriverCommand]:
        self.step = self.official
        self.line = self._checkpoint
        self._guards = dict(self.roles.guards)
        self._evaluate_if_due()
        return self._begin_round()

    def handle(self, event: DriverEvent) -> list[DriverCommand]:
        """Apply one event. An event without a row for the present phase is late or void and changes nothing."""
        return self.react(TABLE, event) or []

    def brief(self, event: object) -> str:
        return f"StagePrepared({event.stage}, {event.step})" if isinstance(event, StagePrepared) else repr(event)

    # ---------------------------------------------------------------------------------------------------- rounds

    def _begin_round(self) -> list[DriverCommand]:
        """Begin a round. Discards the step in progress, except for a commit that is being journalled."""
        self.phase = DriverPhase.ATTACHING
        self.attempt += 1
        self._round = RestoringRound()
        self._votes.discard()
        self._saves.asked, self._saves.saving = False, None
        if self.inspector is not None:
            self.inspector.drop()
        return [SendAttach(self.fence, self.roles, dict(self._guards))]

    def on_enlisted(self, event: MemberEnlisted) -> list[DriverCommand]:
        self._round.snapshots[event.peer] = event.snapshots
        return self._restore_if_all_answered()

    def on_reported(self, event: StageReported) -> list[DriverCommand]:
        self._round.positions[event.stage] = StagePosition(event.applied, event.prepared, event.retained_from)
        return self._restore_if_all_answered()

    def _restore_if_all_answered(self) -> list[DriverCommand]:
        """First barrier: no stage gets an instruction before all stages have reported and the journal has answered
        (rule 7)."""
        members = {*self.roles.places.values(), *self._guards.values()}
        answered = self._round.positions.keys() >= self.roles.places.keys() and self._round.snapshots.keys() >= members
        if answered and self._votes.journalling is None:
            self.follow_ups.append(AllAnswered())
        return []

    def on_all_answered(self, _: AllAnswered) -> list[DriverCommand]:
        restoration = self._round.restoration = decide(
            self.roles,
            self._round.positions,
            self._round.snapshots,
            committed=self.step,
            checkpoint=None if self.saved < 0 else self.saved,
            records_from=min(self.records, default=self.step),
        )
        told = ReportRestored(
            committed=self.step,
            base=restoration.base,
            restored=tuple(restoration.sources),
            rollback=restoration.rollback and restoration.base < self.step,
        )
        rewound: list[DriverCommand] = []
        if restoration.rollback:
            self._roll_back(restoration.base)
            if self._verifying.voided:  # results of these steps are not compared with earlier ones
                rewound = self._take_back(restoration.base)
        self._verifying.voided = False
        self._acked = {
            stage: max(held)
            for stage, guard in self._guards.items()
            if (held := [step for at, step in self._round.snapshots[guard] if at == stage and step <= self.step])
        }
        self._move_line()
        self.phase = DriverPhase.LOADING
        return [told, *rewound, *self._load(restoration)]

    def _roll_back(self, base: int) -> None:
        """Restart all stages from the checkpoint. The line falls to it as well; afterwards only snapshots held by
        guards raise the line (rule 10)."""
        self.step, self.line = base, min(self.line, base)
        self._votes.history.clear()
        if self._saves.evaluating is not None and self._saves.evaluating > base:
            self._saves.evaluating = None

    def _load(self, restoration: Restoration) -> list[DriverCommand]:
        if not restoration.sources:
            self.follow_ups.append(AllRestored())
            return []
        self._round.replayed = dict.fromkeys(restoration.sources, restoration.base)
        passed: list[DriverCommand] = [
            PassSnapshot(stage, restoration.base, holder, self.roles.places[stage])
            for stage, holder in restoration.holders.items()
        ]
        replaying = frozenset(restoration.sources)
        return passed + [
            SendResume(
                stage,
                committed=self.step,
                source=source,
                base=restoration.base,
                records=tuple(self.records[step] for step in range(restoration.base, self.step)),
                replaying=replaying,
                snapshot=self._wants_snapshot(stage),
            )
            for stage, source in restoration.sources.items()
        ]

    def on_loaded(self, event: StageReady) -> list[DriverCommand]:
        """Second barrier: all stages that lost their state have one again."""
        assert self._round.restoration is not None
        base, restored = self._round.restoration.base, self._round.restoration.sources.keys()
        if event.applied != base or event.stage not in restored:
            return self._fail(f"stage {event.stage} is at step {event.applied} instead of {base}")
        self._round.loaded.add(event.stage)
        if self._round.loaded >= restored:
            self.follow_ups.append(AllRestored())
        return []

    def on_all_loaded(self, _: AllRestored) -> list[DriverCommand]:
        return self._go_on()

    def _go_on(self) -> list[DriverCommand]:
        """Let the other stages reach the official step and stream what they retained, while restored stages replay."""
        assert self._round.restoration is not None
        self.phase = DriverPhase.REPLAYING
        base, replaying = self._round.restoration.base, frozenset(self._round.restoration.sources)
        if base == self.step:
            self._round.ready |= self._round.loaded
        last = tuple(self.records[step] for step in (self.step - 1,) if step in self.records)
        resumes: list[DriverCommand] = [
            SendResume(
                stage,
                committed=self.step,
                source="keep",
                base=base,
                records=last,
                replaying=replaying,
                snapshot=self._wants_snapshot(stage),
                line=self.line,
            )
            for stage in self.roles.stages
            if stage not in replaying
        ]
        self._fed = (base, 0)
        return [*resumes, *self._feed_replay(), *self._run_if_all_ready()]

    def _wants_snapshot(self, stage: int) -> bool:
        return stage in self._guards and self._acked.get(stage, -1) < self.step

    def on_ready(self, event: StageReady) -> list[DriverCommand]:
        if event.applied != self.step:
            return self._fail(f"stage {event.stage} is at step {event.applied} instead of {self.step}")
        self._round.ready.add(event.stage)
        return self._run_if_all_ready()

    def _run_if_all_ready(self) -> list[DriverCommand]:
        """Third barrier: new work begins only when all stages are at the official step (rule 7)."""
        if self._round.ready >= set(self.roles.stages):
            self.follow_ups.append(AllReady())
        return []

    def on_all_ready(self, _: AllReady) -> list[DriverCommand]:
        self._fed = (self.step, 0)
        if self._probed:
            return self._run()
        self.phase = DriverPhase.PROBING
        return [SendProbe(self.step)]

    def on_probed(self, event: ProbeAnswered) -> list[DriverCommand]:
        """Announce that the job is ready. Two passes over the same state must agree bit for bit, or no replay could."""
        warnings: list[DriverCommand] = []
        first, second = event.losses
        if first.hex() != second.hex():
            detail = f"the same microbatch crossed the stages twice and gave {first!r} and {second!r}"
            if self.shape.takeover != "tolerant":
                return self._fail(f"the probe did not come back right: {detail}")
            warnings.append(WarnTolerant(self.step, detail))
        self._probed = True
        return [*warnings, AnnounceReady(self.step), *self._run()]

    def _run(self) -> list[DriverCommand]:
        """Resume what the fault interrupted: a checkpoint, an evaluation or the end."""
        self._verifying.checkable = self.step
        commands = self._save_if_owed()
        if self._saves.evaluating is not None:
            commands.append(Evaluate(self._saves.evaluating))
        if self.phase is DriverPhase.SAVING:
            return [*commands, *self._end_if_settled()]
        return [*commands, *self._feed(), *self._change_plan_if_quiet()]

    def _save_if_owed(self) -> list[DriverCommand]:
        """Between two steps, before the next one begins: save a checkpoint if one is due, then go on or end."""
        last = self._is_last()
        self.phase = DriverPhase.SAVING if last else DriverPhase.RUNNING
        if self._saves.saving is not None or not self._is_save_owed(last):
            return self._name_best()
        self._saves.saving, self._saves.asked = self.step, True
        return [WriteCheckpoint(self.step, ask=True)]

    # -------------------------------------------------------------------------------------------------- replaying

    def _feed_replay(self) -> list[DriverCommand]:
        """Feed inputs to the replaying stages, at most two steps ahead of the slowest of them."""
        fed = frozenset(stage for stage in self._round.replayed if stage in self.roles.fed)
        if not fed:
            return []
        commands: list[DriverCommand] = []
        below = min(self.step, min(self._round.replayed[stage] for stage in fed) + REPLAY_AHEAD)
        while self._fed[0] < below:
            commands.append(FeedMicrobatch(*self._fed, only=fed))
            self._fed = self._after(self._fed)
        return commands

    def on_replayed(self, event: StagePrepared) -> list[DriverCommand]:
        """A stage has run an official step again. Its norms must equal those of the first run (rule 21)."""
        if self._round.replayed.get(event.stage) != event.step:
            return []
        self._round.replayed[event.stage] = event.step + 1
        known = self._votes.history.get(event.step)
        differing = [key for key in sorted(event.norms) if known is not None and known.get(key) != event.norms[key]]
        if not differing:
            return self._feed_replay()
        detail = f"stage {event.stage} replayed step {event.step} with another norm of {', '.join(differing[:3])}"
        if self.shape.takeover == "exact":
            return self._fail(f"replay is not exact: {detail}")
        return [WarnTolerant(event.step, detail), *self._feed_replay()]

    # ----------------------------------------------------------------------------------------------- normal steps

    def on_loss(self, event: LossArrived) -> list[DriverCommand]:
        if event.step < self.step:
            return []
        if event.microbatch >= self.shape.microbatches or (event.step, event.microbatch) >= self._fed:
            return self._fail(f"a loss came for microbatch {event.microbatch} of step {event.step}, which was not fed")
        self._votes.losses.setdefault(event.step, {}).setdefault(event.microbatch, event.loss)
        return [*self._feed(), *self._decide()]

    def on_prepared(self, event: StagePrepared) -> list[DriverCommand]:
        if event.step != self.step or event.stage not in self.roles.places:
            return []
        self._votes.norms.setdefault(event.step, {}).setdefault(event.stage, event.norms)  # a vote can't be changed
        return self._decide()

    def _decide(self) -> list[DriverCommand]:
        """If all losses and votes are in and no evaluation still needs the state, reduce the norms."""
        voted = self._votes.norms.get(self.step, {}).keys() == self.roles.places.keys()
        computed = len(self._votes.losses.get(self.step, {})) == self.shape.microbatches
        held = self._votes.deciding or self._saves.evaluating is not None or self._saves.saving is not None
        if not (voted and computed) or held or self._votes.journalling is not None:
            return []  # one checkpoint at a time: a commit never overtakes the state still being collected
        self._votes.deciding = True
        norms = self._votes.all_norms(self.step)
        unknown = norms.keys() - set(self.shape.canonical_order)
        if unknown:
            return self._fail(f"norms of parameters the model does not have: {', '.join(sorted(unknown)[:5])}")
        return [DecideScale(self.step, tuple(norms[key] for key in self.shape.canonical_order if key in norms))]

    def on_scale(self, event: ScaleDecided) -> list[DriverCommand]:
        if not self._votes.deciding or event.step != self.step:
            return []  # requested before a fault
        losses = self._votes.step_losses(self.step)
        record = CommitRecord(
            step=event.step,
            scale=event.scale,
            learning_rate=self.learning_rate(event.step),
            total_norm=event.total_norm,
            norms_hash=norms_hash(self._votes.all_norms(self.step)),
            fence=self.fence,
            loss=sum(losses) / len(losses),
        )
        self._votes.deciding = False
        if event.step < self.official:
            return self._check_replay(record, self.records[event.step])
        self._votes.journalling = record
        return [JournalCommit(record)]

    def _check_replay(self, computed: CommitRecord, journalled: CommitRecord) -> list[DriverCommand]:
        same = computed.norms_hash == journalled.norms_hash and computed.loss.hex() == journalled.loss.hex()
        if same:
            return self._commit(journalled, replayed=True)
        detail = (
            f"step {computed.step} came out with loss {computed.loss!r} and norm {computed.total_norm!r}, "
            f"the journal has {journalled.loss!r} and {journalled.total_norm!r}"
        )
        if self.shape.takeover != "exact":
            return [WarnTolerant(computed.step, detail), *self._commit(journalled, replayed=True)]
        return self._fail(f"replay is not exact: {detail}")

    def on_journalled(self, event: CommitJournalled) -> list[DriverCommand]:
        self._votes.journalling = None
        self.official = event.record.step + 1
        commands = self._commit(event.record, replayed=False)
        if self._verifying.sentence is not None:
            self.follow_ups.append(ExpulsionDue())
        return commands

    def on_journalled_in_a_round(self, event: CommitJournalled) -> list[DriverCommand]:
        """A fault happened between the vote and the end of journalling. The step is official; stages get it with their
        resume."""
        self._votes.journalling = None
        self.official = event.record.step + 1
        told = self._make_official(event.record, replayed=False)
        self._evaluate_if_due()
        if self._verifying.sentence is not None:
            return [told, *self._expel_if_free()]
        attaching = self.phase is DriverPhase.ATTACHING
        return [told, *(self._restore_if_all_answered() if attaching else [])]

    def _make_official(self, record: CommitRecord, *, replayed: bool) -> StepCommitted:
        told = StepCommitted(record, self._votes.step_losses(self.step), replayed)
        self.records[record.step] = record
        self._votes.make_official(record.step)
        self.step = record.step + 1
        self._faults.forgive_links(frozenset(self.roles.places.values()) | {self.roles.owner})
        self._faults.stages.clear()
        self._move_line()
        return told

    def _commit(self, record: CommitRecord, *, replayed: bool) -> list[DriverCommand]:
        told = self._make_official(record, replayed=replayed)
        last = self._is_last()
        save = self._is_save_owed(last)
        commands: list[DriverCommand] = [SendCommit(record, line=self.line, save=save), told]
        if save:
            self._saves.saving = self.step
            commands.append(WriteCheckpoint(self.step, ask=False))
        if self._evaluate_if_due():
            commands.append(Evaluate(self.step))
        if last:
            self.phase = DriverPhase.SAVING
            return [*commands, *self._end_if_settled()]
        return [*commands, *self._feed(), *self._change_plan_if_quiet()]

    def on_snapshot(self, event: SnapshotStored) -> list[DriverCommand]:
        """A guard has a newer snapshot of its stage. Tensors from before the oldest of these snapshots can be
        dropped."""
        if self._guards.get(event.stage) != event.peer or event.step > self.step:
            return []
        self._acked[event.stage] = max(event.step, self._acked.get(event.stage, -1))
        self._faults.forgive_links(frozenset((event.peer, self.roles.places[event.stage])))
        checks = self._check_what_is_over()
        self._move_line()
        return [*checks, *(self._feed() if self.phase is DriverPhase.RUNNING else [])]

    def _move_line(self) -> None:
        """Raise the line (rule 10) and drop records below the line and the newest checkpoint. A check needs retained
        tensors just as a replay does (25)."""
        newest = [self._acked.get(stage, self.line) for stage in self._guards]
        hold = None if self.inspector is None else self.inspector.hold
        until = min(newest, default=self.step)
        self.line = max(self.line, until if hold is None else min(until, hold))
        below = min(self.line, self._checkpoint)
        self.records = {step: record for step, record in self.records.items() if step >= below - 1}
        self._votes.history = {step: norms for step, norms in self._votes.history.items() if step >= self.line}

    def on_checkpoint(self, event: CheckpointWritten) -> list[DriverCommand]:
        if event.step > self.official:
            return []  # belongs to a state that was taken back
        self.older.append(event.step)
        self.saved = max(self.saved, event.step)
        if self._saves.saving == event.step:
            self._saves.saving, self._saves.asked = None, False
        told = self._name_best()
        match self.phase:
            case DriverPhase.SAVING:
                return [*told, *self._end_if_settled()]
            case DriverPhase.RUNNING:
                return [*told, *self._feed(), *self._decide(), *self._change_plan_if_quiet()]
            case _:
                return told

    def on_evaluated(self, event: EvaluationDone) -> list[DriverCommand]:
        if event.step != self._saves.evaluating:
            return []
        self._saves.evaluating = None
        self.evaluations = (*self.evaluations, Evaluation(event.step, event.loss))
        running = self.phase is DriverPhase.RUNNING
        if running and not self._is_choosing:  # the next step has begun
            return [*self._decide(), *self._change_plan_if_quiet()]
        commands = self._save_if_owed() if running else self._name_best()
        if self.phase is DriverPhase.SAVING:
            return [*commands, *self._end_if_settled()]
        return [*commands, *self._feed(), *self._change_plan_if_quiet()]

    def _name_best(self) -> list[DriverCommand]:
        """Announce the best state once its checkpoint is complete."""
        best = self.standing.best
        if not self.shape.keep_best or best is None or best.step != self.saved or best.step == self._saves.named:
            return []
        self._saves.named = best.step
        return [NameBest(best)]

    def _feed(self) -> list[DriverCommand]:
        """Feed microbatches in order. Limits: the window beyond the known losses, one step ahead of the vote, the bound
        on retained steps (rule 12). Feeds nothing new while another plan waits."""
        if self._saves.asked or (self._is_choosing and self._saves.evaluating is not None):
            return []
        commands: list[DriverCommand] = []
        known = self.step * self.shape.microbatches + sum(len(losses) for losses in self._votes.losses.values())
        last = self.step if self._stop is not None else min(self.step + 1, self.shape.steps - 1)
        if self._guards:
            last = min(last, self.line + 2 * self.roles.snapshot_every - 1)
        if self._is_choosing:  # the evaluated state may have to be saved first
            every = self.shape.evaluate_every
            last = min(last, self.step - self.step % every + every - 1)
        if self._pending is not None:
            last = min(last, self._fed[0] if self._fed[1] else self._fed[0] - 1)
        while self._fed[0] <= last:
            step, microbatch = self._fed
            if step * self.shape.microbatches + microbatch >= known + self.roles.feed_window:
                break
            commands.append(FeedMicrobatch(step, microbatch))
            self._fed = self._after(self._fed)
        return commands

    def _after(self, fed: tuple[int, int]) -> tuple[int, int]:
        step, microbatch = fed
        return (step, microbatch + 1) if microbatch + 1 < self.shape.microbatches else (step + 1, 0)

    # ------------------------------------------------------------------------------------------------- spot checks

    def _check_what_is_over(self) -> list[DriverCommand]:
        """Decide whether a finished stretch is checked. This happens only after all guards have the state at its end,
        when no peer can change its results any more (25). One stretch at a time."""
        calm = self.phase in (DriverPhase.RUNNING, DriverPhase.SAVING)
        if self.inspector is None or self.inspector.open or not self._guards or not calm:
            return []
        below = min(self._acked.get(stage, -1) for stage in self._guards)
        if below <= self.line or self.line < self._verifying.checkable:
            return []
        checks = self.inspector.due(self.roles.places, self._guards, self.line, below)
        return [StartCheck(check) for check in checks]

    def on_checked(self, event: StageChecked) -> list[DriverCommand]:
        found = None if self.inspector is None else self.inspector.answered(event.check, event.opinion)
        if found is None:
            return []
        if found.again is not None:
            return [ReportCheck(event.check, found.outcome, found.reason), StartCheck(found.again)]
        told = ReportCheck(event.check, found.outcome, found.reason)
        if found.liar:
            self._verifying.sentence = found
            return [told, *self._expel_if_free()]
        checks: list[DriverCommand] = []
        if self.inspector is not None and not self.inspector.open:
            self._move_line()
            checks = self._check_what_is_over()
        match self.phase:
            case DriverPhase.SAVING:
                return [told, *checks, *self._end_if_settled()]
            case _:
                return [told, *checks, *self._feed(), *self._change_plan_if_quiet()]

    def on_expulsion_due(self, _: ExpulsionDue) -> list[DriverCommand]:
        return self._expel_if_free()

    def _expel_if_free(self) -> list[DriverCommand]:
        """Expel a lying peer for good. Its work since its last successful check, and everything computed from it, is
        void: these steps are taken back and repeated (26)."""
        found = self._verifying.sentence
        if found is None or self._votes.journalling is not None or self.phase is DriverPhase.ENDED:
            return []
        self._verifying.sentence = None
        peer, stages = found.liar, self.roles.stages_of(found.liar)
        guarded = peer in self._guards.values()
        told: list[DriverCommand] = [
            Distrust(peer, found.reason),
            ReportFault("liar", peer, stages, self.step, found.reason),
        ]
        self._guards = {stage: guard for stage, guard in self._guards.items() if guard != peer}
        if not stages:
            return [*told, *(self._without_guard(peer, found.reason) if guarded else [])]
        self._lost.add(peer)
        self._pending = None
        self._verifying.voided = True
        taken_back = self._take_back(min(found.trusted, self.step))
        self.phase = DriverPhase.WAITING
        return [*told, *taken_back, AskPlan(frozenset(self._lost), found.reason)]

    def _take_back(self, step: int) -> list[DriverCommand]:
        """Take back the steps from `step` on and all states that include them."""
        self.official = self.step = step
        self.records = {of: record for of, record in self.records.items() if of < step}
        self._votes.history = {of: norms for of, norms in self._votes.history.items() if of < step}
        self._votes.losses.clear()
        self._votes.norms.clear()
        self.older = [of for of in {*self.older, self.saved} if 0 <= of <= step]
        self.saved = max(self.older, default=-1)
        self.line = min(self.line, step)
        self._acked = {stage: min(of, step) for stage, of in self._acked.items()}
        self._saves.evaluating = self._saves.saving = None
        self.evaluations = tuple(found for found in self.evaluations if found.step <= step)
        self._saves.named = -1
        self._votes.deciding = self._saves.asked = False
        if self.inspector is not None:
            self.inspector.went_back(step)
        return [Rewind(step)]

    # ----------------------------------------------------------------------------------------------- faults, plans

    def on_peer_lost(self, event: PeerLost) -> list[DriverCommand]:
        return self._lose(event.peer, "peer", event.reason)

    def _lose(self, peer: str, kind: Literal["peer", "stage", "link"], reason: str) -> list[DriverCommand]:
        present = {*self.roles.places.values(), *self._guards.values()}
        if peer in self._lost or peer not in present:
            return []
        self._lost.add(peer)
        if self._pending is not None and peer in self._pending.members:
            self._pending = None
        stages = self.roles.stages_of(peer)
        self._guards = {stage: guard for stage, guard in self._guards.items() if guard != peer}
        if not stages:
            return [ReportFault("guard", peer, (), self.step, reason), *self._without_guard(peer, reason)]
        if peer == self.roles.owner:
            return self._fail(f"stage {stages[0]} of the job's own machine failed: {reason}")
        told = ReportFault(kind, peer, stages, self.step, reason)
        if self._pending is not None and self._leaves_alone(self._pending):
            return [told, *self._adopt(self._pending)]
        self._pending = None
        self.phase = DriverPhase.WAITING
        return [told, AskPlan(frozenset(self._lost), reason)]

    def _leaves_alone(self, roles: Roles) -> bool:
        """Return whether every connected member keeps its stages, so that no state is dropped before it is in a
        checkpoint."""
        living = {stage: peer for stage, peer in self.roles.places.items() if peer not in self._lost}
        return self.roles.partition == roles.partition and living.items() <= dict(roles.places).items()

    def _without_guard(self, peer: str, reason: str) -> list[DriverCommand]:
        """Handle a lost guard without a new round (rule 20), unless a stage needs its snapshot now."""
        self._round.snapshots.pop(peer, None)
        self._move_line()
        match self.phase:
            case DriverPhase.ATTACHING:
                return self._restore_if_all_answered()
            case DriverPhase.LOADING if self._round.restoration and peer in self._round.restoration.holders.values():
                return self._begin_round()
            case DriverPhase.RUNNING:
                return self._feed()
            case DriverPhase.WAITING:
                return [AskPlan(frozenset(self._lost), reason)]
            case _:
                return []

    def on_link_broken(self, event: LinkBroken) -> list[DriverCommand]:
        """First break of a link: another round over the same plan. Second break before any commit: one of the two peers
        is removed."""
        pair = frozenset((event.reporter, event.other))
        present = {self.roles.owner, *self.roles.places.values(), *self._guards.values()}
        if len(pair) < 2 or not pair <= present:
            return []
        if self._faults.link_broke(pair) > 1:
            return self._lose(self._faults.blamed(pair, self.roles, self._guards), "link", event.reason)
        stages = self.roles.stages_of(event.other)
        return [ReportFault("link", event.other, stages, self.step, event.reason), *self._begin_round()]

    def on_stage_failed(self, event: StageFailed) -> list[DriverCommand]:
        """First failure: another round. Second: another peer. Third: end the job, because the peer is not the cause."""
        times = self._faults.stage_failed(event.stage)
        peer = self.roles.places[event.stage]
        if event.fatal or times > 2:
            return self._fail(f"stage {event.stage} failed: {event.reason}")
        if times > 1:
            return self._lose(peer, "stage", event.reason)
        return [ReportFault("stage", peer, (event.stage,), self.step, event.reason), *self._begin_round()]

    def on_plan(self, event: PlanGranted) -> list[DriverCommand]:
        """Adopt the plan at once if a stage waits for a peer, otherwise when nothing is in progress. The plan may
        contain a guard that was lost. Either it is back, or it is lost again at the cost of one round."""
        newest = self._pending or self.roles
        if event.roles.version <= newest.version:
            return []
        if self.phase is DriverPhase.WAITING:
            return self._adopt(event.roles)
        self._pending = event.roles
        return self._change_plan_if_quiet() if self.phase is DriverPhase.RUNNING else []

    def _change_plan_if_quiet(self) -> list[DriverCommand]:
        """Adopt a pending plan between steps, when nothing is fed, because no work is lost then. State that moves goes
        through a checkpoint unless the new peer is its guard."""
        busy = self._fed != (self.step, 0) or self._saves.saving is not None or self._saves.evaluating is not None
        if self._pending is not None and not busy and self.phase is DriverPhase.RUNNING:
            self.follow_ups.append(BetweenSteps())
        return []

    def on_between_steps(self, _: BetweenSteps) -> list[DriverCommand]:
        assert self._pending is not None, "the event is raised for a pending plan"
        moves = self.roles.moves(self._pending) and not self._exchanges(self._pending)
        if moves and self.saved < self.step:
            self._saves.saving, self._saves.asked = self.step, True
            return [WriteCheckpoint(self.step, ask=True)]
        return self._adopt(self._pending)

    def _exchanges(self, roles: Roles) -> bool:
        """Return whether one stage changes places with its guard and nothing else moves. The guard starts from its
        snapshot. The stage's former peer keeps its state until it has a snapshot in turn (rule 22)."""
        moved = [stage for stage, peer in self.roles.places.items() if roles.places.get(stage) != peer]
        if self.roles.partition != roles.partition or len(moved) != 1 or moved[0] not in self.sheltered:
            return False
        stage = moved[0]
        before = (self.roles.places[stage], self._guards[stage])
        return before == (roles.guards.get(stage), roles.places[stage])

    @property
    def sheltered(self) -> frozenset[int]:
        """Return the stages whose guard could take over now. Its snapshot must be newer than the checkpoint, because a
        single stage that starts from the checkpoint's step would force all others back."""
        return frozenset(stage for stage in self._guards if self._acked.get(stage, -1) > self._checkpoint)

    def _adopt(self, roles: Roles) -> list[DriverCommand]:
        self._pending = None
        self.roles = roles
        self._lost.clear()
        self._guards = dict(roles.guards)
        return self._begin_round()

    # -------------------------------------------------------------------------------------------------- the end

    def on_stop(self, event: StopAsked) -> list[DriverCommand]:
        """Stop the job. Before any work, or with a stage missing, nothing is saved. A step in progress is finished
        first."""
        self._stop = self._stop if self._stop is not None else event.reason
        if self.phase is DriverPhase.WAITING or not self._probed:
            return self._end()
        return []

    def on_command_failed(self, event: CommandFailed) -> list[DriverCommand]:
        return self._fail(event.reason)

    def _end_if_settled(self) -> list[DriverCommand]:
        checking = self._verifying.sentence is not None or (self.inspector is not None and bool(self.inspector.open))
        if not checking and self._saves.evaluating is None and self._saves.saving is None:
            self.follow_ups.append(Settled())
        return []

    def on_settled(self, _: Settled) -> list[DriverCommand]:
        return self._end()

    def _end(self) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        early = None if self.step >= self.shape.steps or self._stop is not None else self._enough
        return [EndJob(self.step, stopped=self._stop, early=early)]

    def _fail(self, reason: str) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        return [EndJob(self.step, failed=reason)]

    # ---------------------------------------------------------------------------------------------------- details

    @property
    def _checkpoint(self) -> int:
        """Return the step from which all stages can restart: the newest complete checkpoint, or the beginning."""
        return max(self.saved, 0)

    @property
    def standing(self) -> Standing:
        """Return the result of all evaluations so far."""
        return standing(self.evaluations, self.shape.minimum_improvement)

    @property
    def _is_choosing(self) -> bool:
        """Return whether evaluations decide which state is best or when to end."""
        return self.shape.evaluate_every > 0 and (self.shape.keep_best or self.shape.patience is not None)

    @property
    def _enough(self) -> str | None:
        """Return why the job may end, or None. Answers only when the present state is the one that was evaluated
        last."""
        replaying = bool(self.evaluations) and self.step < self.evaluations[-1].step
        return None if replaying else self.standing.enough(self.shape.patience)

    def _is_last(self) -> bool:
        return self.step >= self.shape.steps or self._stop is not None or self._enough is not None

    def _is_save_owed(self, last: bool) -> bool:
        every = self.shape.checkpoint_every
        at_base = self.shape.save_base and self.saved < 0
        best = self.standing.best if self.shape.keep_best else None
        at_best = best is not None and best.step == self.step
        in_turn = every > 0 and self.step > 0 and self.step % every == 0
        return self.saved < self.step and (last or at_base or at_best or in_turn)

    def _evaluate_if_due(self) -> bool:
        """Evaluate the state if it is due, once per state, even if steps are repeated."""
        every = self.shape.evaluate_every
        done = self.evaluations and self.evaluations[-1].step >= self.step
        if every and self.step > 0 and self.step % every == 0 and self.step >= self.official and not done:
            self._saves.evaluating = self.step
        return self._saves.evaluating is not None


REPLAY_AHEAD: Final = 2
"""Most steps that may be fed beyond what the slowest replaying stage has finished."""


_A, _L, _R, _P, _G, _S, _W, _E = (
    DriverPhase.ATTACHING,
    DriverPhase.LOADING,
    DriverPhase.REPLAYING,
    DriverPhase.PROBING,
    DriverPhase.RUNNING,
    DriverPhase.SAVING,
    DriverPhase.WAITING,
    DriverPhase.ENDED,
)
_ROUND: Final = (_A, _L, _R, _P, _G, _S)
_ALIVE: Final = (*_ROUND, _W)

_RESTORING: Final[list[Transition[DriverMachine, Any, list[DriverCommand]]]] = [
    Transition((_A,), MemberEnlisted, (_A,), DriverMachine.on_enlisted),
    Transition((_A,), StageReported, (_A,), DriverMachine.on_reported),
    Transition((_A,), AllAnswered, (_L,), DriverMachine.on_all_answered),
    Transition((_L,), StageReady, (_L, _E), DriverMachine.on_loaded),
    Transition((_L,), AllRestored, (_R,), DriverMachine.on_all_loaded),
    Transition((_R,), StageReady, (_R, _E), DriverMachine.on_ready),
    Transition((_R,), StagePrepared, (_R, _E), DriverMachine.on_replayed),
    Transition((_R,), AllReady, (_P, _G, _S), DriverMachine.on_all_ready),
    Transition((_P,), ProbeAnswered, (_G, _S, _E), DriverMachine.on_probed),
]
_WORKING: Final[list[Transition[DriverMachine, Any, list[DriverCommand]]]] = [
    Transition((_G,), LossArrived, (_G, _E), DriverMachine.on_loss),
    Transition((_G,), StagePrepared, (_G, _E), DriverMachine.on_prepared),
    Transition((_G,), ScaleDecided, (_G, _S, _E), DriverMachine.on_scale),
    Transition((_G,), CommitJournalled, (_G, _S), DriverMachine.on_journalled),
    Transition((_A,), CommitJournalled, (_A, _W), DriverMachine.on_journalled_in_a_round),
    Transition((_W,), CommitJournalled, (_W,), DriverMachine.on_journalled_in_a_round),
    Transition((_G,), CheckpointWritten, (_G, _E), DriverMachine.on_checkpoint),
    *(
        Transition((phase,), CheckpointWritten, (phase,), DriverMachine.on_checkpoint)
        for phase in _ALIVE
        if phase != _G
    ),
    Transition((_G,), EvaluationDone, (_G, _S, _E), DriverMachine.on_evaluated),
    Transition((_S,), EvaluationDone, (_S,), DriverMachine.on_evaluated),
    *(Transition((phase,), SnapshotStored, (phase,), DriverMachine.on_snapshot) for phase in _ROUND if phase != _A),
    Transition((_G,), BetweenSteps, (_G, _A), DriverMachine.on_between_steps),
    Transition((_S,), Settled, (_E,), DriverMachine.on_settled),
]
_FAULTS: Final[list[Transition[DriverMachine, Any, list[DriverCommand]]]] = [
    *(Transition((phase,), StageChecked, (phase, _W), DriverMachine.on_checked) for phase in (_G, _S)),
    *(Transition((phase,), ExpulsionDue, (phase, _W), DriverMachine.on_expulsion_due) for phase in (_A, _G, _S)),
    *(Transition((phase,), PeerLost, (phase, _A, _W, _E), DriverMachine.on_peer_lost) for phase in _ALIVE),
    *(Transition((phase,), LinkBroken, (phase, _A, _W, _E), DriverMachine.on_link_broken) for phase in _ROUND),
    Transition(_ROUND, StageFailed, (_A, _W, _E), DriverMachine.on_stage_failed),
    *(Transition((phase,), PlanGranted, (phase,), DriverMachine.on_plan) for phase in _ROUND),
    Transition((_W,), PlanGranted, (_A, _W), DriverMachine.on_plan),
    *(Transition((phase,), StopAsked, (phase, _E), DriverMachine.on_stop) for phase in _ALIVE),
    Transition(_ALIVE, CommandFailed, (_E,), DriverMachine.on_command_failed),
]
TABLE: Final = Table[DriverMachine, list[DriverCommand]](
    "driver", [*_RESTORING, *_WORKING, *_FAULTS], initial=(_A,), final=(_E,)
)
"""Events without a row are late and are ignored."""
