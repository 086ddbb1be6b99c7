"""Compiled products with blocked matrices of 16 columns per block, in every weight format.

With few rows a product takes as long as reading the matrix; with many it is as fast as a float32 product. Every (row,
column) is summed in float32 in the order of the summands, or (HALVES) of their pairs, whatever rows, columns and
threads are computed together: a row's bits depend on that row alone. Weights in other formats are converted exactly to
float32: in vectors for few rows, in a scratch buffer of a few blocks for many rows. The order of sums is the same, so
both give the same bits.

The number of sums in the processor's vector registers depends on its instruction set: sums that exceed the registers go
through memory at every step, which is ten times slower. Neighbours: `row_weights` reads the formats that `row_blocks`
defines, `row_vectors` has the instructions.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import cfunc, njit
from numba.core import cgutils, config

from fusionai.backends.torch import row_blocks, row_code, row_weights
from fusionai.backends.torch import row_vectors as vec
from fusionai.backends.torch.blocked_linear import compiled_once
from fusionai.backends.torch.row_blocks import GROUPS, LAYOUT_OF
from fusionai.backends.torch.row_code import Factor, Form
from fusionai.backends.torch.row_weights import each_summand
from fusionai.ir import levels

HALVES: Final[bool] = (
    vec.LEVEL.startswith("AVX512")
    and config.CPU_NAME is None
    and get_host_cpu_features().get("avx512bf16", False)
    and get_host_cpu_name().startswith("znver")
)
"""Whether the processor multiplies bfloat16 by bfloat16, two summands per instruction, as fast as float32. Intel
processors do it at half that speed, which gains nothing."""
SUMMANDS: Final = 256
"""Summands that many rows are multiplied by at a time, so that their weights as float32 stay in the cache. A multiple
of the four-bit groups."""
ROWS: Final = 512
"""Rows that share blocks converted to float32."""
FEW_ROWS: Final = 16
"""Largest number of rows for which the matrix is read directly in its storage format."""
_GROUP_BYTES: Final = 2**20
"""Bytes of blocks that stay in the processor's cache while all of few rows are multiplied by them; chosen."""
_PADDING: Final = 16
"""Floats between copied rows, so that they do not all map to the same cache lines."""


# (blocks, rows) by falling rows, the last with one row. The sums fill the vector registers that the factors leave: 32
# registers of 16 numbers, 16 of 8, or 16 of 4. Other processors than x86 have 32 of 4, as much as the second.
_TILES: Final = vec.by_registers(((3, 8), (4, 4), (4, 2), (4, 1)), ((1, 6), (1, 4), (2, 2), (4, 1)), ((1, 2), (2, 1)))
_DECODED: Final = frozenset({*GROUPS.values(), *LAYOUT_OF})
"""Formats whose scales and offsets take registers too."""
_FOUR_BIT_TILES: Final = vec.by_registers(((2, 8), (2, 4), (2, 2), (2, 1)), ((1, 4), (1, 2), (1, 1)), ((1, 2), (1, 1)))


def factor_of(blocks: row_blocks.Blocks) -> Factor:
    """Return the format in which `multiply` reads the matrix."""
    return Factor.HALVES if HALVES and blocks.factor is Factor.BF16 else blocks.factor


def scratch_bytes() -> int:
    """Return the scratch bytes of `multiply_many`."""
    return 4 * (ROWS * (SUMMANDS + _PADDING) + _TILES[0][0] * SUMMANDS * vec.LANES)


# --------------------------------------------------------------------------------------------------------------- pieces


def _tile(kind: Factor, blocks: int, rows: int, *, resumed: bool = False) -> Any:
    """Return an intrinsic for `blocks` x `rows` vectors of inner products. `w`: the first block; `w_step`: bytes of a
    block. y is overwritten, or added to if `resumed`."""

    def codegen(builder: Any, args: Any) -> None:
        w, w_step, x, x_step, y, y_step, count = args
        w_at = [builder.add(w, builder.mul(w_step, vec.int64(block))) for block in range(blocks)]
        x_at = [builder.add(x, builder.mul(x_step, vec.int64(row))) for row in range(rows)]
        sums = [[cgutils.alloca_once(builder, vec.FLOATS) for _ in range(rows)] for _ in range(blocks)]

        def place_of(block: int, row: int) -> Any:
            out = builder.add(y, builder.add(builder.mul(y_step, vec.int64(row)), vec.int64(4 * vec.LANES * block)))
            return vec.at_address(builder, out, vec.FLOATS)

        for block, line in enumerate(sums):
            for row, place in enumerate(line):
                start = ir.Constant(vec.FLOATS, [0.0] * vec.LANES)
                builder.store(builder.load(place_of(block, row), align=4) if resumed else start, place)
        # The next tile's weights are prefetched while this tile multiplies, which takes as long. With fewer rows memory
        # is busy anyway; the weights of resumed sums are in the cache.
        ahead = builder.mul(w_step, vec.int64(blocks)) if rows >= 4 and not resumed else None
        if kind is Factor.HALVES:
            _add_pairs(builder, w_at, x_at, sums, count, ahead)
        else:
            fma = vec.fused(builder, vec.FLOATS, "v16f32")

            def add(weights: list[Any], index: Any) -> None:
                for row, at in enumerate(x_at):
                    value = vec.load_one(builder, Form.FP32, builder.add(at, builder.mul(index, vec.int64(4))))
                    same = vec.spread(builder, value)
                    for values, line in zip(weights, sums, strict=True):
                        builder.store(builder.call(fma, [values, same, builder.load(line[row])]), line[row])

            each_summand(builder, kind, w_at, count, add, ahead)
        for block, line in enumerate(sums):
            scale = None
            if kind is Factor.INT8:
                scale = vec.load_wide(
                    builder, Form.FP32, builder.add(w_at[block], builder.mul(count, vec.int64(vec.LANES)))
                )
            for row, place in enumerate(line):
                value = builder.load(place)
                value = value if scale is None else builder.fmul(value, scale)
                builder.store(value, place_of(block, row), align=4)

    return vec.intrinsic_of(f"tile_{kind.name}_{blocks}_{rows}_{resumed}", codegen)


def _add_pairs(builder: Any, w_at: list[Any], x_at: list[Any], sums: Any, count: Any, ahead: Any) -> None:
    pairs = ir.VectorType(vec.BFLOAT, 2 * vec.LANES)
    function = ir.FunctionType(vec.FLOATS, [vec.FLOATS, pairs, pairs])
    dot = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512bf16.dpbf16ps.512")
    with cgutils.for_range(builder, builder.sdiv(builder.add(count, vec.int64(1)), vec.int64(2))) as loop:
        off, x_off = builder.mul(loop.index, vec.int64(4 * vec.LANES)), builder.mul(loop.index, vec.int64(4))
        if ahead is not None:
            for at in w_at:
                vec.prefetch(builder, builder.add(builder.add(at, ahead), off))
        words = [builder.load(vec.at_address(builder, builder.add(at, off), vec.WORDS), align=4) for at in w_at]
        for row, at in enumerate(x_at):
            pair = builder.load(vec.at_address(builder, builder.add(at, x_off), vec.INT), align=2)
            same = builder.bitcast(vec.spread(builder, pair), pairs)
            for word, line in zip(words, sums, strict=True):
                values = builder.bitcast(word, pairs)
                builder.store(builder.call(dot, [builder.load(line[row]), values, same]), line[row])


def _widened(kind: Factor) -> Any:
    """Return an intrinsic that stores `count` summands of the block at w as float32 at y."""

    def codegen(builder: Any, args: Any) -> None:
        w, _, _, _, y, _, count = args

        def keep(weights: list[Any], index: Any) -> None:
            out = builder.add(y, builder.mul(index, vec.int64(4 * vec.LANES)))
            builder.store(weights[0], vec.at_address(builder, out, vec.FLOATS), align=4)

        each_summand(builder, kind, [w], count, keep)

    return vec.intrinsic_of(f"widened_{kind.name}", codegen)


def _copied() -> Any:
    """Return an intrinsic that copies `count` words from x to y."""

    def codegen(builder: Any, args: Any) -> None:
        _, _, x, _, y, _, count = args
        cgutils.raw_memcpy(
            builder,
            vec.at_address(builder, y, vec.INT),
            vec.at_address(builder, x, vec.INT),
            count,
            vec.int64(4),
            align=1,
        )

    return vec.intrinsic_of("copied", codegen)


def _scaled() -> Any:
    """Return an intrinsic that multiplies `count` rows of y by the 16 numbers at w."""

    def codegen(builder: Any, args: Any) -> None:
        w, _, _, _, y, y_step, count = args
        scale = vec.load_wide(builder, Form.FP32, w)
        with cgutils.for_range(builder, count) as loop:
            place = vec.at_address(builder, builder.add(y, builder.mul(y_step, loop.index)), vec.FLOATS)
            builder.store(builder.fmul(builder.load(place, align=4), scale), place, align=4)

    return vec.intrinsic_of("scaled", codegen)


def _across(kind: Factor, width: int, rows: int, *, resumed: bool = False) -> Any:
    """Return a function that multiplies `rows` rows by blocks `block` to `end`, `width` blocks at a time."""
    wide, one = _tile(kind, width, rows, resumed=resumed), _tile(kind, 1, rows, resumed=resumed)

    def run_across(
        w: Any, step: Any, x: Any, x_step: Any, y: Any, y_step: Any, block: Any, end: Any, count: Any
    ) -> Any:
        while end - block >= width:
            wide(w + block * step, step, x, x_step, y + 64 * block, y_step, count)
            block += width
        while block < end:
            one(w + block * step, step, x, x_step, y + 64 * block, y_step, count)
            block += 1

    return njit(nogil=True)(vec.named(run_across, f"across_{kind.name}_{width}_{rows}_{resumed}"))


def _down(kind: Factor, *, resumed: bool = False) -> Any:
    """Return a function that multiplies all rows by blocks `block` to `end`."""
    tiles = _FOUR_BIT_TILES if kind in _DECODED else _TILES
    # If there are fewer than four tile sizes, the smallest is repeated.
    sizes = [tiles[min(number, len(tiles) - 1)] for number in range(4)]
    most, many, some, _ = (rows for _, rows in sizes)
    a, b, c, d = (_across(kind, width, rows, resumed=resumed) for width, rows in sizes)

    def run_down(
        w: Any, step: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, block: Any, end: Any, count: Any
    ) -> Any:
        row = 0
        while row < rows:
            at, out = x + row * x_step, y + row * y_step
            if rows - row >= most:
                a(w, step, at, x_step, out, y_step, block, end, count)
                row += most
            elif rows - row >= many:
                b(w, step, at, x_step, out, y_step, block, end, count)
                row += many
            elif rows - row >= some:
                c(w, step, at, x_step, out, y_step, block, end, count)
                row += some
            else:
                d(w, step, at, x_step, out, y_step, block, end, count)
                row += 1

    return njit(nogil=True)(vec.named(run_down, f"down_{kind.name}_{resumed}"))


# ------------------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True, slots=True)
class Products:
    """Compiled products for one matrix format: addresses of C functions that take integers. They do not touch Python's
    global lock.

    `few` (w, x, x_step, y, y_step, rows, columns, count): addresses, and steps in bytes. y [rows, columns] is float32
    with memory for whole blocks of columns in every row. x [rows, count] is float32, or bfloat16 for HALVES, with a
    zero after an odd count. `many`: the same, with the address of `scratch_bytes` at the end; y must be zeros before
    the call.
    """

    few: int
    many: int


@cache
def products(kind: Factor) -> Products:
    """Return the compiled products. Takes seconds the first time on a machine; afterwards they come from the disk."""
    with compiled_once(f"products-{kind.name.lower()}"):
        few, many = _few(int(kind), _STAMP), _many(int(kind), _TILES[0][0], _STAMP)
    _KEPT.extend((few, many))
    return Products(few.address, many.address)


_KEPT: Final[list[Any]] = []
"""Keeps the compiled functions alive: their code is freed with them."""


def _few(kind: int, stamp: int) -> Any:
    def multiply(w: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any) -> None:
        if stamp < 0:
            return
        step, blocks = _step(kind, count), (columns + 15) // 16
        group = max(12, _GROUP_BYTES // max(1, step)) if rows > _TILE_ROWS else blocks
        for block in range(0, blocks, max(1, group)):
            _down_of_kind(w, step, x, x_step, y, y_step, rows, block, min(blocks, block + group), count)

    signature = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
    return cfunc(signature, cache=True)(_of_kind(multiply, Factor(kind), _down_of_kind=_down(Factor(kind))))


def _many(kind: int, wide: int, stamp: int) -> Any:
    direct = kind in (Factor.FP32, Factor.HALVES)

    def multiply_many(
        w: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any, scratch: Any
    ) -> None:
        if stamp < 0:
            return
        step, blocks = _step(kind, count), (columns + 15) // 16
        widened = scratch + 4 * _ROWS * (_SUMMANDS + 16)
        for row in range(0, rows, _ROWS):
            some = min(rows - row, _ROWS)
            for first in range(0, count, _SUMMANDS):
                part = min(count - first, _SUMMANDS)
                words = (part + 1) // 2 if kind == _HALVES else part
                off = 2 * first if kind == _HALVES else 4 * first
                near = 4 * words + 64
                for number in range(some):
                    _copy(0, 0, x + (row + number) * x_step + off, 0, scratch + number * near, 0, words)
                behind = _step(kind, first) - (64 if kind == _INT8 else 0)
                for block in range(0, blocks, wide):
                    end = min(blocks, block + wide)
                    at, out = w + block * step + behind, y + row * y_step + 64 * block
                    # Numba removes one of these branches before it compiles.
                    if direct:
                        _more_of_kind(at, step, scratch, near, out, y_step, some, 0, end - block, part)
                    else:
                        for number in range(end - block):
                            _widen_of_kind(at + number * step, 0, 0, 0, widened + number * 64 * part, 0, part)
                        _more_of_kind(widened, 64 * part, scratch, near, out, y_step, some, 0, end - block, part)
                    if kind == _INT8 and first + part == count:
                        for number in range(end - block):
                            _scale(w + (block + number) * step + 16 * count, 0, 0, 0, out + 64 * number, y_step, some)

    factor = Factor(kind)
    more = _down(factor if factor is Factor.HALVES else Factor.FP32, resumed=True)
    widen = None if direct else _widened(factor)
    signature = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"
    return cfunc(signature, cache=True)(_of_kind(multiply_many, factor, _more_of_kind=more, _widen_of_kind=widen))


_down_of_kind: Any = None
_more_of_kind: Any = None
_widen_of_kind: Any = None


def _of_kind(function: Any, kind: Factor, **pieces: Any) -> Any:
    """Return the function with these globals. As variables of a closure, which numba makes a part of the code's name on
    the disk, compiled pieces would have another name in each process."""
    made = FunctionType(function.__code__, {**globals(), **pieces}, closure=function.__closure__)
    return vec.named(made, f"{function.__name__}_{kind.name}")


@njit(nogil=True)
def _step(kind: Any, count: Any) -> Any:
    """Return what `row_blocks.block_bytes` returns."""
    if kind == _FP32:
        return 64 * count
    if kind in (_BF16, _HALVES):
        return 64 * ((count + 1) // 2)
    if kind == _FP16:
        return 32 * count
    if kind == _INT8:
        return 16 * count + 64
    for number, shared, shared_bytes in _SHARED:
        if kind == number:
            return count // shared * 16 * shared_bytes
    group = 32 << (kind - _INT4_32)
    return count // group * (64 + 8 * group)


_FP32, _BF16, _HALVES, _FP16, _INT8, _INT4_32 = (
    int(factor) for factor in (Factor.FP32, Factor.BF16, Factor.HALVES, Factor.FP16, Factor.INT8, Factor.INT4_32)
)
_SHARED: Final = tuple((int(factor), layout.shared, layout.shared_bytes) for factor, layout in LAYOUT_OF.items())
_ROWS, _SUMMANDS, _TILE_ROWS = ROWS, SUMMANDS, _TILES[0][1]
_copy, _scale = _copied(), _scaled()
_STAMP: Final = vec.stamp_of(
    __file__,
    row_code.__file__,
    row_blocks.__file__,
    row_weights.__file__,
    levels.__file__,
    about=f"{vec.LEVEL} {HALVES}",
)
