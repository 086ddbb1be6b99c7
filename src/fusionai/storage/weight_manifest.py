"""Describes the weights of a model, tensor by tensor (names, shapes, hashes), and provides their bytes by hash.

Decides where the bytes of a graph's key come from. A key that is stored in the model's files is described as stored,
dtype included; the stage that loads it converts it. A key made of parts of several tensors, such as stacked experts, is
read from them piece by piece, without a copy on the disk. Any other key (created from a configuration, a computed
buffer, transformed on loading) is requested from `state`, one at a time, and kept in the weight store.

Hashes are of the graph's tensors, so that a peer can verify what it fetches without knowing any file. They are cached
by the files' paths, sizes and modification times, so that a second start reads nothing. If a cached hash is wrong, the
peer that fetches the tensor refuses it.

    captured = capture(...)
    weights = manifest(keys, captured.state, store, located=captured.source.checkpoint.entries,
                       memory=home / "weights.json")
    weights.specs                                         # into each stage's `Load`, by key
    weights.read(spec), weights.pieces(digest, 0, 4)      # for the owner's own stages; for `execution.weights.server`

`capture` knows the file and the name in it for each key (ties, older names); `weight_store` keeps the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.storage.assembly import Assembly
from fusionai.storage.safetensors_file import ByteRange, ByteRanges, SafetensorsFile
from fusionai.storage.weight_memory import FileStamp, PartsStamp, WeightMemory
from fusionai.storage.weight_pieces import make_spec, pieces_of
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
    memory: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Describe `keys` in their order, each once.

    `located`: key -> (safetensors file, name in it) for tensors stored in files bit for bit. `assembled`: keys made of
    parts of tensors; `files` maps those tensors' names to files. `memory`: cache file of hashes. `on_progress(done,
    total)`: bytes of files to hash.

    Raises `StorageError` if a file can't be read or changes meanwhile, and the errors of `state`.
    """
    wanted = tuple(dict.fromkeys(keys))
    opened = _Files(memory)
    places: dict[str, _Place] = {}
    for key in wanted:
        if located and key in located:
            places[key] = opened.whole(*located[key])
        elif assembled and key in assembled and (place := opened.parts(assembled[key], files or {})) is not None:
            places[key] = place
    described = opened.described(places.values(), on_progress)
    specs = {key: _renamed(described[place], key) for key, place in places.items()}
    ranges = {described[place].digest: place.stored for place in places.values()}
    for key, tensor in state([key for key in wanted if key not in places]):
        spec = specs[key] = make_spec(key, tensor.dtype, tensor.shape, _cut(tensor.data))
        if spec.digest not in ranges:
            store.add(spec, tensor.data)
    if lacking := [key for key in wanted if key not in specs]:
        raise StorageError(f"the model has no bytes for {len(lacking)} of its tensors, such as {lacking[0]}.")
    return ModelWeights(tuple(specs[key] for key in wanted), ranges, store)


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
        paths = tuple(sorted({part.path for part in parts}))
        known_by = PartsStamp(
            tuple(self._stamps[path] for path in paths),
            tuple((paths.index(part.path), part.offset, part.nbytes) for part in parts),
        )
        return _Place(paths, known_by, dtype, assembly.shape, ByteRanges(parts))

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
        spec = self._known.get_parts(one.known_by)
        return spec if spec is not None and (spec.dtype, spec.shape) == (one.dtype, one.shape) else None

    def _span(self, path: Path, name: str) -> tuple[str, tuple[int, ...], int, int]:
        if path not in self._files:
            self._files[path], self._stamps[path] = SafetensorsFile(path), FileStamp.of(path)
        return self._files[path].span(name)


def _described(place: _Place) -> WeightSpec:
    name = place.known_by if isinstance(place.known_by, str) else "parts"
    return make_spec(name, place.dtype, place.shape, _read(place.stored))


def _read(stored: ByteRange | ByteRanges) -> Iterator[bytes]:
    for piece in range(pieces_of(stored.nbytes)):
        start = piece * PIECE_BYTES
        yield stored.read(start, min(PIECE_BYTES, stored.nbytes - start))


def _cut(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + PIECE_BYTES] for start in range(0, data.nbytes, PIECE_BYTES))


def _renamed(spec: WeightSpec, key: str) -> WeightSpec:
    return WeightSpec(key=key, dtype=spec.dtype, shape=spec.shape, digest=spec.digest, pieces=spec.pieces)
