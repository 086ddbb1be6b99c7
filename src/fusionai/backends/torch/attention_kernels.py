"""Compiled attention of many positions: queries lie side by side in vectors, keys and values are read from the cache.

A lane of a vector is one query of one head; lanes never exchange data. Each score is summed over the key's width in
order. Each sum of weights and each mixed value is summed over the keys in the order of their positions, in blocks of
keys that begin at multiples of `KEYS` in the text, with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). So a row's bits follow from its own position alone,
not from the rows computed with it or from where prompt pieces begin and end.

A block of keys and values is copied as float32 into the processor's cache once per sweep of up to about a thousand
lanes; queries that share a key head share the copy. The kernel reads memory at the addresses it is given: only
`paged_attention` calls it, with sizes that it has checked. Neighbours: `row_vectors` has the instructions,
`row_kernels` the attention of single rows.
"""

# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from fusionai.backends.serving.page_table import TILE_POSITIONS
from fusionai.backends.torch import row_code
from fusionai.backends.torch import row_vectors as vec
from fusionai.backends.torch.row_code import Form

_VECTORS, _ROWS = vec.by_registers((2, 8), (1, 6), (1, 2))
"""Register tile: vectors of queries, by keys or by elements of values, that are summed together."""
WIDE: Final = _VECTORS * vec.LANES
"""Lanes that are computed together."""
KEYS: Final = 192
"""Keys of a block: a multiple of every register tile."""


class Place(IntEnum):
    """Index of each number in the description of a call. Addresses and steps are in bytes.

    Queries are [positions, heads, width], results float32 [positions, heads, value width], both of one span. `SWEEP`
    lanes of a key head share a copied block and form one item; a call computes items `FIRST` to `END`. `WINDOW` and
    `CAPACITY` are 0 without a window.
    """

    QUERIES = 0
    QUERY_POSITION_STEP = 1
    QUERY_HEAD_STEP = 2
    OUT = 3
    KEYS = 4
    VALUES = 5
    FORM = 6
    HEADS = 7
    SHARED = 8
    KEY_WIDTH = 9
    VALUE_WIDTH = 10
    START = 11
    STOP = 12
    WINDOW = 13
    CAPACITY = 14
    RING = 15
    PAGE_TOKENS = 16
    SWEEP = 17
    FIRST = 18
    END = 19


def items(start: int, stop: int, heads: int, shared: int, sweep: int) -> int:
    """Return the number of items of a span of positions `start` to `stop`."""
    lanes = (stop - start // TILE_POSITIONS * TILE_POSITIONS) * (heads // shared)
    return shared * -(-lanes // sweep)


def scratch_floats(positions: int, groups: int, key_width: int, value_width: int, sweep: int) -> int:
    """Return the floats of scratch memory that a call needs for a span of at most `positions`."""
    lanes = min(sweep, (positions + TILE_POSITIONS) * groups + WIDE)
    padded = -(-value_width // _ROWS) * _ROWS
    return lanes * (key_width + padded + 3) + KEYS * (key_width + padded) + max(KEYS * WIDE, key_width, value_width)


# --------------------------------------------------------------------------------------------------------------- pieces


def _tile(*, resumed: bool) -> Any:
    """Return an intrinsic that computes y[r] = sum of x[r] * w over `count`, for `_ROWS` values of r and `WIDE` lanes.

    w and y store their lanes contiguously. For scores, x is `_ROWS` keys of `count` elements, `x_step` apart. For
    values (`resumed`), x is `_ROWS` elements of `count` values, `x_step` apart, and the earlier sums in y are first
    multiplied by the factors of the lanes at `y_step`.
    """

    def codegen(builder: Any, args: Any) -> None:
        w, _, x, x_step, y, y_step, count = args
        line = vec.int64(4 * WIDE)
        fma = vec.fused(builder, vec.FLOATS, "v16f32")
        sums = [[cgutils.alloca_once(builder, vec.FLOATS) for _ in range(_VECTORS)] for _ in range(_ROWS)]

        def vector_at(address: Any, number: int) -> Any:
            return vec.at_address(builder, builder.add(address, vec.int64(4 * vec.LANES * number)), vec.FLOATS)

        def out(row: int) -> Any:
            return builder.add(y, vec.int64(4 * WIDE * row))

        factors = [builder.load(vector_at(y_step, number), align=4) for number in range(_VECTORS)] if resumed else []
        for row, places in enumerate(sums):
            for number, place in enumerate(places):
                if resumed:
                    before = builder.load(vector_at(out(row), number), align=4)
                    builder.store(builder.fmul(before, factors[number]), place)
                else:
                    builder.store(ir.Constant(vec.FLOATS, [0.0] * vec.LANES), place)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(w, builder.mul(loop.index, line))
            vectors = [builder.load(vector_at(at, number), align=4) for number in range(_VECTORS)]
            for row, places in enumerate(sums):
                if resumed:
                    one = builder.add(x, builder.add(builder.mul(loop.index, x_step), vec.int64(4 * row)))
                else:
                    one = builder.add(
                        builder.add(x, builder.mul(x_step, vec.int64(row))), builder.mul(loop.index, vec.int64(4))
                    )
                same = vec.spread(builder, vec.load_one(builder, Form.FP32, one))
                for vector, place in zip(vectors, places, strict=True):
                    builder.store(builder.call(fma, [vector, same, builder.load(place)]), place)
        for row, places in enumerate(sums):
            for number, place in enumerate(places):
                builder.store(builder.load(place), vector_at(out(row), number), align=4)

    return vec.intrinsic_of(f"attention_tile_{resumed}", codegen)


def _all(value: float) -> Any:
    return ir.Constant(vec.FLOATS, [float(np.float32(value))] * vec.LANES)


def _power(builder: Any, x: Any) -> Any:
    """Return e to the x for x <= 0 (after Cephes' expf); results below float32's normal numbers become 0."""
    fma = vec.fused(builder, vec.FLOATS, "v16f32")
    magic = _all(12582912.0)  # adding it moves the integer part into the last bits
    shifted = builder.call(fma, [x, _all(1.44269504088896341), magic])
    whole = builder.fsub(shifted, magic)
    rest = builder.call(fma, [whole, _all(-0.693359375), x])
    rest = builder.call(fma, [whole, _all(2.12194440e-4), rest])
    value = _all(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = builder.call(fma, [value, rest, _all(factor)])
    value = builder.call(fma, [builder.fmul(value, rest), rest, rest])
    value = builder.fadd(value, _all(1.0))
    exponent = builder.shl(builder.bitcast(shifted, vec.WORDS), ir.Constant(vec.WORDS, [23] * vec.LANES))
    value = builder.bitcast(builder.add(builder.bitcast(value, vec.WORDS), exponent), vec.FLOATS)
    value = builder.select(builder.fcmp_ordered("<", x, _all(-87.3)), _all(0.0), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)  # NaN stays NaN


def _weighed() -> Any:
    """Return an intrinsic that turns the scores of `count` keys at w into weights, in place. A weight is e to the score
    minus the largest score so far, which is kept at x. The sums of weights at y are updated, and the factors by which
    earlier sums shrink are written to `y_step`."""

    def codegen(builder: Any, args: Any) -> None:
        w, _, x, _, y, y_step, count = args
        line = vec.int64(4 * WIDE)
        offsets = [vec.int64(4 * vec.LANES * number) for number in range(_VECTORS)]

        def vector_at(address: Any, number: int) -> Any:
            return vec.at_address(builder, builder.add(address, offsets[number]), vec.FLOATS)

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        before = [builder.load(vector_at(x, number), align=4) for number in range(_VECTORS)]
        # Four maxima at a time, because each comparison waits for the previous one.
        tops = [[cgutils.alloca_once(builder, vec.FLOATS) for _ in range(4)] for _ in range(_VECTORS)]
        for first, places in zip(before, tops, strict=True):
            for place in places:
                builder.store(first, place)

        def look(start: Any, turn: int) -> None:
            at = builder.add(w, builder.mul(builder.add(start, vec.int64(turn)), line))
            for number, places in enumerate(tops):
                score = builder.load(vector_at(at, number), align=4)
                builder.store(larger(score, builder.load(places[turn])), places[turn])

        fours = builder.mul(builder.sdiv(count, vec.int64(4)), vec.int64(4))
        with cgutils.for_range_slice(builder, vec.int64(0), fours, vec.int64(4), intp=vec.LONG) as (start, _):
            for turn in range(4):
                look(start, turn)
        with cgutils.for_range_slice(builder, fours, count, vec.int64(1), intp=vec.LONG) as (start, _):
            look(start, 0)
        largest: list[Any] = []
        totals: list[Any] = []
        for number, places in enumerate(tops):
            a, b, c, d = (builder.load(place) for place in places)
            top = larger(larger(a, b), larger(c, d))
            builder.store(top, vector_at(x, number), align=4)
            largest.append(top)
            kept = _power(builder, builder.fsub(before[number], top))
            builder.store(kept, vector_at(y_step, number), align=4)
            total = cgutils.alloca_once(builder, vec.FLOATS)
            builder.store(builder.fmul(builder.load(vector_at(y, number), align=4), kept), total)
            totals.append(total)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(w, builder.mul(loop.index, line))
            for number, total in enumerate(totals):
                place = vector_at(at, number)
                weight = _power(builder, builder.fsub(builder.load(place, align=4), largest[number]))
                builder.store(weight, place, align=4)
                builder.store(builder.fadd(builder.load(total), weight), total)
        for number, total in enumerate(totals):
            builder.store(builder.load(total), vector_at(y, number), align=4)

    return vec.intrinsic_of("attention_weigh", codegen)


def _limited() -> Any:
    """Return an intrinsic that soft-caps the scores of `count` keys at w: the limit at x times tanh(score / limit),
    after Cephes' tanhf."""

    def codegen(builder: Any, args: Any) -> None:
        w, _, x, _, _, _, count = args
        fma = vec.fused(builder, vec.FLOATS, "v16f32")
        limit = vec.spread(builder, vec.load_one(builder, Form.FP32, x))
        signs = ir.Constant(vec.WORDS, [-(2**31)] * vec.LANES)
        with cgutils.for_range(builder, builder.mul(count, vec.int64(_VECTORS))) as loop:
            place = vec.at_address(
                builder, builder.add(w, builder.mul(loop.index, vec.int64(4 * vec.LANES))), vec.FLOATS
            )
            part = builder.fdiv(builder.load(place, align=4), limit)
            sign = builder.and_(builder.bitcast(part, vec.WORDS), signs)
            size = builder.bitcast(builder.xor(builder.bitcast(part, vec.WORDS), sign), vec.FLOATS)
            square = builder.fmul(part, part)
            near = _all(-5.70498872745e-3)
            for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
                near = builder.call(fma, [near, square, _all(factor)])
            near = builder.call(fma, [builder.fmul(near, square), part, part])
            rest = _power(builder, builder.fmul(size, _all(-2.0)))
            far = builder.fdiv(builder.fsub(_all(1.0), rest), builder.fadd(_all(1.0), rest))
            far = builder.bitcast(builder.or_(builder.bitcast(far, vec.WORDS), sign), vec.FLOATS)
            small = builder.fcmp_ordered("<", size, _all(0.625))
            builder.store(builder.fmul(builder.select(small, near, far), limit), place, align=4)

    return vec.intrinsic_of("attention_cap", codegen)


def _copied(form: Form) -> Any:
    """Return an intrinsic that copies `rows` rows of `count` numbers from x to y, as float32."""
    size = vec.SIZE[form]

    def codegen(builder: Any, args: Any) -> None:
        rows, _, x, x_step, y, y_step, count = args
        whole = builder.mul(builder.sdiv(count, vec.int64(vec.LANES)), vec.int64(vec.LANES))
        with cgutils.for_range(builder, rows) as loop:
            given = builder.add(x, builder.mul(loop.index, x_step))
            made = builder.add(y, builder.mul(loop.index, y_step))
            scale = vec.scale_behind(builder, given, count) if form is Form.INT8 else None
            for start, stop, step in ((vec.int64(0), whole, vec.LANES), (whole, count, 1)):
                with cgutils.for_range_slice(builder, start, stop, vec.int64(step), intp=vec.LONG) as (index, _):
                    one = builder.add(given, builder.mul(index, vec.int64(size)))
                    if step > 1:  # rows of one head are far apart, so the processor does not detect the stride
                        vec.prefetch(builder, builder.add(one, builder.mul(x_step, vec.int64(_AHEAD))))
                    value = (vec.load_wide if step > 1 else vec.load_one)(builder, form, one)
                    if scale is not None:
                        value = builder.fmul(value, vec.spread(builder, scale) if step > 1 else scale)
                    out = builder.add(made, builder.mul(index, vec.int64(4)))
                    builder.store(value, vec.at_address(builder, out, value.type), align=4)

    return vec.intrinsic_of(f"attention_copied_{form.name}", codegen)


_AHEAD: Final = 8
"""Rows between the row being copied and the row being prefetched; chosen."""
_score, _mix, _weigh, _limit = _tile(resumed=False), _tile(resumed=True), _weighed(), _limited()
_copy_fp32, _copy_bf16, _copy_fp16, _copy_int8 = (_copied(form) for form in Form)
_FP32, _BF16, _FP16, _ = (int(form) for form in Form)
_TILE = TILE_POSITIONS
_LOWEST, _HIDDEN = np.float32(np.finfo(np.float32).min), np.float32(-np.inf)
(
    _QUERIES, _QUERY_POSITION_STEP, _QUERY_HEAD_STEP, _OUT, _KEYS, _VALUES, _FORM, _HEADS, _SHARED, _KEY_WIDTH,
    _VALUE_WIDTH, _START, _STOP, _WINDOW, _CAPACITY, _RING, _PAGE_TOKENS, _SWEEP, _FIRST, _END,
) = (int(place) for place in Place)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- blocks


@njit(nogil=True)
def _copy(form: Any, rows: Any, x: Any, x_step: Any, y: Any, y_step: Any, count: Any) -> Any:
    if form == _FP32:
        _copy_fp32(rows, 0, x, x_step, y, y_step, count)
    elif form == _BF16:
        _copy_bf16(rows, 0, x, x_step, y, y_step, count)
    elif form == _FP16:
        _copy_fp16(rows, 0, x, x_step, y, y_step, count)
    else:
        _copy_int8(rows, 0, x, x_step, y, y_step, count)


@njit(nogil=True)
def _lay_out(
    task: Any, table: Any, head: Any, block: Any, first: Any, stop: Any, scratch: Any, base: Any, keys: Any,
    values: Any, padded: Any,
) -> Any:  # fmt: skip
    """Copy keys and values of positions `first` to `stop` of a block to the scratch memory; fill the rest of the tiles
    that are read with zeros."""
    form, shared, key_width, value_width = task[_FORM], task[_SHARED], task[_KEY_WIDTH], task[_VALUE_WIDTH]
    capacity, page_tokens = task[_CAPACITY], task[_PAGE_TOKENS]
    key_bytes, value_bytes = vec.vector_bytes(form, key_width), vec.vector_bytes(form, value_width)
    begin, end = max(first - block, 0), min(stop - block, KEYS)
    for index in range(keys, keys + begin * key_width):
        scratch[index] = np.float32(0.0)
    for index in range(values, values + begin * padded):
        scratch[index] = np.float32(0.0)
    past = (end + _ROWS - 1) // _ROWS * _ROWS
    for index in range(keys + end * key_width, keys + past * key_width):
        scratch[index] = np.float32(0.0)
    while begin < end:
        position = block + begin
        if capacity > 0:
            around = position % capacity
            place, run = task[_RING] * capacity + around, capacity - around
        else:
            page = position // page_tokens
            place, run = table[page] * page_tokens + position - page * page_tokens, (page + 1) * page_tokens - position
        run = min(run, end - begin)
        key_step, value_step = shared * key_bytes, shared * value_bytes
        key = task[_KEYS] + place * key_step + head * key_bytes
        value = task[_VALUES] + place * value_step + head * value_bytes
        _copy(form, run, key, key_step, base + 4 * (keys + begin * key_width), 4 * key_width, key_width)
        _copy(form, run, value, value_step, base + 4 * (values + begin * padded), 4 * padded, value_width)
        begin += run


@njit(nogil=True)
def _seen_until(task: Any, until: Any, position: Any) -> Any:
    """Return the position before which a query sees keys."""
    start, stop = task[_START], task[_STOP]
    return until[position - start] if len(until) > 0 and start <= position < stop else position + 1


@njit(nogil=True)
def _hide(
    task: Any, until: Any, scratch: Any, scores: Any, begin: Any, end: Any, block: Any, first: Any, groups: Any
) -> Any:
    """Hide the keys `begin` to `end` of a block from the queries that do not see them, in a text of which some
    positions see later ones. `first`: the lane of the first query, counted from the tile's."""
    tile = task[_START] // _TILE * _TILE
    for index in range(WIDE):
        position = tile + (first + index) // groups
        after = _seen_until(task, until, position) - block
        oldest = position - task[_WINDOW] - block if task[_WINDOW] > 0 else -block - 1
        for key in range(begin, end):
            if key >= after or key <= oldest:
                scratch[scores + key * WIDE + index] = _HIDDEN


@njit(nogil=True)
def _sweep(
    task: Any, scale: Any, softcap: Any, table: Any, until: Any, sinks: Any, scratch: Any, base: Any, head: Any,
    lane0: Any,
) -> Any:  # fmt: skip
    """Compute the lanes of a key head from `lane0` on, at most `SWEEP` of them."""
    groups, key_width, value_width = task[_HEADS] // task[_SHARED], task[_KEY_WIDTH], task[_VALUE_WIDTH]
    start, stop, window = task[_START], task[_STOP], task[_WINDOW]
    padded = (value_width + _ROWS - 1) // _ROWS * _ROWS
    tile = start // _TILE * _TILE
    lanes = min(task[_SWEEP], (stop - tile) * groups - lane0)
    chunks = (lanes + WIDE - 1) // WIDE
    room = chunks * WIDE
    # Scratch layout: per chunk the queries and mixed values, both [element, lane]; per lane three numbers; one block.
    mixed = room * key_width
    largest = mixed + room * padded
    total, kept = largest + room, largest + 2 * room
    keys = kept + room
    values = keys + KEYS * key_width
    scores = values + KEYS * padded
    for index in range(scores):
        scratch[index] = np.float32(0.0)
    for lane in range(room):
        scratch[largest + lane] = _LOWEST
    for lane in range(lanes):
        position, query = tile + (lane0 + lane) // groups, head * groups + (lane0 + lane) % groups
        if len(sinks) > 0:  # a sink is a key of weight 1 without a value
            scratch[largest + lane] = sinks[query]
            scratch[total + lane] = np.float32(1.0)
        if position >= start:
            given = task[_QUERIES] + (position - start) * task[_QUERY_POSITION_STEP] + query * task[_QUERY_HEAD_STEP]
            _copy_fp32(1, 0, given, 0, base + 4 * scores, 0, key_width)
            out = lane // WIDE * WIDE * key_width + lane % WIDE
            for index in range(key_width):
                scratch[out + index * WIDE] = scratch[scores + index] * scale
    last = tile + (lane0 + lanes - 1) // groups
    latest = _seen_until(task, until, last) - 1
    seen = max(tile + lane0 // groups - window + 1, 0) if window > 0 else 0
    for block in range(seen // KEYS * KEYS, latest + 1, KEYS):
        _lay_out(task, table, head, block, seen, latest + 1, scratch, base, keys, values, padded)
        for chunk in range(chunks):
            lane = lane0 + chunk * WIDE
            low, high = tile + lane // groups - block, min(tile + (lane + WIDE - 1) // groups, last) - block
            begin = max(low - window + 1, 0) // _ROWS * _ROWS if window > 0 else 0
            end = min(KEYS, _seen_until(task, until, high + block) - block)
            at, weights = chunk * WIDE, base + 4 * (scores + begin * WIDE)
            for key in range(begin, end, _ROWS):
                _score(
                    base + 4 * at * key_width, 0, base + 4 * (keys + key * key_width), 4 * key_width,
                    base + 4 * (scores + key * WIDE), 0, key_width,
                )  # fmt: skip
            if end <= begin:
                continue
            if softcap > 0:
                scratch[kept + at] = softcap  # unused until the weights are computed
                _limit(weights, 0, base + 4 * (kept + at), 0, 0, 0, end - begin)
            if end <= _seen_until(task, until, low + block) - block and (window == 0 or begin > high - window):
                pass  # every query sees every key
            elif len(until) > 0:
                _hide(task, until, scratch, scores, begin, end, block, lane, groups)
            else:
                for index in range(WIDE):
                    scratch[kept + at + index] = np.float32(tile + (lane + index) // groups - block)
                oldest = np.float32(window if window > 0 else latest + 2)
                for key in range(begin, end):
                    here = np.float32(key)
                    for index in range(WIDE):
                        behind = scratch[kept + at + index] - here
                        one = scratch[scores + key * WIDE + index]
                        scratch[scores + key * WIDE + index] = (
                            one if behind >= np.float32(0.0) and behind < oldest else _HIDDEN
                        )
            numbers = base + 4 * (kept + at)
            _weigh(weights, 0, base + 4 * (largest + at), 0, base + 4 * (total + at), numbers, end - begin)
            for index in range(0, padded, _ROWS):
                _mix(
                    weights, 0, base + 4 * (values + begin * padded + index), 4 * padded,
                    base + 4 * (mixed + at * padded + index * WIDE), numbers, end - begin,
                )  # fmt: skip
    for lane in range(lanes):
        position, query = tile + (lane0 + lane) // groups, head * groups + (lane0 + lane) % groups
        if position >= start:
            share = np.float32(1.0) / scratch[total + lane]
            made = mixed + lane // WIDE * WIDE * padded + lane % WIDE
            for index in range(value_width):
                # Adding zero turns -0.0 into 0.0: keys that a row does not see must not determine the sign of a zero.
                scratch[scores + index] = (scratch[made + index * WIDE] + np.float32(0.0)) * share
            out = task[_OUT] + 4 * ((position - start) * task[_HEADS] + query) * value_width
            _copy_fp32(1, 0, base + 4 * scores, 0, out, 0, value_width)


def _made(stamp: int) -> Any:
    kinds = "void(int64[::1], float32, float32, int64[::1], int64[::1], float32[::1], float32[::1], int64)"

    @njit(kinds, nogil=True, cache=True)
    def attend(
        task: Any, scale: Any, softcap: Any, table: Any, until: Any, sinks: Any, scratch: Any, scratch_address: Any
    ) -> None:
        if stamp < 0:
            return
        lanes = (task[_STOP] - task[_START] // _TILE * _TILE) * (task[_HEADS] // task[_SHARED])
        sweeps = (lanes + task[_SWEEP] - 1) // task[_SWEEP]
        for item in range(task[_FIRST], task[_END]):
            head, lane = item // sweeps, item % sweeps * task[_SWEEP]
            _sweep(task, scale, softcap, table, until, sinks, scratch, scratch_address, head, lane)

    return attend


attend = _made(vec.stamp_of(__file__, row_code.__file__, about=f"{_VECTORS} {_ROWS}"))
"""Kernel of one span's attention. `task`: numbers as `Place` lists them. `scale`: factor of the scores, which `softcap`
limits unless it is 0. `table`: the session's pages. `until`: for each position of the span the position before which it
sees keys, ascending and at most `STOP`; empty if each sees those up to itself. `sinks`: one number per head, or empty.
`scratch`: `scratch_floats` floats; `scratch_address`: their address."""
