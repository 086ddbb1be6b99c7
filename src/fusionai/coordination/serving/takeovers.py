"""Faults in the serving machine: lost members, broken links, failing and late stages, and who takes the stages over.

A lost stage goes to its standby at once, under the same plan version; the broker is asked for a plan beside that. A
stage without a standby waits for the plan. A peer whose results were found wrong is lost for good.

Signs of progress are results, and reports of stages about the work they do. A stage is waited for as long as it works
within the limit that `stage_times.Patience` gives this piece of work, however slow it is. If nothing came back in time,
a round begins with shorter pieces of prompts and longer limits; after `ATTEMPTS` such rounds the sessions under way
fail, with the stage and its speed as the reason, so that others can be served.

Neighbours: `rounds` begins the round that follows and knows what is under way in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from fusionai.coordination.round.interface import (
    Distrust,
    FaultKind,
    LinkBroken,
    PeerLost,
    ReportCheck,
    ReportFault,
    StageFailure,
)
from fusionai.coordination.round.verification import CheckVerdict
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingCommand
from fusionai.coordination.serving.rounds import ProbeRefused, Rounds
from fusionai.coordination.serving.stage_times import ATTEMPTS, IDLE_MARGIN, PassWork
from fusionai.coordination.serving.standbys import Standbys
from fusionai.coordination.serving.state import ServingJobState, ServingPhase


@dataclass(slots=True)
class Takeovers:
    job: ServingJobState
    rounds: Rounds
    standbys: Standbys

    def on_peer_lost(self, event: PeerLost) -> list[ServingCommand]:
        return self.lose([event.peer], "peer", event.reason)

    def lose(self, peers: Collection[str], kind: FaultKind, reason: str) -> list[ServingCommand]:
        """Remove lost peers. Their stages go to their standbys at once; a stage without a standby waits for a plan."""
        job = self.job
        gone = [peer for peer in peers if peer in job.participants and peer not in job.lost]
        if job.roles.owner in gone:
            return job.fail(f"a stage of the job's own machine failed: {reason}")
        if not gone:
            return []
        has_standby = any(job.roles.standby_of(peer) for peer in gone)
        self._remove(gone)
        unmanned = {stage for stage, peer in job.roles.places.items() if peer in job.lost}
        successors = self._successors(unmanned)
        commands: list[ServingCommand] = []
        for peer in gone:
            stages = job.roles.stages_of(peer)
            inherited = {stage: successors[stage] for stage in stages if stage in successors}
            commands.append(
                ReportFault(
                    kind if stages or kind == "faulty" else "standby", peer, stages, reason, successors=inherited
                )
            )
            commands.append(interface.Dismiss(peer, reason))
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
            return [*commands, interface.ReportState("waiting", state), job.plan_request(reason, urgent=True)]
        return [*commands, *self.rounds.begin(cause), job.plan_request(reason, urgent=False)]

    def _remove(self, peers: Iterable[str]) -> None:
        job = self.job
        for peer in peers:
            job.lost.add(peer)
            job.leaving.discard(peer)
            # The peer may return to the same stages without its former state.
            job.sound = {stage: one for stage, one in job.sound.items() if one != peer}
            job.strike(peer)
        if job.pending is not None and job.pending.members & job.lost:
            job.pending = None

    def _successors(self, stages: Iterable[int]) -> dict[int, str]:
        """Return the successors of these stages: standbys, and peers that were about to take the stage over."""
        job = self.job
        successors = {stage: job.roles.standbys[stage] for stage in stages if stage in job.roles.standbys}
        if job.pending is not None:
            moving = job.moving(job.pending)
            prepared = {stage: moving[stage] for stage in stages if (stage, moving.get(stage)) in job.roster.warm}
            successors = {**prepared, **successors}
        return successors

    def on_probe_refused(self, event: ProbeRefused) -> list[ServingCommand]:
        """Refuse a plan whose new peers compute different results."""
        new = sorted({self.job.roles.places[stage] for stage in self.job.unsound} - {self.job.roles.owner})
        if not self.job.ready or not new:
            return self.job.fail(event.reason)
        return self.lose(new, "probe", event.reason)

    # ------------------------------------------------------------------------------------------- links and stages

    def on_link_broken(self, event: LinkBroken) -> list[ServingCommand]:
        roles = self.job.roles
        peers = {*roles.places.values(), roles.owner}
        blamed = self.job.faults.link_broken(event, roles, peers, roles.standbys)
        if blamed is None:
            return []
        if blamed:
            return self.lose([blamed], "link", event.reason)
        fault = ReportFault("link", event.other, roles.stages_of(event.other), event.reason)
        return [fault, *self.rounds.begin(event.reason)]

    def on_stage_failed(self, event: StageFailure) -> list[ServingCommand]:
        """A running stage that fails gets another round first, and another peer if it fails again before a pass came
        back. If the job was never ready, a third failure ends it, because the peer is not the cause. If a
        standby or a peer that prepares a stage fails, another one is chosen."""
        if self.job.roles.places.get(event.stage) != event.peer:
            return self._fail_standby(event)
        return self._fail_stage(event.stage, event.reason, fatal=event.fatal)

    def _fail_stage(self, stage: int, reason: str, *, fatal: bool) -> list[ServingCommand]:
        job = self.job
        times = self.job.faults.stage_failed(stage)
        peer = job.roles.places[stage]
        if fatal or (times > 2 and (not job.ready or peer == job.roles.owner)):
            return job.fail(f"stage {stage} failed: {reason}")
        if times > 1 and peer != job.roles.owner:
            return self.lose([peer], "stage", reason)
        return [ReportFault("stage", peer, (stage,), reason), *self.rounds.begin(reason)]

    def _fail_standby(self, event: StageFailure) -> list[ServingCommand]:
        job, peer = self.job, event.peer
        if not job.roles.stages_of(peer):
            return self.lose([peer], "standby", event.reason)
        if job.pending is not None and job.pending.places.get(event.stage) == peer:
            job.pending = None
        standbys = {stage: one for stage, one in job.roles.standbys.items() if (stage, one) != (event.stage, peer)}
        job.roles = replace(job.roles, standbys=standbys)
        return [ReportFault("standby", peer, (), event.reason)]

    def on_pass_failed(self, event: interface.PassFailure) -> list[ServingCommand]:
        """Let each session of the failed pass try once more in a pass of its own."""
        if event.number in self.rounds.rebuilds:
            return self.rounds.on_rebuild_failed(event)
        if event.number in self.rounds.probes:
            return self._fail_stage(event.stage, event.reason, fatal=False)
        if not self.job.is_running:
            return []
        over = self.job.batcher.failed(event.number, self.job.patience.now_s)
        failed: list[ServingCommand] = (
            [interface.FailSessions(over, f"stage {event.stage}: {event.reason}")] if over else []
        )
        return [*failed, interface.ResumePasses()]

    # ------------------------------------------------------------------------------------------------- spot checks

    def on_checked(self, event: interface.TextChecked) -> list[ServingCommand]:
        job = self.job
        if job.checks is None:
            return []
        text = job.checks.reading
        found = job.checks.answered(job.batcher, event.check, event.opinion)
        if found is None or text is None:
            return []
        outcome = ReportCheck(event.check, found.outcome, found.reason, found.partners)
        if found.again is not None:
            return [outcome, interface.BeginCheck(found.again, text, job.fence)]
        return [outcome, *(self._expel(found) if found.faulty_peer else [])]

    def _expel(self, found: CheckVerdict) -> list[ServingCommand]:
        """Expel a peer for good. Everything under way may depend on its results, so all of it is read again from
        tokens."""
        if self.job.roles.stages_of(found.faulty_peer):
            self.job.batcher.compute_again()
        return [Distrust(found.faulty_peer, found.reason), *self.lose([found.faulty_peer], "faulty", found.reason)]

    # ------------------------------------------------------------------------------------------------ no progress

    def on_tick(self, event: interface.Tick) -> list[ServingCommand]:
        job, patience, limits = self.job, self.job.patience, self.job.limits
        idle_s = patience.idle_s(event.now_s, nothing_sent=job.is_running and not job.batcher.under_way)
        match job.phase:
            case ServingPhase.ENLISTING if idle_s > limits.enlist_s:
                return self._lose_late(set(job.roles.places.values()) - job.roster.enlisted, "it does not answer")
            case ServingPhase.LOADING if idle_s > patience.grown_s(limits.load_s):
                late = {peer for stage, peer in job.roles.places.items() if stage not in self.rounds.loaded}
                return self._lose_late(late, "it does not load its stage")
            case ServingPhase.REBUILDING if idle_s > patience.grown_s(limits.rebuild_s):
                return self._stalled({request.through for request, _ in self.rounds.rebuilds.values()})
            case ServingPhase.PROBING if idle_s > patience.grown_s(limits.probe_s):
                return self._stalled(job.unsound)
            case ServingPhase.RUNNING if idle_s > patience.silence_s(job.batcher.works):
                return self._stalled(())
            case ServingPhase.RUNNING if self._is_overdue(event.now_s):
                return self._stalled(())
            case _:
                return []

    def _is_overdue(self, now_s: float) -> bool:
        """Return whether a pass has been under way longer than all passes together should take, which means that its
        result was lost."""
        oldest_s = self.job.batcher.oldest_s
        return oldest_s is not None and now_s - oldest_s > self.job.patience.whole_s(self.job.batcher.works)

    def _lose_late(self, peers: Collection[str], reason: str) -> list[ServingCommand]:
        """Remove late peers, except the driver's own machine."""
        self.job.patience.progressed(self.job.patience.now_s)
        return self.lose(sorted(set(peers) - {self.job.roles.owner}), "late", reason)

    def on_load_progressed(self, event: interface.LoadProgressed) -> list[ServingCommand]:
        """A report of loading is a sign of progress, unless no further bytes came for too long."""
        self.job.patience.loads(event.stage, event.done_bytes, self.job.limits.loading_s)
        return []

    def on_working(self, event: interface.StageWorking) -> list[ServingCommand]:
        """A stage reports what it computes. This is a sign of progress unless the stage exceeds its time limit."""
        job = self.job
        if job.roles.places.get(event.stage) != event.peer:
            return []
        work = self.rounds.work_of(event.number) if event.number >= 0 else None
        # Work of an earlier round, or work that waits behind other work, may be as large as a pass can be.
        most = PassWork(job.batcher.limits.pass_tokens, float(job.batcher.limits.pass_tokens))
        limit_s = job.patience.limit_s(event.stage, work or most) * (1.0 if work is not None else IDLE_MARGIN)
        if event.busy_s <= limit_s:
            job.patience.progressed(None)
            return []
        if job.phase in (ServingPhase.ENLISTING, ServingPhase.LOADING):
            return []  # the limits of these phases remove a member that makes no progress
        if work is not None:
            job.patience.times.measured(event.stage, work, event.busy_s)
        return self._stalled((event.stage,), busy_s=event.busy_s, work=work)

    def _stalled(
        self, stages: Collection[int], *, busy_s: float | None = None, work: PassWork | None = None
    ) -> list[ServingCommand]:
        """Handle that nothing came back in time although all members answer. First another round, with shorter pieces
        and longer limits; while caches are rebuilt or probed, then a round without rebuilds; then the peers whose
        `stages` are late are replaced; at last the sessions under way fail."""
        job, patience = self.job, self.job.patience
        patience.stalls += 1
        job.batcher.pieces.shrink()
        reason = self._why_late(stages, busy_s, work)
        suspects = {job.roles.places[stage] for stage in stages} - {job.roles.owner}
        waiting = not job.is_running
        # A stage that reports working is replaced only by a peer that is ready.
        replaceable = (waiting and busy_s is None) or all(job.is_warm(stage) for stage in stages)
        if patience.stalls > 2 and suspects and replaceable:
            return self._lose_late(suspects, reason)
        if patience.stalls > ATTEMPTS:
            return job.fail(reason) if waiting else self._give_up_sessions(reason)
        if patience.stalls > 1 and waiting:
            job.batcher.compute_again()
        return [ReportFault("late", "", (), reason), *self.rounds.begin(reason)]

    def _why_late(self, stages: Collection[int], busy_s: float | None, work: PassWork | None) -> str:
        if busy_s is None or not stages:
            return f"nothing came back in time while {self.job.phase.value}"
        stage = min(stages)
        what = "another piece of work" if work is None else f"a piece of {work.rows} positions"
        speed = self.job.patience.times.tokens_per_s(stage)
        known = "" if speed is None else f", after {speed:.3g} tokens a second"
        return f"stage {stage} on {self.job.roles.places[stage]} works on {what} for {busy_s:.0f} s{known}"

    def _give_up_sessions(self, reason: str) -> list[ServingCommand]:
        """Fail the sessions that were under way, because they make no progress. Other sessions may."""
        sessions = self.job.batcher.sessions_under_way
        why = (
            f"given up after {ATTEMPTS} attempts with shorter pieces and more time: {reason}. Free the machine of "
            "other work, let a faster one join, or ask for less at a time."
        )
        for number in sessions:
            self.job.batcher.cancel(number)
        self.job.patience.stalls = 0
        failed: list[ServingCommand] = [interface.FailSessions(sessions, why)] if sessions else []
        return [*failed, ReportFault("late", "", (), reason), *self.rounds.begin(reason)]
