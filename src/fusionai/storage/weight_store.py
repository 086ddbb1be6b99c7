"""Weights on this machine, one file per tensor, named by the hash of its bytes.

    <digest>         a complete tensor, verified before it got this name
    <digest>.part    a tensor that is being fetched, at its full size, with holes
    .lock            held while files are renamed or removed

Decides which tensors are complete, which are dropped when space is short (least recently used first, never those in
use), and how an interrupted download resumes: the pieces of a part are hashed again when it is opened. This reads the
few unfinished tensors once more, but needs no record of written pieces that could be wrong after a crash, and no fsync
per piece. Two processes may share the directory: both write only verified bytes, so they write the same, and names
change under the lock.

`execution.weights.fetching` fetches into the store, `execution.weights.server` serves from it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import FULL, directory_lock, storage_errors, sync_directory
from fusionai.storage.safetensors_file import ByteRange, ByteRanges
from fusionai.wire.job import PIECE_BYTES, WeightSpec

log = logging.getLogger(__name__)

ABANDONED_S: Final = 7 * 86_400.0
"""Seconds without a write after which the next start removes a part. A part whose tensor is complete is removed too."""
FRESH_S: Final = 600.0
"""Seconds since the last write during which a part may belong to another process and is not dropped."""


class WeightStore:
    """Store of weights. `limit_bytes` limits the size of all files together. Methods may be called from any thread.
    Keep what is in use: `with store.holding(digests)` around loading and the stage's lifetime."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int | None = None,
        *,
        beside: Callable[[bytes], ByteRange | ByteRanges | None] | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Create the directory. `beside`: finds tensors by digest that are read in place and not stored here. Raises
        `StorageError`."""
        self.directory = directory
        self._elsewhere = beside or (lambda _digest: None)
        self._limit_bytes = limit_bytes
        self._wall_s = wall_s
        self._mutex = threading.Lock()
        self._holding = threading.Lock()  # held only briefly, because an event loop takes it
        self._held: Counter[bytes] = Counter()
        self._parts: dict[bytes, WeightPart] = {}
        with storage_errors(directory, "made"):
            directory.mkdir(parents=True, exist_ok=True)
        with directory_lock(directory):
            self._remove_abandoned()

    # ------------------------------------------------------------------------------------------------------ reading

    def has(self, spec: WeightSpec) -> bool:
        """Return whether the complete tensor is available. A file of the wrong size is damaged and removed."""
        nbytes = spec_bytes(spec)
        path = self._path(spec.digest)
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            return self._elsewhere(spec.digest) is not None
        except OSError as problem:
            raise StorageError(f"{path} can't be read: {problem.strerror or problem}.") from problem
        if found == nbytes:
            return True
        log.warning("%s is damaged: %d bytes instead of %d; it is fetched again", path, found, nbytes)
        with suppress(OSError):
            path.unlink()
        return False

    def read(self, spec: WeightSpec) -> HostTensor:
        """Return the tensor, mapped from its file, and mark it as used. Raises `StorageError` if it is not
        available."""
        if not self.has(spec):
            raise StorageError(f"{spec.key} is not among the weights in {self.directory}.")
        path = self._path(spec.digest)
        elsewhere = None if path.exists() else self._elsewhere(spec.digest)
        if elsewhere is not None:
            return host_tensor(spec.dtype, spec.shape, elsewhere.mapped())
        with suppress(OSError):
            os.utime(path)
        return host_tensor(spec.dtype, spec.shape, ByteRange(path, 0, spec_bytes(spec)).mapped())

    def pieces(self, digest: bytes, first: int, count: int) -> bytes:
        """Return at most `count` pieces from index `first` on, for other peers. Returns fewer at the end of the tensor
        or where a part has a gap, and nothing if there are none. Raises `StorageError` if reading fails."""
        with self._mutex:
            part = self._parts.get(digest)
        whole = self._path(digest)
        if part is not None and not whole.exists():
            data = _read(part.path, first, part.run(first, count))
            if data is not None:
                return data
            # The part was renamed meanwhile, so the complete tensor is there now.
        data = _read(whole, first, count)
        if data is None and (elsewhere := self._elsewhere(digest)) is not None:
            start = min(first * PIECE_BYTES, elsewhere.nbytes)
            return elsewhere.read(start, min(max(0, count) * PIECE_BYTES, elsewhere.nbytes - start))
        return data or b""

    # ------------------------------------------------------------------------------------------------------ writing

    def missing(self, spec: WeightSpec) -> tuple[int, ...]:
        """Return the indices of missing pieces, ascending. Hashes the pieces that an interrupted download left."""
        if not self.begun(spec.digest):
            return () if self.has(spec) else tuple(range(len(spec.pieces)))
        part = self._part(spec)
        return () if part is None else part.missing

    def begun(self, digest: bytes) -> bool:
        """Return whether a part of the tensor is on the disk."""
        return self._part_path(digest).exists()

    def put(self, spec: WeightSpec, first: int, data: memoryview) -> int:
        """Store the verified pieces at the start of `data`, which begins at piece `first`. Return how many were valid.
        Raises `StorageError` if the store's limit or the disk is exceeded."""
        part = self._part(spec)
        return good_pieces(spec, first, data) if part is None else part.put(first, data)

    def finish(self, spec: WeightSpec) -> None:
        """Verify a tensor whose pieces are complete and give it its name. Idempotent. Raises `StorageError` if the
        digest does not match although the pieces' hashes do: the part is dropped."""
        part = self._part(spec)
        if part is None:
            return
        with part.finishing:
            if part.closed:
                return
            try:
                if not self.has(spec):
                    part.check()
                with directory_lock(self.directory):
                    if self.has(spec):  # another process finished first
                        part.remove()
                    else:
                        part.rename(self._path(spec.digest))
            finally:
                self._forget(part)

    def add(self, spec: WeightSpec, data: memoryview) -> None:
        """Store a complete tensor that is in memory."""
        if not self.has(spec):
            self.put(spec, 0, data)
            self.finish(spec)

    def _part(self, spec: WeightSpec) -> WeightPart | None:
        """The tensor's part, shared by all threads of this process that fetch it; None if the tensor is complete."""
        with self._mutex:
            part = self._parts.get(spec.digest)
            if part is None:
                if self.has(spec):
                    return None
                part = self._parts[spec.digest] = WeightPart(spec, self._part_path(spec.digest))
        try:
            part.open(self.make_room)
        except StorageError:
            self._forget(part)
            raise
        return part

    def _forget(self, part: WeightPart) -> None:
        with self._mutex:
            if self._parts.get(part.spec.digest) is part:
                del self._parts[part.spec.digest]
        part.close()

    def close(self) -> None:
        """Close all parts. They stay on the disk, and the next start resumes them."""
        with self._mutex:
            for part in self._parts.values():
                part.close()
            self._parts.clear()

    # ------------------------------------------------------------------------------------------------------- space

    @contextmanager
    def holding(self, digests: Collection[bytes]) -> Iterator[None]:
        """Mark these tensors as in use, so that they are not dropped."""
        with self._holding:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._holding:
                self._held.subtract(digests)
                self._held += Counter()  # removes entries at zero

    def make_room(self, nbytes: int) -> None:
        """Drop least recently used tensors until `nbytes` more fit the limit. Raises `StorageError` if they don't
        fit."""
        if self._limit_bytes is None:
            return
        with directory_lock(self.directory):
            files = sorted(self._files(), key=lambda file: file[1].st_mtime)
            used = sum(stat.st_size for _, stat in files)
            for path, stat in files:
                if used + nbytes <= self._limit_bytes:
                    break
                if self._droppable(path, stat):
                    with suppress(OSError):  # some systems can't remove a mapped file
                        path.unlink()
                        used -= stat.st_size
        if used + nbytes > self._limit_bytes:
            raise StorageError(
                f"no room for {format_bytes(nbytes)} more of weights in {self.directory}: "
                f"{format_bytes(used)} of {format_bytes(self._limit_bytes)} are in use.",
                hint="Raise this peer's limit for weights, or let it serve a smaller part of the model.",
            )

    def _droppable(self, path: Path, stat: os.stat_result) -> bool:
        digest = bytes.fromhex(path.name.removesuffix(PART_SUFFIX))
        with self._holding:
            held = digest in self._held
        if held or digest in self._parts:
            return False
        return not path.name.endswith(PART_SUFFIX) or self._wall_s() - stat.st_mtime > FRESH_S

    def _remove_abandoned(self) -> None:
        for path, stat in self._files():
            whole = path.with_name(path.name.removesuffix(PART_SUFFIX))
            if path != whole and (self._wall_s() - stat.st_mtime > ABANDONED_S or whole.exists()):
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Complete tensors and parts. Other files in the directory are ignored."""
        found: list[tuple[Path, os.stat_result]] = []
        with storage_errors(self.directory, "read"):
            for path in self.directory.iterdir():
                name = path.name.removesuffix(PART_SUFFIX)
                if len(name) == 64 and all(letter in "0123456789abcdef" for letter in name):
                    with suppress(FileNotFoundError):
                        found.append((path, path.stat()))
        return found

    def _path(self, digest: bytes) -> Path:
        return self.directory / digest.hex()

    def _part_path(self, digest: bytes) -> Path:
        return self.directory / (digest.hex() + PART_SUFFIX)


def _read(path: Path, first: int, count: int) -> bytes | None:
    """Read pieces and mark the file as used. Returns None if the file does not exist. Raises `StorageError` if reading
    fails."""
    start = first * PIECE_BYTES
    with storage_errors(path, "read"):
        try:
            handle = path.open("rb")
        except FileNotFoundError:
            return None
        with handle:
            nbytes = min(count * PIECE_BYTES, os.fstat(handle.fileno()).st_size - start)
            if nbytes <= 0:
                return b""
            with suppress(OSError):
                os.utime(path)
            handle.seek(start)
            return handle.read(nbytes)


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
