"""One process at a time changes the names in a directory. Decides nothing; waits, for the holder is quick.

The operating system holds the lock, so that a killed process lets go. Neighbours: `weight_store` takes it around
renaming and removing; `lock` is the one that refuses instead of waiting.
"""

from __future__ import annotations

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
    """Not reentrant. Raises `StorageError` where the directory can't be written."""
    path = directory / LOCK_FILE
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with storage_errors(path, "locked"):
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
            else:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
