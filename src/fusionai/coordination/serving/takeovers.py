"""Faults of members, links and stages in the serving machine, and who takes their stages over.

A lost stage goes to its standby at once, under the same plan version; the broker is asked for a plan beside that. A
stage without a standby waits for the plan. A peer whose results were found wrong is lost for good.

Neighbours: `rounds` begins the round that follows; `lateness` reports peers that do not answer in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from fusionai.coordination.round.events import PeerLost
from fusionai.coordination.round.faults import Faults
from fusionai.coordination.round.verification import CheckVerdict
from fusionai.coordination.serving.commands import (
    BeginCheck,
    Dismiss,
    Distrust,
    FailSessions,
    FaultKind,
    ReportCheck,
    ReportFault,
    ReportState,
    ResumePasses,
    ServingCommand,
)
from fusionai.coordination.serving.events import LinkBroken, PassFailed, StageFailed, TextChecked
from fusionai.coordination.serving.rounds import ProbeRefused, Rounds
from fusionai.coordination.serving.standbys import Standbys
from fusionai.coordination.serving.state import ServingJobState, ServingPhase


@dataclass(slots=True)
class Takeovers:
    job: ServingJobState
    rounds: Rounds
    standbys: Standbys
    faults: Faults = field(default_factory=Faults)
    """Since the last pass came back."""

    def on_peer_lost(self, event: PeerLost) -> list[ServingCommand]:
        return self.lose([event.peer], "peer", event.reason)

    def lose(self, peers: Collection[str], kind: FaultKind, reason: str) -> list[ServingCommand]:
        """Remove lost peers. Their stages go to their standbys at once; a stage without a standby waits for a plan."""
        job = self.job
        gone = [peer for peer in peers if peer in job.participants and peer not in job.lost_peers]
        if job.roles.owner in gone:
            return job.fail(f"a stage of the job's own machine failed: {reason}")
        if not gone:
            return []
        has_standby = any(job.roles.standby_of(peer) for peer in gone)
        self._remove(gone)
        unmanned = {stage for stage, peer in job.roles.places.items() if peer in job.lost_peers}
        successors = self._successors(unmanned)
        commands: list[ServingCommand] = []
        for peer in gone:
            stages = job.roles.stages_of(peer)
            inherited = {stage: successors[stage] for stage in stages if stage in successors}
            commands.append(
                ReportFault(kind if stages or kind == "faulty" else "standby", peer, stages, reason, inherited)
            )
            commands.append(Dismiss(peer, reason))
        if not unmanned:
            if has_standby:
                commands.append(job.plan_request(reason, urgent=False))
            return [*commands, *self.standbys.prepare()]
        job.promote(successors)
        cause = f"lost {' and '.join(gone)} ({reason.rstrip('.')})"
        if left := sorted(unmanned - successors.keys()):
            job.phase = ServingPhase.WAITING
            self.rounds.void()
            state = f"waiting for a machine to run stage {', '.join(map(str, left))}: {cause}"
            return [*commands, ReportState("waiting", state), job.plan_request(reason, urgent=True)]
        return [*commands, *self.rounds.begin(cause), job.plan_request(reason, urgent=False)]

    def _remove(self, peers: Iterable[str]) -> None:
        job = self.job
        for peer in peers:
            job.lost_peers.add(peer)
            job.leaving.discard(peer)
            # The peer may return to the same stages without its former state.
            job.sound = {stage: one for stage, one in job.sound.items() if one != peer}
            job.strike(peer)
        if job.pending is not None and job.pending.members & job.lost_peers:
            job.pending = None

    def _successors(self, stages: Iterable[int]) -> dict[int, str]:
        """Return the successors of these stages: standbys, and peers that were about to take the stage over."""
        job = self.job
        successors = {stage: job.roles.standbys[stage] for stage in stages if stage in job.roles.standbys}
        if job.pending is not None:
            moving = job.moving(job.pending)
            prepared = {stage: moving[stage] for stage in stages if job.roster.is_warm(stage, moving.get(stage, ""))}
            successors = {**prepared, **successors}
        return successors

    def on_probe_refused(self, event: ProbeRefused) -> list[ServingCommand]:
        """Refuse a plan whose new peers compute different results."""
        new = sorted({self.job.roles.places[stage] for stage in self.job.unsound} - {self.job.roles.owner})
        if not self.job.ready or not new:
            return self.job.fail(event.reason)
        return self.lose(new, "probe", event.reason)

    # ------------------------------------------------------------------------------------------- links and stages

    def passes_flow(self) -> None:
        """A pass came back, so earlier faults of links and stages count no more."""
        self.faults.clear()

    def on_link_broken(self, event: LinkBroken) -> list[ServingCommand]:
        """First break of a link: another round under the same plan. Second break before a pass came back: one of the
        two peers is removed."""
        roles = self.job.roles
        pair = frozenset((event.reporter, event.other))
        if len(pair) < 2 or not pair <= set(roles.places.values()) | {roles.owner}:
            return []
        if self.faults.link_broke(pair) > 1:
            return self.lose([self.faults.blamed(pair, roles, roles.standbys)], "link", event.reason)
        fault = ReportFault("link", event.other, roles.stages_of(event.other), event.reason, {})
        return [fault, *self.rounds.begin(event.reason)]

    def on_stage_failed(self, event: StageFailed) -> list[ServingCommand]:
        """A running stage that fails gets another round first, and another peer if it fails again before a pass came
        back. If the job was never ready, a third failure ends it, because the peer is not the cause. For a with a
        standby or prepared stage another standby is chosen."""
        if self.job.roles.places.get(event.stage) != event.peer:
            return self._fail_standby(event)
        return self._fail_stage(event.stage, event.reason, fatal=event.fatal)

    def _fail_stage(self, stage: int, reason: str, *, fatal: bool) -> list[ServingCommand]:
        job = self.job
        times = self.faults.stage_failed(stage)
        peer = job.roles.places[stage]
        if fatal or (times > 2 and (not job.ready or peer == job.roles.owner)):
            return job.fail(f"stage {stage} failed: {reason}")
        if times > 1 and peer != job.roles.owner:
            return self.lose([peer], "stage", reason)
        return [ReportFault("stage", peer, (stage,), reason, {}), *self.rounds.begin(reason)]

    def _fail_standby(self, event: StageFailed) -> list[ServingCommand]:
        job, peer = self.job, event.peer
        if not job.roles.stages_of(peer):
            return self.lose([peer], "standby", event.reason)
        if job.pending is not None and job.pending.places.get(event.stage) == peer:
            job.pending = None
        standbys = {stage: one for stage, one in job.roles.standbys.items() if (stage, one) != (event.stage, peer)}
        job.roles = replace(job.roles, standbys=standbys)
        return [ReportFault("standby", peer, (), event.reason, {})]

    def on_pass_failed(self, event: PassFailed) -> list[ServingCommand]:
        """Let each session of the failed pass try once more in a pass of its own."""
        if event.number in self.rounds.rebuilds:
            return self.rounds.on_rebuild_failed(event)
        if event.number in self.rounds.probes:
            return self._fail_stage(event.stage, event.reason, fatal=False)
        if not self.job.is_running:
            return []
        over = self.job.batcher.failed(event.number, self.job.patience.now_s)
        failed: list[ServingCommand] = [FailSessions(over, f"stage {event.stage}: {event.reason}")] if over else []
        return [*failed, ResumePasses()]

    # ------------------------------------------------------------------------------------------------- spot checks

    def on_checked(self, event: TextChecked) -> list[ServingCommand]:
        job = self.job
        if job.checks is None:
            return []
        text = job.checks.reading
        found = job.checks.answered(job.batcher, event.check, event.opinion)
        if found is None or text is None:
            return []
        outcome = ReportCheck(event.check, found.outcome, found.reason)
        if found.again is not None:
            return [outcome, BeginCheck(found.again, text, job.fence)]
        return [outcome, *(self._expel(found) if found.faulty_peer else [])]

    def _expel(self, found: CheckVerdict) -> list[ServingCommand]:
        """Expel a peer for good. Everything under way may depend on its results, so all of it is read again from
        tokens."""
        if self.job.roles.stages_of(found.faulty_peer):
            self.job.batcher.compute_again()
        return [Distrust(found.faulty_peer, found.reason), *self.lose([found.faulty_peer], "faulty", found.reason)]
