"""Reports to the broker what a job's members have done, for the pool's ledger.

Each report has the sums since the run began, so that one that is repeated, or lost, changes nothing.
`client.training.lent_work` and `client.serving.lent_work` know the sums, `coordination.broker.accounting` decides
which count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fusionai.client.pool.reporting import LAST_REPORT_S
from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError
from fusionai.primitives.ids import JobId
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
