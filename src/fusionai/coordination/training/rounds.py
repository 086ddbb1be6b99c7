"""Rounds of a training driver's machine: attaching, loading, replaying and probing, until steps run again.

All members report, lost state is restored, the step in progress is repeated. Rules of the recovery protocol: resume
carries the last record (5); all status, resume, all ready, only then new work (7); every stage with a standby sends a
snapshot after a recovery (11).

Neighbours: `restoring` decides which stage starts from which state; `plan_changes` begins rounds after faults.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.round.interface import MemberEnlisted
from fusionai.coordination.training import interface
from fusionai.coordination.training.interface import DriverCommand
from fusionai.coordination.training.restoring import Restoration, RestoringRound, decide
from fusionai.coordination.training.stage_interface import Resumed
from fusionai.coordination.training.state import AllAnswered, DriverPhase, DriverState
from fusionai.coordination.training.steps import Checkpointing, Feeding


class AllRestored(FollowUp, frozen=True):
    """All stages that lost their state have one again."""


class AllReady(FollowUp, frozen=True):
    """All stages are at the official step."""


@dataclass(slots=True)
class TrainingRounds:
    job: DriverState
    feeding: Feeding
    checkpointing: Checkpointing
    probed: bool = False

    def begin(self) -> list[DriverCommand]:
        """Begin a round. Discards the step in progress, except for a commit that is being journalled."""
        job = self.job
        job.phase = DriverPhase.ATTACHING
        job.attempt += 1
        job.round = RestoringRound()
        job.votes.discard()
        job.saves.asked, job.saves.saving = False, None
        if job.inspector is not None:
            job.inspector.drop()
        return [interface.SendAttach(job.fence, job.roles, dict(job.standbys))]

    def on_enlisted(self, event: MemberEnlisted) -> list[DriverCommand]:
        self.job.round.snapshots[event.peer] = event.snapshots
        self.job.restore_if_all_answered()
        return []

    def on_reported(self, event: interface.StageReported) -> list[DriverCommand]:
        self.job.round.positions[event.stage] = event
        self.job.restore_if_all_answered()
        return []

    def on_all_answered(self, _: AllAnswered) -> list[DriverCommand]:
        job = self.job
        restoration = job.round.restoration = decide(
            job.roles,
            job.round.positions,
            job.round.snapshots,
            committed=job.step,
            checkpoint=None if job.saved < 0 else job.saved,
            records_from=min(job.records, default=job.step),
        )
        report = interface.ReportRestored(
            committed=job.step,
            base=restoration.base,
            restored=tuple(restoration.sources),
            rollback=restoration.rollback and restoration.base < job.step,
        )
        rewound: list[DriverCommand] = []
        if restoration.rollback:
            self._roll_back(restoration.base)
            if job.verifying.voided:  # results of these steps are not compared with earlier ones
                rewound = job.take_back(restoration.base)
        job.verifying.voided = False
        job.retention.acked = {
            stage: max(held)
            for stage, standby in job.standbys.items()
            if (held := [step for at, step in job.round.snapshots[standby] if at == stage and step <= job.step])
        }
        job.move_watermark()
        job.phase = DriverPhase.LOADING
        return [report, *rewound, *self._load(restoration)]

    def _roll_back(self, base: int) -> None:
        """Restart all stages from the checkpoint. The watermark falls to it as well; afterwards only snapshots held by
        standbys raise the watermark (rule 10)."""
        job = self.job
        job.step, job.retention.watermark = base, min(job.watermark, base)
        job.votes.history.clear()
        if job.saves.evaluating is not None and job.saves.evaluating > base:
            job.saves.evaluating = None

    def _load(self, restoration: Restoration) -> list[DriverCommand]:
        job = self.job
        if not restoration.sources:
            job.follow_ups.append(AllRestored())
            return []
        job.round.replayed = dict.fromkeys(restoration.sources, restoration.base)
        passed: list[DriverCommand] = [
            interface.SendSnapshot(stage, restoration.base, holder, job.roles.places[stage])
            for stage, holder in restoration.holders.items()
        ]
        replaying = frozenset(restoration.sources)
        return passed + [
            interface.SendResume(
                stage,
                Resumed(
                    committed=job.step,
                    source=source,
                    base=restoration.base,
                    records=tuple(job.records[step] for step in range(restoration.base, job.step)),
                    replaying=replaying,
                    snapshot=job.wants_snapshot(stage),
                ),
            )
            for stage, source in restoration.sources.items()
        ]

    def on_loaded(self, event: interface.StageReady) -> list[DriverCommand]:
        """Second barrier: all stages that lost their state have one again."""
        job = self.job
        assert job.round.restoration is not None
        base, restored = job.round.restoration.base, job.round.restoration.sources.keys()
        if event.applied != base or event.stage not in restored:
            return job.fail(f"stage {event.stage} is at step {event.applied} instead of {base}")
        job.round.loaded.add(event.stage)
        if job.round.loaded >= restored:
            job.follow_ups.append(AllRestored())
        return []

    def on_all_loaded(self, _: AllRestored) -> list[DriverCommand]:
        """Let the other stages reach the official step and stream what they retained, while restored stages replay."""
        job = self.job
        assert job.round.restoration is not None
        job.phase = DriverPhase.REPLAYING
        base, replaying = job.round.restoration.base, frozenset(job.round.restoration.sources)
        if base == job.step:
            job.round.ready |= job.round.loaded
        last = tuple(job.records[step] for step in (job.step - 1,) if step in job.records)
        resumes: list[DriverCommand] = [
            interface.SendResume(
                stage,
                Resumed(
                    committed=job.step,
                    source="keep",
                    base=base,
                    records=last,
                    replaying=replaying,
                    snapshot=job.wants_snapshot(stage),
                    watermark=job.watermark,
                ),
            )
            for stage in job.roles.stages
            if stage not in replaying
        ]
        self.feeding.fed = (base, 0)
        commands = [*resumes, *self.feeding.feed_replay()]
        self._run_if_all_ready()
        return commands

    def on_ready(self, event: interface.StageReady) -> list[DriverCommand]:
        job = self.job
        if event.applied != job.step:
            return job.fail(f"stage {event.stage} is at step {event.applied} instead of {job.step}")
        job.round.ready.add(event.stage)
        self._run_if_all_ready()
        return []

    def _run_if_all_ready(self) -> None:
        """Third barrier: new work begins only when all stages are at the official step (rule 7)."""
        if self.job.round.ready >= set(self.job.roles.stages):
            self.job.follow_ups.append(AllReady())

    def on_all_ready(self, _: AllReady) -> list[DriverCommand]:
        self.feeding.fed = (self.job.step, 0)
        if self.probed:
            return self._run()
        self.job.phase = DriverPhase.PROBING
        return [interface.SendProbe(self.job.step)]

    def on_probed(self, event: interface.ProbeAnswered) -> list[DriverCommand]:
        """Announce that the job is ready. Two passes over the same state must agree bit for bit, or no replay could."""
        job = self.job
        warnings: list[DriverCommand] = []
        first, second = event.losses
        if first.hex() != second.hex():
            detail = f"the same microbatch crossed the stages twice and gave {first!r} and {second!r}"
            if job.shape.takeover != "tolerant":
                return job.fail(f"the probe did not come back right: {detail}")
            warnings.append(interface.WarnTolerant(job.step, detail))
        self.probed = True
        return [*warnings, interface.AnnounceReady(job.step), *self._run()]

    def _run(self) -> list[DriverCommand]:
        """Resume what the fault interrupted: a checkpoint, an evaluation or the end."""
        job = self.job
        job.verifying.checkable = job.step
        commands = self.checkpointing.save_if_owed()
        if job.saves.evaluating is not None:
            commands.append(interface.Evaluate(job.saves.evaluating))
        return [*commands, *self.feeding.proceed()]
