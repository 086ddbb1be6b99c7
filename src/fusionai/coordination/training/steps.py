"""Steps of a training driver's machine: feeding microbatches, votes, commits, checkpoints and evaluations.

Rules of the recovery protocol: journal, then send the commit (2); commit only when every stage is prepared (3); nothing
is fed beyond the watermark plus twice the snapshot interval (12); replayed steps use the journalled record and are
checked against it (21).

Neighbours: `rounds` says from which step on to feed; `state` knows which checkpoints and evaluations are due.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.training import interface
from fusionai.coordination.training.evaluations import Evaluation
from fusionai.coordination.training.interface import DriverCommand
from fusionai.coordination.training.state import DriverPhase, DriverState
from fusionai.wire.messages import CommitRecord

REPLAY_AHEAD: Final = 2
"""Most steps that may be fed beyond what the slowest replaying stage has finished."""


class BetweenSteps(FollowUp, frozen=True):
    """Another plan is pending and nothing is in progress."""


class ExpulsionDue(FollowUp, frozen=True):
    """A peer was found to be faulty, and no commit is being journalled any more."""


class NotFinite(FollowUp, frozen=True):
    """A stage made values that are not finite from finite ones, so the step can't be committed."""

    stage: int
    step: int


class Settled(FollowUp, frozen=True):
    """The last step is committed; no check, evaluation or checkpoint is outstanding."""


def norms_hash(norms: Mapping[str, float]) -> str:
    """Return the SHA-256 over the (parameter, norm) pairs in key order, norms as exact hexadecimal floats."""
    digest = hashlib.sha256()
    for key in sorted(norms):
        digest.update(f"{key}={norms[key].hex()}\n".encode())
    return digest.hexdigest()


@dataclass(slots=True)
class Feeding:
    job: DriverState
    fed: tuple[int, int] = (0, 0)
    """(step, microbatch) that is fed next."""

    def proceed(self) -> list[DriverCommand]:
        """Go on after a step, a checkpoint, an evaluation or a check: feed, or end the job once all is settled."""
        if self.job.phase is DriverPhase.SAVING:
            self._end_if_settled()
            return []
        commands = self.feed()
        self.change_plan_if_quiet()
        return commands

    def change_plan_if_quiet(self) -> None:
        """Adopt a pending plan between steps, when nothing is fed, because no work is lost then. State that moves goes
        through a checkpoint unless the new peer is its standby."""
        job = self.job
        busy = self.fed != (job.step, 0) or job.saves.saving is not None or job.saves.evaluating is not None
        if job.pending is not None and not busy and job.phase is DriverPhase.RUNNING:
            job.follow_ups.append(BetweenSteps())

    def _end_if_settled(self) -> None:
        job = self.job
        checking = job.verifying.sentence is not None or (job.inspector is not None and bool(job.inspector.open))
        if not checking and job.saves.evaluating is None and job.saves.saving is None:
            job.follow_ups.append(Settled())

    def feed(self) -> list[DriverCommand]:
        """Feed microbatches in order. Limits: the window beyond the known losses, one step ahead of the vote, the bound
        on retained steps (rule 12). Feeds nothing new while another plan waits."""
        job, shape = self.job, self.job.shape
        if job.saves.asked or (shape.is_choosing and job.saves.evaluating is not None):
            return []
        commands: list[DriverCommand] = []
        known = job.step * shape.microbatches + sum(len(losses) for losses in job.votes.losses.values())
        last = job.step if job.stop is not None else min(job.step + 1, shape.steps - 1)
        if job.retention.standbys:
            last = min(last, job.watermark + 2 * job.roles.snapshot_every - 1)
        if shape.is_choosing:  # the evaluated state may have to be saved first
            every = shape.evaluate_every
            last = min(last, job.step - job.step % every + every - 1)
        if job.pending is not None:
            last = min(last, self.fed[0] if self.fed[1] else self.fed[0] - 1)
        while self.fed[0] <= last:
            step, microbatch = self.fed
            if step * shape.microbatches + microbatch >= known + job.roles.feed_window:
                break
            commands.append(interface.FeedMicrobatch(step, microbatch))
            self._advance()
        return commands

    def feed_replay(self) -> list[DriverCommand]:
        """Feed inputs to the replaying stages, at most two steps ahead of the slowest of them."""
        replayed = self.job.round.replayed
        fed = frozenset(stage for stage in replayed if stage in self.job.roles.fed)
        if not fed:
            return []
        commands: list[DriverCommand] = []
        below = min(self.job.step, min(replayed[stage] for stage in fed) + REPLAY_AHEAD)
        while self.fed[0] < below:
            commands.append(interface.FeedMicrobatch(*self.fed, only=fed))
            self._advance()
        return commands

    def _advance(self) -> None:
        step, microbatch = self.fed
        self.fed = (step, microbatch + 1) if microbatch + 1 < self.job.shape.microbatches else (step + 1, 0)


@dataclass(slots=True)
class Commits:
    job: DriverState
    feeding: Feeding
    learning_rate: Callable[[int], float]

    def on_loss(self, event: interface.LossArrived) -> list[DriverCommand]:
        job = self.job
        if event.step < job.step:
            return []
        if event.microbatch >= job.shape.microbatches or (event.step, event.microbatch) >= self.feeding.fed:
            return job.fail(f"a loss came for microbatch {event.microbatch} of step {event.step}, which was not fed")
        job.votes.losses.setdefault(event.step, {}).setdefault(event.microbatch, event.loss)
        return [*self.feeding.feed(), *self.decide()]

    def on_prepared(self, event: interface.StagePrepared) -> list[DriverCommand]:
        job = self.job
        if event.step != job.step or event.stage not in job.roles.places:
            return []
        votes = job.votes.norms.setdefault(event.step, {})
        if event.stage not in votes:  # a vote can't be changed
            votes[event.stage] = event.norms
            if event.nonfinite:
                job.votes.nonfinite[event.step, event.stage] = event.nonfinite
        return self.decide()

    def decide(self) -> list[DriverCommand]:
        """If all losses and votes are in and no evaluation still needs the state, reduce the norms."""
        job, votes, saves = self.job, self.job.votes, self.job.saves
        voted = votes.norms.get(job.step, {}).keys() == job.roles.places.keys()
        computed = len(votes.losses.get(job.step, {})) == job.shape.microbatches
        held = votes.deciding or saves.evaluating is not None or saves.saving is not None
        if not (voted and computed) or held or votes.journalling is not None:
            return []  # one checkpoint at a time: a commit never overtakes the state still being collected
        source = votes.source_of_nonfinite(job.step)
        if source is not None:
            job.follow_ups.append(NotFinite(source, job.step))
            return []
        votes.deciding = True
        norms = votes.all_norms(job.step)
        unknown = norms.keys() - set(job.shape.canonical_order)
        if unknown:
            return job.fail(f"norms of parameters the model does not have: {', '.join(sorted(unknown)[:5])}")
        return [interface.DecideScale(job.step, tuple(norms[key] for key in job.shape.canonical_order if key in norms))]

    def on_scale(self, event: interface.ScaleDecided) -> list[DriverCommand]:
        job, votes = self.job, self.job.votes
        if not votes.deciding or event.step != job.step:
            return []  # requested before a fault
        losses = votes.step_losses(job.step)
        record = CommitRecord(
            step=event.step,
            scale=event.scale,
            learning_rate=self.learning_rate(event.step),
            total_norm=event.total_norm,
            norms_hash=norms_hash(votes.all_norms(job.step)),
            fence=job.fence,
            loss=sum(losses) / len(losses),
        )
        votes.deciding = False
        if event.step < job.official:
            return self._check_replay(record, job.records[event.step])
        votes.journalling = record
        return [interface.JournalCommit(record)]

    def _check_replay(self, computed: CommitRecord, journalled: CommitRecord) -> list[DriverCommand]:
        same = computed.norms_hash == journalled.norms_hash and computed.loss.hex() == journalled.loss.hex()
        if same:
            return self._commit(journalled, replayed=True)
        detail = (
            f"step {computed.step} came out with loss {computed.loss!r} and norm {computed.total_norm!r}, "
            f"the journal has {journalled.loss!r} and {journalled.total_norm!r}"
        )
        if self.job.shape.takeover != "exact":
            return [interface.WarnTolerant(computed.step, detail), *self._commit(journalled, replayed=True)]
        return self.job.fail(f"replay is not exact: {detail}")

    def on_replayed(self, event: interface.StagePrepared) -> list[DriverCommand]:
        """A stage has run an official step again. Its norms must equal those of the first run (rule 21)."""
        replayed = self.job.round.replayed
        if replayed.get(event.stage) != event.step:
            return []
        replayed[event.stage] = event.step + 1
        known = self.job.votes.history.get(event.step)
        differing = [key for key in sorted(event.norms) if known is not None and known.get(key) != event.norms[key]]
        if not differing:
            return self.feeding.feed_replay()
        if not all(math.isfinite(event.norms[key]) for key in differing):
            self.job.follow_ups.append(NotFinite(event.stage, event.step))
            return []
        detail = f"stage {event.stage} replayed step {event.step} with another norm of {', '.join(differing[:3])}"
        if self.job.shape.takeover == "exact":
            return self.job.fail(f"replay is not exact: {detail}")
        return [interface.WarnTolerant(event.step, detail), *self.feeding.feed_replay()]

    def on_journalled(self, event: interface.CommitJournalled) -> list[DriverCommand]:
        commands = self._commit(event.record, replayed=False)
        if self.job.verifying.sentence is not None:
            self.job.follow_ups.append(ExpulsionDue())
        return commands

    def on_journalled_in_a_round(self, event: interface.CommitJournalled) -> list[DriverCommand]:
        """A fault happened between the vote and the end of journalling. The step is official; stages get it with their
        resume."""
        job = self.job
        committed = self._make_official(event.record, replayed=False)
        job.evaluate_if_due()
        if job.verifying.sentence is not None:
            job.follow_ups.append(ExpulsionDue())
        elif job.phase is DriverPhase.ATTACHING:
            job.restore_if_all_answered()
        return [committed]

    def _make_official(self, record: CommitRecord, *, replayed: bool) -> interface.StepCommitted:
        job = self.job
        committed = interface.StepCommitted(record, job.votes.step_losses(job.step), replayed)
        if not replayed:
            job.votes.journalling = None
            job.official = record.step + 1
        job.records[record.step] = record
        job.votes.make_official(record.step)
        job.step = record.step + 1
        job.faults.forgive_links(frozenset(job.roles.places.values()) | {job.roles.owner})
        job.faults.stages.clear()
        job.move_watermark()
        return committed

    def _commit(self, record: CommitRecord, *, replayed: bool) -> list[DriverCommand]:
        job = self.job
        committed = self._make_official(record, replayed=replayed)
        last = job.is_last
        save = job.is_save_owed(last)
        commands: list[DriverCommand] = [interface.SendCommit(record, watermark=job.watermark, save=save), committed]
        if save:
            job.saves.saving = job.step
            commands.append(interface.WriteCheckpoint(job.step, ask=False))
        if job.evaluate_if_due():
            commands.append(interface.Evaluate(job.step))
        if last:
            job.phase = DriverPhase.SAVING
        return [*commands, *self.feeding.proceed()]


@dataclass(slots=True)
class Checkpointing:
    """Checkpoints and evaluations of committed states, and which state is announced as the best."""

    job: DriverState
    feeding: Feeding
    commits: Commits

    def save_if_owed(self) -> list[DriverCommand]:
        """Between two steps, before the next one begins: save a checkpoint if one is due, then go on or end."""
        job = self.job
        last = job.is_last
        job.phase = DriverPhase.SAVING if last else DriverPhase.RUNNING
        if job.saves.saving is not None or not job.is_save_owed(last):
            return self._name_best()
        return job.ask_checkpoint()

    def on_checkpoint(self, event: interface.CheckpointWritten) -> list[DriverCommand]:
        job = self.job
        if event.step > job.official:
            return []  # belongs to a state that was taken back
        job.older.append(event.step)
        job.saved = max(job.saved, event.step)
        if job.saves.saving == event.step:
            job.saves.saving, job.saves.asked = None, False
        named = self._name_best()
        match job.phase:
            case DriverPhase.SAVING:
                return [*named, *self.feeding.proceed()]
            case DriverPhase.RUNNING:
                return [*named, *self.feeding.proceed(), *self.commits.decide()]
            case _:
                return named

    def on_evaluated(self, event: interface.EvaluationDone) -> list[DriverCommand]:
        job = self.job
        if event.step != job.saves.evaluating:
            return []
        job.saves.evaluating = None
        job.evaluations = (*job.evaluations, Evaluation(event.step, event.loss))
        running = job.phase is DriverPhase.RUNNING
        if running and not job.shape.is_choosing:  # the next step has begun
            return [*self.feeding.proceed(), *self.commits.decide()]
        commands = self.save_if_owed() if running else self._name_best()
        return [*commands, *self.feeding.proceed()]

    def _name_best(self) -> list[DriverCommand]:
        """Announce the best state once its checkpoint is complete."""
        job, best = self.job, self.job.standing.best
        if not job.shape.keep_best or best is None or best.step != job.saved or best.step == job.saves.named:
            return []
        job.saves.named = best.step
        return [interface.NameBest(best)]
