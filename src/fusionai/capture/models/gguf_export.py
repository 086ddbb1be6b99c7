"""Writes a model in Hugging Face layout as a GGUF file, for llama.cpp and its relatives.

Weights get llama.cpp's names and order of rows; matrices are quantised by the `gguf` package, one at a time, vectors
stay in float32. An adapter is merged into the layers it changes. Only architectures and tokenizers that llama.cpp runs
like transformers are written: others are refused by name. The file appears under its name once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fusionai.capture.models.gguf import llama3_divisors
from fusionai.capture.models.huggingface import resolve
from fusionai.capture.models.source import DirectorySource
from fusionai.ir.weights import floats_of_bfloat16
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.adapter_files import AdapterFiles
from fusionai.storage.atomic import PARTIAL_SUFFIX, storage_errors
from fusionai.storage.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from gguf import GGUFWriter

GgufType = Literal["f32", "f16", "q8_0", "q4_0"]
Float32s = npt.NDArray[np.float32]

_ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type -> llama.cpp's architecture."""
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    _SPLIT.replace("DIGITS", r"\p{N}{1,3}"): "llama-bpe",
    _SPLIT.replace("DIGITS", r"\p{N}"): "qwen2",
}
"""Pattern by which a tokenizer splits a text first -> llama.cpp's name of it."""
_BLOCK: Final = 32
"""Numbers of a row that share a scale; a matrix whose rows are no multiple is kept in float16."""


@dataclass(frozen=True, slots=True)
class ExportedGguf:
    """A written file. `kept_wider`: matrices that could not be quantised and are in float16."""

    tensors: int
    size_bytes: int
    kept_wider: tuple[str, ...]


def export_gguf(
    directory: Path,
    file: Path,
    kind: GgufType,
    *,
    adapter: AdapterFiles | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> ExportedGguf:
    """Write the model of `directory` to `file`. `on_progress`(tensors written, all). Raises `ModelError`,
    `StorageError`."""
    from gguf import GGUFWriter

    built = resolve(DirectorySource(directory))
    # Older files hold some settings under other names or leave defaults out, so transformers reads them.
    config = built.config.to_dict()
    architecture = _ARCHITECTURES.get(built.config.model_type)
    if architecture is None:
        raise _refused(f"{built.config.model_type} models", f"expected one of {', '.join(_ARCHITECTURES)}")
    if built.quantisation is not None:
        raise ModelError(
            f"the weights of {directory} are quantised; only plain weights are written as GGUF.",
            hint="Use the model that they were made from.",
        )
    partial = file.with_name(file.name + PARTIAL_SUFFIX)
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        writer = GGUFWriter(partial, architecture)
        try:
            _metadata(writer, config, directory)
            _vocabulary(writer, config, directory)
            tensors = _tensors(built.weights, config, architecture, adapter)
            count, wider = _weights(writer, tensors, kind, on_progress)
            writer.close()
            partial.replace(file)
        finally:
            writer.close()
            partial.unlink(missing_ok=True)
        return ExportedGguf(count, file.stat().st_size, wider)


def _json(path: Path) -> dict[str, Any]:
    with storage_errors(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ModelError(f"{path} is not valid JSON: {problem}.", hint="Save the model again.") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected an object.", hint="Save the model again.")
    return found


def _metadata(writer: GGUFWriter, config: Mapping[str, Any], directory: Path) -> None:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    rotations = config["rope_parameters"]
    if (scaling := rotations.get("rope_type", "default")) not in ("default", "llama3"):
        raise _refused(f"rotations of the type {scaling!r}", "expected 'default' or 'llama3'")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise _refused(f"a sliding window of {config['sliding_window']} positions", "expected none")
    if (function := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise _refused(f"the activation {function!r}", "expected 'silu'")
    writer.add_name(directory.resolve().name)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rotations["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))


def _refused(what: str, expected: str) -> ModelError:
    """Return the error for what llama.cpp would run otherwise than transformers."""
    return ModelError(
        f"{what} can't be written as GGUF; {expected}.",
        hint="Convert the directory with llama.cpp's convert_hf_to_gguf.py.",
    )


def _vocabulary(writer: GGUFWriter, config: Mapping[str, Any], directory: Path) -> None:
    from gguf import TokenType

    tokenizer, settings = _json(directory / "tokenizer.json"), {}
    if (directory / "tokenizer_config.json").is_file():
        settings = _json(directory / "tokenizer_config.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(tokenizer.get("pre_tokenizer")):
        raise _refused(f"a tokenizer like that of {directory}", "expected a byte-level BPE")
    size, added_tokens = int(config["vocab_size"]), tokenizer.get("added_tokens") or ()
    largest = max((*model["vocab"].values(), *(added["id"] for added in added_tokens)), default=0)
    if largest >= size:
        raise ModelError(
            f"the tokenizer of {directory} has token {largest}, but the model's vocabulary has {size} tokens.",
            hint="The tokenizer belongs to another model: save the model's own beside it.",
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(TokenType.UNUSED)] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, int(TokenType.NORMAL)
    for added in added_tokens:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = int(TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        ids = config.get(name)
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int):
            add(first)
    template = directory / "chat_template.jinja"
    written = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(written, str):
        writer.add_chat_template(written)


def _split(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pattern by which the tokenizer splits a text first. Raises `ModelError`."""
    split = tokenizer["pre_tokenizer"]
    steps = split.get("pretokenizers", [split])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if not patterns and any(step.get("use_regex", True) for step in steps if step.get("type") == "ByteLevel"):
        return "gpt-2"
    if len(patterns) == 1 and patterns[0] in _SPLITS:
        return _SPLITS[patterns[0]]
    raise _refused(
        f"a tokenizer that splits texts by {str(patterns)[:200]}", "expected Llama 3's, Qwen2's or GPT-2's way"
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A weight to be written. `read` returns its numbers, in the file's order of rows."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Float32s]


def _tensors(
    files: Sequence[Path], config: Mapping[str, Any], architecture: str, adapter: AdapterFiles | None
) -> list[_Tensor]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    of_architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(of_architecture, int(config["num_hidden_layers"]))
    changed = {} if adapter is None else dict(adapter.layers)
    found: list[_Tensor] = []
    for path in files:
        file = SafetensorsFile(path)
        for name in file.names:
            if name.endswith("rotary_emb.inv_freq"):
                continue
            written = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if written is None:
                raise ModelError(
                    f"llama.cpp's {architecture} has no weight like {name} ({path}).",
                    hint="Leave only the model's own *.safetensors in the directory.",
                )
            changed.pop(name.removesuffix(".weight"), None)
            read = _reader(file, name, config, architecture, adapter)
            found.append(_Tensor(written, file.span(name)[1], read))
    if changed:
        raise ModelError(
            f"the adapter changes {next(iter(changed))}, which the model does not have.",
            hint="Give the adapter's own base model.",
        )
    if not found:
        raise ModelError("the model has no weights (*.safetensors).", hint="Save the model, weights included.")
    if config["rope_parameters"].get("rope_type") == "llama3":
        table = llama3_divisors(config)
        found.append(_Tensor("rope_freqs.weight", table.shape, lambda: table))
    return found


def _reader(
    file: SafetensorsFile, name: str, config: Mapping[str, Any], architecture: str, adapter: AdapterFiles | None
) -> Callable[[], Float32s]:
    def read() -> Float32s:
        weight = _floats(file.read(name))
        layer = name.removesuffix(".weight")
        if adapter is not None and layer in adapter.layers:
            part, of_adapter = adapter.layers[layer], SafetensorsFile(adapter.weights)
            up, down = _floats(of_adapter.read(part.b)), _floats(of_adapter.read(part.a))
            weight += np.multiply(up @ down, adapter.config.scale(layer, part.rank), dtype=np.float32)
        if architecture == "llama" and ".self_attn.q_proj." in name:
            return _in_pairs(weight, int(config["num_attention_heads"]))
        if architecture == "llama" and ".self_attn.k_proj." in name:
            return _in_pairs(weight, int(config.get("num_key_value_heads") or config["num_attention_heads"]))
        return weight

    return read


def _floats(tensor: HostTensor) -> Float32s:
    if tensor.dtype == "bfloat16":
        return floats_of_bfloat16(np.frombuffer(tensor.data, np.uint16)).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape).astype(np.float32)


def _in_pairs(weight: Float32s, heads: int) -> Float32s:
    """Put the two halves of each rotation beside each other, as llama.cpp keeps them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _weights(
    writer: GGUFWriter,
    tensors: list[_Tensor],
    kind: GgufType,
    on_progress: Callable[[int, int], None],
) -> tuple[int, tuple[str, ...]]:
    """Write all weights, one in memory at a time. Returns their number, and the matrices kept in float16."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
    from gguf.quants import quantize

    wanted = GGMLQuantizationType[kind.upper()]
    of_file = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
    writer.add_file_type(int(LlamaFileType[of_file[kind]]))
    wider: list[str] = []
    kinds: list[GGMLQuantizationType] = []
    for tensor in tensors:
        of = wanted if len(tensor.shape) == 2 else GGMLQuantizationType.F32
        if len(tensor.shape) == 2 and kind.startswith("q") and tensor.shape[-1] % _BLOCK:
            of = GGMLQuantizationType.F16
            wider.append(tensor.name)
        kinds.append(of)
        block, block_bytes = GGML_QUANT_SIZES[of]
        row_bytes = tensor.shape[-1] // block * block_bytes
        nbytes = row_bytes * int(np.prod(tensor.shape[:-1], dtype=np.int64))
        held = np.dtype(np.uint8)
        writer.add_tensor_info(tensor.name, (*tensor.shape[:-1], row_bytes), held, nbytes, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (tensor, of) in enumerate(zip(tensors, kinds, strict=True), 1):
        writer.write_tensor_data(quantize(np.ascontiguousarray(tensor.read()), of).view(np.uint8))
        on_progress(done, len(tensors))
    return len(tensors), tuple(wider)
