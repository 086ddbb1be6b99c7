"""How fast pieces of prompts are multiplied in every weight format, beside torch's float32 product.

    python benchmarks/prompts.py [--rounds 5] [--rows 1 8 64 256 512] [--threads 1] [--json FILE]

Three matrices of a model of 1.1 billion parameters. Each round multiplies by every format and by `F.linear` in float32,
one after the other, so that a busy machine slows all alike; `ratio` is the median over rounds of a format's speed over
float32's of the same round and rows. With one thread, time is the thread's own processor time. For lower instruction
sets set ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS and NUMBA_CPU_NAME (with NUMBA_CPU_FEATURES
empty) before the start: `avx2`, `AVX2`, `AVX2`, `haswell`, or `default`, `SSE41`, `SSE4_2`, `nehalem`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch.nn.functional import linear

from fusionai.backends.torch.blocked_linear import kernels
from fusionai.backends.torch.packed_linear import pack
from fusionai.wire.serving import WeightFormat

SHAPES: Final = ((2048, 2048), (5632, 2048), (2048, 5632))
"""Columns and summands."""
LEAST_S: Final = 0.03
"""Of one measurement."""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    found = [_measured(columns, count, arguments) for columns, count in SHAPES]
    report = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "compiled": kernels() is not None,
        "threads": arguments.threads,
        "worst_ratio_of_many_rows": min(
            row["ratio"] for shape in found for row in shape["products"] if row["rows"] >= 64
        ),
        "shapes": found,
    }
    print(json.dumps(report, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _measured(columns: int, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((columns, count), generator=generator) / count**0.5
    formats = get_args(WeightFormat)
    products = {form: pack(weight, None, form, "weight", in_blocks=kernels() is not None) for form in formats}
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    rows_of: list[dict[str, Any]] = []
    for rows in arguments.rows:
        x = torch.randn((rows, count), generator=generator)
        speeds: dict[str, list[float]] = {form: [] for form in (*formats, "torch")}
        for _ in range(arguments.rounds):
            speeds["torch"].append(_per_s(lambda x=x: linear(x, weight), clock))
            for form, product in products.items():
                speeds[form].append(_per_s(lambda x=x, product=product: product(x), clock))
        flops = 2.0 * rows * weight.numel()
        rows_of += [
            {
                "format": form,
                "rows": rows,
                "gflops_per_s": round(statistics.median(speeds[form]) * flops / 1e9, 2),
                "torch_fp32_gflops_per_s": round(statistics.median(speeds["torch"]) * flops / 1e9, 2),
                "ratio": round(
                    statistics.median(own / torchs for own, torchs in zip(speeds[form], speeds["torch"], strict=True)),
                    3,
                ),
            }
            for form in formats
        ]
    return {"columns": columns, "summands": count, "products": rows_of}


def _per_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    call()
    start_s, calls = clock(), 0
    while True:
        call()
        calls += 1
        took_s = clock() - start_s
        if took_s >= LEAST_S:
            return calls / took_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
