"""Locks held by the operating system, so that they are released if the process is killed.

A job directory has one driver at a time: a second one is refused. The names in a directory are changed by one process
at a time: a second one waits.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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

    def __exit__(self, *_: object) -> None:
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


LOCK_FILE: Final = ".lock"


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock. Not reentrant. Creates the directory. Raises `StorageError` if the lock file can't be written."""
    path = directory / LOCK_FILE
    with storage_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with storage_errors(path, "locked"):
            if sys.platform == "win32":
                _windows_lock(descriptor)
            else:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _windows_lock(descriptor: int) -> None:
    """Lock, retrying because Windows gives up after ten seconds with a deadlock error."""
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
            except OSError as problem:
                if problem.errno != errno.EDEADLK:
                    raise
            else:
                return
