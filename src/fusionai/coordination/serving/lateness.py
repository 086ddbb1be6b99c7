"""Decides in the serving machine that a member, a stage or a pass is late, and what follows.

Signs of progress are results, and reports of stages about the work they do. A stage is waited for as long as it works
within the limit that `stage_times.Patience` gives this piece of work, however slow it is. If nothing came back in time,
a round begins with shorter pieces of prompts and longer limits; after `ATTEMPTS` such rounds the sessions under way
fail, with the stage and its speed as the reason, so that others can be served.

Neighbours: `takeovers` replaces late peers; `rounds` knows what is under way in the round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fusionai.coordination.serving.commands import FailSessions, ReportFault, ServingCommand
from fusionai.coordination.serving.events import LoadProgressed, StageWorking, Tick
from fusionai.coordination.serving.rounds import Rounds
from fusionai.coordination.serving.stage_times import ATTEMPTS, IDLE_MARGIN, PassWork
from fusionai.coordination.serving.state import ServingJobState, ServingPhase
from fusionai.coordination.serving.takeovers import Takeovers


@dataclass(slots=True)
class Lateness:
    job: ServingJobState
    rounds: Rounds
    takeovers: Takeovers

    def on_tick(self, event: Tick) -> list[ServingCommand]:
        job, patience, limits = self.job, self.job.patience, self.job.limits
        idle_s = patience.idle_s(event.now_s, nothing_sent=job.is_running and not job.batcher.under_way)
        match job.phase:
            case ServingPhase.ENLISTING if idle_s > limits.enlist_s:
                return self._lose(set(job.roles.places.values()) - job.roster.enlisted, "it does not answer")
            case ServingPhase.LOADING if idle_s > patience.grown_s(limits.load_s):
                late = {peer for stage, peer in job.roles.places.items() if stage not in self.rounds.loaded}
                return self._lose(late, "it does not load its stage")
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

    def _lose(self, peers: Collection[str], reason: str) -> list[ServingCommand]:
        """Remove late peers, except the driver's own machine."""
        self.job.patience.progressed(self.job.patience.now_s)
        return self.takeovers.lose(sorted(set(peers) - {self.job.roles.owner}), "late", reason)

    def on_load_progressed(self, event: LoadProgressed) -> list[ServingCommand]:
        """A report of loading is a sign of progress, unless no further bytes came for too long."""
        self.job.patience.loads(event.stage, event.done_bytes, self.job.limits.loading_s)
        return []

    def on_working(self, event: StageWorking) -> list[ServingCommand]:
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
            return self._lose(suspects, reason)
        if patience.stalls > ATTEMPTS:
            return job.fail(reason) if waiting else self._give_up_sessions(reason)
        if patience.stalls > 1 and waiting:
            job.batcher.compute_again()
        return [ReportFault("late", "", (), reason, {}), *self.rounds.begin(reason)]

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
        failed: list[ServingCommand] = [FailSessions(sessions, why)] if sessions else []
        return [*failed, ReportFault("late", "", (), reason, {}), *self.rounds.begin(reason)]
