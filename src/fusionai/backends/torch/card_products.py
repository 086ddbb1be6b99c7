"""Products with packed matrices on a card, which read levels where they lie and never write the numbers to memory.

`single` serves one row at a time, and rows that each have an expert: it multiplies by the same numbers as a processor
does, in float32. `several` uses the card's units for small matrices. Levels have at most eight bits, so bfloat16 holds
them exactly; rows in float32 are split into two bfloat16, and scales are applied to the sums of a group, so that what
is lost is in the order of float32's own rounding. Neighbours: `card_matrix` holds the matrices, `packed_linear` made
the levels.
"""

# pyright: basic, reportMissingTypeStubs=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingParameterType=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fusionai.backends.torch.card_launch import ANYWHERE_OF_PRODUCTS, SIZES
from fusionai.backends.torch.row_code import Factor

_BF16: tl.constexpr = tl.constexpr(int(Factor.BF16))
_FP16: tl.constexpr = tl.constexpr(int(Factor.FP16))
_INT8: tl.constexpr = tl.constexpr(int(Factor.INT8))
_INT4: tl.constexpr = tl.constexpr(int(Factor.INT4_32))
"""Stands for every group's size, which is an argument of its own."""


@triton.jit
def four_bits(bytes_: tl.tensor, scale: tl.tensor, middle: tl.tensor) -> Any:
    """Return the numbers of the lower and of the upper halves of bytes. The product is exact, so its sum with the
    middle is rounded once, whether or not both are one instruction."""
    low = ((bytes_ & 15).to(tl.int32) - 8).to(tl.float32) * scale + middle
    high = ((bytes_ >> 4).to(tl.int32) - 8).to(tl.float32) * scale + middle
    return low, high


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE_OF_PRODUCTS)
def single(
    x: tl.tensor, x_width: tl.tensor, rows_at: tl.tensor, y: tl.tensor, y_width: tl.tensor, weight: tl.tensor,
    scales: tl.tensor, bias: tl.tensor, biased: tl.tensor, indices: tl.tensor, columns: tl.tensor, count: tl.tensor,
    chosen_experts: tl.tensor, x_step: tl.tensor, known: tl.tensor, FORM: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row (axis 1) by some columns (axis 0). `rows_at`: places of the rows in x and y. With ALIGNED,
    `count` is a multiple of 16. With CHOSEN, axis 1 counts the experts of each row too, whose numbers are in `indices`,
    laid out as x; `x_step` is between the operands of two experts, and `known` is how many there are."""
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    number = tl.program_id(1)
    at = tl.load(rows_at + number // chosen_experts)
    which = number % chosen_experts
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    matrix = n.to(tl.int64)
    real = True
    if CHOSEN:
        value = tl.load(indices + at * x_width + which)
        real = (value >= 0) & (value < known)
        matrix += tl.where(real, value, 0.0).to(tl.int64) * columns
    x_at = x + at * x_width + which * x_step
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if FORM == _INT4:
        half = count // 2
        for start in range(0, half, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = inside[:, None] & (k < half)[None, :]
            bytes_ = tl.load(weight + matrix[:, None] * half + k[None, :], mask=some, other=0)
            pair = scales + 2 * (matrix[:, None] * (count // GROUP) + (2 * k // GROUP)[None, :])
            scale = tl.load(pair, mask=some, other=0.0).to(tl.float32)
            middle = tl.load(pair + 1, mask=some, other=0.0).to(tl.float32)
            low, high = four_bits(bytes_, scale, middle)
            sums += tl.load(x_at + 2 * k, mask=k < half, other=0.0)[None, :] * low
            sums += tl.load(x_at + 2 * k + 1, mask=k < half, other=0.0)[None, :] * high
    else:
        for start in range(0, count, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = inside[:, None] & (k < count)[None, :]
            own = tl.load(weight + matrix[:, None] * count + k[None, :], mask=some, other=0.0).to(tl.float32)
            row = tl.load(x_at + k, mask=k < count, other=0.0)
            if FORM == _BF16:
                row = row.to(tl.bfloat16).to(tl.float32)
            if FORM == _FP16:
                row = row.to(tl.float16).to(tl.float32)
            sums += row[None, :] * own
    made = tl.sum(sums, 1)
    if FORM == _INT8:
        made *= tl.load(scales + matrix, mask=inside, other=0.0).to(tl.float32)
    if biased > 0:
        made += tl.load(bias + n, mask=inside, other=0.0)
    if CHOSEN:
        made = tl.where(real, made, float("nan"))
    tl.store(y + at * y_width + which * columns + n, made, mask=inside)


@triton.jit
def _halved(x: tl.tensor) -> Any:
    """Return two bfloat16 whose sum is x up to 16 bits."""
    first = x.to(tl.bfloat16)
    return first, (x - first.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE_OF_PRODUCTS)
def several(
    x: tl.tensor, x_width: tl.tensor, rows_at: tl.tensor, y: tl.tensor, y_width: tl.tensor, weight: tl.tensor,
    scales: tl.tensor, bias: tl.tensor, biased: tl.tensor, columns: tl.tensor, count: tl.tensor, rows: tl.tensor,
    FORM: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ROWS rows (axis 1) by some columns (axis 0). In four bits, BLOCK_K is at most GROUP."""
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = r < rows
    at = tl.load(rows_at + r, mask=there, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    matrix = n.to(tl.int64)
    x_at = x + (at * x_width)[:, None]
    sums = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if FORM == _INT4:
        half = count // 2
        for start in range(0, half, BLOCK_K // 2):
            k = start + tl.arange(0, BLOCK_K // 2)
            bytes_ = tl.load(weight + matrix[None, :] * half + k[:, None], mask=inside[None, :], other=0)
            pair = scales + 2 * (matrix * (count // GROUP) + 2 * start // GROUP)
            scale = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
            middle = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
            low = ((bytes_ & 15).to(tl.int32) - 8).to(tl.bfloat16)
            high = ((bytes_ >> 4).to(tl.int32) - 8).to(tl.bfloat16)
            even = tl.load(x_at + (2 * k)[None, :], mask=there[:, None], other=0.0)
            odd = tl.load(x_at + (2 * k + 1)[None, :], mask=there[:, None], other=0.0)
            even_first, even_rest = _halved(even)
            odd_first, odd_rest = _halved(odd)
            own = tl.dot(even_first, low) + tl.dot(even_rest, low)
            own += tl.dot(odd_first, high) + tl.dot(odd_rest, high)
            sums += own * scale[None, :] + tl.sum(even + odd, 1)[:, None] * middle[None, :]
    else:
        for start in range(0, count, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = inside[None, :] & (k < count)[:, None]
            own = tl.load(weight + matrix[None, :] * count + k[:, None], mask=some, other=0.0)
            row = tl.load(x_at + k[None, :], mask=there[:, None] & (k < count)[None, :], other=0.0)
            if FORM == _INT8:
                first, rest = _halved(row)
                levels = own.to(tl.bfloat16)
                sums += tl.dot(first, levels) + tl.dot(rest, levels)
            elif FORM == _BF16:
                sums += tl.dot(row.to(tl.bfloat16), own)
            elif FORM == _FP16:
                sums += tl.dot(row.to(tl.float16), own)
            else:
                sums += tl.dot(row, own, input_precision=PRECISION)
    if FORM == _INT8:
        sums *= tl.load(scales + matrix, mask=inside, other=0.0).to(tl.float32)[None, :]
    if biased > 0:
        sums += tl.load(bias + n, mask=inside, other=0.0)[None, :]
    tl.store(y + (at * y_width)[:, None] + n[None, :], sums, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=(*ANYWHERE_OF_PRODUCTS, "weight"))
def look_up(
    x: tl.tensor, x_width: tl.tensor, rows_at: tl.tensor, y: tl.tensor, y_width: tl.tensor, weight: tl.tensor,
    columns: tl.tensor, known: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copy for each row (axis 1) the row of a table, whose number is in x; NaN for one that is not there."""
    at = tl.load(rows_at + tl.program_id(1))
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * x_width)
    real = (value >= 0) & (value < known)
    row = tl.where(real, value, 0.0).to(tl.int64)
    made = tl.load(weight + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y + at * y_width + column, tl.where(real, made, float("nan")), mask=column < columns)
