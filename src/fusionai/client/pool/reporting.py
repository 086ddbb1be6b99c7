"""Reports a job's progress to the broker: a training job's at most once a second, a served job's every five seconds.

If the broker is away, the job continues; a training job notes its absence and its return once each.
`client.training.train` and `client.serving.serve` use this, `client.pool.session` sends the reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError, StorageError
from fusionai.primitives.ids import JobId
from fusionai.storage.atomic import JobLock
from fusionai.training import progress
from fusionai.wire import messages as wire

REPORT_EVERY_S: Final = 1.0
SERVING_REPORT_S: Final = 5.0
MAX_LINES: Final = 100
"""Most lines kept while the broker is away (chosen)."""
LAST_REPORT_S: Final = 5.0
"""Timeout for the last report, in seconds (chosen). Without it, the broker learns of the end from the members'
leases."""


@dataclass
class Reporting:
    """Reports one job. `run` lasts until cancelled; then call `close`. `on_progress` receives the broker's absence and
    return."""

    pool: PoolSession
    job: JobId
    on_progress: Callable[[progress.Progress], None]
    _away: bool = False
    _step: int = -1
    _lines: list[str] = field(default_factory=list[str])
    """Lines not sent yet."""
    _seen: asyncio.Event = field(default_factory=asyncio.Event)

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
            await self._report("running", self._lines[0] if self._lines else "")
            if self._lines:
                self._seen.set()
            await asyncio.sleep(REPORT_EVERY_S)

    async def close(self, state: Literal["done", "failed"], detail: str) -> None:
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self._report(state, detail)
        except TimeoutError:
            self.on_progress(progress.Warned("the broker could not be informed that the job is over"))

    async def _report(self, state: Literal["running", "done", "failed"], detail: str) -> None:
        report = wire.JobReport(job=self.job, state=state, step=self._step, detail=detail[:4000])
        try:
            await self.pool.report(report)
        except FusionError as error:
            if not self._away:
                self.on_progress(progress.BrokerAway(error.message))
            self._away = True
        else:
            if detail in self._lines:
                self._lines.remove(detail)
            if self._away:
                self.on_progress(progress.BrokerBack())
            self._away = False


async def report_state(pool: PoolSession, job: JobId, state: Literal["running", "done", "failed"], detail: str) -> bool:
    """Report the state of a job without steps. Returns False if the broker does not answer; it then learns of an end
    from the members' leases."""
    try:
        async with asyncio.timeout(LAST_REPORT_S):
            await pool.report(wire.JobReport(job=job, state=state, step=0, detail=detail))
    except RefusedError:
        pass  # the broker does not know the job, or knows that it is over
    except (FusionError, TimeoutError):
        return False
    return True


async def report_tokens(pool: PoolSession, job: JobId, status: Callable[[], tuple[str, int]]) -> None:
    """Report a served job every `SERVING_REPORT_S` seconds if its `status`, its state and the number of emitted tokens,
    has changed. While the broker is away, the next interval tries again."""
    reported = None
    while True:
        current = status()
        if current != reported:
            with suppress(FusionError):
                await pool.report(wire.JobReport(job=job, state="running", step=current[1], detail=""))
                reported = current
        await asyncio.sleep(SERVING_REPORT_S)


DIRECTORY: Final = "serving"


class ServedNote:
    """A locked file that says that this process serves `job`. Raises `StorageError`."""

    def __init__(self, home: Path, job: JobId) -> None:
        self._path = home / DIRECTORY / job
        self._lock = JobLock(self._path)

    def close(self, *, reported: bool) -> None:
        """Release the lock. `reported`: the broker knows of the job's end, so the file is removed; otherwise the next
        start reports the end."""
        self._lock.release()
        if reported:
            with suppress(OSError):  # if the file stays, the end is reported once more
                self._path.unlink(missing_ok=True)


def leftovers(home: Path) -> tuple[JobId, ...]:
    """Return the jobs that were started here and whose process is gone."""
    gone: list[JobId] = []
    for path in sorted((home / DIRECTORY).glob("*")):
        with suppress(StorageError):  # locked: a process serves it
            JobLock(path).release()
            gone.append(JobId(path.name))
    return tuple(gone)


async def end_leftovers(pool: PoolSession, home: Path) -> tuple[JobId, ...]:
    """Report the leftover jobs as ended, which frees their peers, and return them. A job whose report fails is kept for
    the next start."""
    ended: list[JobId] = []
    for job in leftovers(home):
        try:
            await pool.report(wire.JobReport(job=job, state="failed", step=0, detail="its server was killed"))
        except RefusedError:
            pass  # the broker already counts it as ended
        except FusionError:
            continue
        ended.append(job)
        with suppress(OSError):
            (home / DIRECTORY / job).unlink(missing_ok=True)
    return tuple(ended)
