"""`fusion.attention` with a cache: the layout of pages and rings, and each session's new positions attending to all of
it.

Pages are shared by all sessions; layers with a window have a ring per session. Once per pass, a `PassLayout` is
computed: the slot of each row, and where each session's keys are. Layers then copy rows in and read a session's keys as
one tensor, without a copy if its pages are consecutive.

Sessions are computed one after the other, in shapes that depend on that session alone, so their bits do not depend on
other sessions in the pass. Kernels round differently for one query and for several. So a few positions after others are
computed as if each came alone, which accepted speculative tokens rely on. Prompts are computed by a compiled kernel,
which reads pages and rings directly, on CPUs with numba, and elsewhere in tiles: `TILE_POSITIONS` positions that end at
a multiple of that, or at the end of the text so far. A tile's queries attend to keys in blocks from the first visible
key on, with a running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao
et al., "FlashAttention", 2022), so the shape of every product follows from the tile alone, and chunks may have any
length. Arithmetic is float32 whatever the cache's format.

Neighbours: `page_table` assigns pages, `attention_kernels` has the kernel, `semantic` the same operator on dense
tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.semantics import Scores
from fusionai.backends.serving.page_table import (
    CACHE_NAMES,
    LEVELS,
    TILE_POSITIONS,
    LayerShape,
    RowSpan,
    first_key,
    keys_until,
    one_by_one,
    stored_width,
)
from fusionai.backends.torch.blocked_linear import in_threads, kernel_module
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.row_code import Form
from fusionai.ir.serving_cost import INT8_SCALE_BYTES
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import ServeOptions

ALIGNMENT_BYTES: Final = 64
"""Cache-line alignment. Matrix kernels may round differently on memory with another alignment."""


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Destinations of a pass's rows. `slots` [rows]: positions in the pages; `ring_slots`: window -> positions in the
    rings. `runs`: per span the page ids to gather, None if they are consecutive."""

    spans: tuple[RowSpan, ...]
    page_tokens: int
    slots: Tensor | None
    ring_slots: Mapping[int, Tensor]
    runs: tuple[Tensor | None, ...]


def lay_out(
    spans: tuple[RowSpan, ...], options: ServeOptions, *, paged: bool, windows: Mapping[int, int], device: torch.device
) -> PassLayout:
    size = options.page_tokens
    slots: list[int] = []
    runs: list[Tensor | None] = []
    if paged:
        for span in spans:
            slots += [span.pages[position // size] * size + position % size for position in range(span.start, span.end)]
            consecutive = span.pages == tuple(range(span.pages[0], span.pages[0] + len(span.pages)))
            runs.append(None if consecutive else torch.tensor(span.pages, device=device))
    rings = {
        window: torch.tensor(
            [span.ring * capacity + at % capacity for span in spans for at in range(span.start, span.end)],
            device=device,
        )
        for window, capacity in windows.items()
    }
    return PassLayout(spans, size, torch.tensor(slots, device=device) if paged else None, rings, tuple(runs))


class LayerCache:
    """Keys and values of one attention node."""

    def __init__(self, shape: LayerShape, options: ServeOptions, device: torch.device) -> None:
        self.shape = shape
        self.page_tokens = options.page_tokens
        self.dtype = DTYPES[CACHE_NAMES[options.cache]]
        self.window = shape.window
        blocks, per_block = shape.blocks(options)
        self.capacity = 0 if shape.window is None else per_block
        widths = (shape.key_width, shape.value_width)
        # Zeroed, because a hostile caller may have a page read before it was written: it must not show old memory.
        self._blocks = [
            torch.zeros(
                (blocks, per_block, shape.heads, stored_width(width, options.cache)), dtype=self.dtype, device=device
            )
            for width in widths
        ]
        self._rows = [block.view(blocks * per_block, shape.heads, -1) for block in self._blocks]
        self._heads_first = [rows.transpose(0, 1)[None] for rows in self._rows]

    @property
    def nbytes(self) -> int:
        return sum(block.untyped_storage().nbytes() for block in self._blocks)

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the keys and of the values, both [positions, heads, width]."""
        keys, values = (rows.data_ptr() for rows in self._rows)
        return keys, values

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, both [positions, heads, width]."""
        keys, values = self._rows
        return keys, values

    def write(self, layout: PassLayout, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of the pass, each [1, heads, rows, width]."""
        slots = layout.slots if self.window is None else layout.ring_slots[self.window]
        assert slots is not None
        for rows, new in zip(self._rows, (keys, values), strict=True):
            given = new[0].transpose(0, 1)
            if self.dtype == torch.uint8:
                given = levels_and_scales(given)
            rows.index_copy_(0, slots, given if given.dtype == rows.dtype else given.to(rows.dtype))

    def copy_place(self, source: int, target: int) -> None:
        if self.window is not None:
            for block in self._blocks:
                block[target] = block[source]

    def read(self, layout: PassLayout, number: int) -> tuple[Tensor, Tensor]:
        """Return (keys, values), float32 [1, heads, positions, width], that span `number` may see."""
        span = layout.spans[number]
        if self.window is not None:
            keys, values = (self._ringed(half, span) for half in self._heads_first)
        elif (pages := layout.runs[number]) is None:
            first = span.pages[0] * layout.page_tokens
            keys, values = (cut(half, first, first + span.end) for half in self._heads_first)
        else:
            keys, values = (
                block.index_select(0, pages).view(-1, *block.shape[2:])[: span.end].transpose(0, 1)[None]
                for block in self._blocks
            )
        match keys.dtype:
            case torch.float32:
                return keys, values
            case torch.uint8:
                return numbers_of_levels(keys), numbers_of_levels(values)
            case _:
                return keys.float(), values.float()

    def _ringed(self, half: Tensor, span: RowSpan) -> Tensor:
        first = first_key(span.start, self.window)
        base = span.ring * self.capacity
        begin, end = first % self.capacity, (span.end - 1) % self.capacity + 1
        if begin < end:
            return cut(half, base + begin, base + end)
        late, early = half[0, :, base + begin : base + self.capacity], half[0, :, base : base + end]
        return torch.cat([late.transpose(0, 1), early.transpose(0, 1)]).transpose(0, 1)[None]


def levels_and_scales(vectors: Tensor) -> Tensor:
    """Return uint8 [..., width + 4] for vectors [..., width]: levels from -127 to 127, and the bytes of a scale."""
    largest = vectors.float().abs().amax(dim=-1, keepdim=True)
    step = torch.where(largest > 0, LEVELS / largest, torch.zeros_like(largest))
    levels = (vectors.float() * step).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return torch.cat([levels.view(torch.uint8), (largest / LEVELS).view(torch.uint8)], dim=-1)


def numbers_of_levels(stored: Tensor) -> Tensor:
    """Return the vectors [..., width] in float32, from what `levels_and_scales` made of them."""
    scales = stored[..., -INT8_SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-INT8_SCALE_BYTES].contiguous().view(torch.int8).float() * scales


def cut(rows: Tensor, first: int, end: int) -> Tensor:
    """Return positions `first` to `end` of [1, heads, positions, width], aligned in memory as if they were alone."""
    if first == 0 and end == rows.shape[2]:
        return rows
    part = rows.narrow(2, first, end - first)
    # Positions are contiguous, so all kernels give the same bits if the first one is aligned.
    if first and part.storage_offset() * part.element_size() % ALIGNMENT_BYTES:
        part = part[0].transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)[None]
    return part


FORMS: Final = {
    torch.float32: Form.FP32, torch.bfloat16: Form.BF16, torch.float16: Form.FP16, torch.uint8: Form.INT8
}  # fmt: skip
_LINE_FLOATS: Final = 16
"""Floats in a cache line."""


def attention_kernels() -> Any | None:
    """Return the compiled kernel's module; None if operators compute attention."""
    return kernel_module("fusionai.backends.torch.attention_kernels", "attention")


def attention_scratch_bytes(layers: Sequence[LayerShape], rows: int) -> int:
    """Return the most scratch bytes that attention of a pass of `rows` needs besides operands and results, for all
    threads together."""
    made = attention_kernels()
    if made is None:
        return 0
    floats = (_scratch_floats(made, shape, rows) for shape in layers)
    return 4 * max(floats, default=0) * torch.get_num_threads()


def _scratch_floats(made: Any, shape: LayerShape, rows: int) -> int:
    groups = shape.query_heads // shape.heads
    return made.scratch_floats(rows, groups, shape.key_width, shape.value_width, _sweep()) + _LINE_FLOATS


def _sweep() -> int:
    """Return the lanes that share a copied block: fewer with several threads, so that each thread gets some."""
    return 1024 if torch.get_num_threads() == 1 else 512


def compiled_attention(span: RowSpan, cache: LayerCache, q: Tensor, scores: Scores) -> Tensor:
    """Return the attention of the span's rows, [rows, Hq, Dv]; q is float32 [1, Hq, rows, D], keys and values are in
    the cache."""
    made = attention_kernels()
    assert made is not None
    shape = cache.shape
    scale, softcap, sinks = scores
    _, heads, rows, key_width = q.shape
    if (heads, rows, key_width) != (shape.query_heads, span.length, shape.key_width) or heads % shape.heads:
        raise ExecutionError(f"queries {tuple(q.shape)} don't fit {span.length} rows of a cache of {shape}.")
    if sinks is not None and sinks.shape != (heads,):
        raise ExecutionError(f"expected sinks of shape ({heads},), got {tuple(sinks.shape)}.")
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty((rows, heads, shape.value_width), dtype=torch.float32)
    places = made.Place
    keys, values = cache.addresses
    task = np.zeros(len(places), dtype=np.int64)
    task[[places.QUERIES, places.QUERY_POSITION_STEP, places.QUERY_HEAD_STEP]] = (
        q.data_ptr(), 4 * q.stride(2), 4 * q.stride(1)
    )  # fmt: skip
    task[[places.OUT, places.KEYS, places.VALUES, places.FORM]] = out.data_ptr(), keys, values, FORMS[cache.dtype]
    task[[places.HEADS, places.SHARED, places.KEY_WIDTH, places.VALUE_WIDTH]] = (
        heads, shape.heads, key_width, shape.value_width
    )  # fmt: skip
    task[[places.START, places.STOP]] = span.start, span.end
    task[[places.WINDOW, places.CAPACITY, places.RING]] = cache.window or 0, cache.capacity, span.ring
    task[places.PAGE_TOKENS] = cache.page_tokens
    table = np.array(span.pages, dtype=np.int64)
    until = keys_until(span) if span.together else np.zeros(0, np.int64)
    added = np.zeros(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
    task[places.SWEEP] = sweep = _sweep()
    floats = _scratch_floats(made, shape, rows)

    def share(first: int, end: int) -> None:
        own = task.copy()
        own[[places.FIRST, places.END]] = first, end
        room = np.empty(floats, dtype=np.float32)
        scratch = room[-room.ctypes.data % (4 * _LINE_FLOATS) // 4 :]
        made.attend(own, scale, softcap or 0.0, table, until, added, scratch, scratch.ctypes.data)

    in_threads(share, made.items(span.start, span.end, heads, shape.heads, sweep))
    return out


def cached_attention(layout: PassLayout, cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Write the pass's k and v to the cache and return the attention's output [1, Hq, T, Dv]. q [1, Hq, T, D], k [1,
    Hkv, T, D], v [1, Hkv, T, Dv]."""
    if q.shape[0] != 1:
        raise ExecutionError(f"a pass packs its sessions along the sequence, got a batch of {q.shape[0]}.")
    cache.write(layout, k, v)
    wanted, q = q.dtype, q if q.dtype == torch.float32 else q.float()
    singles = _singles(q, k.shape[1]) if any(one_by_one(span) for span in layout.spans) else ()
    compiled = q.device.type == "cpu" and attention_kernels() is not None
    parts: list[Tensor] = []
    for number, span in enumerate(layout.spans):
        if compiled and not one_by_one(span):
            queries = q[:, :, span.first : span.first + span.length]
            parts.append(compiled_attention(span, cache, queries, scores))
            continue
        keys, values = cache.read(layout, number)
        if one_by_one(span):
            offset = first_key(span.start, cache.window)
            for row in range(span.length):
                first, end = first_key(span.start + row, cache.window) - offset, span.start + row + 1 - offset
                seen = cut(keys, first, end), cut(values, first, end)
                part = _single(singles[span.first + row], *seen, scores)
                parts.append(part)
            continue
        queries = q[:, :, span.first : span.first + span.length]
        part = tiled_attention(span, cache.window, queries, keys, values, scores)
        parts.append(part[0].transpose(0, 1))
    joined = (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)[None]
    return joined if joined.dtype == wanted else joined.to(wanted)


def _singles(q: Tensor, shared: int) -> tuple[Tensor, ...]:
    """Return the queries of each position: [1, Hkv, queries that share a key head, D]."""
    _, heads, positions, width = q.shape
    rows = q.transpose(1, 2).reshape(positions, 1, shared, heads // shared, width)
    offset, stride = rows.storage_offset() * rows.element_size(), rows.stride(0) * rows.element_size()
    if offset % ALIGNMENT_BYTES or (positions > 1 and stride % ALIGNMENT_BYTES):
        return tuple(row.clone() for row in rows.unbind(0))
    return rows.unbind(0)


def _single(q: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Return [1, Hq, Dv] of one position that sees all of `keys`."""
    _, shared, groups, width = q.shape
    if scores.softcap is None and scores.sinks is None:
        # One key head at a time, for all queries that share it.
        out = scaled_dot_product_attention(q, keys, values, scale=scores.scale)
    else:
        whole = q.reshape(1, shared * groups, 1, width)
        out = _explicit(whole, keys, values, scores)
    return out.reshape(1, shared * groups, -1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute the explicit formula of transformers' eager attention."""
    scale, softcap, sinks = scores
    _, heads, queries, width = q.shape
    shared = k.shape[1]
    groups = heads // shared
    grouped = q.reshape(1, shared, groups * queries, width)
    weights = (torch.matmul(grouped, k.transpose(2, 3)) * scale).reshape(1, heads, queries, -1)
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if sinks is None:
        weights = torch.softmax(weights, dim=-1)
    else:
        column = sinks.to(weights.dtype).reshape(1, -1, 1, 1).expand(1, -1, queries, -1)
        weights = torch.softmax(torch.cat([weights, column], dim=-1), dim=-1)[..., :-1]
    mixed = torch.matmul(weights.reshape(1, shared, groups * queries, -1), v)
    return mixed.reshape(1, heads, queries, v.shape[-1])


BLOCK_KEYS: Final = 512
"""Keys of a block; chosen."""


def tiles(span: RowSpan) -> Iterator[tuple[int, int]]:
    """Yield the first position and the end of each tile of the span. Tiles also end where a range of positions that see
    each other begins or ends."""
    start = span.start
    borders = (*itertools.chain.from_iterable(span.together), span.end)
    while start < span.end:
        multiple = (start // TILE_POSITIONS + 1) * TILE_POSITIONS
        end = min(multiple, next(border for border in borders if border > start))
        yield start, end
        start = end


def tiled_attention(
    span: RowSpan, window: int | None, q: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Return [1, Hq, rows, Dv] for q [1, Hq, rows, D] of the span and keys, values [1, Hkv, positions, D or Dv] from
    the first visible position on, all float32."""
    offset = first_key(span.start, window)
    until = keys_until(span)
    parts: list[Tensor] = []
    for start, end in tiles(span):
        first, last = first_key(start, window), int(until[end - 1 - span.start])
        seen = cut(keys, first - offset, last - offset), cut(values, first - offset, last - offset)
        tile = q[0, :, start - span.start : end - span.start]
        parts.append(_tile(tile, TileView(start, first, window, int(until[start - span.start])), *seen, scores))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[None]


@dataclass(frozen=True, slots=True)
class TileView:
    """Which keys the queries of a tile see, the first of which is at position `start`: those up to their own position,
    and all before `until`, within the window. `first`: position of the first key."""

    start: int
    first: int
    window: int | None
    until: int

    def hidden(self, rows: int, begin: int, end: int, device: torch.device) -> Tensor | None:
        """Return bool [rows, keys] for the keys at positions `begin` to `end`, True where hidden; None if every row
        sees every key."""
        start, window = self.start, self.window
        if end <= self.until and (window is None or begin > start + rows - 1 - window):
            return None
        queries = torch.arange(start, start + rows, device=device)[:, None]
        at = torch.arange(begin, end, device=device)[None, :]
        hidden = (at > queries) & (at >= self.until)
        return hidden if window is None else hidden | (at <= queries - window)


def _tile(q: Tensor, view: TileView, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    """Return [Hq, rows, Dv] for q [Hq, rows, D], and keys and values from position `view.first` on."""
    scale, softcap, sinks = scores
    heads, rows, width = q.shape
    shared, positions = keys.shape[1], keys.shape[2]
    groups = heads // shared
    grouped = (q * scale).reshape(shared, groups * rows, width)
    lowest = torch.finfo(q.dtype).min
    if sinks is None:
        largest = q.new_full((shared, groups * rows, 1), lowest)
        total = torch.zeros_like(largest)
    else:
        # A sink is a key of weight 1 without a value.
        column = sinks.to(q.dtype).reshape(shared, groups, 1).expand(shared, groups, rows)
        largest = column.reshape(shared, groups * rows, 1).clone()
        total = torch.ones_like(largest)
    mixed = q.new_zeros((shared, groups * rows, values.shape[3]))
    for begin in range(0, positions, BLOCK_KEYS):
        end = min(positions, begin + BLOCK_KEYS)
        weights = torch.bmm(grouped, keys[0, :, begin:end].transpose(1, 2))
        if softcap is not None:
            weights.div_(softcap).tanh_().mul_(softcap)
        hidden = view.hidden(rows, view.first + begin, view.first + end, q.device)
        if hidden is not None:
            weights.view(shared, groups, rows, end - begin).masked_fill_(hidden, lowest)
        larger = torch.maximum(largest, weights.amax(dim=2, keepdim=True))
        weights.sub_(larger).exp_()
        if hidden is not None:  # in rows that see no key of this block, the maximum comes from hidden keys
            weights.view(shared, groups, rows, end - begin).masked_fill_(hidden, 0.0)
        kept = largest.sub_(larger).exp_()
        total = total.mul_(kept).add_(weights.sum(dim=2, keepdim=True))
        mixed = torch.baddbmm(mixed.mul_(kept), weights, values[0, :, begin:end])
        largest = larger
    return mixed.div_(total).reshape(heads, rows, -1)
