"""Faults, spot checks and plans of a training driver's machine: who is lost, and when another plan comes into force.

Any fault that touches a stage ends the round. A lost standby is removed under the same plan (rule 20 of the recovery
protocol). A peer whose results were found wrong is lost for good: its work is taken back (rule 26), and the watermark
waits for checks (25).

Neighbours: `round.driver.Faults` counts faults; `round.verification` decides what is checked and which peer is faulty;
`rounds` begins the round that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.interface import Distrust, LinkBroken, PeerLost, ReportCheck, ReportFault, StageFailure
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.training.interface import (
    DriverCommand,
    EvidenceLost,
    GatherEvidence,
    PlanGranted,
    Roles,
    SnapshotStored,
    StageChecked,
    StartCheck,
    VerifierReady,
)
from fusionai.coordination.training.rounds import TrainingRounds
from fusionai.coordination.training.state import DriverPhase, DriverState
from fusionai.coordination.training.steps import BetweenSteps, Feeding, NotFinite


@dataclass(slots=True)
class PlanChanges:
    job: DriverState
    feeding: Feeding
    rounds: TrainingRounds

    # ------------------------------------------------------------------------------------------------------ faults

    def on_peer_lost(self, event: PeerLost) -> list[DriverCommand]:
        return self._lose(event.peer, "peer", event.reason)

    def _lose(self, peer: str, kind: Literal["peer", "stage", "link"], reason: str) -> list[DriverCommand]:
        job = self.job
        if peer in job.lost or peer not in job.members:
            return []
        job.lost.add(peer)
        if job.pending is not None and peer in job.pending.members:
            job.pending = None
        stages = job.roles.stages_of(peer)
        job.retention.strike(peer)
        if not stages:
            return [ReportFault("standby", peer, (), reason, job.step), *self.without_standby(peer, reason)]
        if peer == job.roles.owner:
            return job.fail(f"stage {stages[0]} of the job's own machine failed: {reason}")
        fault = ReportFault(kind, peer, stages, reason, job.step)
        if job.pending is not None and self._leaves_alone(job.pending):
            return [fault, *self._adopt(job.pending)]
        return [fault, *self.wait_for_plan(reason)]

    def wait_for_plan(self, reason: str) -> list[DriverCommand]:
        self.job.pending = None
        self.job.phase = DriverPhase.WAITING
        return self.job.ask_plan(reason)

    def _leaves_alone(self, roles: Roles) -> bool:
        """Return whether every connected member keeps its stages, so that no state is dropped before it is in a
        checkpoint."""
        living = {stage: peer for stage, peer in self.job.roles.places.items() if peer not in self.job.lost}
        return self.job.roles.partition == roles.partition and living.items() <= dict(roles.places).items()

    def without_standby(self, peer: str, reason: str) -> list[DriverCommand]:
        """Handle a lost standby without a new round (rule 20), unless a stage needs its snapshot now."""
        job, restoration = self.job, self.job.round.restoration
        job.round.snapshots.pop(peer, None)
        job.move_watermark()
        match job.phase:
            case DriverPhase.ATTACHING:
                job.restore_if_all_answered()
                return []
            case DriverPhase.LOADING if restoration and peer in restoration.holders.values():
                return self.rounds.begin()
            case DriverPhase.RUNNING:
                return self.feeding.feed()
            case DriverPhase.WAITING:
                return job.ask_plan(reason)
            case _:
                return []

    def on_link_broken(self, event: LinkBroken) -> list[DriverCommand]:
        job = self.job
        blamed = job.faults.link_broken(event, job.roles, job.members | {job.roles.owner}, job.standbys)
        if blamed is None:
            return []
        if blamed:
            return self._lose(blamed, "link", event.reason)
        stages = job.roles.stages_of(event.other)
        return [ReportFault("link", event.other, stages, event.reason, job.step), *self.rounds.begin()]

    def on_stage_failed(self, event: StageFailure) -> list[DriverCommand]:
        """First failure: another round. Second: another peer. Third: end the job, because the peer is not the cause."""
        times = self.job.faults.stage_failed(event.stage)
        peer = self.job.roles.places[event.stage]
        if event.fatal or times > 2:
            return self.job.fail(f"stage {event.stage} failed: {event.reason}")
        if times > 1:
            return self._lose(peer, "stage", event.reason)
        return [ReportFault("stage", peer, (event.stage,), event.reason, self.job.step), *self.rounds.begin()]

    def on_not_finite(self, event: NotFinite) -> list[DriverCommand]:
        """Run the step again, then elsewhere. If another peer comes to the same, the training diverges."""
        job = self.job
        times = job.faults.stage_failed(event.stage)
        peer = job.roles.places[event.stage]
        reason = f"step {event.step}: stage {event.stage} makes values that are not finite from finite ones"
        if times > 2:
            return job.fail(
                f"{reason}, on two peers. The training diverges there: lower the learning rate, clip gradients, or "
                f"resume from a checkpoint before step {event.step}"
            )
        if times > 1:
            return self._lose(peer, "stage", reason)
        return [ReportFault("stage", peer, (event.stage,), reason, job.step), *self.rounds.begin()]

    # ------------------------------------------------------------------------------------------------------- plans

    def on_plan(self, event: PlanGranted) -> list[DriverCommand]:
        """Adopt the plan at once if a stage waits for a peer, otherwise when nothing is in progress. The plan may
        contain a standby that was lost. Either it is back, or it is lost again at the cost of one round."""
        job = self.job
        newest = job.pending or job.roles
        if event.roles.version <= newest.version:
            return []
        if job.phase is DriverPhase.WAITING:
            return self._adopt(event.roles)
        job.pending = event.roles
        self.feeding.change_plan_if_quiet()
        return []

    def on_between_steps(self, _: BetweenSteps) -> list[DriverCommand]:
        job = self.job
        assert job.pending is not None, "the event is raised for a pending plan"
        moves = job.roles.moves(job.pending) and not self._exchanges(job.pending)
        return job.ask_checkpoint() if moves and job.saved < job.step else self._adopt(job.pending)

    def _exchanges(self, roles: Roles) -> bool:
        """Return whether one stage changes places with its standby and nothing else moves. The standby starts from its
        snapshot. The stage's former peer keeps its state until it has a snapshot in turn (rule 22)."""
        job = self.job
        moved = [stage for stage, peer in job.roles.places.items() if roles.places.get(stage) != peer]
        if job.roles.partition != roles.partition or len(moved) != 1 or moved[0] not in job.warm_stages:
            return False
        stage = moved[0]
        before = (job.roles.places[stage], job.standbys[stage])
        return before == (roles.standbys.get(stage), roles.places[stage])

    def _adopt(self, roles: Roles) -> list[DriverCommand]:
        job = self.job
        job.pending = None
        job.roles = roles
        job.lost.clear()
        job.retention.standbys = dict(roles.standbys)
        return self.rounds.begin()


@dataclass(slots=True)
class SpotChecks:
    job: DriverState
    feeding: Feeding
    plan_changes: PlanChanges

    def on_snapshot(self, event: SnapshotStored) -> list[DriverCommand]:
        """A standby has a newer snapshot of its stage. Tensors from before the oldest of these snapshots can be
        dropped."""
        job, acked = self.job, self.job.retention.acked
        if job.standbys.get(event.stage) != event.peer or event.step > job.step:
            return []
        acked[event.stage] = max(event.step, acked.get(event.stage, -1))
        self.job.faults.forgive_links(frozenset((event.peer, job.roles.places[event.stage])))
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
        due = job.inspector.due(job.roles.places, job.roles.checkers(standbys), job.watermark, below)
        return [StartCheck(check) for check in due]

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
        """End a check without an opinion, because a neighbour no longer has what it sent to the checked stage, or the
        stage's standby the snapshots that the owner's machine needs."""
        check = self.open_check(event.about)
        runs = self.job.roles.places.get(event.stage) == event.peer
        stands_by = event.stage == event.about and self.job.standbys.get(event.stage) == event.peer
        if check is None or not (runs or stands_by):
            return []
        lost = "everything that it sent" if runs else "its snapshots"
        void = Opinion(void=f"{'' if runs else 'the standby of '}stage {event.stage} no longer has {lost}")
        return self.on_checked(StageChecked(check, void))

    def on_checked(self, event: StageChecked) -> list[DriverCommand]:
        job, inspector = self.job, self.job.inspector
        found = None if inspector is None else inspector.answered(event.check, event.opinion)
        if inspector is None or found is None:
            return []
        report = ReportCheck(event.check, found.outcome, found.reason, found.partners)
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
            ReportFault("faulty", peer, stages, found.reason, job.step),
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
