"""Writes a checkpoint while the stages stream it; the result is complete or absent.

    step-00000012/
      model.safetensors                  or model-00001-of-00002.safetensors, ... with model.safetensors.index.json
      adapter_model.safetensors          instead of these if only an adapter is trained, in PEFT layout
      config.json, tokenizer.json, ...   provided by the caller, so that transformers can load the directory
      fusion/optimizer-00001.safetensors optimizer slots under `<key>/<slot>`
      fusion/private-00001.safetensors   model state that has no place in the Hugging Face layout
      fusion/manifest.json               step, graph, recipe, aliases; SHA-256 and size of every file
      fusion/manifest.sha256             SHA-256 of the manifest itself

Decides layout, shards and the manifest. The tensors' names are those that `save_pretrained` would write, as the
header's layout says. The directory is built as `step-00000012.partial` and renamed when everything is on the disk.
Memory use is at most one shard per part, plus keys that wait for the others of the same tensor.

`reader` opens checkpoints, the driver adds what `StateChunk` messages bring.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.adapter_files import PREFIX, WEIGHTS_FILE
from fusionai.storage.assembly import Assembly, assembled, inverted
from fusionai.storage.atomic import PARTIAL_SUFFIX, storage_errors, sync_directory, write_synced
from fusionai.storage.reader import (
    MANIFEST,
    MANIFEST_HASH,
    CheckpointHeader,
    CheckpointReader,
    FileRecord,
    Manifest,
    step_directory,
)
from fusionai.storage.safetensors_file import INDEX_FILE, SINGLE_FILE, SafetensorsFile, Written, write_safetensors


class Layout:
    """Layout of one checkpoint while it is written."""

    def __init__(self, layout: Mapping[str, Assembly]) -> None:
        """`layout`: name of a tensor in the files -> the parts of keys it is made of."""
        self._layout = layout
        self._group: dict[str, _Group] = {}
        for name, assembly in layout.items():
            group = _Group()
            for other in {id(one): one for key in assembly.sources if (one := self._group.get(key))}.values():
                group.names += other.names
                group.keys |= other.keys
            group.names.append(name)
            group.keys.update(assembly.sources)
            self._group.update(dict.fromkeys(group.keys, group))
        self._waiting: dict[str, HostTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._group

    def add(self, key: str, tensor: HostTensor) -> Iterator[tuple[str, HostTensor]]:
        """Add a key and yield the tensors that it completes. Keys are kept until their tensors are complete. Raises
        `StorageError` if a part exceeds its key."""
        group = self._group[key]
        if not group.keys <= {*self._waiting, key}:
            self._waiting[key] = host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
            return
        held = {other: tensor if other == key else self._waiting.pop(other) for other in group.keys}
        self._shapes.update({other: one.shape for other, one in held.items()})
        for name in group.names:
            yield name, assembled(name, self._layout[name], held.__getitem__)

    def rest(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield the keys whose tensors are incomplete, under their own names. This happens if the model does not use
        the other keys of these tensors."""
        while self._waiting:
            key = next(iter(self._waiting))
            group = self._group[key]
            for other in group.keys:
                del self._group[other]
                if other in self._waiting:
                    yield other, self._waiting.pop(other)

    def value(self, key: str, written: Callable[[str], HostTensor]) -> HostTensor:
        """Return what was added as `key`. `written` returns a tensor that was yielded before."""
        if key in self._waiting:
            return self._waiting[key]
        return assembled(key, self._taken_apart(self._group[key])[key], written)

    def assemblies(self) -> dict[str, Assembly]:
        """Key -> the parts of the yielded tensors that it is made of."""
        groups = {id(group): group for key in self._shapes if (group := self._group[key])}
        return {key: one for group in groups.values() for key, one in self._taken_apart(group).items()}

    def _taken_apart(self, group: _Group) -> dict[str, Assembly]:
        names = {name: self._layout[name] for name in group.names}
        return inverted(names, {key: self._shapes[key] for key in sorted(group.keys)})


class _Group:
    """Keys that share tensors."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.names: list[str] = []


DEFAULT_SHARD_BYTES: Final = 256_000_000
"""Default size in bytes above which a new shard is begun. Also the memory needed per part."""

_Part = Literal["model", "adapter", "optimizer", "private"]
_MISSING_SHOWN: Final = 3


class CheckpointWriter:
    """Writes one checkpoint. Use as a context manager: without `finish` everything is removed. Not thread-safe; every
    call may block on the disk."""

    def __init__(
        self,
        root: Path,
        step: int,
        header: CheckpointHeader,
        *,
        files: Mapping[str, bytes],
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        """`files`: name -> content of the files beside the weights. Raises `StorageError`."""
        self._place = step_directory(root, step)
        self._partial = self._place.with_name(self._place.name + PARTIAL_SUFFIX)
        self._step = step
        self._header = header
        self._shard_bytes = shard_bytes
        self._held: dict[_Part, dict[str, HostTensor]] = {"model": {}, "adapter": {}, "optimizer": {}, "private": {}}
        self._held_bytes: dict[_Part, int] = dict.fromkeys(self._held, 0)
        self._shards: dict[_Part, list[Path]] = {part: [] for part in self._held}
        self._shard_of: dict[str, Path] = {}
        """Keyed by kind of entry and name in the file."""
        self._came: set[str] = set()
        self._layout = Layout(header.layout)
        self._records: dict[str, FileRecord] = {}
        self._model_bytes = 0
        with storage_errors(self._partial):
            if self._partial.exists():
                shutil.rmtree(self._partial)
            (self._partial / "fusion").mkdir(parents=True)
        try:
            for name, content in files.items():
                if Path(name).name != name or name.startswith("model") or name == WEIGHTS_FILE:
                    raise ValueError(f"{name!r} can't stand beside the weights of a checkpoint")
                self._put(name, content)
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def add(self, entry: str, tensor: HostTensor) -> None:
        """Add a copy of one state entry (`model/<key>`, `optimizer/<key>/<slot>`), in any order, from any stage. A tied
        parameter comes from each stage that holds it; its bytes must be equal. Raises `StorageError`, after which the
        writer can't be used any more."""
        part, name = self._part_of(entry)
        if entry in self._came:
            self._require_same(entry, tensor)
            return
        self._came.add(entry)
        if part == "model" and name in self._layout:
            for placed, made in self._layout.add(name, tensor):
                self._put_in(part, placed, made)
        else:
            self._put_in(part, name, tensor)

    def _put_in(self, part: _Part, name: str, tensor: HostTensor) -> None:
        # PEFT supports a single file only.
        if part != "adapter" and self._held[part] and self._held_bytes[part] + tensor.nbytes > self._shard_bytes:
            self._flush(part)
        self._held[part][name] = host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
        self._held_bytes[part] += tensor.nbytes
        if part == "model":
            self._model_bytes += tensor.nbytes

    def finish(self, expected: Collection[str] | None = None) -> Path:
        """Complete the checkpoint and give it its name. `expected`: the entries that must have been added. A complete
        checkpoint of this step that exists already is kept. Raises `StorageError`."""
        for name, tensor in self._layout.rest():
            self._put_in("model", name, tensor)
        for part in self._held:
            if self._held[part]:
                self._flush(part)
        missing = sorted(set(expected or ()) - self._came)
        if missing:
            some = ", ".join(missing[:_MISSING_SHOWN])
            raise StorageError(f"checkpoint of step {self._step}: {len(missing)} entries are missing, such as {some}.")
        self._name_model_shards()
        self._put_manifest()
        with storage_errors(self._place):
            sync_directory(self._partial / "fusion")
            sync_directory(self._partial)
            if self._place.exists():
                self._settle_with_existing()
            else:
                self._partial.replace(self._place)
            sync_directory(self._place.parent)
        return self._place

    def abandon(self) -> None:
        """Remove the unfinished checkpoint. Does nothing after `finish`. The next start removes what can't be removed
        now."""
        for held in self._held.values():
            held.clear()
        with suppress(OSError):
            shutil.rmtree(self._partial)

    def _part_of(self, entry: str) -> tuple[_Part, str]:
        kind, _, name = entry.partition("/")
        match kind:
            case "model" if name in self._header.adapter_keys:
                return "adapter", PREFIX + name
            case "model" if name and (self._header.adapter_keys or name in self._header.private_keys):
                return "private", name
            case "model" if name:
                return "model", name
            case "optimizer" if name:
                return "optimizer", name
            case _:
                raise StorageError(
                    f"checkpoint of step {self._step}: expected an entry model/... or optimizer/..., got {entry!r}."
                )

    def value(self, entry: str) -> HostTensor:
        """Return what was added as `entry`; only before `finish`. Raises `KeyError`, `StorageError`."""
        part, name = self._part_of(entry)
        if part != "model" or name not in self._layout:
            return self._written(part, name)
        return self._layout.value(name, lambda placed: self._written("model", placed))

    def _written(self, part: _Part, name: str) -> HostTensor:
        """Return the tensor that is or will be in a file under this name."""
        kind = "optimizer" if part == "optimizer" else "model"
        shard = self._shard_of.get(f"{kind}/{name.removeprefix(PREFIX) if part == 'adapter' else name}")
        return self._held[part][name] if shard is None else SafetensorsFile(shard).read(name)

    def _require_same(self, entry: str, tensor: HostTensor) -> None:
        known = self.value(entry)
        if (known.dtype, known.shape) != (tensor.dtype, tensor.shape) or known.data != tensor.data:
            raise StorageError(
                f"checkpoint of step {self._step}: two stages hold different values of {entry}.",
                hint="Tied parameters have diverged; the job must go back to its last checkpoint.",
            )

    def _flush(self, part: _Part) -> None:
        shards = self._shards[part]
        where = self._partial if part in ("model", "adapter") else self._partial / "fusion"
        path = where / (WEIGHTS_FILE if part == "adapter" else f"{part}-{len(shards) + 1:05d}.safetensors")
        self._record(path, write_safetensors(path, self._held[part]))
        shards.append(path)
        entries = "optimizer" if part == "optimizer" else "model"
        prefix = PREFIX if part == "adapter" else ""
        self._shard_of.update({f"{entries}/{name.removeprefix(prefix)}": path for name in self._held[part]})
        self._held[part] = {}
        self._held_bytes[part] = 0

    def _name_model_shards(self) -> None:
        """Rename the model's shards: their number is part of the names and known only now."""
        shards = self._shards["model"]
        renamed: dict[Path, Path] = {}
        for number, path in enumerate(shards, start=1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            renamed[path] = path.with_name(name)
            with storage_errors(path):
                path.replace(renamed[path])
            self._records[name] = self._records.pop(path.name)
        self._shard_of = {entry: renamed.get(path, path) for entry, path in self._shard_of.items()}
        if len(shards) > 1:
            weight_map = {
                entry.removeprefix("model/"): path.name
                for entry, path in sorted(self._shard_of.items())
                if path.parent == self._partial
            }
            index = {"metadata": {"total_size": self._model_bytes}, "weight_map": weight_map}
            self._put(INDEX_FILE, msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")

    def _put_manifest(self) -> None:
        files = {name: path.relative_to(self._partial).as_posix() for name, path in sorted(self._shard_of.items())}
        assembled = {f"model/{key}": one for key, one in self._layout.assemblies().items()}
        tensors = {name: files[f"model/{name}"] for one in assembled.values() for name in one.sources}
        entries = {
            entry: tensors[assembled[entry].sources[0]] if entry in assembled else files[entry]
            for entry in sorted(self._came)
        }
        manifest = Manifest(
            step=self._step,
            graph_hash=self._header.graph_hash,
            data_fingerprint=self._header.data_fingerprint,
            recipe=self._header.recipe,
            aliases=self._header.aliases,
            entries=entries,
            files=dict(sorted(self._records.items())),
            base=self._header.base,
            tolerant_takeovers=self._header.tolerant_takeovers,
            assembled=dict(sorted(assembled.items())),
            tensors=dict(sorted(tensors.items())),
        )
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
        self._put(MANIFEST, content)
        self._put(MANIFEST_HASH, f"{hashlib.sha256(content).hexdigest()}  manifest.json\n".encode())

    def _put(self, name: str, content: bytes) -> None:
        path = self._partial / name
        with storage_errors(path):
            write_synced(path, (content,))
        self._record(path, Written(hashlib.sha256(content).hexdigest(), len(content)))

    def _record(self, path: Path, written: Written) -> None:
        name = path.relative_to(self._partial).as_posix()
        self._records[name] = FileRecord(written.sha256, written.size_bytes)

    def _settle_with_existing(self) -> None:
        """Keep the existing checkpoint of this step, unless it is damaged: a replay writes the same bits again."""
        try:
            CheckpointReader(self._place).verify()
        except StorageError:
            damaged = self._place.with_name(self._place.name + ".damaged" + PARTIAL_SUFFIX)
            self._place.replace(damaged)
            self._partial.replace(self._place)
            shutil.rmtree(damaged)
        else:
            shutil.rmtree(self._partial)
