"""One process at a time changes the names in a directory. Decides nothing; waits for as long as another holds it.

The operating system holds the lock, so that a killed process lets go. Neighbours: `weight_store` takes it around
renaming and removing, `corpus.source` while tokens are made; `lock` is the one that refuses instead of waiting.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fusionai.storage.atomic import storage_errors

LOCK_FILE: Final = ".lock"


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Not reentrant; the directory is made. Raises `StorageError` where it can't be written."""
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
    """Windows itself gives up after ten seconds, as if there were a deadlock."""
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
