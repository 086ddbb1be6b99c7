"""Models in GGUF files, as llama.cpp and its relatives use them: configuration, tokenizer and weights by name.

A GGUF file holds everything: metadata instead of config.json and tokenizer.json, and weights under llama.cpp's names.
Transformers converts the metadata; the result is kept as a small directory in Hugging Face layout whose config.json
names the GGUF file, so that everything else sees an ordinary model. The weights stay in the file and are read, sent and
cached as they lie there (`ir.unpacking` unpacks them).

Differences between llama.cpp's weights and transformers' are undone by the packing itself: rows in the order of
rotations (Llama), norms stored with one added (Gemma), experts as two stacks. Architectures whose weights differ in
other ways are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import platformdirs
from torch import nn

from fusionai.capture.models.source import SPLIT
from fusionai.ir.packed import check_packing
from fusionai.ir.schema import PackedPart, Packing
from fusionai.primitives.errors import GraphError, ModelError
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.quantised_files import PackedMatrix, QuantisedFiles
from fusionai.storage.safetensors_file import ByteRange

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_TABLE: Final = "rope_freqs.weight"
_LLAMA3: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of rotations in Llama 3.1 to 3.3, but for the factor."""
METHOD: Final = "gguf"
"""The `quant_method` of a config.json that names a GGUF file."""
_LAYOUT: Final = 2
"""Number of the form of the kept directories."""
_PLAIN: Final = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3", "starcoder2", "stablelm", "gemma2", "gemma3"}
)
"""Architectures that transformers reads, and whose weights are transformers' but for what is undone here."""
_ONE_ADDED: Final = frozenset({"gemma2", "gemma3"})
_OTHER_SCALE: Final = frozenset({("gemma2", 46), ("gemma3", 62)})
"""Architecture and number of layers of models whose attention has a scale that their metadata do not say (27B)."""
_EXPERTS: Final = re.compile(r"blk\.(\d+)\.ffn_(gate|up)_exps\.weight")
_ROTATED: Final = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def gguf_directory(file: Path) -> Path:
    """Return a directory in Hugging Face layout for a GGUF file, made once for each version of the file. Of a model in
    several files, any may be given. Raises `ModelError`."""
    file = files_of(file)[0]
    with storage_errors(file, "read"):
        stat = file.stat()
    stamp = f"{_LAYOUT} {file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    place = platformdirs.user_cache_path("fusionai") / "gguf" / hashlib.sha256(stamp.encode()).hexdigest()[:24]
    if not (place / "config.json").is_file():
        _write(file.resolve(), place)
    return place


def files_of(file: Path) -> tuple[Path, ...]:
    """Return the files of a model by one of them, as llama.cpp's `llama-gguf-split` names them. Raises `ModelError` if
    one is missing."""
    split = SPLIT.fullmatch(file.name)
    if split is None:
        return (file,)
    count = int(split["count"])
    paths = tuple(file.with_name(f"{split['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise ModelError(
            f"{file} is one of {count} files of a model; {', '.join(missing[:4]) or file.name} is not there.",
            hint="Put all files into one directory, under their own names.",
        )
    return paths


def _write(file: Path, place: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    reader = _opened(file)
    architecture = _text(reader, "general.architecture")
    if architecture not in _PLAIN:
        raise ModelError(
            f"{file} holds a model of the architecture {architecture!r}, whose GGUF files can't be read.",
            hint=f"Use the model's safetensors, or a GGUF file of one of {', '.join(sorted(_PLAIN))}.",
        )
    parts = reader.get_field("split.count")
    if parts is not None and max(1, int(parts.contents())) != len(files_of(file)):
        raise ModelError(
            f"{file} says that it is one of {parts.contents()} files of a model; its name says otherwise.",
            hint="Give the files the names that they were published with.",
        )
    tensors = (tensor for path in files_of(file) for tensor in (reader if path == file else _opened(path)).tensors)
    scaled = _scaled_rotations(reader, tensors, file)
    layers = reader.get_field(f"{architecture}.block_count")
    if layers is not None and (architecture, int(layers.contents())) in _OTHER_SCALE:
        raise ModelError(
            f"{file} does not say how its attention is scaled, and this model's differs from the smaller ones'.",
            hint="Use the model's safetensors.",
        )
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the metadata of {file} can't be read by transformers: {said}",
            hint="Use the model's safetensors, or another GGUF file of it.",
        ) from error
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(place)
        fields = {**config.to_dict(), "quantization_config": {"quant_method": METHOD, "file": str(file)}}
        width = reader.get_field(f"{architecture}.attention.key_length")
        if width is not None and "head_dim" in fields:
            fields["head_dim"] = int(width.contents())  # which transformers does not read
        if scaled is not None:
            fields["rope_parameters"] = {**fields["rope_parameters"], **scaled}
    # Last: a directory with this file is complete.
    write_atomic(place / "config.json", json.dumps(fields, default=str).encode())


def _scaled_rotations(reader: GGUFReader, tensors: Iterable[ReaderTensor], file: Path) -> dict[str, Any] | None:
    """Return how Llama 3.1 and its successors scale rotations, which the file says by a table of divisors; None if
    there is no table. Raises `ModelError` for a table of another kind."""
    tables = [tensor for tensor in tensors if tensor.name.startswith("rope_f")]
    if not tables:
        return None
    table = np.asarray(tables[0].data, np.float32).reshape(-1)
    theta = reader.get_field("llama.rope.freq_base")
    scaled = {**_LLAMA3, "factor": float(table.max(initial=0.0))}
    if tables[0].name == _TABLE and theta is not None and table.size and scaled["factor"] > 1.0:
        of_llama3 = {"head_dim": 2 * table.size, "rope_parameters": {**scaled, "rope_theta": theta.contents()}}
        if np.allclose(table, llama3_divisors(of_llama3), rtol=1e-4):
            return scaled
    raise ModelError(
        f"{file} scales its rotations by a table ({tables[0].name}) that is not Llama 3's.",
        hint="Use the model's safetensors.",
    )


def llama3_divisors(config: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return by how much Llama 3 divides each frequency of rotations. Source: `_compute_llama3_parameters` of
    transformers."""
    scaling = config["rope_parameters"]
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    frequencies = float(scaling["rope_theta"]) ** (-np.arange(0, width, 2) / width)
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * np.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / float(scaling["factor"]) + smooth)).astype(np.float32)


def _opened(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:
        raise ModelError(f"{file} is not a GGUF file that can be read: {error}.", hint="Fetch it again.") from error


def _text(reader: GGUFReader, name: str) -> str:
    field = reader.get_field(name)
    return "" if field is None else str(field.contents())


def gguf_matrices(scheme: Mapping[str, Any], module: nn.Module, config: Mapping[str, Any]) -> QuantisedFiles:
    """Return the weights of the GGUF file that a kept directory names, and of those that belong to it, by their names
    in `module`. Raises `ModelError`."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    file = Path(str(scheme.get("file")))
    if not file.is_file():
        raise ModelError(f"the GGUF file {file} is not there any more.", hint="Put it back, or name the new file.")
    readers = {path: _opened(path) for path in files_of(file)}
    architecture = _text(readers[file], "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(config))
    names = get_gguf_hf_weights_map(module, processor)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stacks: dict[str, dict[str, tuple[Path, ReaderTensor]]] = {}
    matrices: dict[str, PackedMatrix] = {}
    for path, tensor in ((path, tensor) for path, reader in readers.items() for tensor in reader.tensors):
        if tensor.name == _TABLE:
            continue  # read into the configuration
        name = names.get(tensor.name)
        if name is None or name not in shapes:
            raise ModelError(
                f"{path} has weights that its model does not know, such as {tensor.name}.",
                hint="Use the model's safetensors.",
            )
        if (stacked := _EXPERTS.fullmatch(tensor.name)) is not None:
            stacks.setdefault(name, {})[stacked[2]] = path, tensor
        else:
            heads = _heads(architecture, tensor.name, config)
            offset = -1.0 if architecture in _ONE_ADDED and "norm.weight" in tensor.name else 0.0
            packing = _checked(path, tensor, shapes[name], heads=heads, offset=offset)
            place = ByteRange(path, int(tensor.data_offset), int(tensor.n_bytes))
            matrices[name] = PackedMatrix((packing,), (place,))
    matrices |= {name: _experts(file, parts, shapes[name]) for name, parts in stacks.items()}
    return QuantisedFiles(matrices)


def _heads(architecture: str, name: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows llama.cpp reordered; 0: none."""
    part = next((part for part in _ROTATED if f".{part}." in name), None)
    return int(config[_ROTATED[part]]) if architecture == "llama" and part is not None else 0


def _checked(
    file: Path, tensor: ReaderTensor, shape: tuple[int, ...], *, parts: int = 1, heads: int = 0, offset: float = 0.0
) -> Packing:
    """Return the packing of each of the equal `parts` of a tensor of the file, if they fit `shape`."""
    width = int(tensor.shape[0])
    whole = tuple(int(size) for size in reversed(tensor.shape))
    if prod(whole) != parts * prod(shape):
        raise ModelError(
            f"{file}: the weight {tensor.name} has the shape {list(whole)}, the model expects {list(shape)}.",
            hint="Its metadata and weights belong to different models, or transformers misreads them: use safetensors.",
        )
    bytes_per_row = int(tensor.n_bytes) // prod(whole[:-1])
    rows = prod(shape) // width
    packing = Packing(
        form="gguf",
        shape=shape if shape and shape[-1] == width else (rows, width),
        parts=(PackedPart("uint8", (rows * bytes_per_row,)),),
        kind=tensor.tensor_type.name,
        heads=heads,
        offset=offset,
    )
    try:
        check_packing(packing)
    except GraphError as problem:
        raise ModelError(f"{file}: the weight {tensor.name}: {problem.message}", hint=problem.hint) from problem
    return packing


def _experts(file: Path, parts: Mapping[str, tuple[Path, ReaderTensor]], shape: tuple[int, ...]) -> PackedMatrix:
    """Return the stack [experts, gate and up, width] that the file holds as two."""
    if set(parts) != {"gate", "up"}:
        raise ModelError(f"{file} lacks half of the experts: it has only {', '.join(parts)}.", hint="Fetch it again.")
    experts, rows, width = shape

    def pieces() -> Iterator[tuple[Packing, ByteRange]]:
        for expert in range(experts):
            for path, tensor in (parts["gate"], parts["up"]):
                packing = _checked(path, tensor, (rows // 2, width), parts=experts)
                nbytes = int(tensor.n_bytes) // experts
                yield packing, ByteRange(path, int(tensor.data_offset) + expert * nbytes, nbytes)

    packings, ranges = zip(*pieces(), strict=True)
    return PackedMatrix(packings, ranges)
