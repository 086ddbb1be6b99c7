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

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import directory_lock, storage_errors
from fusionai.storage.safetensors_file import ByteRange, ByteRanges
from fusionai.storage.weight_part import PART_SUFFIX, WeightPart, good_pieces, spec_bytes
from fusionai.wire.job import PIECE_BYTES, WeightSpec

log = logging.getLogger(__name__)

ABANDONED_S: Final = 7 * 86_400.0
"""Seconds without a write after which the next start removes a part. A part whose tensor is complete is removed too."""
LARGEST_FLOOR_BYTES: Final = 5 * 10**9
FLOOR_PART: Final = 0.05
"""Space of a disk that stays free: this part of it, at most `LARGEST_FLOOR_BYTES`. Chosen: systems run badly on a full
disk."""
FRESH_S: Final = 600.0
"""Seconds since the last write during which a part may belong to another process and is not dropped."""


class Disk(NamedTuple):
    total_bytes: int
    free_bytes: int


def disk_of(directory: Path) -> Disk:
    """Return size and free space of the disk that has this directory. Raises `StorageError`."""
    with storage_errors(directory, "read"):
        usage = shutil.disk_usage(directory)
    return Disk(usage.total, usage.free)


class WeightStore:
    """Store of weights. `limit_bytes` limits the size of all files together. With `keeps_free`, part of the disk stays
    free (`FLOOR_PART`), and without a limit the files take at most half of what was free for them at the start; else
    the disk alone is the limit. Methods may be called from any thread. Keep what is in use:
    `with store.holding(digests)` around loading and the stage's lifetime."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int | None = None,
        *,
        keeps_free: bool = False,
        beside: Callable[[bytes], ByteRange | ByteRanges | None] | None = None,
        disk: Callable[[Path], Disk] = disk_of,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Create the directory. `beside`: finds tensors by digest that are read in place and not stored here. Raises
        `StorageError`."""
        self.directory = directory
        self._elsewhere = beside or (lambda _digest: None)
        self._disk = disk
        self._floor_bytes: int | None = None
        self._wall_s = wall_s
        self._mutex = threading.Lock()
        self._holding = threading.Lock()  # held only briefly, because an event loop takes it
        self._held: Counter[bytes] = Counter()
        self._parts: dict[bytes, WeightPart] = {}
        with storage_errors(directory, "made"):
            directory.mkdir(parents=True, exist_ok=True)
        with directory_lock(directory):
            self._remove_abandoned()
        if keeps_free:
            found = disk(directory)
            self._floor_bytes = min(LARGEST_FLOOR_BYTES, round(FLOOR_PART * found.total_bytes))
            if limit_bytes is None:
                used = sum(_allocated_bytes(stat) for _, stat in self._files())
                limit_bytes = (used + found.free_bytes) // 2
        self.limit_bytes = limit_bytes
        """Most bytes of all files together; None: what the disk has."""
        with suppress(StorageError):  # the limit may be lower than at the last start
            self.make_room(0)

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
        """Drop least recently used tensors until `nbytes` more fit the limit and the disk. Raises `StorageError` if
        they don't fit."""
        if self.limit_bytes is None and self._floor_bytes is None:
            return
        with directory_lock(self.directory):
            files = sorted(self._files(), key=lambda file: file[1].st_mtime)
            space = self._space(files)
            for path, stat in files:
                if space.lacking(nbytes) is None:
                    break
                if self._droppable(path, stat):
                    with suppress(OSError):  # some systems can't remove a mapped file
                        path.unlink()
                        space.used_bytes -= stat.st_size
                        space.free_bytes += stat.st_size
        lacking = space.lacking(nbytes)
        if lacking is not None:
            raise StorageError(
                f"no room for {format_bytes(nbytes)} more of weights in {self.directory}: {lacking}.",
                hint="Raise --weights-cache of `fusion join`, free some space on this disk, or serve a smaller model.",
            )

    def _space(self, files: Iterable[tuple[Path, os.stat_result]]) -> _Space:
        sizes = [(stat.st_size, _allocated_bytes(stat)) for _, stat in files]
        # Parts have their full size and holes, which will be filled.
        owed = sum(size - allocated for size, allocated in sizes)
        free = 0 if self._floor_bytes is None else self._disk(self.directory).free_bytes - owed
        return _Space(sum(size for size, _ in sizes), self.limit_bytes, free, self._floor_bytes)

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


@dataclass(slots=True)
class _Space:
    """What all files take, their limit, what the disk has left, and what of that stays free."""

    used_bytes: int
    limit_bytes: int | None
    free_bytes: int
    floor_bytes: int | None

    def lacking(self, nbytes: int) -> str | None:
        """Return why `nbytes` more don't fit; None if they do."""
        if self.limit_bytes is not None and self.used_bytes + nbytes > self.limit_bytes:
            return f"{format_bytes(self.used_bytes)} of {format_bytes(self.limit_bytes)} are in use"
        if self.floor_bytes is not None and self.free_bytes - nbytes < self.floor_bytes:
            free, floor = format_bytes(max(0, self.free_bytes)), format_bytes(self.floor_bytes)
            return f"{free} of the disk are free, and {floor} stay free"
        return None


def _allocated_bytes(stat: os.stat_result) -> int:
    """Return what a file takes on the disk, at most its size; its size where the system does not say."""
    blocks: int | None = getattr(stat, "st_blocks", None)
    return stat.st_size if blocks is None else min(stat.st_size, 512 * blocks)


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
