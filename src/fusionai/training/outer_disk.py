"""The outer state of local updates on disk, and the answer given to each job. Only files named in the index count.

    outer/index.json                round, jobs, and which answer each job got; replaced atomically
    outer/state-<round>.safetensors `anchor/<key>`, `momentum/<key>`, `residual/<key>`
    outer/said-<round>-<job>-<step>.safetensors

Files that the index does not name are left over from an interrupted write and are removed. Used by `training.outer`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from fusionai.execution.tensors import as_array
from fusionai.execution.training.codecs import Carried, joined, split
from fusionai.primitives.errors import ExecutionError, StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.safetensors_file import SafetensorsFile, write_safetensors
from fusionai.training.outer import OuterState, OuterUpdate
from fusionai.wire.codecs import PackedTensor, ParameterForm

INDEX: Final = "index.json"
"""Name of the index file."""
_PARTS: Final = ("anchor", "momentum", "residual")
"""Parts of the outer state, as prefixes of tensor names."""
Number = Annotated[int, Meta(ge=0)]


class _SavedUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An answer to a job. `file` has the values; several jobs may share one file."""

    job: str
    step: Number
    form: ParameterForm = msgspec.field(name="told")
    file: str
    packed: tuple[PackedTensor, ...]


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the index file."""

    round: Number
    rounds: dict[str, Number]
    state: str
    updates: tuple[_SavedUpdate, ...] = msgspec.field(default=(), name="said")


class OuterFiles:
    """Stores an outer state and the answers in a directory. Blocking. Only one process may use it at a time."""

    def __init__(self, directory: Path) -> None:
        """Open the directory, creating it if necessary. Raises `StorageError`."""
        self._directory = directory
        self._turn = threading.Lock()
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._index = self._read_index()
        self._clean()

    def load(self) -> tuple[OuterState, dict[str, int]] | None:
        """Return the state and each job's rounds; None if nothing was saved. Raises `StorageError`."""
        index = self._index
        if index is None:
            return None
        file = SafetensorsFile(self._directory / index.state)
        found: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in file.names:
            part, _, key = name.partition("/")
            tensor = file.read(name)
            if part not in found or tensor.dtype != "float32":
                raise StorageError(
                    f"{self._directory / index.state} holds {name}, which is not part of an outer state."
                )
            found[part][key] = as_array(tensor).copy()
            shapes[key] = tensor.shape
        if any(values.keys() != shapes.keys() for values in found.values()):
            raise StorageError(f"{self._directory / index.state} lacks parts of the outer state.")
        return OuterState(round=index.round, shapes=shapes, **found), dict(index.rounds)

    def save(self, state: OuterState, updates: Mapping[str, OuterUpdate], rounds: Mapping[str, int]) -> None:
        """Save durably before returning. `rounds`: for each job, the number of rounds that its state includes."""
        with self._turn:
            before = () if self._index is None else self._index.updates
            written = self._write_updates(state.round, updates)
            name = f"state-{state.round}.safetensors"
            if self._index is None or self._index.state != name:
                parts = dict(zip(_PARTS, (state.anchor, state.momentum, state.residual), strict=True))
                tensors = {
                    f"{part}/{key}": host_tensor("float32", state.shapes[key], value.tobytes())
                    for part, values in parts.items()
                    for key, value in values.items()
                }
                self._write(name, tensors)
            self._replace(_Index(round=state.round, rounds=dict(rounds), state=name, updates=(*before, *written)))

    def updates(self, job: str, since: int) -> list[OuterUpdate]:
        with self._turn:
            entries = () if self._index is None else self._index.updates
            return [self._read_update(entry) for entry in entries if entry.job == job and entry.step >= since]

    def forget(self, job: str, below: int) -> None:
        with self._turn:
            if self._index is None:
                return
            kept = tuple(entry for entry in self._index.updates if entry.job != job or entry.step >= below)
            if len(kept) < len(self._index.updates):
                self._replace(msgspec.structs.replace(self._index, updates=kept))

    # ----------------------------------------------------------------------------------------------------- details

    def _write_updates(self, number: int, updates: Mapping[str, OuterUpdate]) -> list[_SavedUpdate]:
        """Write the answers; one that several jobs get is written once."""
        files: dict[int, tuple[str, tuple[PackedTensor, ...]]] = {}
        entries: list[_SavedUpdate] = []
        for job, outer_update in sorted(updates.items()):
            values = outer_update.values
            if id(values) not in files:
                body, packed = split(values)
                file = f"said-{number}-{job}-{outer_update.step}.safetensors"
                self._write(file, body)
                files[id(values)] = (file, packed)
            file, packed = files[id(values)]
            entries.append(
                _SavedUpdate(job=job, step=outer_update.step, form=outer_update.form, file=file, packed=packed)
            )
        return entries

    def _read_update(self, entry: _SavedUpdate) -> OuterUpdate:
        path = self._directory / entry.file
        file = SafetensorsFile(path)
        try:
            values: dict[str, Carried] = joined({name: file.read(name) for name in file.names}, entry.packed)
        except ExecutionError as problem:
            raise StorageError(f"{path} does not match its entry in {INDEX}: {problem}") from problem
        return OuterUpdate(entry.step, entry.form, values)

    def _write(self, name: str, tensors: Mapping[str, HostTensor]) -> None:
        path = self._directory / name
        with storage_errors(path):
            path.unlink(missing_ok=True)  # left by an interrupted write
        write_safetensors(path, tensors)

    def _replace(self, index: _Index) -> None:
        write_atomic(self._directory / INDEX, msgspec.json.encode(index))
        self._index = index
        self._clean()

    def _read_index(self) -> _Index | None:
        path = self._directory / INDEX
        with storage_errors(path, "read"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return msgspec.json.decode(content, type=_Index)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise StorageError(
                f"{path} does not fit its schema: {problem}.", hint="It may have been written by a newer version."
            ) from problem

    def _clean(self) -> None:
        named = set() if self._index is None else {self._index.state, *(entry.file for entry in self._index.updates)}
        for path in self._directory.glob("*.safetensors"):
            if path.name not in named:
                with suppress(OSError):
                    path.unlink()
