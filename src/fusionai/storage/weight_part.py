"""A tensor that is being fetched: which of its pieces are here. Decides that a piece counts once its bytes are written.

Neighbours: `weight_store` opens and finishes it; `execution.weights` puts pieces that arrive.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import storage_errors, sync_directory
from fusionai.storage.mapped_file import Stretch
from fusionai.storage.weight_pieces import good_pieces, piece_bytes, spec_bytes
from fusionai.wire.serving import PIECE_BYTES, WeightSpec

PART_SUFFIX: Final = ".part"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class WeightPart:
    """Made by `WeightStore.begin`. Methods may be called from any thread."""

    def __init__(self, spec: WeightSpec, path: Path) -> None:
        """Opens or makes the file and hashes what lies in it. Raises `StorageError`."""
        self.spec = spec
        self.path = path
        self.finishing = threading.Lock()
        self._nbytes = spec_bytes(spec)
        self._mutex = threading.Lock()
        with _fetch_errors(path, self._nbytes):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            there = os.fstat(self._descriptor).st_size
            if there != self._nbytes:
                os.ftruncate(self._descriptor, self._nbytes)
        self._good = bytearray(len(spec.pieces))
        if there:
            for piece in range(len(spec.pieces)):
                data = Stretch(path, 0, self._nbytes).read(piece * PIECE_BYTES, piece_bytes(self._nbytes, piece))
                self._good[piece] = good_pieces(spec, piece, memoryview(data)) == 1

    @property
    def missing(self) -> tuple[int, ...]:
        with self._mutex:
            return tuple(piece for piece, good in enumerate(self._good) if not good)

    def run(self, first: int, count: int) -> int:
        """How many pieces from `first` on are here in a row, at most `count`."""
        with self._mutex:
            end = self._good.find(0, first, first + count)
            return (min(first + count, len(self._good)) if end < 0 else end) - first

    def put(self, first: int, data: memoryview) -> int:
        """Write the pieces at the start of `data` that are right, from `first` on; how many were. What comes after the
        first wrong one is left. Raises `StorageError`, also when the disk is full."""
        good = good_pieces(self.spec, first, data)
        with _fetch_errors(self.path, self._nbytes):
            offset = first * PIECE_BYTES
            rest = data[: min(good * PIECE_BYTES, self._nbytes - offset)]
            with self._mutex:
                if self._descriptor < 0:
                    return good  # whole already, or the store is closed
                while rest:
                    os.lseek(self._descriptor, offset, os.SEEK_SET)
                    written = os.write(self._descriptor, rest)
                    offset += written
                    rest = rest[written:]
                self._good[first : first + good] = b"\1" * good
        return good

    def check(self) -> None:
        """That the whole is what its digest says: the hashes of the pieces came from somewhere else. Makes it durable.

        Raises `StorageError`."""
        whole = hashlib.sha256()
        stretch = Stretch(self.path, 0, self._nbytes)
        for piece in range(len(self.spec.pieces)):
            whole.update(stretch.read(piece * PIECE_BYTES, piece_bytes(self._nbytes, piece)))
        if whole.digest() != self.spec.digest:
            raise StorageError(
                f"{self.spec.key}: all its pieces are as announced and together they are not the tensor announced.",
                hint="The job owner's list of weights is wrong; start serving again there.",
            )
        with self._mutex, _fetch_errors(self.path, self._nbytes):
            os.fsync(self._descriptor)

    def rename(self, path: Path) -> None:
        """Give it the name of a whole tensor. Raises `StorageError` when somebody removed the file meanwhile."""
        with self._mutex, storage_errors(self.path, "renamed"):
            if os.fstat(self._descriptor).st_ino != self.path.stat().st_ino:
                raise StorageError(f"{self.path} was replaced while it was fetched.", hint="Try again.")
            self.path.replace(path)
            sync_directory(path.parent)

    def close(self) -> None:
        """Harmless twice."""
        with self._mutex:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


@contextmanager
def _fetch_errors(path: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in _FULL:
            raise StorageError(
                f"no space left on the disk of {path}, which takes {format_bytes(nbytes)}.",
                hint="Free some space, or let this peer serve a smaller part; what was fetched so far is kept.",
            ) from problem
        raise StorageError(f"{path} can't be written: {problem.strerror or problem}.") from problem
