"""All forms in which the kernels for cards are compiled, and compiling them before a job is there.

A confined process can't start the assembler that Triton needs. So a process that is not confined compiles every form
while it measures the card, and later ones find the machine code on disk. The forms do not depend on a model: formats
of matrices and caches, three widths of heads, few or several rows. What is not among them (heads of more than 256
elements, more queries for a key head than lanes, rows that are no multiple of 16) fails in a confined process, and
operators serve. Neighbours: `card_matrix` and `card_program` launch these forms.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from fusionai.backends.torch import card_attention, card_launch, card_products, card_rows
from fusionai.backends.torch.card_matrix import LOOK_UP, options_of_several, options_of_single
from fusionai.backends.torch.card_program import LANES, OF_ATTENTION, OF_LINES, WIDE_HEADS
from fusionai.backends.torch.paged_attention import FORMS
from fusionai.backends.torch.row_code import Factor

log = logging.getLogger(__name__)

_WIDTHS: Final = (64, 128, 256)
_WHOLE: Final[tuple[str, ...]] = ("code", "line", "rows_at", "chosen", "slots", "tiles", "table", "rings")
"""Pointers to integers."""
_FLOATS: Final[tuple[str, ...]] = ("mem", "fed", "made", "parts", "x", "y", "bias", "indices")
_MATRICES: Final = (
    (Factor.FP32, 0, torch.float32, torch.float32),
    (Factor.BF16, 0, torch.bfloat16, torch.bfloat16),
    (Factor.FP16, 0, torch.float16, torch.float16),
    (Factor.INT8, 0, torch.int8, torch.bfloat16),
    *((Factor.INT4_32, group, torch.uint8, torch.bfloat16) for group in (32, 64, 128)),
)
"""Format, group, and the types of data and scales."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with what it is compiled for. `pointers`: argument -> type of its elements, for all arguments that are
    pointers; the others are integers. `options`: constants, and settings of the compiler."""

    name: str
    kernel: Any
    pointers: Mapping[str, torch.dtype]
    options: Mapping[str, Any]


def variants(precision: str) -> Iterator[Variant]:
    whole: dict[str, torch.dtype] = {**dict.fromkeys(_WHOLE, torch.int32), **dict.fromkeys(_FLOATS, torch.float32)}
    for dtype, form in FORMS.items():
        cache = whole | {"keys": dtype, "values": dtype}
        for wide in _WIDTHS:
            options = {"FORM": int(form), "WIDE": wide}
            yield Variant(f"lines {form.name} {wide}", card_rows.lines, cache, {**options, **OF_LINES})
            for lanes in LANES[: 1 if wide > WIDE_HEADS else 2]:
                own = {**options, **OF_ATTENTION, "LANES": lanes, "PRECISION": precision}
                yield Variant(f"attend {form.name} {wide} {lanes}", card_attention.attend, cache, own)
    for wide in _WIDTHS:
        yield Variant(f"combine {wide}", card_attention.combine, whole, {"WIDE": wide})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Variant(f"look_up {dtype}", card_products.look_up, whole | {"weight": dtype}, LOOK_UP)
    for factor, group, data, scales in _MATRICES:
        types = whole | {"weight": data, "scales": scales}
        label = f"{factor.name} {group}"
        for chosen in (False, True):
            options = options_of_single(factor, group, 16, chosen=chosen)
            yield Variant(f"single {label} {chosen}", card_products.single, types, options)
        for rows in (2, 17):
            options = options_of_several(factor, group, 16, rows, precision)
            yield Variant(f"several {label} {rows}", card_products.several, types, options)


def compile_all() -> None:
    """Compile every form for the present card, or find it on disk. A failure is recorded, and operators serve."""
    begun = time.perf_counter()

    def compile_one(variant: Variant) -> None:
        constants = variant.options.keys()
        args = [variant.pointers.get(name, 2) for name in variant.kernel.arg_names if name not in constants]
        variant.kernel.warmup(*args, grid=(1,), **variant.options)

    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, variants(card_launch.precision())))
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and operators serve instead
        card_launch.failed(error)
    log.info("the kernels for this card were ready after %.0f s", time.perf_counter() - begun)
