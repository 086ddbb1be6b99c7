"""The tensors of a model directory in Hugging Face layout, by its index or from its one file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fusionai.primitives.tensors import HostTensor
from fusionai.storage.safetensors_file import INDEX_FILE, SINGLE_FILE, SafetensorsFile, WeightIndex


def model_tensors(directory: Path) -> dict[str, HostTensor]:
    """By name, sorted."""
    index = directory / INDEX_FILE
    if index.is_file():
        file_of = msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map
    else:
        file_of = dict.fromkeys(SafetensorsFile(directory / SINGLE_FILE).names, SINGLE_FILE)
    files = {name: SafetensorsFile(directory / name) for name in set(file_of.values())}
    return {name: files[file_of[name]].read(name) for name in sorted(file_of)}
