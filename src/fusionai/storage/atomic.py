"""Writes files that are complete or absent, and durable when the call returns; locks files for one process at a time.

Write under another name, fsync, rename, fsync the directory. This module also decides how a full disk is reported. All
modules that keep state on the disk use it. Locks are held by the operating system, so that they are released if the
process is killed: a second driver of a job directory is refused; a second process that changes the names in a directory
waits.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from fusionai.primitives.errors import StorageError

PARTIAL_SUFFIX: Final = ".partial"
"""Suffix of files and directories being written. They do not count yet; the next start removes them."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESUMES: Final = "Free some space and run the command again; a job continues from its last checkpoint."


@contextmanager
def storage_errors(
    path: Path, doing: str = "written", *, full: Collection[int] = FULL, needs: str = "", hint: str = _RESUMES
) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` that names the file. `full`: error numbers of a full disk, for which the
    message also has `needs` and `hint`."""
    try:
        yield
    except OSError as problem:
        if problem.errno in full:
            raise StorageError(f"no space left on the disk of {path}{needs}.", hint=hint) from problem
        raise StorageError(f"{path} can't be {doing}: {problem.strerror or problem}.") from problem


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content` and create its directory. Raises `StorageError` and keeps the old file on failure."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(partial, (content,), "wb")
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def write_synced(path: Path, parts: Iterable[bytes | memoryview], mode: Literal["wb", "xb"] = "xb") -> None:
    """Write a file whose content is on the disk on return. Raises `OSError`."""
    with path.open(mode) as handle:
        for part in parts:
            handle.write(part)
        handle.flush()
        os.fsync(handle.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Windows has no such call; its file system journals renames."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(place: Path) -> Iterator[Path]:
    """Yield a directory to fill, which gets its name when the block ends; on failure it is removed. Raises
    `StorageError`."""
    partial = place.with_name(place.name + PARTIAL_SUFFIX)
    with storage_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with storage_errors(place):
            partial.replace(place)
            sync_directory(place.parent)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(partial)
        raise


_LOCKED_BYTE: Final = 2**30
"""Offset of the byte locked on Windows, which makes locked bytes unreadable. It lies far behind the process id."""


class InUse(StorageError):
    """Another process holds the lock. `holder`: its process id, as far as it is known."""

    def __init__(self, message: str, holder: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder


class JobLock:
    """Lock held from construction to `release` or the end of the process. The file stays on the disk."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises `InUse`, or `StorageError` if the file can't be written."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._descriptor)
        except OSError:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            written = os.read(self._descriptor, 32)
            holder = written.decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise InUse(
                f"{path.parent} is in use by process {holder}.",
                holder,
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
            _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock the file, or raise `OSError` if another process holds the lock and this one does not wait."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    while True:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as problem:  # Windows gives up waiting after ten seconds with a deadlock error
            if not wait or problem.errno != errno.EDEADLK:
                raise
        else:
            break
    os.lseek(descriptor, 0, os.SEEK_SET)
