"""Attention over caches on a card: all sessions of a pass in one launch, read where the cache lies and as it is kept.

A launch computes tiles: consecutive positions of one session, as many as lanes fit, with all query heads that share a
key head. Long texts are divided among several groups of threads, whose results a second launch adds up. Sums are kept
as in `paged_attention`, with a running maximum (Dao et al., "FlashAttention", 2022).
"""

# pyright: basic, reportMissingTypeStubs=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportMissingParameterType=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fusionai.backends.torch.card_launch import ANYWHERE, SIZES
from fusionai.backends.torch.card_rows import tanh

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def _numbers(
    cache: tl.tensor, slot: tl.tensor, seen: tl.tensor, head: tl.tensor, heads: tl.tensor, width: tl.tensor,
    FORM: tl.constexpr, WIDE: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the vectors of a head at `slot` [keys], as float32 [keys, WIDE]."""
    column = tl.arange(0, WIDE)[None, :]
    inside = seen[:, None] & (column < width)
    if FORM == 3:
        place = cache + (slot * heads + head) * (width + 4)
        levels = tl.load(place[:, None] + column, mask=inside, other=0).to(tl.int8, bitcast=True)
        bits = tl.zeros_like(slot).to(tl.int32)
        for byte in tl.static_range(4):
            bits |= tl.load(place + width + byte, mask=seen, other=0).to(tl.int32) << (8 * byte)
        made = levels.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    else:
        place = cache + (slot * heads + head) * width
        made = tl.load(place[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    return made


@triton.jit
def _slot(
    key: tl.tensor, seen: tl.tensor, session: tl.tensor, table: tl.tensor, table_width: tl.tensor,
    page_tokens: tl.tensor, rings: tl.tensor, capacity: tl.tensor, window: tl.tensor,
) -> Any:  # fmt: skip
    """Return the places of a session's keys: in its ring, or in its pages."""
    if window > 0:
        slot = tl.load(rings + session).to(tl.int64) * capacity + key % capacity
    else:
        page = tl.load(table + session * table_width + key // page_tokens, mask=seen, other=0)
        slot = page.to(tl.int64) * page_tokens + key % page_tokens
    return slot


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def attend(
    mem: tl.tensor, fixed: tl.tensor, width: tl.tensor, line: tl.tensor, tiles: tl.tensor, table: tl.tensor,
    table_width: tl.tensor, page_tokens: tl.tensor, rings: tl.tensor, capacity: tl.tensor, window: tl.tensor,
    keys: tl.tensor, values: tl.tensor, parts: tl.tensor, chunk: tl.tensor, rows: tl.tensor, split: tl.tensor,
    FORM: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile (axis 0) of one key head (axis 1), of the keys of one share (axis 2) of `chunk` keys each.

    `line`: the line ATTENTION of the row program. `tiles`: for each, its first row, its rows, its session among those
    of the pass, and its first position. `table`: page ids of each session. `rings`: ring of each session. `window`: 0
    for none, and then keys lie in pages. `parts`: if `split` is 1, results of the shares [shares, rows, query heads,
    width of a value + 2]: sums, largest score, sum of weights.
    """
    tile, kept, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, shared, wide = tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    value_width = tl.load(line + 15)
    q_at, out_at = tl.load(line + 5), tl.load(line + 4)
    scale, cap_at, sinks_at = tl.load(mem + tl.load(line + 17)), tl.load(line + 18), tl.load(line + 19)
    first_row, count = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    session, start = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    groups = heads // shared
    lane = tl.arange(0, LANES)
    row = lane // groups
    real = row < count
    head = kept * groups + lane % groups
    column = tl.arange(0, WIDE)[None, :]
    q_place = mem + fixed + (first_row + row) * width + q_at + head * wide
    q = tl.load(q_place[:, None] + column, mask=real[:, None] & (column < wide), other=0.0) * scale
    position = start + row
    cap = tl.load(mem + tl.maximum(cap_at, 0))
    largest, total = tl.full((LANES,), _LOWEST, tl.float32), tl.zeros((LANES,), tl.float32)
    if sinks_at >= 0:  # noqa: SIM102 - in a kernel, `and` would evaluate both
        if share == 0:
            # A sink is a key of weight 1 without a value.
            largest = tl.load(mem + sinks_at + head, mask=real, other=0.0)
            total += 1.0
    mixed = tl.zeros((LANES, WIDE), tl.float32)
    begin = tl.where(window > 0, tl.maximum(0, start - window + 1), 0) + share * chunk
    until = tl.minimum(start + count, begin + chunk)
    for at in range(begin, until, KEYS):
        key = at + tl.arange(0, KEYS)
        seen = key < until
        slot = _slot(key, seen, session, table, table_width, page_tokens, rings, capacity, window)
        k = _numbers(keys, slot, seen, kept, shared, wide, FORM, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if cap_at >= 0:
            scores = tanh(scores / cap) * cap
        visible = seen[None, :] & (key[None, :] <= position[:, None]) & real[:, None]
        if window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, _LOWEST)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - larger[:, None]), 0.0)
        left = tl.exp(largest - larger)
        total = total * left + tl.sum(weights, 1)
        v = _numbers(values, slot, seen, kept, shared, value_width, FORM, WIDE)
        mixed = mixed * left[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        largest = larger
    if split > 0:
        place = parts + ((share * rows + first_row + row) * heads + head) * (value_width + 2)
        tl.store(place + value_width, largest, mask=real)
        tl.store(place + value_width + 1, total, mask=real)
    else:
        place = mem + fixed + (first_row + row) * width + out_at + head * value_width
        mixed = mixed / tl.where(real, total, 1.0)[:, None]
    tl.store(place[:, None] + column, mixed, mask=real[:, None] & (column < value_width))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ANYWHERE)
def combine(
    mem: tl.tensor, fixed: tl.tensor, width: tl.tensor, line: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    shares: tl.tensor, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the shares of one row (axis 0) and query head (axis 1)."""
    row, head = tl.program_id(0), tl.program_id(1)
    heads, value_width = tl.load(line + 1), tl.load(line + 15)
    column = tl.arange(0, WIDE)
    inside = column < value_width
    largest = tl.full((), _LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((WIDE,), tl.float32)
    for share in range(shares):
        place = parts + ((share * rows + row) * heads + head) * (value_width + 2)
        own = tl.load(place + value_width)
        larger = tl.maximum(largest, own)
        before, now = tl.exp(largest - larger), tl.exp(own - larger)
        total = total * before + tl.load(place + value_width + 1) * now
        mixed = mixed * before + tl.load(place + column, mask=inside, other=0.0) * now
        largest = larger
    out = mem + fixed + row * width + tl.load(line + 4) + head * value_width
    tl.store(out + column, mixed / total, mask=inside)
