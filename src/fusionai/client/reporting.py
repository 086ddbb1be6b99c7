"""How a job stands, told to the broker. Decides how often: at most once a second.

A broker that is away does not disturb the job; it is said once, and once when it is back. Neighbours: `client.train`
feeds it, `client.pool_session` asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from fusionai.client.pool_session import PoolSession
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId
from fusionai.training import progress
from fusionai.wire import messages as wire

REPORT_EVERY_S: Final = 1.0
MAX_LINES: Final = 100
"""Kept for a broker that is away."""
LAST_REPORT_S: Final = 5.0
"""The job is over: a broker that does not answer learns it from the members' leases."""


class Reporting:
    """`run` until cancelled, then `close`. `tell` hears when the broker goes and comes."""

    def __init__(self, pool: PoolSession, job: JobId, tell: Callable[[progress.Progress], None]) -> None:
        self._pool = pool
        self._job = job
        self._on_progress = tell
        self._away = False
        self._step = -1
        self._lines: list[str] = []
        """Not told yet."""
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
        """A line of the job's story, for those who ask the broker."""
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
            self._on_progress(progress.Warned("the broker did not hear that the job is over"))

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
