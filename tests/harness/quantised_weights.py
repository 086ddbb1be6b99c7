"""Quantises matrices as the files of quantised models have them, by the published layouts.

Each writer takes a matrix [rows, columns] and returns the tensors that the form's files hold instead, and the numbers
that the form's library computes from them in float32 (compared with AutoGPTQ 0.7.1's `QuantLinear` and AutoAWQ 0.2.9's
`dequantize_gemm`: equal). `write_quantised` does so with a whole model. Matrices that libraries wrote themselves lie in
`tests/data/quantised`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fusionai.corpus.tokens import train_tokenizer
from fusionai.ir.unpacking import TABLES

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""(name of the weight, matrix) -> (tensors in files, numbers)."""


@dataclass(frozen=True)
class Form:
    """`scheme`: what the model's config.json says. `bytes_per_number`: of its matrices, at most."""

    scheme: Mapping[str, Any]
    write: Writer
    bytes_per_number: float


def _float8_blocks(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.reshape(rows // 64, 64, columns // 64, 64)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scales[:, None, :, None]).reshape(rows, columns)
    return {name: codes.reshape(rows, columns), f"{name}_scale_inv": scales}, numbers


def _float8_whole(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {name: codes, _beside(name, "weight_scale"): scale.reshape(1)}, codes.float() * scale


def _beside(name: str, other: str) -> str:
    return f"{name.removesuffix('weight')}{other}"


def _levels(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [in, out], zero points and half-precision scales [groups, out], as GPTQ and AWQ count them."""
    grouped = weight.T.reshape(-1, group, weight.shape[0])
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    most = 2**bits - 1
    scales = ((high - low) / most).half()
    zeros = torch.round(-low / scales.float()).clamp(0, most)
    codes = torch.round(grouped / scales.float()[:, None] + zeros[:, None]).clamp(0, most)
    return codes.reshape(weight.T.shape).to(torch.int64), zeros.to(torch.int64), scales


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, columns] as words [n * bits / 32, columns] of a stream of bits, lowest first."""
    stream = (codes[:, None] >> torch.arange(bits)[None, :, None]) & 1
    stream = stream.reshape(-1, 32, codes.shape[1])
    words = (stream << torch.arange(32)[None, :, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(bits: int, *, ordered: bool, newer: bool) -> tuple[Mapping[str, Any], Writer]:
    """AutoGPTQ's `QuantLinear.pack`: its version 1 stores zero points less one."""
    group = 64

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.arange(weight.shape[1])
        if ordered:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        codes, zeros, scales = _levels(weight[:, order], bits, group)
        numbers = (codes.float() - zeros.float().repeat_interleave(group, 0)) * scales.float().repeat_interleave(
            group, 0
        )
        back = torch.argsort(order)
        stored = zeros if newer else (zeros - 1) & (2**bits - 1)
        return {
            _beside(name, "qweight"): _packed(codes[back], bits),
            _beside(name, "qzeros"): _packed(stored.T, bits).T.contiguous(),
            _beside(name, "scales"): scales,
            _beside(name, "g_idx"): (back // group).to(torch.int32),
        }, numbers[back].T

    scheme = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": ordered,
        "checkpoint_format": "gptq_v2" if newer else "gptq",
    }
    return scheme, write


def _awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """llm-awq's `WQLinear_GEMM.from_linear`."""
    codes, zeros, scales = _levels(weight, 4, 64)

    def words(values: torch.Tensor) -> torch.Tensor:
        ordered = values.reshape(values.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        packed = (ordered << (4 * torch.arange(8))).sum(-1)
        return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

    numbers = (codes.float() - zeros.float().repeat_interleave(64, 0)) * scales.float().repeat_interleave(64, 0)
    parts = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    return {_beside(name, part): tensor for part, tensor in parts.items()}, numbers.T


def _nf4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """bitsandbytes' 4-bit codes, 64 numbers to a scale, the first of each pair in the upper half of its byte."""
    table = torch.from_numpy(TABLES["nf4"].copy())
    groups = weight.reshape(-1, 64)
    largest = groups.abs().amax(1)
    codes = ((groups / largest[:, None])[..., None] - table).abs().argmin(-1).to(torch.uint8)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {
        name: (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        f"{name}.absmax": largest,
        f"{name}.quant_map": table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors, (table[codes.long()] * largest[:, None]).reshape(weight.shape)


def _hqq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """HQQ's `pack_4bit_u8` of groups of 64: the first half of the groups in the upper halves of bytes."""
    groups = weight.reshape(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).half()
    codes = torch.round(groups / scales.float() + zeros.float()).clamp(0, 15)
    upper, lower = codes.to(torch.uint8).chunk(2)
    settings = {"nbits": 4, "group_size": 64, "axis": 1}
    tensors = {
        "W_q": upper << 4 | lower,
        "scale": scales,
        "zero": zeros,
        "shape": torch.tensor(weight.shape),
        **{setting: torch.tensor(value, dtype=torch.int32) for setting, value in settings.items()},
    }
    numbers = ((codes - zeros.float()) * scales.float()).reshape(weight.shape)
    return {_beside(name, part): tensor for part, tensor in tensors.items()}, numbers


SETTINGS = ("g_idx", "__nf4", "nbits", "group_size", "axis", "shape")
"""Ends of names of tensors that say how a matrix is packed."""


def _forms() -> dict[str, Form]:
    return {
        "fp8": Form({"quant_method": "fp8", "weight_block_size": [64, 64]}, _float8_blocks, 1.01),
        "fp8-whole": Form({"quant_method": "fp8", "activation_scheme": "static"}, _float8_whole, 1.01),
        "gptq-4": Form(*_gptq(4, ordered=False, newer=False), 0.58),
        "gptq-4-act-order": Form(*_gptq(4, ordered=True, newer=False), 0.58),
        "gptq-3": Form(*_gptq(3, ordered=True, newer=True), 0.45),
        "gptq-8": Form(*_gptq(8, ordered=False, newer=True), 1.1),
        "nf4": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4, 0.58),
        "hqq": Form({"quant_method": "hqq"}, _hqq, 0.58),
        "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, _awq, 0.55),
    }


FORMS = _forms()


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 300 tokens as a model's files have it."""
    directory.mkdir(exist_ok=True)
    for name, content in train_tokenizer(iter(["a pool of peers serves a model " * 40]), 300).files.items():
        (directory / name).write_bytes(content)


def write_quantised(directory: Path, form: Form, *, model: Any, plain: Path) -> None:
    """Write a transformers model's linear layers in a form to `directory`, and to `plain` the numbers that they stand
    for."""
    model.save_pretrained(directory)
    write_tokenizer(directory)
    shutil.copytree(directory, plain)
    kept: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() == 2 and name.endswith("proj.weight"):
            tensors, numbers[name] = form.write(name, tensor)
            kept |= {part: value.contiguous() for part, value in tensors.items()}
        else:
            kept[name] = numbers[name] = tensor
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {name: tensor.contiguous() for name, tensor in numbers.items()},
        plain / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": form.scheme}), encoding="utf-8")
