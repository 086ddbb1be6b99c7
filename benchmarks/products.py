"""How fast a stage multiplies by a matrix in each format, beside float32.

    python benchmarks/products.py [--columns 4096] [--summands 2048] [--rounds 30] [--json FILE]

One thread, one row (a token) and 256 rows (a piece of a prompt). All formats are timed in turn within each round; a
ratio is the median, over the rounds, of the time with float32 to that with the format. Layouts of quantised files
(`ir.levels`) hold zeros: the time does not depend on the values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Final

import torch

from fusionai.backends.torch.blocked_linear import kernels
from fusionai.backends.torch.packed_linear import PackedLinear, for_levels, pack
from fusionai.backends.torch.row_blocks import LEVELS
from fusionai.wire.serving import WeightFormat

PLAIN: Final[tuple[WeightFormat, ...]] = ("fp32", "bf16", "fp16", "int8", "int4")
ROWS: Final = (1, 256)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    if kernels() is None:
        raise SystemExit("compiled products are not available here (numba is missing)")
    shape = (arguments.columns, arguments.summands)
    products = _products(shape)
    inputs = {rows: torch.randn(rows, arguments.summands) for rows in ROWS}
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in products for rows in ROWS}
    for _ in range(arguments.rounds):
        for (name, rows), seconds in times.items():
            began_s = time.perf_counter()
            products[name](inputs[rows])
            seconds.append(time.perf_counter() - began_s)
    found = {name: _row(name, product, shape, times) for name, product in products.items()}
    for name, row in found.items():
        print(f"{name:16} {row['bits']:6.2f} bits  1 row {row['ratio_1']:5.2f}  256 rows {row['ratio_256']:5.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"shape": shape, "formats": found}, indent=2), encoding="utf-8")


def _products(shape: tuple[int, int]) -> dict[str, PackedLinear]:
    weight = torch.randn(shape)
    found = {form: pack(weight, None, form, "the matrix", in_blocks=True) for form in PLAIN}
    for layout, factor in LEVELS.items():
        if shape[1] % layout.shared == 0:
            product = for_levels(shape, layout)
            assert product.blocks is not None
            product.blocks.data.zero_()
            found[factor.name.lower()] = product
    for product in found.values():  # compiles, and touches all memory
        product(torch.zeros(1, shape[1]))
        product(torch.zeros(256, shape[1]))
    return found


def _row(
    name: str, product: PackedLinear, shape: tuple[int, int], times: dict[tuple[str, int], list[float]]
) -> dict[str, float]:
    ratios = {
        rows: statistics.median(plain / own for plain, own in zip(times["fp32", rows], times[name, rows], strict=True))
        for rows in ROWS
    }
    bits = 8.0 * product.nbytes / (shape[0] * shape[1])
    return {"bits": bits, "ratio_1": ratios[1], "ratio_256": ratios[256]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--summands", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
