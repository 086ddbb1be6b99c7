"""One driver per job directory. The operating system holds the lock, so that it is released if the process is killed.

`commits` takes the lock when it opens the journal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors

_LOCKED_BYTE: Final = 2**30
"""Offset of the byte locked on Windows, which makes locked bytes unreadable. It lies far behind the process id."""


class JobLock:
    """Lock held from construction to `release` or the end of the process. The file stays on the disk."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises `StorageError` naming the process that holds it."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._descriptor)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0) if hasattr(os, "pread") else os.read(self._descriptor, 32)
            os.close(self._descriptor)
            raise StorageError(
                f"{path.parent} is in use by process {holder.decode(errors='replace').strip() or 'unknown'}.",
                hint="One job has one driver: wait for it, stop it, or give the other job its own directory.",
            ) from None
        with storage_errors(path):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> JobLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(descriptor: int) -> None:
    """Lock without waiting. Raises `OSError` if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
