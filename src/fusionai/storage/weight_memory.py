"""Cache of the hashes of tensors in files, kept from one start to the next, and lookup of tensors by their hashes.

Processes on one machine that serve a local model (`fusion serve --local`) read tensors in place from the files whose
hashes are cached, and need not send the weights to each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.lock import directory_lock
from fusionai.storage.safetensors_file import ByteRange, ByteRanges, SafetensorsFile
from fusionai.storage.weight_pieces import spec_bytes
from fusionai.wire.job import WeightSpec

log = logging.getLogger(__name__)

MAX_FILES: Final = 512
"""Upper limit on cached files; those written longest ago are dropped. Chosen."""
MAX_ASSEMBLED: Final = 4096
"""Upper limit on cached tensors made of several parts; those written longest ago are dropped. Chosen."""


class FileStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Return the stamp of the file at `path`. Raises `StorageError`."""
        with storage_errors(path, "read"):
            stat = path.stat()
        return cls(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: FileStamp
    tensors: dict[str, WeightSpec]


class PartsStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies a tensor made of consecutive parts of files: (index of the file, offset, bytes)."""

    files: tuple[FileStamp, ...]
    parts: tuple[tuple[int, int, int], ...]


class _Assembled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: PartsStamp
    spec: WeightSpec


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    files: tuple[_File, ...]
    assembled: tuple[_Assembled, ...] = ()


_DECODER: Final = msgspec.json.Decoder(_Content)


class WeightMemory:
    """Hashes by file and by parts. `path` None keeps nothing on the disk."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files, self._assembled = ({}, {}) if path is None else _load(path)
        self._changed: dict[str, _File] = {}
        self._put_together: dict[PartsStamp, WeightSpec] = {}

    def get(self, stamp: FileStamp, name: str) -> WeightSpec | None:
        """Return the cached spec of tensor `name` of a file, with the name as its key; None if unknown."""
        file = self._files.get(stamp.path)
        return file.tensors.get(name) if file is not None and file.stamp == stamp else None

    def files(self) -> Iterator[tuple[FileStamp, Mapping[str, WeightSpec]]]:
        """All cached files, with their tensors by name."""
        for file in self._files.values():
            yield file.stamp, file.tensors

    def put(self, stamp: FileStamp, specs: Mapping[str, WeightSpec]) -> None:
        before = self._files.get(stamp.path)
        kept = before.tensors if before is not None and before.stamp == stamp else {}
        self._files[stamp.path] = self._changed[stamp.path] = _File(stamp, {**kept, **specs})

    def get_parts(self, stamp: PartsStamp) -> WeightSpec | None:
        """Return the cached spec of a tensor made of these parts; None if unknown. Its key has no meaning."""
        return self._assembled.get(stamp)

    def assembled(self) -> Iterator[tuple[PartsStamp, WeightSpec]]:
        """All cached tensors made of parts."""
        yield from self._assembled.items()

    def put_parts(self, stamp: PartsStamp, spec: WeightSpec) -> None:
        self._assembled[stamp] = self._put_together[stamp] = spec

    def write(self) -> None:
        """Write the new entries to the disk. A failure is logged as a warning, because the next start can hash
        again."""
        if self._path is None or not (self._changed or self._put_together):
            return
        try:
            with storage_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with directory_lock(self._path.parent):
                # Another process may have written since this one read the cache.
                files, assembled = _load(self._path)
                files |= self._changed
                newest = [*(file for path, file in files.items() if path not in self._changed), *self._changed.values()]
                older = {stamp: spec for stamp, spec in assembled.items() if stamp not in self._put_together}
                made = [_Assembled(stamp, spec) for stamp, spec in (older | self._put_together).items()]
                content = _Content(version=1, files=tuple(newest[-MAX_FILES:]), assembled=tuple(made[-MAX_ASSEMBLED:]))
                write_atomic(self._path, msgspec.json.encode(content))
        except StorageError as problem:
            log.warning("the hashes of the model's files can't be cached: %s", problem)


def _load(path: Path) -> tuple[dict[str, _File], dict[PartsStamp, WeightSpec]]:
    try:
        content = _DECODER.decode(path.read_bytes())
        for file in content.files:
            for spec in file.tensors.values():
                spec_bytes(spec)
        for one in content.assembled:
            if spec_bytes(one.spec) != sum(nbytes for _, _, nbytes in one.stamp.parts) or any(
                not 0 <= file < len(one.stamp.files) or offset < 0 or nbytes < 0
                for file, offset, nbytes in one.stamp.parts
            ):
                raise StorageError(f"{one.spec.key} is not made of these parts.")
    except FileNotFoundError:
        return {}, {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, StorageError) as problem:
        log.warning("%s is damaged and ignored, the model's files are hashed again: %s", path, problem)
        return {}, {}
    return {file.stamp.path: file for file in content.files}, {one.stamp: one.spec for one in content.assembled}


class WeightsInFiles:
    """Index of the tensors in the cache file `memory`. The cache may be written or replaced later. Methods may be
    called from any thread."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._seen: tuple[int, int] | None = None
        """Modification time and size of the cache file when it was read."""
        self._ranges: dict[bytes, tuple[tuple[FileStamp, ...], ByteRange | ByteRanges]] = {}

    def find(self, digest: bytes) -> ByteRange | ByteRanges | None:
        """Return where the tensor is stored; None if no unchanged file has it."""
        with self._mutex:
            self._refresh()
            found = self._ranges.get(digest)
        if found is None:
            return None
        stamps, stored = found
        return stored if all(map(_unchanged, stamps)) else None

    def _refresh(self) -> None:
        try:
            stat = self._memory.stat()
        except OSError:
            return
        seen = stat.st_mtime_ns, stat.st_size
        if seen == self._seen:
            return
        self._seen = seen
        self._ranges.clear()
        memory = WeightMemory(self._memory)
        for stamp, tensors in memory.files():
            if not _unchanged(stamp):
                continue
            path = Path(stamp.path)
            try:
                file = SafetensorsFile(path)
                for name, spec in tensors.items():
                    _, _, offset, nbytes = file.span(name)
                    self._ranges[spec.digest] = (stamp,), ByteRange(path, offset, nbytes)
            except StorageError:
                continue  # a file of another job that has been removed since
        for made, spec in memory.assembled():
            if all(map(_unchanged, made.files)):
                parts = (ByteRange(Path(made.files[file].path), offset, nbytes) for file, offset, nbytes in made.parts)
                self._ranges[spec.digest] = made.files, ByteRanges(tuple(parts))


def _unchanged(stamp: FileStamp) -> bool:
    try:
        return FileStamp.of(Path(stamp.path)) == stamp
    except StorageError:
        return False
