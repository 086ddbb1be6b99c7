"""Interpreter of `row_plan` programs: runs every operator of a stage for a few rows in one compiled call.

Numba compiles `run` when this module is imported and keeps the machine code on disk, so only the first process of an
installation waits for the compiler. Sums are vector instructions, each (row, column) in one fixed order, so a row's
bits depend on that row alone. The kernel reads memory at the addresses it is given: only `row_plan` and `row_program`
call it, with sizes that they have checked. It never holds Python's global lock. Neighbours: `row_plan` defines what the
instructions mean.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from fusionai.backends.serving.page_table import LEVELS
from fusionai.backends.torch import row_choices, row_code
from fusionai.backends.torch import row_vectors as vec
from fusionai.backends.torch.row_code import Factor, Field, Form, Op
from fusionai.backends.torch.row_vectors import call_at

_DIMS, _OUT, _A, _A_ROW, _B, _B_ROW, _A_STRIDES, _B_STRIDES, _EXTRA = (int(field) for field in Field)
(
    _ADD, _SUB, _MUL, _DIV, _MINIMUM, _MAXIMUM, _MASKED, _COPY, _NEG, _SQUARE, _CUBE, _SQRT, _RSQRT, _EXP, _SILU,
    _SIGMOID, _RELU, _TANH, _GELU, _GELU_TANH, _TRUTH, _COS, _SIN, _MEAN, _TOTAL, _LAYER_NORM, _SOFTMAX, _LINEAR,
    _ATTENTION, _TOP, _LOOKUP, _SCATTER, _EXPERTS,
) = (int(op) for op in Op if op is not Op.TABLE)  # fmt: skip
_HALVES = int(Factor.HALVES)
_FP32, _BF16, _FP16, _INT8 = (int(form) for form in Form)


def _dots(form: Form, columns: int, rows: int) -> Any:
    """Return an intrinsic for `columns` x `rows` inner products: y[r][c] = sum of w[c] * x[r] over `count`, times the
    scale of w[c] if it has one. Strides and addresses are in bytes."""
    size = vec.SIZE[form]

    def codegen(builder: Any, args: Any) -> None:
        w, w_step, x, x_step, y, y_step, count = args
        w_at = [builder.add(w, builder.mul(w_step, vec.int64(c))) for c in range(columns)]
        x_at = [builder.add(x, builder.mul(x_step, vec.int64(r))) for r in range(rows)]
        zero = ir.Constant(vec.FLOATS, [0.0] * vec.LANES)
        sums = [[cgutils.alloca_once(builder, vec.FLOATS) for _ in range(rows)] for _ in range(columns)]
        totals_at = [[cgutils.alloca_once(builder, vec.FLOAT) for _ in range(rows)] for _ in range(columns)]
        for line in sums:
            for place in line:
                builder.store(zero, place)
        fma, fma_one = vec.fused(builder, vec.FLOATS, "v16f32"), vec.fused(builder, vec.FLOAT, "f32")
        steps = builder.sdiv(count, vec.int64(vec.LANES))
        with cgutils.for_range(builder, steps) as loop:
            x_off = builder.mul(loop.index, vec.int64(4 * vec.LANES))
            w_off = builder.mul(loop.index, vec.int64(size * vec.LANES))
            xs = [vec.load_wide(builder, Form.FP32, builder.add(at, x_off)) for at in x_at]
            for at, line in zip(w_at, sums, strict=True):
                weights = vec.load_wide(builder, form, builder.add(at, w_off))
                # A row of the matrix is too short for the processor to detect sequential reads.
                ahead = builder.add(at, builder.add(w_off, builder.mul(w_step, vec.int64(columns))))
                vec.prefetch(builder, ahead)
                for values, place in zip(xs, line, strict=True):
                    builder.store(builder.call(fma, [weights, values, builder.load(place)]), place)
        totals = vec.folded(builder, [builder.load(place) for line in sums for place in line])
        for total, end in zip(totals, [end for last in totals_at for end in last], strict=True):
            builder.store(total, end)
        rest = builder.mul(steps, vec.int64(vec.LANES))
        with cgutils.for_range_slice(builder, rest, count, vec.int64(1), intp=vec.LONG) as (index, _):
            for at, last in zip(w_at, totals_at, strict=True):
                weight = vec.load_one(builder, form, builder.add(at, builder.mul(index, vec.int64(size))))
                for row, end in zip(x_at, last, strict=True):
                    value = vec.load_one(builder, Form.FP32, builder.add(row, builder.mul(index, vec.int64(4))))
                    builder.store(builder.call(fma_one, [weight, value, builder.load(end)]), end)
        for column, last in enumerate(totals_at):
            scale = vec.scale_behind(builder, w_at[column], count) if form is Form.INT8 else None
            for row, end in enumerate(last):
                address = builder.add(y, builder.add(builder.mul(y_step, vec.int64(row)), vec.int64(4 * column)))
                total = builder.load(end) if scale is None else builder.fmul(builder.load(end), scale)
                builder.store(total, vec.at_address(builder, address, vec.FLOAT), align=4)

    return vec.intrinsic_of(f"dots_{form.name}_{columns}_{rows}", codegen)


def _mix(form: Form) -> Any:
    """Return an intrinsic for y[d] += sum of weights[p] * v[p][d] over `count` positions, ascending, for `width` values
    of d."""
    size = vec.SIZE[form]

    def codegen(builder: Any, args: Any) -> None:
        v, v_step, weights, y, count, width, _ = args
        fma, fma_one = vec.fused(builder, vec.FLOATS, "v16f32"), vec.fused(builder, vec.FLOAT, "f32")

        def weight_of(position: Any) -> Any:
            """Return the weight of a position, times the scale of its vector if that has one."""
            weight = vec.load_one(builder, Form.FP32, builder.add(weights, builder.mul(position, vec.int64(4))))
            if form is not Form.INT8:
                return weight
            return builder.fmul(weight, vec.scale_behind(builder, builder.add(v, builder.mul(position, v_step)), width))

        def blocks(first: Any, many: int) -> None:
            """Compute `many` vectors from `first` on."""
            outs = [
                builder.add(y, builder.mul(builder.add(first, vec.int64(n * vec.LANES)), vec.int64(4)))
                for n in range(many)
            ]
            sums = [cgutils.alloca_once(builder, vec.FLOATS) for _ in range(many)]
            for out, place in zip(outs, sums, strict=True):
                builder.store(builder.load(vec.at_address(builder, out, vec.FLOATS), align=4), place)
            with cgutils.for_range(builder, count) as loop:
                same = vec.spread(builder, weight_of(loop.index))
                line = builder.add(builder.add(v, builder.mul(loop.index, v_step)), builder.mul(first, vec.int64(size)))
                for number, place in enumerate(sums):
                    values = vec.load_wide(builder, form, builder.add(line, vec.int64(number * vec.LANES * size)))
                    builder.store(builder.call(fma, [same, values, builder.load(place)]), place)
            for out, place in zip(outs, sums, strict=True):
                builder.store(builder.load(place), vec.at_address(builder, out, vec.FLOATS), align=4)

        def slices(start: Any, stop: Any, step: int) -> Any:
            return cgutils.for_range_slice(builder, start, stop, vec.int64(step), intp=vec.LONG)

        fours = builder.mul(builder.sdiv(width, vec.int64(4 * vec.LANES)), vec.int64(4 * vec.LANES))
        whole = builder.mul(builder.sdiv(width, vec.int64(vec.LANES)), vec.int64(vec.LANES))
        with slices(vec.int64(0), fours, 4 * vec.LANES) as (first, _):
            blocks(first, 4)
        with slices(fours, whole, vec.LANES) as (first, _):
            blocks(first, 1)
        with slices(whole, width, 1) as (first, _):
            out = builder.add(y, builder.mul(first, vec.int64(4)))
            with cgutils.for_range(builder, count) as loop:
                weight = weight_of(loop.index)
                at = builder.add(builder.add(v, builder.mul(loop.index, v_step)), builder.mul(first, vec.int64(size)))
                value = vec.load_one(builder, form, at)
                place = vec.at_address(builder, out, vec.FLOAT)
                builder.store(builder.call(fma_one, [weight, value, builder.load(place, align=4)]), place, align=4)

    return vec.intrinsic_of(f"mix_{form.name}", codegen)


def _keep_levels() -> Any:
    """Return an intrinsic that stores `count` float32 values from x at w as levels, rounded to nearest even, and their
    scale behind them."""

    def codegen(builder: Any, args: Any) -> None:
        w, _, x, _, _, _, count = args
        zero, most = ir.Constant(vec.FLOAT, 0.0), ir.Constant(vec.FLOAT, LEVELS)
        largest = cgutils.alloca_once_value(builder, ir.Constant(vec.INT, 0))

        def value_at(index: Any) -> Any:
            return vec.load_one(builder, Form.FP32, builder.add(x, builder.mul(index, vec.int64(4))))

        with cgutils.for_range(builder, count) as loop:
            # Bits are ordered like sizes, with what is not finite last, so that the scale shows it.
            size = builder.and_(builder.bitcast(value_at(loop.index), vec.INT), ir.Constant(vec.INT, 0x7FFFFFFF))
            so_far = builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", size, so_far), size, so_far), largest)
        top = builder.bitcast(builder.load(largest), vec.FLOAT)
        step = builder.select(builder.fcmp_ordered(">", top, zero), builder.fdiv(most, top), zero)
        # Adding this number leaves the nearest integer in the lowest bits.
        magic = ir.Constant(vec.FLOAT, 1.5 * 2.0**23)
        with cgutils.for_range(builder, count) as loop:
            level = builder.fadd(builder.fmul(value_at(loop.index), step), magic)
            byte = builder.trunc(builder.bitcast(level, vec.INT), ir.IntType(8))
            builder.store(byte, vec.at_address(builder, builder.add(w, loop.index), ir.IntType(8)), align=1)
        place = vec.at_address(builder, builder.add(w, count), vec.FLOAT)
        builder.store(builder.fdiv(top, most), place, align=1)

    return vec.intrinsic_of("keep_INT8", codegen)


_FP32_1, _FP32_2, _FP32_4 = (_dots(Form.FP32, 4, rows) for rows in (1, 2, 4))
_FP32_LAST = _dots(Form.FP32, 1, 1)
_BF16_1, _BF16_2, _BF16_4 = (_dots(Form.BF16, 4, rows) for rows in (1, 2, 4))
_BF16_LAST = _dots(Form.BF16, 1, 1)
_FP16_1, _FP16_2, _FP16_4 = (_dots(Form.FP16, 4, rows) for rows in (1, 2, 4))
_FP16_LAST = _dots(Form.FP16, 1, 1)
_INT8_1, _INT8_2, _INT8_4 = (_dots(Form.INT8, 4, rows) for rows in (1, 2, 4))
_INT8_LAST = _dots(Form.INT8, 1, 1)
_MIX_FP32, _MIX_BF16, _MIX_FP16, _MIX_INT8 = (_mix(form) for form in Form)
_KEEP_FP32, _KEEP_BF16, _KEEP_FP16 = vec.keep(Form.FP32), vec.keep(Form.BF16), vec.keep(Form.FP16)
_KEEP_INT8 = _keep_levels()


def _product(one: Any, two: Any, four: Any, last: Any) -> Any:
    """Return a function for y [rows, columns] = x [rows, count] times the transpose of w [columns, count]."""

    @njit(nogil=True)
    def run_product(
        w: Any, w_step: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any
    ) -> Any:
        whole = columns - columns % 4
        for column in range(0, whole, 4):
            at, out = w + column * w_step, y + 4 * column
            row = 0
            while rows - row >= 4:
                four(at, w_step, x + row * x_step, x_step, out + row * y_step, y_step, count)
                row += 4
            if rows - row >= 2:
                two(at, w_step, x + row * x_step, x_step, out + row * y_step, y_step, count)
                row += 2
            if rows - row >= 1:
                one(at, w_step, x + row * x_step, x_step, out + row * y_step, y_step, count)
        for column in range(whole, columns):
            for row in range(rows):
                last(
                    w + column * w_step, w_step, x + row * x_step, x_step, y + 4 * column + row * y_step, y_step, count
                )

    return run_product


_product_fp32 = _product(_FP32_1, _FP32_2, _FP32_4, _FP32_LAST)
_product_bf16 = _product(_BF16_1, _BF16_2, _BF16_4, _BF16_LAST)
_product_fp16 = _product(_FP16_1, _FP16_2, _FP16_4, _FP16_LAST)
_product_int8 = _product(_INT8_1, _INT8_2, _INT8_4, _INT8_LAST)


@njit(nogil=True)
def _multiply(
    form: Any, w: Any, w_step: Any, x: Any, x_step: Any, y: Any, y_step: Any, rows: Any, columns: Any, count: Any
) -> Any:
    if form == _FP32:
        _product_fp32(w, w_step, x, x_step, y, y_step, rows, columns, count)
    elif form == _BF16:
        _product_bf16(w, w_step, x, x_step, y, y_step, rows, columns, count)
    elif form == _FP16:
        _product_fp16(w, w_step, x, x_step, y, y_step, rows, columns, count)
    else:
        _product_int8(w, w_step, x, x_step, y, y_step, rows, columns, count)


# --------------------------------------------------------------------------------------------------- element by element


@njit(nogil=True)
def _power(given: Any) -> Any:
    """Return e to the x in float32, with an error of at most two units in the last place; vectorises (after Cephes'
    expf)."""
    x = min(max(given, np.float32(-87.3)), np.float32(88.7))
    n = np.float32(math.floor(x * np.float32(1.44269504088896341) + np.float32(0.5)))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # Two factors, because 2 to the 128 alone exceeds float32.
    half = np.int32(n) >> np.int32(1)
    other = np.int32(n) - half
    first = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
    second = np.int32((other + np.int32(127)) << np.int32(23)).view(np.float32)
    result = p * first * second
    return result if given == given else given  # NaN stays NaN


@njit(nogil=True)
def _binary(op: Any, mem: Any, out: Any, a: Any, b: Any, n: Any, a_step: Any, b_step: Any) -> Any:
    if op == _ADD:
        for i in range(n):
            mem[out + i] = mem[a + i * a_step] + mem[b + i * b_step]
    elif op == _SUB:
        for i in range(n):
            mem[out + i] = mem[a + i * a_step] - mem[b + i * b_step]
    elif op == _MUL:
        for i in range(n):
            mem[out + i] = mem[a + i * a_step] * mem[b + i * b_step]
    elif op == _DIV:
        for i in range(n):
            mem[out + i] = mem[a + i * a_step] / mem[b + i * b_step]
    elif op == _MINIMUM:
        for i in range(n):
            x, y = mem[a + i * a_step], mem[b + i * b_step]
            mem[out + i] = y if x > y or y != y else x
    else:
        for i in range(n):
            x, y = mem[a + i * a_step], mem[b + i * b_step]
            mem[out + i] = y if x < y or y != y else x


@njit(nogil=True)
def _masked(mem: Any, out: Any, a: Any, b: Any, n: Any, a_step: Any, b_step: Any, number: Any) -> Any:
    for i in range(n):
        mem[out + i] = mem[a + i * a_step] if mem[b + i * b_step] == np.float32(0.0) else number


@njit(nogil=True)
def _unary(op: Any, mem: Any, out: Any, a: Any, n: Any, step: Any) -> Any:
    one = np.float32(1.0)
    if op == _COPY:
        for i in range(n):
            mem[out + i] = mem[a + i * step]
    elif op == _NEG:
        for i in range(n):
            mem[out + i] = -mem[a + i * step]
    elif op == _SQUARE:
        for i in range(n):
            mem[out + i] = mem[a + i * step] * mem[a + i * step]
    elif op == _CUBE:
        for i in range(n):
            mem[out + i] = mem[a + i * step] * mem[a + i * step] * mem[a + i * step]
    elif op == _SQRT:
        for i in range(n):
            mem[out + i] = np.sqrt(mem[a + i * step])
    elif op == _RSQRT:
        for i in range(n):
            mem[out + i] = one / np.sqrt(mem[a + i * step])
    elif op == _EXP:
        for i in range(n):
            mem[out + i] = np.float32(math.exp(np.float64(mem[a + i * step])))
    elif op == _SILU:
        for i in range(n):
            x = mem[a + i * step]
            mem[out + i] = x / (one + _power(-x))
    elif op == _SIGMOID:
        for i in range(n):
            mem[out + i] = one / (one + _power(-mem[a + i * step]))
    elif op == _RELU:
        for i in range(n):
            x = mem[a + i * step]
            mem[out + i] = x if not x < np.float32(0.0) else np.float32(0.0)
    elif op == _TANH:
        for i in range(n):
            mem[out + i] = np.float32(math.tanh(np.float64(mem[a + i * step])))
    elif op == _GELU:
        for i in range(n):
            x = np.float64(mem[a + i * step])
            mem[out + i] = np.float32(0.5 * x * (1.0 + math.erf(x * 0.7071067811865476)))
    elif op == _GELU_TANH:
        for i in range(n):
            x = np.float64(mem[a + i * step])
            mem[out + i] = np.float32(0.5 * x * (1.0 + math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))))
    elif op == _TRUTH:
        for i in range(n):
            mem[out + i] = one if mem[a + i * step] != np.float32(0.0) else np.float32(0.0)
    elif op == _COS:
        for i in range(n):
            mem[out + i] = np.float32(math.cos(np.float64(mem[a + i * step])))
    else:
        for i in range(n):
            mem[out + i] = np.float32(math.sin(np.float64(mem[a + i * step])))


@njit(nogil=True)
def _elementwise(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    op = line[0]
    d0, d1, d2 = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2]
    a0, a1, a2 = line[_A_STRIDES], line[_A_STRIDES + 1], line[_A_STRIDES + 2]
    b0, b1, b2 = line[_B_STRIDES], line[_B_STRIDES + 1], line[_B_STRIDES + 2]
    for row in range(rows):
        out = base + row * width + line[_OUT]
        for i in range(d0):
            for j in range(d1):
                a = line[_A] + line[_A_ROW] * (base + row * width) + i * a0 + j * a1
                if op <= _MASKED:
                    b = line[_B] + line[_B_ROW] * (base + row * width) + i * b0 + j * b1
                    if op == _MASKED:
                        _masked(mem, out, a, b, d2, a2, b2, mem[line[_EXTRA]])
                    elif a2 == 1 and b2 == 1:
                        _binary(op, mem, out, a, b, d2, 1, 1)
                    elif a2 == 1 and b2 == 0:
                        _binary(op, mem, out, a, b, d2, 1, 0)
                    else:
                        _binary(op, mem, out, a, b, d2, a2, b2)
                elif a2 == 1:
                    _unary(op, mem, out, a, d2, 1)
                else:
                    _unary(op, mem, out, a, d2, a2)
                out += d2


@njit(nogil=True)
def _sum(mem: Any, first: Any, n: Any) -> Any:
    """Sum in float64, in eight interleaved partial sums."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = n - n % 8
    for i in range(first, first + whole, 8):
        s0 += mem[i]
        s1 += mem[i + 1]
        s2 += mem[i + 2]
        s3 += mem[i + 3]
        s4 += mem[i + 4]
        s5 += mem[i + 5]
        s6 += mem[i + 6]
        s7 += mem[i + 7]
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    for i in range(first + whole, first + n):
        total += mem[i]
    return total


@njit(nogil=True)
def _reduce(line: Any, mem: Any, base: Any, width: Any, rows: Any) -> Any:
    """Reduce the last dimension, which is contiguous: mean, sum, or normalisation by mean and variance."""
    op, groups, n = line[0], line[_DIMS], line[_DIMS + 1]
    for row in range(rows):
        for group in range(groups):
            a = line[_A] + line[_A_ROW] * (base + row * width) + group * n
            total = _sum(mem, a, n)
            if op == _TOTAL:
                mem[base + row * width + line[_OUT] + group] = np.float32(total)
                continue
            mean = total / n
            if op == _MEAN:
                mem[base + row * width + line[_OUT] + group] = np.float32(mean)
                continue
            spread = 0.0
            for i in range(a, a + n):
                spread += (mem[i] - mean) * (mem[i] - mean)
            factor = 1.0 / math.sqrt(spread / n + mem[line[_EXTRA]])
            out = base + row * width + line[_OUT] + group * n
            weight, bias = line[_EXTRA + 1], line[_EXTRA + 2]
            for i in range(n):
                value = (mem[a + i] - mean) * factor
                if weight >= 0:
                    value *= mem[weight + i]
                if bias >= 0:
                    value += mem[bias + i]
                mem[out + i] = np.float32(value)


@njit(nogil=True)
def _linear(
    line: Any, mem: Any, address: Any, base: Any, width: Any, rows: Any, halves: Any, halves_address: Any
) -> Any:
    columns, count, factor, bias = line[_DIMS], line[_DIMS + 1], line[_EXTRA], line[_EXTRA + 2]
    x, step = address + 4 * (base + line[_A]), 4 * width
    y = address + 4 * (base + line[_OUT])
    if factor == _HALVES:
        words = (count + 1) // 2
        for row in range(rows):
            halves[(row + 1) * words - 1] = np.float32(0.0)
            _KEEP_BF16(halves_address + 4 * row * words, 0, x + row * step, 0, 0, 0, count)
        x, step = halves_address, 4 * words
    call_at(line[_EXTRA + 3], line[_EXTRA + 1], x, step, y, 4 * width, rows, columns, count)
    if bias >= 0:
        for row in range(rows):
            _binary(_ADD, mem, base + row * width + line[_OUT], base + row * width + line[_OUT], bias, columns, 1, 1)


# ------------------------------------------------------------------------------------------------------------ attention


@njit(nogil=True)
def _slot(position: Any, table: Any, ring: Any, capacity: Any, page_tokens: Any) -> Any:
    """Return a position's slot, and how many positions are contiguous from there on."""
    if capacity > 0:
        return ring * capacity + position % capacity, capacity - position % capacity
    return table[position // page_tokens] * page_tokens + position % page_tokens, page_tokens - position % page_tokens


@njit(nogil=True)
def _write(form: Any, at: Any, x: Any, heads: Any, width: Any) -> Any:
    if form == _FP32:
        _KEEP_FP32(at, 0, x, 0, 0, 0, heads * width)
    elif form == _BF16:
        _KEEP_BF16(at, 0, x, 0, 0, 0, heads * width)
    elif form == _FP16:
        _KEEP_FP16(at, 0, x, 0, 0, 0, heads * width)
    else:
        for head in range(heads):
            _KEEP_INT8(at + head * vec.vector_bytes(form, width), 0, x + 4 * head * width, 0, 0, 0, width)


@njit(nogil=True)
def _attend(
    line: Any,
    mem: Any,
    address: Any,
    base: Any,
    width: Any,
    rows: Any,
    cache: Any,
    form: Any,
    positions: Any,
    tables: Any,
    rings: Any,
    page_tokens: Any,
    scores: Any,
    scores_address: Any,
) -> Any:
    heads, shared, key_width, value_width = line[_DIMS], line[_DIMS + 1], line[_DIMS + 2], line[_EXTRA]
    q, k, v, out = line[_A], line[_B], line[_EXTRA + 1], line[_OUT]
    scale, softcap, sinks = mem[line[_EXTRA + 2]], line[_EXTRA + 3], line[_EXTRA + 4]
    keys, values, window, capacity = cache[0], cache[1], cache[2], cache[3]
    key_bytes, value_bytes = vec.vector_bytes(form, key_width), vec.vector_bytes(form, value_width)
    groups = heads // shared
    room = scores.size // groups
    key_step, value_step = shared * key_bytes, shared * value_bytes
    for row in range(rows):
        slot, _ = _slot(positions[row], tables[row], rings[row], capacity, page_tokens)
        own = address + 4 * (base + row * width)
        _write(form, keys + slot * key_step, own + 4 * k, shared, key_width)
        _write(form, values + slot * value_step, own + 4 * v, shared, value_width)
    for row in range(rows):
        end = positions[row] + 1
        first = max(np.int64(0), end - window) if window > 0 else np.int64(0)
        own = address + 4 * (base + row * width)
        for head in range(shared):
            position = first
            while position < end:
                slot, run = _slot(position, tables[row], rings[row], capacity, page_tokens)
                run = min(run, end - position)
                _multiply(
                    form, keys + slot * key_step + head * key_bytes, key_step,
                    own + 4 * (q + head * groups * key_width), 4 * key_width,
                    scores_address + 4 * (position - first), 4 * room, groups, run, key_width,
                )  # fmt: skip
                position += run
            seen = end - first
            for group in range(groups):
                start = group * room
                for i in range(start, start + seen):
                    scores[i] *= scale
                if softcap >= 0:
                    for i in range(start, start + seen):
                        scores[i] = np.float32(math.tanh(np.float64(scores[i] / mem[softcap])) * mem[softcap])
                top = scores[start]
                for i in range(start, start + seen):
                    top = max(top, scores[i])
                if sinks >= 0:
                    top = max(top, mem[sinks + head * groups + group])
                for i in range(start, start + seen):
                    scores[i] = _power(scores[i] - top)
                total = _sum(scores, start, seen)
                if sinks >= 0:
                    total += _power(mem[sinks + head * groups + group] - top)
                share = np.float32(1.0 / total)
                for i in range(start, start + seen):
                    scores[i] *= share
                target = base + row * width + out + (head * groups + group) * value_width
                for i in range(target, target + value_width):
                    mem[i] = np.float32(0.0)
                position = first
                while position < end:
                    slot, run = _slot(position, tables[row], rings[row], capacity, page_tokens)
                    run = min(run, end - position)
                    at = values + slot * value_step + head * value_bytes
                    weights = scores_address + 4 * (start + position - first)
                    if form == _FP32:
                        _MIX_FP32(at, value_step, weights, address + 4 * target, run, value_width, 0)
                    elif form == _BF16:
                        _MIX_BF16(at, value_step, weights, address + 4 * target, run, value_width, 0)
                    elif form == _FP16:
                        _MIX_FP16(at, value_step, weights, address + 4 * target, run, value_width, 0)
                    else:
                        _MIX_INT8(at, value_step, weights, address + 4 * target, run, value_width, 0)
                    position += run


def _run(stamp: int) -> Any:
    @njit(
        "void(int64[:, ::1], float32[::1], int64, int64, int64, int64, int64[:, ::1], int64, int64[::1], "
        "int64[:, ::1], int64[::1], int64, float32[::1], int64, float32[::1], int64, int64[::1])",
        nogil=True,
        cache=True,
    )
    def run(
        code: Any,
        mem: Any,
        address: Any,
        base: Any,
        width: Any,
        rows: Any,
        caches: Any,
        form: Any,
        positions: Any,
        tables: Any,
        rings: Any,
        page_tokens: Any,
        scores: Any,
        scores_address: Any,
        scratch: Any,
        scratch_at: Any,
        matrices: Any,
    ) -> None:
        if stamp < 0:
            return
        for number in range(code.shape[0]):
            line = code[number]
            op = line[0]
            if op == _LINEAR:
                _linear(line, mem, address, base, width, rows, scratch, scratch_at)
            elif op == _EXPERTS:
                row_choices.experts(line, mem, address, base, width, rows, matrices, scratch, scratch_at)
            elif op == _ATTENTION:
                _attend(
                    line, mem, address, base, width, rows, caches[line[_EXTRA + 5]], form, positions, tables, rings,
                    page_tokens, scores, scores_address,
                )  # fmt: skip
            elif op == _TOP:
                row_choices.top(line, mem, base, width, rows)
            elif op == _LOOKUP:
                row_choices.lookup(line, mem, base, width, rows)
            elif op == _SCATTER:
                row_choices.scatter(line, mem, base, width, rows)
            elif op == _SOFTMAX:
                row_choices.softmax(line, mem, base, width, rows)
            elif op >= _MEAN:
                _reduce(line, mem, base, width, rows)
            else:
                _elementwise(line, mem, base, width, rows)

    return run


run = _run(vec.stamp_of(__file__, row_choices.__file__, row_code.__file__))
"""Run a program for some rows.

`code`: lines as `row_code.Field` describes them. `mem`: constants, then from `base` on `width` floats for each row;
`address`: its address. `caches`: per attention the addresses of keys and values, the window, and the ring's capacity
(0: none). `form`: storage format of the caches. `positions`, `tables`, `rings`: position, pages and ring of each row.
`scores`: memory for the queries of one key head. `scratch`: memory for the operands, and with experts the results, of
all rows of the largest product. `matrices`: addresses of experts' matrices.
"""
