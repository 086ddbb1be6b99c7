"""Compiles the kernels for cards that are not here: PTX and machine code for NVIDIA's, machine code for AMD's.

`python -m harness.cross_compiled TARGET...` prints the sizes of each kernel as JSON. It is a process of
its own, because kernels imported for the interpreter can't be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).parents[2]

TARGETS: Final = {
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx1100": ("hip", "gfx1100", 32),
}
"""Backend, architecture, threads that run in step."""
_ELEMENTS: Final = {-1: "fp32", 0: "fp32", 1: "bf16", 2: "fp16", 3: "u8"}
"""Format of a cache (`row_code.Form`) -> its elements."""


class Machine(msgspec.Struct):
    """A kernel in a card's machine code. `shared_bytes`: memory that each group of threads takes."""

    code_bytes: int
    shared_bytes: int


Found = dict[str, dict[str, Machine]]


def compiled(*targets: str, only: Sequence[str] = ()) -> Found:
    """Return, for each target, the kernels by name. `only`: kernels whose names begin so."""
    command = [sys.executable, "-m", "harness.cross_compiled", *targets, *(f"--only={name}" for name in only)]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    with TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
        ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.decode()[-3000:])
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Found)


def _variants(precision: str) -> dict[str, tuple[Any, Mapping[str, str], dict[str, Any], dict[str, Any]]]:
    """Return name -> kernel, types of pointers that are not float32, constants, options."""
    from fusionai.backends.torch import card_attention, card_products, card_rows
    from fusionai.backends.torch.row_code import Factor

    whole = {"code": "*i32", "line": "*i32", "rows_at": "*i32", "chosen": "*i32", "slots": "*i32", "tiles": "*i32"}
    whole |= {"table": "*i32", "rings": "*i32"}
    found: dict[str, Any] = {}
    for form, element in _ELEMENTS.items():
        cache = whole | {"keys": f"*{element}", "values": f"*{element}"}
        run = {"num_warps": 8, "enable_fp_fusion": False}
        found[f"lines {form}"] = card_rows.lines, cache, {"FORM": form, "WIDE": 128}, run
        if form < 0:
            continue
        for lanes, wide, split in ((16, 128, True), (16, 128, False), (32, 128, False), (16, 256, True)):
            constants = {"FORM": form, "SPLIT": split, "LANES": lanes, "KEYS": 32, "WIDE": wide, "PRECISION": precision}
            found[f"attend {form} {lanes} {wide} {split}"] = card_attention.attend, cache, constants, {"num_stages": 1}
    found["combine"] = card_attention.combine, whole, {"WIDE": 128}, {}
    matrices = (
        (Factor.FP32, 0, "fp32", "fp32"), (Factor.BF16, 0, "bf16", "bf16"), (Factor.FP16, 0, "fp16", "fp16"),
        (Factor.INT8, 0, "i8", "bf16"), (Factor.INT4_32, 32, "u8", "bf16"), (Factor.INT4_32, 64, "u8", "bf16"),
        (Factor.INT4_32, 128, "u8", "bf16"),
    )  # fmt: skip
    for factor, group, data, scales in matrices:
        types = whole | {"weight": f"*{data}", "scales": f"*{scales}"}
        form = {"FORM": int(factor), "GROUP": group, "BLOCK_N": 16, "BLOCK_K": 128}
        label = f"{factor.name} {group}"
        for chosen in (False, True):
            constants = form | {"BIASED": not chosen, "CHOSEN": chosen}
            found[f"single {label} {chosen}"] = card_products.single, types, constants, {}
        step = min(group, 64) if group else 32 if factor is Factor.FP32 else 64
        for rows in (16, 64):
            constants = form | {"BIASED": True, "ROWS": rows, "PRECISION": precision, "BLOCK_N": 64, "BLOCK_K": step}
            found[f"several {label} {rows}"] = card_products.several, types, constants, {}
    return found


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted = [one.removeprefix("--only=") for one in sys.argv[1:] if one.startswith("--only=")]
    results: Found = {}
    pointers = ("mem", "fed", "made", "parts", "x", "y", "bias", "indices")
    for target in (one for one in sys.argv[1:] if not one.startswith("--")):
        backend, architecture, step = TARGETS[target]
        sizes = results[target] = {}
        variants = _variants("ieee" if backend == "hip" else "tf32x3")
        for name, (kernel, types, constants, options) in variants.items():
            if wanted and not name.startswith(tuple(wanted)):
                continue
            signature = {
                one: "constexpr" if one in constants else types.get(one, "*fp32" if one in pointers else "i32")
                for one in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget(backend, architecture, step), options=options)
            code = made.asm["cubin" if backend == "cuda" else "hsaco"]
            sizes[name] = Machine(len(code), made.metadata.shared)
    sys.stdout.buffer.write(msgspec.json.encode(results) + b"\n")


if __name__ == "__main__":
    main()
