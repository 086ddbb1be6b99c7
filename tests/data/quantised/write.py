"""Writes the files beside it: one matrix in each form, quantised by the library whose form it is.

Run it where bitsandbytes 0.50.2, compressed-tensors 0.20.0 and hqq 0.2.8.post1 are installed, which the project's
own environment does not need: `python tests/data/quantised/write.py [FORM ...]`. A file's metadata has the model's
`quantization_config` and the SHA-256 of the numbers, in float32, that the library itself computes from its tensors.
`compressed-tensors` computes 4-bit floats in bfloat16; these files have its numbers as a tensor of their own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
NAME = "model.layers.0.mlp.down_proj.weight"


def _beside(name: str, other: str) -> str:
    return f"{name.removesuffix('weight')}{other}"


def _four_bits(*, nested: bool) -> Writer:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        tensors = {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        return {name: codes, **tensors}, functional.dequantize_4bit(codes, state).float()

    return write


def _eight_bits(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    from bitsandbytes import functional

    largest = weight.abs().amax(1)
    codes = torch.round(weight / largest[:, None] * 127).to(torch.int8)
    return {name: codes, _beside(name, "SCB"): largest}, functional.int8_vectorwise_dequant(codes, largest)


def _hqq(bits: int, axis: int) -> tuple[Mapping[str, Any], Writer]:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        settings = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
        made = HQQLinear(linear, quant_config=settings, compute_dtype=torch.float32, device="cpu")
        return {_beside(name, part): tensor for part, tensor in made.state_dict().items()}, made.dequantize()

    return {"quant_method": "hqq"}, write


def _compressed(**settings: Any) -> tuple[Mapping[str, Any], Writer]:
    def scheme() -> Any:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        whole = scheme()
        compressor = BaseCompressor.get_value_from_registry(_FORMATS[settings["num_bits"], settings["type"]](settings))
        group = settings.get("group_size") or weight.shape[1]
        grouped = weight.reshape(weight.shape[0], -1, group)
        low, high = grouped.amin(-1), grouped.amax(-1)
        overall = None
        if settings.get("strategy") == "tensor_group":
            overall = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        scale, zero = calculate_qparams(low, high, whole.weights, global_scale=overall)
        state = {"weight": weight, "weight_scale": scale}
        if not settings.get("symmetric", True):
            state["weight_zero_point"] = zero
        if overall is not None:
            state["weight_global_scale"] = overall
        kept = compressor.compress(state, whole)
        numbers = compressor.decompress(dict(kept), whole)["weight"].float()
        return {_beside(name, part): tensor for part, tensor in kept.items()}, numbers

    groups = {"group_0": {"targets": ["Linear"], "weights": settings}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}, write


_FORMATS: Mapping[tuple[int, str], Callable[[Mapping[str, Any]], str]] = {
    (3, "int"): lambda _: "pack-quantized",
    (4, "int"): lambda _: "pack-quantized",
    (8, "int"): lambda _: "int-quantized",
    (8, "float"): lambda _: "float-quantized",
    (4, "float"): lambda given: "nvfp4-pack-quantized" if given["group_size"] == 16 else "mxfp4-pack-quantized",
}


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMS: Mapping[str, tuple[Mapping[str, Any], Writer]] = {
    "nf4": (BITSANDBYTES, _four_bits(nested=False)),
    "nf4-nested": ({**BITSANDBYTES, "bnb_4bit_use_double_quant": True}, _four_bits(nested=True)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _eight_bits),
    "hqq-4": _hqq(4, 1),
    "hqq-3": _hqq(3, 1),
    "hqq-2": _hqq(2, 0),
    "ct-int4": _compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    "ct-int4-zeros": _compressed(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False),
    "ct-int3": _compressed(num_bits=3, type="int", strategy="group", group_size=64, symmetric=True),
    "ct-int8": _compressed(num_bits=8, type="int", strategy="channel", symmetric=True),
    "ct-fp8": _compressed(num_bits=8, type="float", strategy="channel", symmetric=True),
    "ct-nvfp4": _compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True),
    "ct-mxfp4": _compressed(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
}


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 256) * 0.1
    for form, (scheme, write) in FORMS.items():
        if form not in (sys.argv[1:] or FORMS):
            continue
        tensors, numbers = write(NAME, weight)
        digest = hashlib.sha256(numbers.float().contiguous().numpy().tobytes()).hexdigest()
        metadata = {"quantization_config": json.dumps(scheme), "numbers": digest}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if form == "ct-nvfp4":
            kept["numbers"] = numbers.bfloat16()
        save_file(kept, Path(__file__).with_name(f"{form}.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main()
