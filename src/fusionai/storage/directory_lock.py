"""A lock for changing the names in a directory, one process at a time. Waits while another process holds it.

The operating system holds the lock, so that it is released if the process is killed. `weight_store` takes it for
renaming and removing, `corpus.source` while it tokenises. `lock` is the variant that fails instead of waiting.
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
