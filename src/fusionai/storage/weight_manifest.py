"""Describes the weights of a model, tensor by tensor (names, shapes, hashes), and provides their bytes by hash.

Decides where the bytes of a graph's key come from. A key that is stored in the model's files is described as stored,
dtype included; the stage that loads it converts it. A key made of parts of several tensors, such as stacked experts, is
read from them piece by piece, without a copy on the disk. Any other key (created from a configuration, a computed
buffer, transformed on loading) is requested from `state`, one at a time, and kept in the weight store.

Hashes are of the graph's tensors, so that a peer can verify what it fetches without knowing any file. They are cached
by the files' paths, sizes and modification times, so that a second start reads nothing. If a cached hash is wrong, the
peer that fetches the tensor refuses it. Processes on one machine that serve a local model (`fusion serve --local`) read
tensors in place from the files whose hashes are cached, and need not send the weights to each other.

    captured = capture(...)
    weights = manifest(keys, captured.state, store, located=captured.source.checkpoint.entries,
                       memory=home / "weights.json")
    weights.specs                                         # into each stage's `Load`, by key
    weights.read(spec), weights.pieces(digest, 0, 4)      # for the owner's own stages; for `execution.weights.server`

`capture` knows the file and the name in it for each key (ties, older names); `weight_store` keeps the rest.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.storage.assembly import Assembly
from fusionai.storage.atomic import directory_lock, storage_errors, write_atomic
from fusionai.storage.quantised_files import PackedMatrix
from fusionai.storage.safetensors_file import ByteRange, ByteRanges, SafetensorsFile
from fusionai.storage.weight_part import make_spec, spec_bytes
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.job import PIECE_BYTES, WeightSpec

State = Callable[[Iterable[str]], Iterator[tuple[str, HostTensor]]]
"""Yields the tensors of the given keys, like `Captured.state`."""
HASHING_THREADS: Final = 4
"""Upper limit on threads that hash. Hashing releases the GIL; with more threads the disk is the bottleneck."""


class ModelWeights:
    """The job owner's weights: provides all tensors of the manifest. Close it when the job is over."""

    def __init__(
        self, specs: tuple[WeightSpec, ...], ranges: Mapping[bytes, ByteRange | ByteRanges], store: WeightStore
    ) -> None:
        """`ranges`: ranges of files that hold tensors, by digest. All other tensors are in `store`."""
        self.specs = specs
        self._ranges = ranges
        self._store = store
        self._held = ExitStack()
        self._held.enter_context(store.holding([spec.digest for spec in specs if spec.digest not in ranges]))

    def replace(self, tensors: Iterable[tuple[str, HostTensor]]) -> None:
        """Give these keys other values, which are kept in the store. Blocking. Raises `StorageError`."""
        fresh = {key: _stored(self._store, key, tensor, known=self._ranges) for key, tensor in tensors}
        specs = tuple(fresh.get(spec.key, spec) for spec in self.specs)
        held = ExitStack()
        held.enter_context(self._store.holding([spec.digest for spec in specs if spec.digest not in self._ranges]))
        former, self.specs, self._held = self._held, specs, held
        former.close()

    def read(self, spec: WeightSpec) -> HostTensor:
        """Return the tensor, mapped without copying. Raises `StorageError`."""
        stored = self._ranges.get(spec.digest)
        if stored is None:
            return self._store.read(spec)
        return host_tensor(spec.dtype, spec.shape, stored.mapped())

    def pieces(self, digest: bytes, first: int, count: int) -> bytes:
        """Return at most `count` pieces from index `first` on, like `WeightStore.pieces`."""
        stored = self._ranges.get(digest)
        if stored is None:
            return self._store.pieces(digest, first, count)
        start = first * PIECE_BYTES
        if count <= 0 or start >= stored.nbytes:
            return b""
        return stored.read(start, min(count * PIECE_BYTES, stored.nbytes - start))

    def close(self) -> None:
        """Allow the store to drop what was created for this job. Idempotent."""
        self._held.close()


def manifest(
    keys: Iterable[str],
    state: State,
    store: WeightStore,
    *,
    located: Mapping[str, tuple[Path, str]] | None = None,
    assembled: Mapping[str, Assembly] | None = None,
    files: Mapping[str, Path] | None = None,
    packed: Mapping[str, PackedMatrix] | None = None,
    memory: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Describe `keys` in their order, each once.

    `located`: key -> (safetensors file, name in it) for tensors stored in files bit for bit. `assembled`: keys made of
    parts of tensors; `files` maps those tensors' names to files. `packed`: keys that are described as the bytes of a
    quantised model's files (uint8). `memory`: cache file of hashes. `on_progress(done,
    total)`: bytes of files to hash.

    Raises `StorageError` if a file can't be read or changes meanwhile, and the errors of `state`.
    """
    wanted = tuple(dict.fromkeys(keys))
    opened = _Files(memory)
    places: dict[str, _Place] = {}
    for key in wanted:
        if located and key in located:
            places[key] = opened.whole(*located[key])
        elif packed and key in packed:
            places[key] = opened.packed(packed[key])
        elif assembled and key in assembled and (place := opened.parts(assembled[key], files or {})) is not None:
            places[key] = place
    described = opened.described(places.values(), on_progress)
    specs = {key: msgspec.structs.replace(described[place], key=key) for key, place in places.items()}
    ranges = {described[place].digest: place.stored for place in places.values()}
    for key, tensor in state([key for key in wanted if key not in places]):
        specs[key] = _stored(store, key, tensor, known=ranges)
    if lacking := [key for key in wanted if key not in specs]:
        raise StorageError(f"the model has no bytes for {len(lacking)} of its tensors, such as {lacking[0]}.")
    return ModelWeights(tuple(specs[key] for key in wanted), ranges, store)


def _stored(store: WeightStore, key: str, tensor: HostTensor, *, known: Container[bytes]) -> WeightSpec:
    """Describe a tensor, and add it to the store unless its digest is known."""
    pieces = (tensor.data[start : start + PIECE_BYTES] for start in range(0, tensor.nbytes, PIECE_BYTES))
    spec = make_spec(key, tensor.dtype, tensor.shape, pieces)
    if spec.digest not in known:
        store.add(spec, tensor.data)
    return spec


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a tensor, and the key under which its hash is cached: its name in a file, or its parts."""

    paths: tuple[Path, ...]
    known_by: str | PartsStamp
    dtype: str
    shape: tuple[int, ...]
    stored: ByteRange | ByteRanges = field(compare=False)


class _Files:
    """The model's files, each opened once, and the cached hashes."""

    def __init__(self, memory: Path | None) -> None:
        self._known = WeightMemory(memory)
        self._files: dict[Path, SafetensorsFile] = {}
        self._stamps: dict[Path, FileStamp] = {}

    def whole(self, path: Path, name: str) -> _Place:
        dtype, shape, offset, nbytes = self._span(path, name)
        return _Place((path,), name, dtype, shape, ByteRange(path, offset, nbytes))

    def parts(self, assembly: Assembly, files: Mapping[str, Path]) -> _Place | None:
        """Return the location of an assembled tensor; None if its parts have several dtypes and must be converted
        first."""
        spans = {name: self._span(files[name], name) for name in assembly.sources}
        dtypes = {dtype for dtype, _, _, _ in spans.values()}
        if len(dtypes) != 1:
            return None
        dtype = dtypes.pop()
        itemsize = ITEMSIZE_BYTES[dtype]
        parts = tuple(
            ByteRange(files[one.tensor], spans[one.tensor][2] + one.first * itemsize, one.count * itemsize)
            for one in assembly.extents
        )
        return self._place(dtype, assembly.shape, parts)

    def packed(self, matrix: PackedMatrix) -> _Place:
        """Return the location of a quantised model's matrix."""
        for part in matrix.ranges:
            self._stamps.setdefault(part.path, FileStamp.of(part.path))
        return self._place("uint8", (matrix.stored.nbytes,), matrix.ranges)

    def _place(self, dtype: str, shape: tuple[int, ...], parts: tuple[ByteRange, ...]) -> _Place:
        paths = tuple(sorted({part.path for part in parts}))
        known_by = PartsStamp(
            tuple(self._stamps[path] for path in paths),
            tuple((paths.index(part.path), part.offset, part.nbytes) for part in parts),
        )
        return _Place(paths, known_by, dtype, shape, ByteRanges(parts))

    def described(
        self, places: Iterable[_Place], on_progress: Callable[[int, int], None] | None
    ) -> dict[_Place, WeightSpec]:
        """Return the specs of all locations, hashing those not cached. Raises `StorageError`, also if a file was
        changed meanwhile."""
        wanted = dict.fromkeys(places)
        specs = {one: spec for one in wanted if (spec := self._remembered(one)) is not None}
        rest = [one for one in wanted if one not in specs]
        total, done = sum(one.stored.nbytes for one in rest), 0
        if rest:
            with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1), "hashing") as threads:
                for one, spec in zip(rest, threads.map(_described, rest), strict=True):
                    specs[one] = spec
                    done += one.stored.nbytes
                    if on_progress is not None:
                        on_progress(done, total)
        for path, stamp in self._stamps.items():
            if rest and FileStamp.of(path) != stamp:
                raise StorageError(f"{path} was changed while it was read.", hint="Start again once it is complete.")
            if mine := {
                one.known_by: specs[one] for one in rest if one.paths == (path,) and isinstance(one.known_by, str)
            }:
                self._known.put(stamp, mine)
        for one in rest:
            if isinstance(one.known_by, PartsStamp):
                self._known.put_parts(one.known_by, specs[one])
        self._known.write()
        return specs

    def _remembered(self, one: _Place) -> WeightSpec | None:
        """Return the cached spec; None if there is none or it has another dtype or shape."""
        if isinstance(one.known_by, str):
            return self._known.get(self._stamps[one.paths[0]], one.known_by)
        spec = self._known.assembled.get(one.known_by)
        return spec if spec is not None and (spec.dtype, spec.shape) == (one.dtype, one.shape) else None

    def _span(self, path: Path, name: str) -> tuple[str, tuple[int, ...], int, int]:
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
            self._stamps.setdefault(path, FileStamp.of(path))
        return self._files[path].span(name)


def _described(place: _Place) -> WeightSpec:
    name = place.known_by if isinstance(place.known_by, str) else "parts"
    return make_spec(
        name,
        place.dtype,
        place.shape,
        (
            place.stored.read(start, min(PIECE_BYTES, place.stored.nbytes - start))
            for start in range(0, place.stored.nbytes, PIECE_BYTES)
        ),
    )


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
    """Hashes by file and by parts. `path` None keeps nothing on the disk. `assembled`: tensors made of parts; their
    specs have no meaningful keys."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.files, self.assembled = ({}, {}) if path is None else _load(path)
        self._changed: dict[str, _File] = {}
        self._put_together: dict[PartsStamp, WeightSpec] = {}

    def get(self, stamp: FileStamp, name: str) -> WeightSpec | None:
        """Return the cached spec of tensor `name` of a file, with the name as its key; None if unknown."""
        file = self.files.get(stamp.path)
        return file.tensors.get(name) if file is not None and file.stamp == stamp else None

    def put(self, stamp: FileStamp, specs: Mapping[str, WeightSpec]) -> None:
        before = self.files.get(stamp.path)
        kept = before.tensors if before is not None and before.stamp == stamp else {}
        self.files[stamp.path] = self._changed[stamp.path] = _File(stamp, {**kept, **specs})

    def put_parts(self, stamp: PartsStamp, spec: WeightSpec) -> None:
        self.assembled[stamp] = self._put_together[stamp] = spec

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
        for stamp, tensors in ((file.stamp, file.tensors) for file in memory.files.values()):
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
        for made, spec in memory.assembled.items():
            if all(map(_unchanged, made.files)):
                parts = (ByteRange(Path(made.files[file].path), offset, nbytes) for file, offset, nbytes in made.parts)
                self._ranges[spec.digest] = made.files, ByteRanges(tuple(parts))


def _unchanged(stamp: FileStamp) -> bool:
    try:
        return FileStamp.of(Path(stamp.path)) == stamp
    except StorageError:
        return False
