"""Jobs of this machine whose `fusion serve` was killed: without a word their peers wait for it, a quarter of an hour.

A served job has a file in the home, locked by its process for as long as that lives. Where nobody holds the lock of one
any more, nobody drives that job, and it never comes back: the next start ends it for the pool before it looks for
peers. Decides that from the locks alone, so a second server beside is left in peace.

Neighbours: `client.serve` uses it, `storage.lock` asks the system who lives.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from fusionai.client.pool_session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError, StorageError
from fusionai.primitives.ids import JobId
from fusionai.storage.lock import JobLock
from fusionai.wire import messages as wire

DIRECTORY: Final = "serving"


class ServedNote:
    """That this process serves `job`, from construction on. Raises `StorageError`."""

    def __init__(self, home: Path, job: JobId) -> None:
        self._path = home / DIRECTORY / job
        self._lock = JobLock(self._path)

    def close(self, *, told: bool) -> None:
        """`told`: the broker knows of the job's end. Otherwise the next start tells it."""
        self._lock.release()
        if told:
            with suppress(OSError):  # it is told once more
                self._path.unlink(missing_ok=True)


def leftovers(home: Path) -> tuple[JobId, ...]:
    """Jobs that were begun here and whose process is gone."""
    gone: list[JobId] = []
    for path in sorted((home / DIRECTORY).glob("*")):
        with suppress(StorageError):  # somebody serves it
            JobLock(path).release()
            gone.append(JobId(path.name))
    return tuple(gone)


async def end_leftovers(pool: PoolSession, home: Path) -> tuple[JobId, ...]:
    """Their peers are free for others; gives the jobs. One that the broker can't be told of now is kept."""
    ended: list[JobId] = []
    for job in leftovers(home):
        try:
            await pool.report(wire.JobReport(job=job, state="failed", step=0, detail="its server was killed"))
        except RefusedError:
            pass  # it is over for the pool already
        except FusionError:
            continue
        ended.append(job)
        with suppress(OSError):
            (home / DIRECTORY / job).unlink(missing_ok=True)
    return tuple(ended)
