"""Writes files that are complete or absent, and durable when the call returns. Decides how a full disk is reported.

Write under another name, fsync, rename, fsync the directory. All modules that keep state on the disk use this.
"""

from __future__ import annotations

import errno
import os
import shutil
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
