"""One unfinished tensor of the weight store: its file with holes, its pieces and their hashes.

Neighbours: `storage.weight_store` creates parts and names complete tensors; `wire.job.WeightSpec` describes a tensor.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import FULL, storage_errors, sync_directory
from fusionai.wire.job import PIECE_BYTES, WeightSpec

PART_SUFFIX: Final = ".part"


class WeightPart:
    """One unfinished tensor, created by `WeightStore`. Methods may be called from any thread."""

    def __init__(self, spec: WeightSpec, path: Path) -> None:
        """Does not touch the file. Raises `StorageError` for an inconsistent spec."""
        self.spec = spec
        self.path = path
        self.finishing = threading.Lock()
        self._nbytes = spec_bytes(spec)
        self._opening = threading.Lock()
        self._mutex = threading.Lock()
        self._opened = False
        self._descriptor = -1
        self._good = bytearray(len(spec.pieces))

    def open(self, make_room: Callable[[int], None]) -> None:
        """Open or create the file and hash its pieces. Later calls do nothing. Raises `StorageError` and the errors of
        `make_room`."""
        with self._opening:
            if self._opened:
                return
            if not self.path.exists():
                make_room(self._nbytes)
            with _fetch_errors(self.path, self._nbytes):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
                there = os.fstat(descriptor).st_size
                if there != self._nbytes:
                    os.ftruncate(descriptor, self._nbytes)
            self._descriptor = descriptor
            if there:
                for piece in range(len(self.spec.pieces)):
                    self._good[piece] = good_pieces(self.spec, piece, memoryview(self._read(piece)))
            self._opened = True

    @property
    def closed(self) -> bool:
        """Whether the file has been opened and closed again."""
        return self._opened and self._descriptor < 0

    @property
    def missing(self) -> tuple[int, ...]:
        with self._mutex:
            return tuple(piece for piece, good in enumerate(self._good) if not good)

    def run(self, first: int, count: int) -> int:
        """Return how many consecutive pieces from `first` on are here, at most `count`."""
        with self._mutex:
            end = self._good.find(0, first, first + count)
            return (min(first + count, len(self._good)) if end < 0 else end) - first

    def put(self, first: int, data: memoryview) -> int:
        """Write the valid pieces at the start of `data`, which begins at piece `first`, and return how many were valid.
        Data after the first invalid piece is ignored. Raises `StorageError`, also if the disk is full."""
        good = good_pieces(self.spec, first, data)
        with _fetch_errors(self.path, self._nbytes):
            offset = first * PIECE_BYTES
            rest = data[: min(good * PIECE_BYTES, self._nbytes - offset)]
            with self._mutex:
                if self._descriptor < 0:
                    return good  # the tensor is complete or the store is closed
                while rest:
                    os.lseek(self._descriptor, offset, os.SEEK_SET)
                    written = os.write(self._descriptor, rest)
                    offset += written
                    rest = rest[written:]
                self._good[first : first + good] = b"\1" * good
        return good

    def check(self) -> None:
        """Verify the whole tensor against its digest, because the pieces' hashes are claims too, and make it durable.
        Raises `StorageError` and removes the part if it does not match."""
        whole = hashlib.sha256()
        for piece in range(len(self.spec.pieces)):
            whole.update(self._read(piece))
        if whole.digest() != self.spec.digest:
            self.remove()
            raise StorageError(
                f"{self.spec.key}: all pieces match their hashes, but the whole tensor does not match its digest.",
                hint="The job owner's list of weights is wrong; start serving again there.",
            )
        with self._mutex, _fetch_errors(self.path, self._nbytes):
            os.fsync(self._descriptor)

    def _read(self, piece: int) -> bytes:
        """Read a piece by descriptor, because another process may just have renamed the file."""
        nbytes = piece_bytes(self._nbytes, piece)
        with self._mutex, storage_errors(self.path, "read"):
            os.lseek(self._descriptor, piece * PIECE_BYTES, os.SEEK_SET)
            parts: list[bytes] = []
            while nbytes > 0 and (part := os.read(self._descriptor, nbytes)):
                parts.append(part)
                nbytes -= len(part)
        return b"".join(parts)

    def rename(self, path: Path) -> None:
        """Give the file the name of the complete tensor. Raises `StorageError` if the file was removed meanwhile."""
        with self._mutex, storage_errors(self.path, "renamed"):
            if not self._is_named():
                raise StorageError(f"{self.path} was removed while it was fetched.", hint="Try again.")
            self.path.replace(path)
            sync_directory(path.parent)

    def remove(self) -> None:
        """Remove the file, unless its name now belongs to another file. The next start removes what can't be removed
        now."""
        with self._mutex, suppress(OSError):
            if self._is_named():
                self.path.unlink()

    def _is_named(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._mutex:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def _fetch_errors(path: Path, nbytes: int) -> AbstractContextManager[None]:
    return storage_errors(
        path,
        full=FULL | {errno.EFBIG},
        needs=f", which takes {format_bytes(nbytes)}",
        hint="Free some space, or let this peer serve a smaller part; what was fetched so far is kept.",
    )


def spec_bytes(spec: WeightSpec) -> int:
    """Return the tensor's size in bytes. Raises `StorageError` for an inconsistent spec."""
    try:
        nbytes = tensor_bytes(spec.dtype, spec.shape)
    except ValueError as problem:
        raise StorageError(f"the description of {spec.key} is invalid: {problem}.") from None
    if len(spec.pieces) != pieces_of(nbytes):
        raise StorageError(
            f"the description of {spec.key} has {len(spec.pieces)} hashes, its {nbytes} bytes take {pieces_of(nbytes)}."
        )
    return nbytes


def pieces_of(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


def piece_bytes(nbytes: int, piece: int) -> int:
    """Return the size in bytes of this piece of a tensor of `nbytes`."""
    return min(PIECE_BYTES, nbytes - piece * PIECE_BYTES)


def make_spec(key: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes | memoryview]) -> WeightSpec:
    """Hash a tensor given in pieces, each of `PIECE_BYTES` except the last."""
    whole = hashlib.sha256()
    hashes: list[bytes] = []
    for piece in pieces:
        whole.update(piece)
        hashes.append(hashlib.sha256(piece).digest())
    return WeightSpec(key=key, dtype=dtype, shape=shape, digest=whole.digest(), pieces=tuple(hashes))


def good_pieces(spec: WeightSpec, first: int, data: memoryview) -> int:
    """Return how many complete pieces at the start of `data` match the tensor's pieces from `first` on."""
    nbytes = spec_bytes(spec)
    offset = 0
    for piece in range(first, len(spec.pieces)):
        end = offset + piece_bytes(nbytes, piece)
        if end > len(data) or hashlib.sha256(data[offset:end]).digest() != spec.pieces[piece]:
            return piece - first
        offset = end
    return len(spec.pieces) - first
