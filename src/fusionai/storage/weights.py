"""Reads the weights of a model directory in Hugging Face layout. Decides which files hold them.

The job owner imports pretrained models through this; `checkpoint` writes the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.atomic import storage_errors
from fusionai.storage.safetensors_file import SafetensorsFile

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class WeightIndex(msgspec.Struct, frozen=True):
    """Content of `model.safetensors.index.json`: tensor name -> file."""

    weight_map: dict[str, str]
    metadata: dict[str, object] = {}


class ModelDirectory:
    """Tensors of a model by their names in the files, mapped and not read."""

    def __init__(self, directory: Path) -> None:
        """Raises `StorageError` if there are no safetensors weights or a shard is missing or damaged."""
        self._directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of = self._located()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._file_of))

    def read(self, name: str) -> HostTensor:
        """Return a tensor. Raises `StorageError` for an unknown name."""
        if name not in self._file_of:
            raise StorageError(f"{self._directory}: the model's files have no tensor {name!r}.")
        return self._file_of[name].read(name)

    def entries(self, names: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        """Yield the tensors of `names` in that order."""
        return ((name, self.read(name)) for name in names)

    def _located(self) -> dict[str, SafetensorsFile]:
        index = self._directory / INDEX_FILE
        if not index.is_file():
            single = self._directory / SINGLE_FILE
            if not single.is_file():
                raise StorageError(
                    f"{self._directory}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither.",
                    hint="Save the model with transformers: model.save_pretrained(DIRECTORY).",
                )
            file = SafetensorsFile(single)
            return dict.fromkeys(file.names, file)
        with storage_errors(index, "read"):
            content = index.read_bytes()
        try:
            weight_map = msgspec.json.decode(content, type=WeightIndex).weight_map
        except msgspec.DecodeError as problem:
            raise StorageError(f"{index} is damaged: {problem}.") from None
        files: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise StorageError(f"{index}: {shard!r} is not the name of a file beside it.")
            files[shard] = SafetensorsFile(self._directory / shard)
        for name, shard in weight_map.items():
            if name not in files[shard].names:
                raise StorageError(f"{self._directory / shard} is damaged: it lacks the tensor {name!r}.")
        return {name: files[shard] for name, shard in weight_map.items()}
