"""Faults and plans of a training driver's machine: who is lost, and when another plan comes into force.

Any fault that touches a stage ends the round. A lost standby is removed under the same plan (rule 20 of the recovery
protocol). A peer whose results were found wrong is lost for good.

Neighbours: `round.faults` counts faults; `rounds` begins the round that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.events import PeerLost
from fusionai.coordination.round.faults import Faults
from fusionai.coordination.training.commands import DriverCommand, ReportFault
from fusionai.coordination.training.events import LinkBroken, PlanGranted, StageFailed
from fusionai.coordination.training.roles import Roles
from fusionai.coordination.training.rounds import TrainingRounds
from fusionai.coordination.training.state import DriverPhase, DriverState
from fusionai.coordination.training.steps import BetweenSteps, Feeding


@dataclass(slots=True)
class PlanChanges:
    job: DriverState
    feeding: Feeding
    rounds: TrainingRounds
    faults: Faults

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
            return [ReportFault("standby", peer, (), job.step, reason), *self.without_standby(peer, reason)]
        if peer == job.roles.owner:
            return job.fail(f"stage {stages[0]} of the job's own machine failed: {reason}")
        fault = ReportFault(kind, peer, stages, job.step, reason)
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
        """First break of a link: another round over the same plan. Second break before any commit: one of the two peers
        is removed."""
        job, pair = self.job, frozenset((event.reporter, event.other))
        if len(pair) < 2 or not pair <= job.members | {job.roles.owner}:
            return []
        if self.faults.link_broke(pair) > 1:
            return self._lose(self.faults.blamed(pair, job.roles, job.standbys), "link", event.reason)
        stages = job.roles.stages_of(event.other)
        return [ReportFault("link", event.other, stages, job.step, event.reason), *self.rounds.begin()]

    def on_stage_failed(self, event: StageFailed) -> list[DriverCommand]:
        """First failure: another round. Second: another peer. Third: end the job, because the peer is not the cause."""
        times = self.faults.stage_failed(event.stage)
        peer = self.job.roles.places[event.stage]
        if event.fatal or times > 2:
            return self.job.fail(f"stage {event.stage} failed: {event.reason}")
        if times > 1:
            return self._lose(peer, "stage", event.reason)
        return [ReportFault("stage", peer, (event.stage,), self.job.step, event.reason), *self.rounds.begin()]

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
