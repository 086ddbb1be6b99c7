"""Rounds of the serving machine: enlisting, loading, rebuilding, probing, until passes run.

A round begins with a higher fence: everything under way is void, and each member reports what it has. A stage is
*sound* while its holder has taken part in every pass since it was whole. Unsound stages drop their caches and are
rebuilt, in contiguous runs, from what the stage before each run retains, or from the tokens if no stage is before it.
A probe then crosses all stages: twice before the job's first pass, with equal bits; once after a takeover, behind the
rebuilds, close to the first probe.

Neighbours: `takeovers` and `standbys` begin rounds; `driver` has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.round.interface import MemberEnlisted, ReportFault
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.admission import PROBE_SESSION
from fusionai.coordination.serving.interface import ServingCommand
from fusionai.coordination.serving.stage_times import PassWork
from fusionai.coordination.serving.state import ServingJobState, ServingPhase
from fusionai.wire.serving import Segment


class AllLoaded(FollowUp, frozen=True):
    """Every member is enlisted and every stage has reported its caches."""


class ProbeRefused(FollowUp, frozen=True):
    """A probe's result differs from the first probe's by more than the tolerance."""

    reason: str


class PassesResumed(FollowUp, frozen=True):
    """The pipeline is whole."""


@dataclass(slots=True)
class Rounds:
    job: ServingJobState
    loaded: dict[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])
    """Stage -> positions it reported for each session."""
    rebuilds: dict[int, tuple[interface.SendRebuild, dict[int, int]]] = field(
        default_factory=dict[int, tuple[interface.SendRebuild, dict[int, int]]]
    )
    """Number -> the rebuild request, and the sessions that are not rebuilt yet with the ends of their segments."""
    probes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Number of each probe under way -> the sessions that it has the stages drop."""
    _digests: list[str] = field(default_factory=list[str])

    def begin(self, reason: str) -> list[ServingCommand]:
        """Begin a round. Everything under way is void; sessions keep their emitted tokens."""
        job = self.job
        job.phase = ServingPhase.ENLISTING
        job.attempt += 1
        job.fence = job.next_fence()
        self.void()
        # A member without a place for a stage drops it, so it is unsound even if a later round gives it back before
        # passes run.
        job.sound = {stage: one for stage, one in job.sound.items() if job.roles.places.get(stage) == one}
        job.roster.begin(job.roles)
        job.patience.times.begin(job.roles)
        state: Final = "recovering" if job.ready else "starting"
        return [interface.ReportState(state, reason), interface.BeginRound(job.fence, job.roles)]

    def void(self) -> None:
        """Drop everything under way."""
        job = self.job
        job.batcher.rewind()
        job.roster.void()
        if job.checks is not None:
            job.checks.drop()
        for one in (self.loaded, self.rebuilds, self.probes):
            one.clear()
        self._digests.clear()
        job.patience.begin_round()

    # ---------------------------------------------------------------------------------------- enlisting and loading

    def on_enlisted(self, event: MemberEnlisted) -> list[ServingCommand]:
        """Load each stage as soon as its member is enlisted. Standbys load when passes run, so that they do not delay
        stages."""
        job = self.job
        job.roster.enlisted.add(event.peer)
        unsound = set(job.unsound)
        loads: list[ServingCommand] = [
            interface.SendLoad(job.fence, event.peer, stage, standby=False, fresh=stage in unsound, roles=job.roles)
            for stage in job.roles.stages_of(event.peer)
        ]
        self._go_on_when_loaded()
        return loads

    def on_standby_enlisted(self, event: MemberEnlisted) -> list[ServingCommand]:
        """Enlist a standby that runs no stage. Standbys load when passes run."""
        self.job.roster.enlisted.add(event.peer)
        return []

    def on_loaded(self, event: interface.StageLoaded) -> list[ServingCommand]:
        if self.job.roles.places.get(event.stage) == event.peer:
            self.loaded[event.stage] = dict(event.cached)
            self._go_on_when_loaded()
        return []

    def _go_on_when_loaded(self) -> None:
        job = self.job
        if set(job.roles.places.values()) <= job.roster.enlisted:
            job.phase = ServingPhase.LOADING
            if self.loaded.keys() >= set(job.roles.stages):
                job.follow_ups.append(AllLoaded())

    # --------------------------------------------------------------------------------------------------- rebuilding

    def on_all_loaded(self, _: AllLoaded) -> list[ServingCommand]:
        """Start rebuilds where stages lack caches, and probes."""
        job, batcher = self.job, self.job.batcher
        live = batcher.live
        for cached in self.loaded.values():
            batcher.forget(session for session in cached if session not in live)
        lacking = [stage for stage in range(job.roles.last_caching + 1) if not self._is_whole(stage, live)]
        if not lacking:
            return self._send_probes()
        segments = batcher.segments_for_rebuild()
        if not job.retain:
            segments = ()
            batcher.compute_again()
        batcher.caches_lost()
        if not segments:
            return self._send_probes()
        job.phase = ServingPhase.REBUILDING
        positions = sum(segment.length for segment in segments)
        commands: list[ServingCommand] = [interface.ReportRebuilding(tuple(lacking), len(segments), positions)]
        for first, last in _runs(lacking):
            tokens = () if first else tuple(token for one in segments for token in batcher.tokens_of(one))
            request = interface.SendRebuild(batcher.take_number(), first - 1, last, segments, tokens)
            self.rebuilds[request.number] = (request, {one.session: one.start + one.length for one in segments})
            commands.append(request)
        # Sent behind the rebuilds without waiting for them: a probe has pages of its own.
        return [*commands, *self._new_probes()]

    def _is_whole(self, stage: int, live: Mapping[int, int]) -> bool:
        """Return whether the stage has all that passes need, and retains what it should."""
        if stage in self.job.unsound:
            return False
        cached = self.loaded[stage]
        return stage not in self.job.roles.caching or all(cached.get(one, 0) >= live[one] for one in live)

    def on_rebuilt(self, event: interface.CacheRebuilt) -> list[ServingCommand]:
        if event.number not in self.rebuilds:
            return []
        _, missing = self.rebuilds[event.number]
        if event.session in missing and event.end >= missing[event.session]:
            del missing[event.session]
        if missing:
            return []
        del self.rebuilds[event.number]
        return [] if self.rebuilds else self._await_probes()

    def on_rebuild_failed(self, event: interface.PassFailure) -> list[ServingCommand]:
        """A stage does not retain what a rebuild needs, or can't compute it. Read the sessions again from their tokens,
        which always works."""
        request, _ = self.rebuilds[event.number]
        stage = request.through
        self.job.batcher.compute_again()
        reason = f"caches of stage {stage} could not be rebuilt ({event.reason}): sessions are read again"
        return [ReportFault("stage", self.job.roles.places[stage], (stage,), reason), *self.begin(reason)]

    # ------------------------------------------------------------------------------------------------------ probing

    def _send_probes(self) -> list[ServingCommand]:
        return [*self._new_probes(), *self._await_probes()]

    def _await_probes(self) -> list[ServingCommand]:
        if not self.probes:
            return self._resume()
        self.job.phase = ServingPhase.PROBING
        return []

    def _new_probes(self) -> list[ServingCommand]:
        """Start probes. None is needed after a round without changes, because its links and stages have been probed."""
        job = self.job
        if not (job.unsound or job.must_probe):
            return []
        commands: list[ServingCommand] = []
        segment = Segment(PROBE_SESSION, 0, len(job.probe), 0, job.batcher.pages.table(PROBE_SESSION))
        for _ in range(1 if job.ready else 2):
            number = job.batcher.take_number()
            self.probes[number] = forget = job.batcher.forgotten
            commands.append(interface.SendProbePass(number, (segment,), job.probe, forget))
        return commands

    def on_probed(self, event: interface.ProbeReturned) -> list[ServingCommand]:
        if event.number not in self.probes:
            return []
        self.job.batcher.dropped(event.number, self.probes.pop(event.number))
        self._digests.append(event.digest)
        if not event.distance <= event.tolerance:
            reason = (
                f"a probe is {event.distance:.3g} off, at most {event.tolerance:.3g} is right"
                if isfinite(event.distance)
                else "the logits of a probe are not finite: a weight is not, or numbers exceed their format's range"
            )
            self.job.follow_ups.append(ProbeRefused(reason))
            return []
        if len(set(self._digests)) > 1:
            return self.job.fail("the same probe came back with other bits the second time")
        return [] if self.probes or self.rebuilds else self._resume()

    def _resume(self) -> list[ServingCommand]:
        job = self.job
        job.phase = ServingPhase.RUNNING
        job.ready = True
        job.must_probe = False
        job.sound = dict(job.roles.places)
        job.roster.warm -= set(job.sound.items())  # they are no standbys of these stages any more
        job.follow_ups.append(PassesResumed())
        return [interface.ReportState("ready", ""), interface.ResumePasses()]

    def work_of(self, number: int) -> PassWork | None:
        """Return the work of a pass or a probe, or the largest pass of a rebuild; None if it is not under way in this
        round."""
        job, times = self.job, self.job.patience.times
        if number in self.probes:
            return PassWork(len(job.probe), times.units(0, len(job.probe)))
        if number in self.rebuilds:
            request, _ = self.rebuilds[number]
            rows = min(job.batcher.limits.pass_tokens, sum(one.length for one in request.segments))
            end = max(one.start + one.length for one in request.segments)
            return PassWork(rows, times.units(max(0, end - rows), end))
        return job.batcher.work_of(number)


def _runs(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Return contiguous runs of ascending numbers, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for stage in stages:
        if runs and runs[-1][1] == stage - 1:
            runs[-1] = (runs[-1][0], stage)
        else:
            runs.append((stage, stage))
    return runs
