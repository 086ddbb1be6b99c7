"""Products with matrices kept as blocks of 16 columns, read once from end to end: few rows wait for memory alone.

A block has the columns' weights of the first summand, then those of the second ...: one vector each in float32, two
summands in a vector of pairs in bfloat16. Every (row, column) is summed in float32 in the order of the summands, or of
their pairs, however many rows and columns are computed together, so a row's bits depend on nothing but the row.
`as_blocks` lays a matrix out; `row_kernels` and `packed_linear` call `multiply` with its address.

Neighbours: `row_vectors` has the instructions.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any, Final

import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit
from numba.core import cgutils

from fusionai.backends.torch import row_code
from fusionai.backends.torch.row_code import Factor, Form
from fusionai.backends.torch.row_vectors import (
    BFLOAT,
    FLOATS,
    INT,
    LANES,
    WORDS,
    at_address,
    fused,
    int64,
    intrinsic_of,
    load_one,
    load_wide,
    prefetch,
    stamp_of,
)
from fusionai.backends.torch.wide_pages import WidePages, taken_bytes

HALVES: Final[bool] = get_host_cpu_features().get("avx512bf16", False)
"""Whether the processor multiplies bfloat16 by bfloat16, two summands an instruction."""
_BF16, _HALVES = int(Factor.BF16), int(Factor.HALVES)
_GROUP: Final = 12
"""Blocks whose weights stay in the processor's cache while all rows pass: whole tiles of any number of rows."""


def factor_of(blocks: torch.Tensor) -> Factor:
    """How `multiply` takes a matrix that `as_blocks` laid out."""
    if blocks.dtype == torch.float32:
        return Factor.FP32
    return Factor.HALVES if HALVES else Factor.BF16


def as_blocks(matrix: torch.Tensor, pages: WidePages | None = None) -> torch.Tensor:
    """[columns, summands] float32 or bfloat16 -> [blocks, summands, 16], or [blocks, pairs, 16, 2]; zeros fill up.
    In `pages`, where given."""
    columns, count = matrix.shape
    paired = matrix.dtype == torch.bfloat16
    whole = matrix.new_zeros((columns + -columns % LANES, count + (count % 2 if paired else 0)))
    whole[:columns, :count] = matrix
    blocks = whole.reshape(-1, LANES, whole.shape[1])
    if paired:
        blocks = blocks.reshape(*blocks.shape[:2], -1, 2)
    blocks = blocks.transpose(1, 2)
    if pages is None:
        return blocks.contiguous()
    return pages.take(tuple(blocks.shape), blocks.dtype).copy_(blocks)


def blocks_bytes(columns: int, count: int, dtype: torch.dtype) -> int:
    """What `as_blocks` takes of pages."""
    return taken_bytes((columns + -columns % LANES, count + (count % 2 if dtype == torch.bfloat16 else 0)), dtype)


def _tile(kind: Factor, blocks: int, rows: int) -> Any:
    """`blocks` x `rows` vectors of inner products. `w`: the first block, `w_step`: bytes of one; y is overwritten."""
    x_bytes = {Factor.FP32: 4, Factor.BF16: 8, Factor.HALVES: 4}[kind]

    def codegen(builder: Any, args: Any) -> None:
        w, w_step, x, x_step, y, y_step, count = args
        w_at = [builder.add(w, builder.mul(w_step, int64(block))) for block in range(blocks)]
        x_at = [builder.add(x, builder.mul(x_step, int64(row))) for row in range(rows)]
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(rows)] for _ in range(blocks)]
        for line in sums:
            for place in line:
                builder.store(ir.Constant(FLOATS, [0.0] * LANES), place)
        tile = builder.mul(w_step, int64(blocks))
        pairs = ir.VectorType(BFLOAT, 2 * LANES)
        fma = fused(builder, FLOATS, "v16f32")

        def add(factors: list[Any], x_off: Any) -> None:
            for row, at in enumerate(x_at):
                spread = _spread(builder, load_one(builder, Form.FP32, builder.add(at, x_off)))
                for values, line in zip(factors, sums, strict=True):
                    builder.store(builder.call(fma, [values, spread, builder.load(line[row])]), line[row])

        def add_pairs(words: list[Any], x_off: Any) -> None:
            function = ir.FunctionType(FLOATS, [FLOATS, pairs, pairs])
            dot = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512bf16.dpbf16ps.512")
            factors = [builder.bitcast(word, pairs) for word in words]
            for row, at in enumerate(x_at):
                pair = builder.load(at_address(builder, builder.add(at, x_off), INT), align=2)
                spread = builder.bitcast(_spread(builder, pair), pairs)
                for values, line in zip(factors, sums, strict=True):
                    builder.store(builder.call(dot, [builder.load(line[row]), values, spread]), line[row])

        def step(index: Any, *, last: bool = False) -> None:
            off = builder.mul(index, int64(4 * LANES))
            x_off = builder.mul(index, int64(x_bytes))
            if rows >= 4 and not last:
                # The next tile's weights come while this one's are multiplied by: that takes as long. With fewer rows
                # memory is busy anyway.
                for at in w_at:
                    prefetch(builder, builder.add(builder.add(at, tile), off))
            if kind is Factor.FP32:
                add([load_wide(builder, Form.FP32, builder.add(at, off)) for at in w_at], x_off)
                return
            words = [builder.load(at_address(builder, builder.add(at, off), WORDS), align=4) for at in w_at]
            if kind is Factor.HALVES:
                add_pairs(words, x_off)
                return
            add([_first(builder, word) for word in words], x_off)
            if not last:
                add([_second(builder, word) for word in words], builder.add(x_off, int64(4)))

        match kind:
            case Factor.FP32:
                steps = count
            case Factor.HALVES:
                steps = builder.sdiv(builder.add(count, int64(1)), int64(2))
            case Factor.BF16:
                steps = builder.sdiv(count, int64(2))
        with cgutils.for_range(builder, steps) as loop:
            step(loop.index)
        if kind is Factor.BF16:
            with builder.if_then(builder.icmp_signed("!=", builder.and_(count, int64(1)), int64(0))):
                step(steps, last=True)
        for block, line in enumerate(sums):
            for row, place in enumerate(line):
                out = builder.add(y, builder.add(builder.mul(y_step, int64(row)), int64(4 * LANES * block)))
                builder.store(builder.load(place), at_address(builder, out, FLOATS), align=4)

    return intrinsic_of(f"tile_{kind.name}_{blocks}_{rows}", codegen)


def _spread(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    lone = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    return builder.shuffle_vector(lone, lone, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


def _first(builder: Any, words: Any) -> Any:
    """A bfloat16 is the upper half of its float32."""
    return builder.bitcast(builder.shl(words, ir.Constant(words.type, [16] * LANES)), FLOATS)


def _second(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir.Constant(words.type, [-65536] * LANES)), FLOATS)


def _across(kind: Factor, width: int, rows: int) -> Any:
    """`rows` rows by blocks `block` to `end`, `width` of them at a time."""
    wide, one = _tile(kind, width, rows), _tile(kind, 1, rows)

    @njit(nogil=True)
    def run_across(
        w: Any, step: Any, x: Any, x_step: Any, y: Any, y_step: Any, block: Any, end: Any, count: Any
    ) -> Any:
        while end - block >= width:
            wide(w + block * step, step, x, x_step, y + 64 * block, y_step, count)
            block += width
        while block < end:
            one(w + block * step, step, x, x_step, y + 64 * block, y_step, count)
            block += 1

    return run_across


def _blocked(kind: Factor) -> Any:
    """y [rows, columns, rounded up to whole blocks] = x [rows, count] times the matrix transposed."""
    # As many sums as a processor has vectors, less those for factors.
    eight, four, two, one = (_across(kind, width, rows) for width, rows in ((3, 8), (4, 4), (4, 2), (4, 1)))
    paired = kind is not Factor.FP32

    @njit(nogil=True)
    def run_blocked(w: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any) -> Any:
        step = 64 * ((count + 1) // 2 if paired else count)
        blocks = (columns + 15) // 16
        for first in range(0, blocks, _GROUP):
            end = min(blocks, first + _GROUP)
            row = 0
            while row < rows:
                at, out = x + row * x_step, y + row * y_step
                if rows - row >= 8:
                    eight(w, step, at, x_step, out, y_step, first, end, count)
                    row += 8
                elif rows - row >= 4:
                    four(w, step, at, x_step, out, y_step, first, end, count)
                    row += 4
                elif rows - row >= 2:
                    two(w, step, at, x_step, out, y_step, first, end, count)
                    row += 2
                else:
                    one(w, step, at, x_step, out, y_step, first, end, count)
                    row += 1

    return run_blocked


_blocked_fp32, _blocked_bf16 = _blocked(Factor.FP32), _blocked(Factor.BF16)
# The instruction must not be asked for where there is none; nobody calls what stands in for it.
_blocked_halves = _blocked(Factor.HALVES) if HALVES else _blocked_bf16


def _multiply(stamp: int) -> Any:
    @njit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def multiply(
        kind: Any, w: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any
    ) -> None:
        if stamp < 0:
            return
        if kind == _HALVES:
            _blocked_halves(w, x, x_step, y, y_step, rows, columns, count)
        elif kind == _BF16:
            _blocked_bf16(w, x, x_step, y, y_step, rows, columns, count)
        else:
            _blocked_fp32(w, x, x_step, y, y_step, rows, columns, count)

    return multiply


multiply = _multiply(stamp_of(__file__, row_code.__file__))
"""(kind, w, x, x_step, y, y_step, rows, columns, count): a `Factor`, addresses, steps in bytes. y [rows, columns] is
float32 and has room for whole blocks of columns in every row; so is x [rows, count], but bfloat16 for HALVES, with a
zero behind an odd count."""
