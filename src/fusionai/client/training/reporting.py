"""Reports a job's progress to the broker, at most once a second.

If the broker is away, the job continues; its absence and its return are each reported once. `client.training.train`
feeds this, `client.pool.session` sends the reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId
from fusionai.training import progress
from fusionai.wire import messages as wire

REPORT_EVERY_S: Final = 1.0
MAX_LINES: Final = 100
"""Most lines kept while the broker is away (chosen)."""
LAST_REPORT_S: Final = 5.0
"""Timeout for the last report, in seconds (chosen). Without it, the broker learns of the end from the members'
leases."""


class Reporting:
    """Reports one job. `run` lasts until cancelled; then call `close`. `tell` receives the broker's absence and
    return."""

    def __init__(self, pool: PoolSession, job: JobId, tell: Callable[[progress.Progress], None]) -> None:
        self._pool = pool
        self._job = job
        self._on_progress = tell
        self._away = False
        self._step = -1
        self._lines: list[str] = []
        """Lines not sent yet."""
        self._seen = asyncio.Event()

    def see(self, event: progress.Progress) -> None:
        match event:
            case progress.StepDone(record=record):
                self._step = record.step
            case progress.JobReady():
                pass
            case _:
                return
        self._seen.set()

    def note(self, line: str) -> None:
        """Add a line to the job's history at the broker."""
        self._lines.append(line)
        del self._lines[:-MAX_LINES]
        self._seen.set()

    async def run(self) -> None:
        while True:
            await self._seen.wait()
            self._seen.clear()
            await self._tell("running", self._lines[0] if self._lines else "")
            if self._lines:
                self._seen.set()
            await asyncio.sleep(REPORT_EVERY_S)

    async def close(self, state: Literal["done", "failed"], detail: str) -> None:
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._tell(state, detail)
        except TimeoutError:
            self._on_progress(progress.Warned("the broker could not be informed that the job is over"))

    async def _tell(self, state: Literal["running", "done", "failed"], detail: str) -> None:
        report = wire.JobReport(job=self._job, state=state, step=self._step, detail=detail[:4000])
        try:
            await self._pool.report(report)
        except FusionError as error:
            if not self._away:
                self._on_progress(progress.BrokerAway(error.message))
            self._away = True
        else:
            if detail in self._lines:
                self._lines.remove(detail)
            if self._away:
                self._on_progress(progress.BrokerBack())
            self._away = False
