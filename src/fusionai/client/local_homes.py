"""Where a pool of this machine's own keeps its homes. Decides that nothing stays behind: not afterwards, and what a
process left that was killed outright not beyond the next start.

Neighbours: `client.serve` brings up such pools, `storage.lock` tells who still lives.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusionai.primitives.errors import StorageError
from fusionai.storage.lock import JobLock


@contextmanager
def local_home(parent: Path) -> Iterator[Path]:
    """The name of a new directory in `parent`, gone afterwards with all that is in it. Blocking."""
    clear_left(parent)
    directory = parent / secrets.token_hex(4)
    # Locked before it is there: a directory without a lock on it is nobody's.
    with JobLock(_lock_of(directory)):
        try:
            directory.mkdir()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            _lock_of(directory).unlink(missing_ok=True)


def clear_left(parent: Path) -> None:
    """Remove the directories of processes that are gone; what can't be removed stays."""
    for directory in parent.glob("*/"):
        try:
            lock = JobLock(_lock_of(directory))
        except StorageError:
            continue
        with lock:
            shutil.rmtree(directory, ignore_errors=True)
            _lock_of(directory).unlink(missing_ok=True)


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")
