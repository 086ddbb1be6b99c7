"""Writes small llamas as GGUF files, as llama.cpp's `convert_hf_to_gguf.py` and `llama-quantize` do.

Blocks of the K types can be quantised by llama.cpp alone: here they are random, and the numbers that they stand for are
the `gguf` package's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def write_gguf(directory: Path, file: Path, kind: str, *, architecture: str = "llama") -> None:
    """Write the model of `directory` (Hugging Face layout) to `file`, its matrices as `kind`, and write the numbers
    that they stand for back to `directory`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, architecture)
    _metadata(writer, config)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    _vocabulary(writer, directory)
    numbers = load_file(directory / "model.safetensors")
    for name, weight in numbers.items():
        stored = weight
        if architecture == "llama" and ".q_proj." in name:
            stored = _rotated(weight, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in name:
            stored = _rotated(weight, config["num_key_value_heads"])
        if weight.ndim == 1:
            writer.add_tensor(_gguf_name(name), stored.astype(np.float32))
            continue
        packed, meant = _quantised(stored, kind, seed=len(name))
        of_kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=None if kind in ("F16", "F32") else of_kind)
        if architecture == "llama" and ".q_proj." in name:
            meant = _restored(meant, config["num_attention_heads"])
        elif architecture == "llama" and ".k_proj." in name:
            meant = _restored(meant, config["num_key_value_heads"])
        numbers[name] = np.ascontiguousarray(meant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(numbers, directory / "model.safetensors", metadata={"format": "pt"})


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("a small model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def _divisors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    scaling = config["rope_parameters"]
    dim = config["hidden_size"] // config["num_attention_heads"]
    made: list[float] = []
    for frequency in 1.0 / scaling["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        length = 2 * np.pi / frequency
        longest = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        shortest = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        if length < shortest:
            made.append(1.0)
        elif length > longest:
            made.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            made.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(made, np.float32)


def _vocabulary(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(gguf.TokenType.UNUSED)] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{end}"
    return f"{_NAMES[stem]}.{end}"


def _quantised(weight: npt.NDArray[Any], kind: str, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    of_kind = gguf.GGMLQuantizationType[kind]
    if kind == "F16":
        return weight.astype(np.float16), weight.astype(np.float16).astype(np.float32)
    if kind == "F32":
        return weight, weight
    try:
        packed = quantize(weight, of_kind)
    except NotImplementedError:
        packed = _random_blocks(weight, of_kind, seed)
    return packed, dequantize(packed, of_kind)


def _random_blocks(weight: npt.NDArray[Any], kind: gguf.GGMLQuantizationType, seed: int) -> npt.NDArray[Any]:
    """Blocks with random codes; half-precision scales, wherever the type keeps them, are small numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (weight.size // size, nbytes), dtype=np.uint8)
    scale = np.float16(0.002).view(np.uint16)
    for at in _SCALES[kind.name]:
        blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,), "Q3_K": (108,)}
"""Offsets of half-precision scales within a block."""


def _rotated(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """`LlamaModel.permute` of llama.cpp's converter."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _restored(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
