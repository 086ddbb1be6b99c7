"""Temporary directories for the homes of a pool of local processes.

A directory is removed at its end; one left by a killed process is removed at the next start. `client.serving.serve`
starts such pools; `storage.lock` shows which directories are still in use."""

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
    """Yield a new directory in `parent` and remove it with its content afterwards. Blocking."""
    clear_left(parent)
    directory = parent / secrets.token_hex(4)
    # Locked before it is created, because a directory without a lock is removed as left over.
    with JobLock(_lock_of(directory)):
        try:
            directory.mkdir()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            _lock_of(directory).unlink(missing_ok=True)


def clear_left(parent: Path) -> None:
    """Remove the directories of processes that are gone. Files that can't be removed stay."""
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
