"""Compiles the kernels for cards that are not here: PTX and machine code for NVIDIA's, machine code for AMD's.

`python -m harness.cross_compiled TARGET...` prints the sizes of each kernel as JSON. It is a process of
its own, because kernels imported for the interpreter can't be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import torch

ROOT: Final = Path(__file__).parents[2]

TARGETS: Final = {
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx1100": ("hip", "gfx1100", 32),
}
"""Backend, architecture, threads that run in step."""
_TYPES: Final = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int8: "i8",
    torch.uint8: "u8",
}  # fmt: skip
"""Triton's names of types."""


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


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusionai.backends.torch.card_variants import variants

    wanted = [one.removeprefix("--only=") for one in sys.argv[1:] if one.startswith("--only=")]
    results: Found = {}
    for target in (one for one in sys.argv[1:] if not one.startswith("--")):
        backend, architecture, step = TARGETS[target]
        sizes = results[target] = {}
        for variant in variants("ieee" if backend == "hip" else "tf32x3"):
            if wanted and not variant.name.startswith(tuple(wanted)):
                continue
            kernel = variant.kernel
            constants = {name: value for name, value in variant.options.items() if name in kernel.arg_names}
            options = {name: value for name, value in variant.options.items() if name not in constants}
            types = {name: "*" + _TYPES[dtype] for name, dtype in variant.pointers.items()}
            signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget(backend, architecture, step), options=options)
            code = made.asm["cubin" if backend == "cuda" else "hsaco"]
            sizes[variant.name] = Machine(len(code), made.metadata.shared)
    sys.stdout.buffer.write(msgspec.json.encode(results) + b"\n")


if __name__ == "__main__":
    main()
