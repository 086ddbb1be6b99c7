"""What the weights of a model are, tensor by tensor: names, shapes, hashes. And their bytes, for who asks by hash.

Decides where the bytes of a graph's key come from. A key that lies in the model's files is described as it lies there,
dtype included: whoever loads it converts it. Every other (made from a configuration, computed buffers, transformed
when loaded) is asked of `state` one at a time and kept in the weight store. Hashes of files are remembered by path,
size and time of change, so that a second start reads nothing; what is remembered wrongly is refused by whoever fetches.

    captured = capture(...)
    weights = manifest(keys, captured.state, store, located=captured.source.checkpoint.entries,
                       memory=home / "weights.json")
    # Without files (`checkpoint` is None): `weight_declared.declared(graph, captured.state, seed)`, nothing located.
    weights.specs                                         # into each stage's `Load`, by key
    weights.read(spec), weights.pieces(digest, 0, 4)      # for the owner's own stages; for `execution.weight_desk`

Neighbours: `capture` knows which name in which file a key has (ties, old spellings); `weight_store` keeps the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.mapped_file import Stretch
from fusionai.storage.safetensors_file import SafetensorsFile
from fusionai.storage.weight_memory import FileStamp, WeightMemory
from fusionai.storage.weight_pieces import make_spec, pieces_of
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.serving import PIECE_BYTES, WeightSpec

log = logging.getLogger(__name__)

State = Callable[[Iterable[str]], Iterator[tuple[str, HostTensor]]]
"""As `Captured.state`."""
HASHING_THREADS: Final = 4
"""Hashing lets others run; more than this waits for the disk."""


class ModelWeights:
    """The owner's side: has all tensors of the manifest. Close it when the job is over."""

    def __init__(self, specs: tuple[WeightSpec, ...], stretches: Mapping[bytes, Stretch], store: WeightStore) -> None:
        """`stretches`: where the files have the bytes, by digest; others are in `store`."""
        self.specs = specs
        self._stretches = stretches
        self._store = store
        self._held = ExitStack()
        self._held.enter_context(store.holding([spec.digest for spec in specs if spec.digest not in stretches]))

    def has(self, spec: WeightSpec) -> bool:
        return spec.digest in self._stretches or self._store.has(spec)

    def read(self, spec: WeightSpec) -> HostTensor:
        """Mapped, not copied. Raises `StorageError`."""
        stretch = self._stretches.get(spec.digest)
        if stretch is None:
            return self._store.read(spec)
        return host_tensor(spec.dtype, spec.shape, stretch.mapped())

    def pieces(self, digest: bytes, first: int, count: int) -> bytes:
        """As `WeightStore.pieces`."""
        stretch = self._stretches.get(digest)
        if stretch is None:
            return self._store.pieces(digest, first, count)
        start = first * PIECE_BYTES
        if count <= 0 or start >= stretch.nbytes:
            return b""
        return stretch.read(start, min(count * PIECE_BYTES, stretch.nbytes - start))

    def close(self) -> None:
        """What was made for this job may be dropped when space is short. Harmless twice."""
        self._held.close()


def manifest(
    keys: Iterable[str],
    state: State,
    store: WeightStore,
    *,
    located: Mapping[str, tuple[Path, str]] | None = None,
    memory: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Describe `keys`, in their order, each once. `located`: key -> (safetensors file, name in it) for those that lie
    in files bit by bit. `memory`: the file of remembered hashes. `on_progress(done, total)`: bytes of files to hash.

    Raises `StorageError` when a file can't be read or changes meanwhile, and what `state` raises."""
    wanted = tuple(dict.fromkeys(keys))
    places = {key: located[key] for key in wanted if key in located} if located else {}
    specs: dict[str, WeightSpec] = {}
    stretches: dict[bytes, Stretch] = {}
    known = WeightMemory(memory)
    for path in sorted({path for path, _ in places.values()}):
        names = {name: key for key, (where, name) in places.items() if where == path}
        for name, (spec, stretch) in _described(path, names, known, on_progress).items():
            for key in [key for key, place in places.items() if place == (path, name)]:
                specs[key] = _renamed(spec, key)
            stretches[spec.digest] = stretch
    known.write()
    for key, tensor in state([key for key in wanted if key not in places]):
        spec = specs[key] = make_spec(key, tensor.dtype, tensor.shape, _cut(tensor.data))
        if spec.digest not in stretches:
            store.add(spec, tensor.data)
    if lacking := [key for key in wanted if key not in specs]:
        raise StorageError(f"the model gave no bytes for {len(lacking)} of its tensors, first {lacking[0]}.")
    return ModelWeights(tuple(specs[key] for key in wanted), stretches, store)


def _described(
    path: Path, names: Iterable[str], known: WeightMemory, on_progress: Callable[[int, int], None] | None
) -> dict[str, tuple[WeightSpec, Stretch]]:
    """Names in one file -> what they are and where they lie."""
    file, stamp = SafetensorsFile(path), FileStamp.of(path)
    spans = {name: file.span(name) for name in names}
    specs = {name: spec for name in spans if (spec := known.get(stamp, name)) is not None}
    rest = [name for name in spans if name not in specs]
    total, done = sum(spans[name][3] for name in rest), 0

    def describe(name: str) -> WeightSpec:
        dtype, shape, offset, nbytes = spans[name]
        return make_spec(name, dtype, shape, _read(Stretch(path, offset, nbytes)))

    if rest:
        with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1), "hashing") as threads:
            for name, spec in zip(rest, threads.map(describe, rest), strict=True):
                specs[name] = spec
                done += spans[name][3]
                if on_progress is not None:
                    on_progress(done, total)
        if FileStamp.of(path) != stamp:
            raise StorageError(f"{path} was changed while it was read.", hint="Start again once it is complete.")
        known.put(stamp, {name: specs[name] for name in rest})
    return {name: (specs[name], Stretch(path, spans[name][2], spans[name][3])) for name in spans}


def _read(stretch: Stretch) -> Iterator[bytes]:
    for piece in range(pieces_of(stretch.nbytes)):
        start = piece * PIECE_BYTES
        yield stretch.read(start, min(PIECE_BYTES, stretch.nbytes - start))


def _cut(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + PIECE_BYTES] for start in range(0, data.nbytes, PIECE_BYTES))


def _renamed(spec: WeightSpec, key: str) -> WeightSpec:
    return WeightSpec(key=key, dtype=spec.dtype, shape=spec.shape, digest=spec.digest, pieces=spec.pieces)
