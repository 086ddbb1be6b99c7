"""Ends jobs of this machine whose `fusion serve` was killed. Otherwise their peers would wait for it for 15 minutes.

A served job has a file in the home that its process locks as long as it runs. If a file is not locked, its job has no
process and will not return, so the next start reports it to the broker as ended before it looks for peers. Only the
locks decide, so a second running server is not affected.

`client.serving.serve` uses this; `storage.lock` holds the locks.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError, StorageError
from fusionai.primitives.ids import JobId
from fusionai.storage.lock import JobLock
from fusionai.wire import messages as wire

DIRECTORY: Final = "serving"


class ServedNote:
    """A locked file that says that this process serves `job`. Raises `StorageError`."""

    def __init__(self, home: Path, job: JobId) -> None:
        self._path = home / DIRECTORY / job
        self._lock = JobLock(self._path)

    def close(self, *, told: bool) -> None:
        """Release the lock. `told`: the broker knows of the job's end, so the file is removed; otherwise the next start
        reports the end."""
        self._lock.release()
        if told:
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
