"""Runs the lines of a row program on a card: what is between two products, or a product and attention, in one launch.

One group of threads computes a row and goes through the lines as `row_kernels` does on a processor: a value is written
to the row's memory, and the next line reads it there. Between two lines all threads wait for each other. Nothing is
compiled for a model: the lines are read when the kernel runs, so that the same few kernels serve every graph and may be
compiled before any is known. Neighbours: `row_code` defines the lines, `card_lines` prepares them, `card_products` and
`card_attention` compute what is not here.
"""

# pyright: basic, reportMissingTypeStubs=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingParameterType=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fusionai.backends.torch.card_launch import ANYWHERE, SIZES
from fusionai.backends.torch.card_lines import CardOp
from fusionai.backends.torch.row_code import LINE, Field, Op

BLOCK: tl.constexpr = tl.constexpr(1024)
"""Elements that one step computes; chosen."""
GROUPS: tl.constexpr = tl.constexpr(4)
"""Groups that a reduction computes together; chosen."""
_WIDE: tl.constexpr = tl.constexpr(512)
"""Elements of each group that a reduction reads in one step; chosen."""
_LINE: tl.constexpr = tl.constexpr(LINE)
_DIMS: tl.constexpr = tl.constexpr(int(Field.DIMS))
_OUT: tl.constexpr = tl.constexpr(int(Field.OUT))
_A: tl.constexpr = tl.constexpr(int(Field.A))
_A_ROW: tl.constexpr = tl.constexpr(int(Field.A_ROW))
_B: tl.constexpr = tl.constexpr(int(Field.B))
_B_ROW: tl.constexpr = tl.constexpr(int(Field.B_ROW))
_A_STRIDES: tl.constexpr = tl.constexpr(int(Field.A_STRIDES))
_B_STRIDES: tl.constexpr = tl.constexpr(int(Field.B_STRIDES))
_EXTRA: tl.constexpr = tl.constexpr(int(Field.EXTRA))
_ADD: tl.constexpr = tl.constexpr(int(Op.ADD))
_SUB: tl.constexpr = tl.constexpr(int(Op.SUB))
_MUL: tl.constexpr = tl.constexpr(int(Op.MUL))
_DIV: tl.constexpr = tl.constexpr(int(Op.DIV))
_MINIMUM: tl.constexpr = tl.constexpr(int(Op.MINIMUM))
_MAXIMUM: tl.constexpr = tl.constexpr(int(Op.MAXIMUM))
_MASKED: tl.constexpr = tl.constexpr(int(Op.MASKED))
_NEG: tl.constexpr = tl.constexpr(int(Op.NEG))
_SQUARE: tl.constexpr = tl.constexpr(int(Op.SQUARE))
_CUBE: tl.constexpr = tl.constexpr(int(Op.CUBE))
_SQRT: tl.constexpr = tl.constexpr(int(Op.SQRT))
_RSQRT: tl.constexpr = tl.constexpr(int(Op.RSQRT))
_EXP: tl.constexpr = tl.constexpr(int(Op.EXP))
_SILU: tl.constexpr = tl.constexpr(int(Op.SILU))
_SIGMOID: tl.constexpr = tl.constexpr(int(Op.SIGMOID))
_RELU: tl.constexpr = tl.constexpr(int(Op.RELU))
_TANH: tl.constexpr = tl.constexpr(int(Op.TANH))
_GELU: tl.constexpr = tl.constexpr(int(Op.GELU))
_GELU_TANH: tl.constexpr = tl.constexpr(int(Op.GELU_TANH))
_TRUTH: tl.constexpr = tl.constexpr(int(Op.TRUTH))
_COS: tl.constexpr = tl.constexpr(int(Op.COS))
_SIN: tl.constexpr = tl.constexpr(int(Op.SIN))
_MEAN: tl.constexpr = tl.constexpr(int(Op.MEAN))
_TOTAL: tl.constexpr = tl.constexpr(int(Op.TOTAL))
_SOFTMAX: tl.constexpr = tl.constexpr(int(Op.SOFTMAX))
_ATTENTION: tl.constexpr = tl.constexpr(int(Op.ATTENTION))
_TOP: tl.constexpr = tl.constexpr(int(Op.TOP))
_LOOKUP: tl.constexpr = tl.constexpr(int(Op.LOOKUP))
_SCATTER: tl.constexpr = tl.constexpr(int(Op.SCATTER))
_TAKE: tl.constexpr = tl.constexpr(int(CardOp.TAKE))
_GIVE: tl.constexpr = tl.constexpr(int(CardOp.GIVE))
_OUT_STRIDES: tl.constexpr = tl.constexpr(int(Field.EXTRA) + 3)


@triton.jit
def tanh(x: tl.tensor) -> Any:
    # One rounding less than from the exponential of 2 x alone where x is large: that would overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _of_two(op: tl.tensor, a: tl.tensor, b: tl.tensor, number: tl.tensor) -> Any:
    if op == _ADD:
        made = a + b
    elif op == _SUB:
        made = a - b
    elif op == _MUL:
        made = a * b
    elif op == _DIV:
        made = tl.div_rn(a, b)
    elif op == _MINIMUM:
        made = tl.minimum(a, b)
    elif op == _MAXIMUM:
        made = tl.maximum(a, b)
    else:
        made = tl.where(b != 0, number, a)
    return made


@triton.jit
def _of_one(op: tl.tensor, a: tl.tensor) -> Any:
    made = a
    if op == _NEG:
        made = -a
    elif op == _SQUARE:
        made = a * a
    elif op == _CUBE:
        made = a * a * a
    elif op == _SQRT:
        made = tl.sqrt_rn(a)
    elif op == _RSQRT:
        made = tl.rsqrt(a)
    elif op == _EXP:
        made = tl.exp(a)
    elif op == _SILU:
        made = a / (1.0 + tl.exp(-a))
    elif op == _SIGMOID:
        made = 1.0 / (1.0 + tl.exp(-a))
    elif op == _RELU:
        made = tl.where(a > 0, a, a * 0)
    elif op == _TANH:
        made = tanh(a)
    elif op == _GELU:
        made = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif op == _GELU_TANH:
        made = 0.5 * a * (1.0 + tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)))
    elif op == _TRUTH:
        made = tl.where(a != 0, 1.0, 0.0)
    elif op == _COS:
        made = tl.cos(a)
    elif op == _SIN:
        made = tl.sin(a)
    return made


@triton.jit
def _elementwise(
    line: tl.tensor, op: tl.tensor, mem: tl.tensor, base: tl.tensor, part: tl.tensor, parts: tl.tensor,
) -> None:  # fmt: skip
    d0, d1, d2 = tl.load(line + _DIMS), tl.load(line + _DIMS + 1), tl.load(line + _DIMS + 2)
    out, a_at, b_at = base + tl.load(line + _OUT), tl.load(line + _A), tl.load(line + _B)
    a_at += tl.load(line + _A_ROW) * base
    b_at += tl.load(line + _B_ROW) * base
    a0, a1, a2 = tl.load(line + _A_STRIDES), tl.load(line + _A_STRIDES + 1), tl.load(line + _A_STRIDES + 2)
    b0, b1, b2 = tl.load(line + _B_STRIDES), tl.load(line + _B_STRIDES + 1), tl.load(line + _B_STRIDES + 2)
    o0, o1, o2 = tl.load(line + _OUT_STRIDES), tl.load(line + _OUT_STRIDES + 1), tl.load(line + _OUT_STRIDES + 2)
    number = 0.0
    if op == _MASKED:
        number = tl.load(mem + tl.load(line + _EXTRA))
    total = d0 * d1 * d2
    for start in range(part * BLOCK, total, parts * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < total
        i2 = i % d2
        rest = i // d2
        i1 = rest % d1
        i0 = rest // d1
        a = tl.load(mem + a_at + i0 * a0 + i1 * a1 + i2 * a2, mask=inside, other=1.0)
        if op <= _MASKED:
            b = tl.load(mem + b_at + i0 * b0 + i1 * b1 + i2 * b2, mask=inside, other=1.0)
            made = _of_two(op, a, b, number)
        else:
            made = _of_one(op, a)
        tl.store(mem + out + i0 * o0 + i1 * o1 + i2 * o2, made, mask=inside)


@triton.jit
def _reduced(line: tl.tensor, op: tl.tensor, mem: tl.tensor, base: tl.tensor) -> None:
    """Mean, sum, normalisation and softmax of each group."""
    groups, n = tl.load(line + _DIMS), tl.load(line + _DIMS + 1)
    a_at, out = base + tl.load(line + _A), base + tl.load(line + _OUT)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)[:, None]
        real = group < groups
        column = tl.arange(0, _WIDE)[None, :]
        sums = tl.zeros((GROUPS, _WIDE), tl.float32)
        if op == _SOFTMAX:
            sums += float("-inf")
            for start in range(0, n, _WIDE):
                inside = real & (start + column < n)
                a = tl.load(mem + a_at + group * n + start + column, mask=inside, other=float("-inf"))
                sums = tl.maximum(sums, a)
            top = tl.where(real, tl.max(sums, 1)[:, None], 0.0)
            sums = tl.zeros((GROUPS, _WIDE), tl.float32)
            for start in range(0, n, _WIDE):
                inside = real & (start + column < n)
                a = tl.load(mem + a_at + group * n + start + column, mask=inside, other=float("-inf"))
                sums += tl.exp(a - top)
            total = tl.sum(sums, 1)[:, None]
            for start in range(0, n, _WIDE):
                inside = real & (start + column < n)
                a = tl.load(mem + a_at + group * n + start + column, mask=inside, other=0.0)
                tl.store(mem + out + group * n + start + column, tl.exp(a - top) / total, mask=inside)
        else:
            for start in range(0, n, _WIDE):
                inside = real & (start + column < n)
                sums += tl.load(mem + a_at + group * n + start + column, mask=inside, other=0.0)
            total = tl.sum(sums, 1)[:, None]
            if op == _TOTAL:
                tl.store(mem + out + group, total, mask=real)
            else:
                mean = total / n
                if op == _MEAN:
                    tl.store(mem + out + group, mean, mask=real)
                else:
                    _normalised(line, mem, a_at, out, group, real, n, mean)


@triton.jit
def _normalised(
    line: tl.tensor, mem: tl.tensor, a_at: tl.tensor, out: tl.tensor, group: tl.tensor, real: tl.tensor, n: tl.tensor,
    mean: tl.tensor,
) -> None:  # fmt: skip
    eps = tl.load(mem + tl.load(line + _EXTRA))
    weight, bias = tl.load(line + _EXTRA + 1), tl.load(line + _EXTRA + 2)
    column = tl.arange(0, _WIDE)[None, :]
    sums = tl.zeros((GROUPS, _WIDE), tl.float32)
    for start in range(0, n, _WIDE):
        inside = real & (start + column < n)
        a = tl.load(mem + a_at + group * n + start + column, mask=inside, other=0.0)
        sums += tl.where(inside, (a - mean) * (a - mean), 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(sums, 1)[:, None] / n + eps)
    for start in range(0, n, _WIDE):
        inside = real & (start + column < n)
        a = tl.load(mem + a_at + group * n + start + column, mask=inside, other=0.0)
        made = (a - mean) * scale
        if weight >= 0:
            made *= tl.load(mem + weight + start + column, mask=start + column < n, other=0.0)
        if bias >= 0:
            made += tl.load(mem + bias + start + column, mask=start + column < n, other=0.0)
        tl.store(mem + out + group * n + start + column, made, mask=inside)


@triton.jit
def _top(line: tl.tensor, mem: tl.tensor, base: tl.tensor) -> None:
    """The largest elements of each group and their indices, in descending order; of equal ones the first."""
    groups, n, chosen = tl.load(line + _DIMS), tl.load(line + _DIMS + 1), tl.load(line + _DIMS + 2)
    i = tl.arange(0, BLOCK)
    for group in range(groups):
        left = tl.load(mem + base + tl.load(line + _A) + group * n + i, mask=i < n, other=float("-inf"))
        free = i < n
        for number in range(chosen):
            best = tl.max(left, 0)
            index = tl.min(tl.where(free & (left == best), i, BLOCK), 0)
            tl.store(mem + base + tl.load(line + _OUT) + group * chosen + number, best)
            tl.store(mem + base + tl.load(line + _EXTRA) + group * chosen + number, index.to(tl.float32))
            free = free & (i != index)
            left = tl.where(free, left, float("-inf"))


@triton.jit
def _looked_up(line: tl.tensor, mem: tl.tensor, base: tl.tensor) -> None:
    """The chosen elements of each group; NaN for an index that is out of range."""
    groups, chosen, floats = tl.load(line + _DIMS), tl.load(line + _DIMS + 1), tl.load(line + _DIMS + 2)
    length, total = tl.load(line + _EXTRA), groups * chosen * floats
    source = tl.load(line + _A) + tl.load(line + _A_ROW) * base
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        number = i // floats
        value = tl.load(mem + base + tl.load(line + _B) + number, mask=i < total, other=0.0)
        known = (value >= 0) & (value < length)
        index = number // chosen * length + tl.where(known, value, 0.0).to(tl.int32)
        made = tl.load(mem + source + index * floats + i % floats, mask=(i < total) & known, other=float("nan"))
        tl.store(mem + base + tl.load(line + _OUT) + i, made, mask=i < total)


@triton.jit
def _scattered(line: tl.tensor, mem: tl.tensor, base: tl.tensor) -> None:
    """Write a number in place of the chosen elements; an index that is out of range chooses none."""
    groups, chosen, length = tl.load(line + _DIMS), tl.load(line + _DIMS + 1), tl.load(line + _DIMS + 2)
    total, number = groups * chosen, tl.load(mem + tl.load(line + _EXTRA))
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(mem + base + tl.load(line + _B) + i, mask=i < total, other=-1.0)
        known = (value >= 0) & (value < length) & (i < total)
        index = i // chosen * length + tl.where(known, value, 0.0).to(tl.int32)
        tl.store(mem + base + tl.load(line + _OUT) + index, number + tl.zeros((BLOCK,), tl.float32), mask=known)


@triton.jit
def _kept(
    mem: tl.tensor, at: tl.tensor, cache: tl.tensor, slot: tl.tensor, heads: tl.tensor, width: tl.tensor,
    FORM: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the vectors of all key heads to a place of a cache, in its format (`row_code.Form`)."""
    stored = width
    if FORM == 3:
        stored = width + 4
    column = tl.arange(0, WIDE)[None, :]
    for first in range(0, heads, GROUPS):
        head = first + tl.arange(0, GROUPS)[:, None]
        inside = (head < heads) & (column < width)
        x = tl.load(mem + at + head * width + column, mask=inside, other=0.0)
        place = cache + (slot * heads + head) * stored
        if FORM == 3:
            largest = tl.max(tl.abs(x), 1)[:, None]
            safe = tl.where(largest > 0, largest, 1.0)
            step = tl.where(largest > 0, tl.div_rn(tl.zeros_like(safe) + 127.0, safe), 0.0)
            # Adding and subtracting this number rounds to the nearest whole number, halves to even.
            levels = (x * step + 12582912.0) - 12582912.0
            levels = tl.minimum(tl.maximum(levels, -127.0), 127.0)
            tl.store(place + column, levels.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
            bits = tl.div_rn(largest, tl.zeros_like(largest) + 127.0).to(tl.int32, bitcast=True)
            byte = tl.arange(0, 4)[None, :]
            some = ((bits >> (8 * byte)) & 255).to(tl.uint8)
            tl.store(place + width + byte, some, mask=head < heads)
        else:
            tl.store(place + column, x.to(cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def lines(
    code: tl.tensor, first: tl.tensor, count: tl.tensor, mem: tl.tensor, fixed: tl.tensor, width: tl.tensor,
    chosen: tl.tensor, row: tl.tensor, fed: tl.tensor, fed_width: tl.tensor, made: tl.tensor, made_width: tl.tensor,
    keys: tl.tensor, values: tl.tensor, slots: tl.tensor, FORM: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Run `count` lines from line `first` on. `chosen`: the rows of memory, one for each group of threads. `row`: how
    many rows of the pass are before memory's first. `keys`, `values`: the cache in which a line ATTENTION keeps its
    operands, in the format FORM. `slots`: the places of the pass's rows there. WIDE: at least a vector's elements."""
    number = tl.program_id(0)
    at = tl.load(chosen + number)
    base = fixed + at * width
    part, parts = tl.program_id(1), tl.num_programs(1)
    for place in range(first, first + count):
        line = code + place * _LINE
        op = tl.load(line)
        if op <= _SIN:
            _elementwise(line, op, mem, base, part, parts)
        elif op <= _SOFTMAX:
            _reduced(line, op, mem, base)
        elif op == _TAKE:
            n = tl.load(line + _DIMS)
            for start in range(0, n, BLOCK):
                i = start + tl.arange(0, BLOCK)
                some = tl.load(fed + (row + at) * fed_width + tl.load(line + _A) + i, mask=i < n, other=0.0)
                tl.store(mem + base + tl.load(line + _OUT) + i, some, mask=i < n)
        elif op == _GIVE:
            n = tl.load(line + _DIMS)
            for start in range(0, n, BLOCK):
                i = start + tl.arange(0, BLOCK)
                some = tl.load(mem + base + tl.load(line + _A) + i, mask=i < n, other=0.0)
                tl.store(made + number * made_width + tl.load(line + _OUT) + i, some, mask=i < n)
        elif op == _TOP:
            _top(line, mem, base)
        elif op == _LOOKUP:
            _looked_up(line, mem, base)
        elif op == _SCATTER:
            _scattered(line, mem, base)
        elif op == _ATTENTION:
            slot = tl.load(slots + row + at).to(tl.int64)
            heads, wide = tl.load(line + _DIMS + 1), tl.load(line + _DIMS + 2)
            _kept(mem, base + tl.load(line + _B), keys, slot, heads, wide, FORM, WIDE)
            _kept(mem, base + tl.load(line + _EXTRA + 1), values, slot, heads, tl.load(line + _EXTRA), FORM, WIDE)
        tl.debug_barrier()
