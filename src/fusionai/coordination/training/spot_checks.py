"""Spot checks of a training driver's machine: which audit interval is checked when, and what follows from a verdict.

What a faulty peer computed is taken back (rule 26 of the recovery protocol), and the watermark waits for checks (25).

Neighbours: `round.verification` decides what is checked and who is faulty; `plan_changes` replaces an expelled peer.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.round.commands import Distrust, ReportCheck
from fusionai.coordination.round.faults import Faults
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.training.commands import DriverCommand, GatherEvidence, ReportFault, StartCheck
from fusionai.coordination.training.events import EvidenceLost, SnapshotStored, StageChecked, VerifierReady
from fusionai.coordination.training.plan_changes import PlanChanges
from fusionai.coordination.training.state import DriverPhase, DriverState
from fusionai.coordination.training.steps import Feeding


@dataclass(slots=True)
class SpotChecks:
    job: DriverState
    feeding: Feeding
    plan_changes: PlanChanges
    faults: Faults

    def on_snapshot(self, event: SnapshotStored) -> list[DriverCommand]:
        """A standby has a newer snapshot of its stage. Tensors from before the oldest of these snapshots can be
        dropped."""
        job, acked = self.job, self.job.retention.acked
        if job.standbys.get(event.stage) != event.peer or event.step > job.step:
            return []
        acked[event.stage] = max(event.step, acked.get(event.stage, -1))
        self.faults.forgive_links(frozenset((event.peer, job.roles.places[event.stage])))
        checks = self._check_finished_stretch()
        job.move_watermark()
        return [*checks, *(self.feeding.feed() if job.phase is DriverPhase.RUNNING else [])]

    def _check_finished_stretch(self) -> list[DriverCommand]:
        """Decide whether a finished audit interval is checked. This happens only after all standbys have the state at
        its end, when no peer can change its results any more (25). One audit interval at a time."""
        job, standbys = self.job, self.job.standbys
        calm = job.phase in (DriverPhase.RUNNING, DriverPhase.SAVING)
        if job.inspector is None or job.inspector.open or not standbys or not calm:
            return []
        below = min(job.retention.acked.get(stage, -1) for stage in standbys)
        if below <= job.watermark or job.watermark < job.verifying.checkable:
            return []
        return [StartCheck(check) for check in job.inspector.due(job.roles.places, standbys, job.watermark, below)]

    def open_check(self, stage: int) -> Check | None:
        return None if self.job.inspector is None else self.job.inspector.open.get(stage)

    def check_of(self, verifier: str, stage: int, first: int, below: int) -> Check | None:
        """Return the open check that this verifier was asked for, None if it was not asked to run these steps."""
        check = self.open_check(stage)
        asked = check is not None and (check.verifier, check.first, check.below) == (verifier, first, below)
        return check if asked else None

    def on_verifier_ready(self, event: VerifierReady) -> list[DriverCommand]:
        check = self.check_of(event.peer, event.stage, event.first, event.below)
        return [] if check is None else [GatherEvidence(check)]

    def on_evidence_lost(self, event: EvidenceLost) -> list[DriverCommand]:
        """End a check without an opinion, because a neighbour no longer has what it sent to the checked stage."""
        check = self.open_check(event.about)
        if check is None or self.job.roles.places.get(event.stage) != event.peer:
            return []
        void = Opinion(void=f"stage {event.stage} no longer has everything that it sent")
        return self.on_checked(StageChecked(check, void))

    def on_checked(self, event: StageChecked) -> list[DriverCommand]:
        job, inspector = self.job, self.job.inspector
        found = None if inspector is None else inspector.answered(event.check, event.opinion)
        if inspector is None or found is None:
            return []
        report = ReportCheck(event.check, found.outcome, found.reason)
        if found.again is not None:
            return [report, StartCheck(found.again)]
        if found.faulty_peer:
            job.verifying.sentence = found
            return [report, *self.expel_if_free()]
        checks: list[DriverCommand] = []
        if not inspector.open:
            job.move_watermark()
            checks = self._check_finished_stretch()
        return [report, *checks, *self.feeding.proceed()]

    def expel_if_free(self) -> list[DriverCommand]:
        """Expel a faulty peer for good. Its work since its last successful check, and everything computed from it, is
        void: these steps are taken back and repeated (26)."""
        job, found = self.job, self.job.verifying.sentence
        if found is None or job.votes.journalling is not None or job.phase is DriverPhase.ENDED:
            return []
        job.verifying.sentence = None
        peer, stages = found.faulty_peer, job.roles.stages_of(found.faulty_peer)
        standby = peer in job.standbys.values()
        expelled: list[DriverCommand] = [
            Distrust(peer, found.reason),
            ReportFault("faulty", peer, stages, job.step, found.reason),
        ]
        job.retention.strike(peer)
        if standby and not stages:
            return [*expelled, *self.plan_changes.without_standby(peer, found.reason)]
        if not stages:  # it left before
            if job.phase is DriverPhase.ATTACHING:
                job.restore_if_all_answered()
            return expelled
        job.lost.add(peer)
        job.verifying.voided = True
        taken_back = job.take_back(min(found.trusted, job.step))
        return [*expelled, *taken_back, *self.plan_changes.wait_for_plan(found.reason)]
