"""Adds up what a job's members have done, and reports it to the broker for the pool's ledger.

Each report has the sums since the run began, so that one that is repeated, or lost, changes nothing.
`coordination.broker.accounting` decides which count. Nothing counts of a member whose results were wrong.

A member's work in training is that of the committed steps in which it ran a stage, as the job's journal
(`storage.commits`) has them. Steps that are disputed between it and another member don't count for either.

For a served model, tokens count: those that the engine emitted, and those of prompts without the ones found in caches.
They count for the members that held the stages at the last look; a look follows each change of the plan, and each
report of the job's state. No disputed text counts for those that contradict each other."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from fusionai.client.pool.replanning import TrainingReplanner
from fusionai.client.pool.reporting import LAST_REPORT_S
from fusionai.client.pool.session import PoolSession
from fusionai.ir.cost import BlockCost
from fusionai.primitives.errors import FusionError, RefusedError
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import Plan
from fusionai.serving import job as progress
from fusionai.serving.interface import EngineStatus
from fusionai.storage.commits import CommitJournal, DisputedSteps, JournalledWork, StagePlace, StepPlaces
from fusionai.wire.messages import WorkReport, WorkShare

log = logging.getLogger(__name__)

WORK_REPORT_S: Final = 300.0
"""Pause between two reports, in seconds (chosen): each is a row in the broker's journal."""
_STARTS: Final = 2**32
"""Reports per start of the owner's process that have numbers of their own."""


@dataclass(frozen=True, slots=True)
class CommittedWork:
    """Sums of a run since it began, and the shares of its members."""

    steps: int
    tokens: int
    shares: tuple[WorkShare, ...]


@dataclass
class WorkReports:
    """Reports one job. `run` lasts until cancelled; then call `close`. `name`: that of the run, which ends with the
    job's directory. `incarnation`: number of the start of the owner's process in it. `work` returns the present sums.
    `warn` gets a sentence if the broker refuses a report."""

    pool: PoolSession
    job: JobId
    name: str
    incarnation: int
    work: Callable[[], CommittedWork]
    warn: Callable[[str], None]
    _count: int = 0
    _reported: CommittedWork | None = None
    _refused: bool = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WORK_REPORT_S)
            await self._report()

    async def close(self) -> None:
        """Send the last sums. Without an answer, the next start of the job reports them."""
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._report()
        except TimeoutError:
            log.info("the broker has not answered the last report of work")

    async def _report(self) -> None:
        work = self.work()
        if work == self._reported:
            return
        self._count += 1
        self._reported = None  # without an answer it is not known what the broker has
        report = WorkReport(
            job=self.job,
            run=self.name,
            sequence=self.incarnation * _STARTS + self._count,
            steps=work.steps,
            tokens=work.tokens,
            shares=work.shares,
        )
        try:
            await self.pool.report_work(report)
        except RefusedError as error:
            if not self._refused:
                self.warn(f"the pool's ledger does not count this job's work: {error.hint or error.message}")
            self._refused = True
        except FusionError as error:
            log.info("work could not be reported, the next report includes it: %s", error)
        else:
            self._reported = work


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step of a job takes. `blocks`: their costs per microbatch. `replicas`: copies of the pipeline, among which
    the microbatches are divided."""

    owner: str
    blocks: tuple[BlockCost, ...]
    microbatches: int
    tokens_per_microbatch: int
    replicas: int = 1

    def of_places(self, places: Collection[StagePlace]) -> dict[str, tuple[int, float]]:
        """Return the tokens and operations of one step by member. Operations are those of the model, once: what a
        machine computes again to save memory does not count."""
        crossing: dict[str, set[int]] = defaultdict(set)
        flops: dict[str, float] = defaultdict(float)
        for place in places:
            if place.peer == self.owner:
                continue
            microbatches = range(place.replica, self.microbatches, self.replicas)
            blocks = self.blocks[place.first : place.below]
            crossing[place.peer].update(microbatches)
            flops[place.peer] += len(microbatches) * sum(one.forward_flops + one.backward_flops for one in blocks)
        return {peer: (len(crossing[peer]) * self.tokens_per_microbatch, flops[peer]) for peer in flops}


def committed_work(
    step: StepWork, committed: int, records: Collection[JournalledWork], faulty: Collection[str]
) -> CommittedWork:
    """Return the work of the first `committed` steps. Steps before the first record of their places, from an earlier
    version of this program, have no shares."""
    places = [one for one in records if isinstance(one, StepPlaces)]
    disputes = [one for one in records if isinstance(one, DisputedSteps)]
    steps: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    flops: dict[str, float] = defaultdict(float)
    for number, one in enumerate(places):
        below = min(committed, places[number + 1].step if number + 1 < len(places) else committed)
        for peer, (step_tokens, step_flops) in step.of_places(one.places).items():
            disputed = {
                at for dispute in disputes if peer in dispute.peers for at in range(dispute.first, dispute.below)
            }
            count = max(0, below - one.step) - sum(one.step <= at < below for at in disputed)
            if count > 0 and peer not in faulty:
                steps[peer] += count
                tokens[peer] += count * step_tokens
                flops[peer] += count * step_flops
    return CommittedWork(
        committed,
        committed * step.microbatches * step.tokens_per_microbatch,
        tuple(WorkShare(peer, steps[peer], tokens[peer], flops[peer]) for peer in sorted(steps)),
    )


def work_reports(
    replanner: TrainingReplanner, journal: CommitJournal, plan: Plan, owner: str, warn: Callable[[str], None]
) -> WorkReports:
    """Return the reports of a job that begins with `plan`."""
    problem = replanner.problem
    step = StepWork(owner, problem.blocks, problem.microbatches, problem.microbatch_tokens, plan.replicas)

    def done() -> CommittedWork:
        return committed_work(step, journal.committed, journal.work, replanner.faulty_peers)

    return WorkReports(replanner.pool, replanner.job, journal.run, journal.incarnation, done, warn)


class CountingEngine(Protocol):
    """The part of an engine that this module reads."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def plan(self) -> Plan: ...


@dataclass
class TokenWork:
    """Tokens of one pipeline. `blocks`: costs per position. Operations of attention to earlier positions are left out,
    as they are in plans."""

    engine: CountingEngine
    owner: str
    blocks: tuple[BlockCost, ...]
    faulty: set[str]
    _counted: int = 0
    _places: dict[str, float] = field(default_factory=dict[str, float])
    """Members with stages at the last look, with their operations per token."""
    _tokens: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    _flops: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    _disputed: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Tokens of disputed texts."""

    def look(self) -> EngineStatus:
        """Give the tokens since the last look to the members that held the stages then."""
        status = self.engine.status
        total = status.emitted_tokens + status.prompt_tokens - status.prefix_hit_tokens
        places: dict[str, float] = defaultdict(float)
        for stage in self.engine.plan.stages:
            if stage.peer != self.owner:
                first, below = stage.blocks
                places[stage.peer] += sum(block.forward_flops for block in self.blocks[first:below])
        for peer, flops in (self._places or places).items():
            self._tokens[peer] += total - self._counted
            self._flops[peer] += (total - self._counted) * flops
        self._counted, self._places = total, dict(places)
        return status

    def state(self) -> tuple[str, int]:
        """Look, and return the state of the engine and the number of emitted tokens."""
        status = self.look()
        return status.state, status.emitted_tokens

    def see(self, event: object) -> None:
        match event:
            case progress.TextRechecked(outcome="disputed", peer=peer, partners=partners, text_tokens=tokens):
                for one in (peer, *partners):
                    self._disputed[one] += tokens
            case progress.ServingPlanChanged() | progress.Fault():
                self.look()
            case _:
                pass

    def work(self) -> CommittedWork:
        self.look()
        shares: list[WorkShare] = []
        for peer, tokens in sorted(self._tokens.items()):
            undisputed = max(0, tokens - self._disputed[peer])
            if undisputed and peer not in self.faulty:
                shares.append(WorkShare(peer, 0, undisputed, self._flops[peer] * undisputed / tokens))
        return CommittedWork(0, self._counted, tuple(shares))
