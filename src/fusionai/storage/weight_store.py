"""Weights that lie on this machine, one file per tensor, named by the hash of its bytes.

    <digest>         a whole tensor, checked against its digest before it got this name
    <digest>.part    one that is being fetched, at its full size, with holes
    .lock            taken around renaming and removing

Decides what is whole, what is dropped when space is short (what was used longest ago; never what is held), how an
interrupted download goes on: the pieces of a part are hashed again when it is opened. That costs one reading of the
few tensors that were under way, needs no record of what was written beside it that could be wrong after a crash, and
no fsync per piece. Two processes may share the directory: both write only bytes that have been checked, so that they
write the same, and names change under the lock.

Neighbours: `weight_part` fills a part, `execution.weights` fetches into it, `execution.weight_desk` serves from it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import storage_errors
from fusionai.storage.directory_lock import directory_lock
from fusionai.storage.mapped_file import Stretch, Stretches
from fusionai.storage.weight_part import PART_SUFFIX, WeightPart
from fusionai.storage.weight_pieces import good_pieces, spec_bytes
from fusionai.storage.weights_in_files import WeightsInFiles
from fusionai.wire.serving import PIECE_BYTES, WeightSpec

log = logging.getLogger(__name__)

ABANDONED_S: Final = 7 * 86_400.0
"""A part that nobody has written to for so long is removed at the next start, as is one whose whole is here."""
FRESH_S: Final = 600.0
"""A part written to so recently may be another process's work."""


class WeightStore:
    """`limit_bytes` bounds all files together. Methods may be called from any thread.

    Hold what is in use: `with store.holding(digests)` around loading and the stage's life."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int | None = None,
        *,
        beside: WeightsInFiles | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Makes the directory. `beside`: tensors found there are read in place and not kept here. Raises
        `StorageError`."""
        self.directory = directory
        self._beside = beside
        self._limit_bytes = limit_bytes
        self._wall_s = wall_s
        self._mutex = threading.Lock()
        self._holding = threading.Lock()  # never held for long: an event loop takes it
        self._held: Counter[bytes] = Counter()
        self._parts: dict[bytes, WeightPart] = {}
        with storage_errors(directory, "made"):
            directory.mkdir(parents=True, exist_ok=True)
        with directory_lock(directory):
            self._remove_abandoned()

    # ------------------------------------------------------------------------------------------------------ reading

    def has(self, spec: WeightSpec) -> bool:
        """Whether the whole tensor is here. A file of another size is damaged and removed."""
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
        """The tensor, its memory the mapped file; counts as a use. Raises `StorageError` when it is not here."""
        if not self.has(spec):
            raise StorageError(f"{spec.key} is not among the weights in {self.directory}.")
        path = self._path(spec.digest)
        elsewhere = None if path.exists() else self._elsewhere(spec.digest)
        if elsewhere is not None:
            return host_tensor(spec.dtype, spec.shape, elsewhere.mapped())
        with suppress(OSError):
            os.utime(path)
        return host_tensor(spec.dtype, spec.shape, Stretch(path, 0, spec_bytes(spec)).mapped())

    def pieces(self, digest: bytes, first: int, count: int) -> bytes:
        """Pieces from `first` on, at most `count`, for others: fewer at the end, or where a part has no more in a row.
        Empty when there are none. Raises `StorageError` when the disk fails."""
        with self._mutex:
            part = self._parts.get(digest)
        whole = self._path(digest)
        if part is not None and not whole.exists():
            data = _read(part.path, first, part.run(first, count))
            if data is not None:
                return data
            # It has got its name meanwhile: what was a part when it was looked for is the whole now.
        data = _read(whole, first, count)
        if data is None and (elsewhere := self._elsewhere(digest)) is not None:
            start = min(first * PIECE_BYTES, elsewhere.nbytes)
            return elsewhere.read(start, min(max(0, count) * PIECE_BYTES, elsewhere.nbytes - start))
        return data or b""

    def _elsewhere(self, digest: bytes) -> Stretch | Stretches | None:
        return None if self._beside is None else self._beside.find(digest)

    # ------------------------------------------------------------------------------------------------------ writing

    def missing(self, spec: WeightSpec) -> tuple[int, ...]:
        """Pieces that are not here, ascending. Hashes again what an interrupted download left."""
        if not self.begun(spec.digest):
            return () if self.has(spec) else tuple(range(len(spec.pieces)))
        part = self._part(spec)
        return () if part is None else part.missing

    def begun(self, digest: bytes) -> bool:
        """Whether a part of it lies here."""
        return self._part_path(digest).exists()

    def put(self, spec: WeightSpec, first: int, data: memoryview) -> int:
        """Keep the pieces at the start of `data` that are right, from `first` on; how many were.

        Raises `StorageError`: there is no room, the disk is full."""
        part = self._part(spec)
        return good_pieces(spec, first, data) if part is None else part.put(first, data)

    def finish(self, spec: WeightSpec) -> None:
        """All pieces are here: check the whole and give it its name. Harmless when done before.

        Raises `StorageError` when the pieces' hashes and the tensor's do not belong together: the part is dropped."""
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
                    if self.has(spec):  # another process was as quick
                        part.remove()
                    else:
                        part.rename(self._path(spec.digest))
            finally:
                self._forget(part)

    def add(self, spec: WeightSpec, data: memoryview) -> None:
        """Keep a tensor that is at hand as a whole."""
        if not self.has(spec):
            self.put(spec, 0, data)
            self.finish(spec)

    def _part(self, spec: WeightSpec) -> WeightPart | None:
        """The part of a tensor, the same for everybody in this process who fetches it; None if the whole is here."""
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
        """Close parts; they stay on the disk, and the next start goes on with them."""
        with self._mutex:
            for part in self._parts.values():
                part.close()
            self._parts.clear()

    # ------------------------------------------------------------------------------------------------------- space

    @contextmanager
    def holding(self, digests: Collection[bytes]) -> Iterator[None]:
        """These are in use and not dropped meanwhile."""
        with self._holding:
            self._held.update(digests)
        try:
            yield
        finally:
            with self._holding:
                self._held.subtract(digests)
                self._held += Counter()  # drops those at zero

    def make_room(self, nbytes: int) -> None:
        """Drop what was used longest ago until `nbytes` more fit the limit. Raises `StorageError` when they can't."""
        if self._limit_bytes is None:
            return
        with directory_lock(self.directory):
            files = sorted(self._files(), key=lambda file: file[1].st_mtime)
            used = sum(stat.st_size for _, stat in files)
            for path, stat in files:
                if used + nbytes <= self._limit_bytes:
                    break
                if self._droppable(path, stat):
                    with suppress(OSError):  # on some systems a mapped file can't go
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
        """Whole tensors and parts; nothing else that lies here is touched."""
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
    """None when there is no such file (any more). Counts as a use. Raises `StorageError` when the disk fails."""
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
