"""`fusion.attention` with a cache: each session's new positions attend to all of that session. Chooses the kernels.

Sessions are computed one after the other, in shapes that depend on that session alone, so their bits do not depend on
other sessions in the pass. Kernels round differently for one query and for several. So a few positions after others
are computed as if each came alone, which accepted speculative tokens rely on. Prompts are computed by a compiled kernel
on CPUs and elsewhere in tiles, which chunks of any length rely on. Arithmetic is float32 whatever the cache's format.

Neighbours: `paged_cache` keeps keys and values, `compiled_attention` has the kernel, `semantic` the
same operator on dense tensors. Tiles: `TILE_POSITIONS` positions that end at a multiple of that, or at the end of the
text so far. A tile's queries attend to keys in blocks from the first visible key on, with a running maximum and sum
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022), so the
shape of every product follows from the tile alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.arguments import Scores
from fusionai.backends.interface import TILE_POSITIONS
from fusionai.backends.serving.page_table import RowSpan, first_key, one_by_one
from fusionai.backends.torch.compiled_attention import attention_kernels, compiled_attention
from fusionai.backends.torch.paged_cache import ALIGNMENT_BYTES, LayerCache, PassLayout, cut
from fusionai.primitives.errors import ExecutionError


def cached_attention(
    layout: PassLayout, cache: LayerCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Write the pass's k and v to the cache and return the attention's output [1, Hq, T, Dv]. q [1, Hq, T, D], k [1,
    Hkv, T, D], v [1, Hkv, T, Dv]."""
    if q.shape[0] != 1:
        raise ExecutionError(f"a pass packs its sessions along the sequence, got a batch of {q.shape[0]}.")
    cache.write(layout, k, v)
    wanted, q = q.dtype, q if q.dtype == torch.float32 else q.float()
    singles = _singles(q, k.shape[1]) if any(one_by_one(span) for span in layout.spans) else ()
    compiled = q.device.type == "cpu" and attention_kernels() is not None
    parts: list[torch.Tensor] = []
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


def _singles(q: torch.Tensor, shared: int) -> tuple[torch.Tensor, ...]:
    """Return the queries of each position: [1, Hkv, queries that share a key head, D]."""
    _, heads, positions, width = q.shape
    rows = q.transpose(1, 2).reshape(positions, 1, shared, heads // shared, width)
    offset, stride = rows.storage_offset() * rows.element_size(), rows.stride(0) * rows.element_size()
    if offset % ALIGNMENT_BYTES or (positions > 1 and stride % ALIGNMENT_BYTES):
        return tuple(row.clone() for row in rows.unbind(0))
    return rows.unbind(0)


def _single(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return [1, Hq, Dv] of one position that sees all of `keys`."""
    _, shared, groups, width = q.shape
    if scores.softcap is None and scores.sinks is None:
        # One key head at a time, for all queries that share it.
        out = scaled_dot_product_attention(q, keys, values, scale=scores.scale)
    else:
        whole = q.reshape(1, shared * groups, 1, width)
        out = _explicit(whole, keys, values, scores)
    return out.reshape(1, shared * groups, -1)


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
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
    """Yield the first position and the end of each tile of the span."""
    start = span.start
    while start < span.end:
        end = min(span.end, (start // TILE_POSITIONS + 1) * TILE_POSITIONS)
        yield start, end
        start = end


def tiled_attention(
    span: RowSpan, window: int | None, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Return [1, Hq, rows, Dv] for q [1, Hq, rows, D] of the span and keys, values [1, Hkv, positions, D or Dv] from
    the first visible position on, all float32."""
    offset = first_key(span.start, window)
    parts: list[torch.Tensor] = []
    for start, end in tiles(span):
        first = first_key(start, window)
        seen = cut(keys, first - offset, end - offset), cut(values, first - offset, end - offset)
        tile = q[0, :, start - span.start : end - span.start]
        parts.append(_tile(tile, start, first, window, *seen, scores))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[None]


def _tile(
    q: torch.Tensor,
    start: int,
    first: int,
    window: int | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Return [Hq, rows, Dv] for q [Hq, rows, D] at positions from `start` on, and keys and values from position `first`
    on."""
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
        hidden = _hidden(start, rows, first + begin, first + end, window, q.device)
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


def _hidden(
    start: int, rows: int, begin: int, end: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return bool [rows, keys] for keys `begin` to `end`, True where hidden; None if every row sees every key."""
    if end - 1 <= start and (window is None or begin > start + rows - 1 - window):
        return None
    queries = torch.arange(start, start + rows, device=device)[:, None]
    at = torch.arange(begin, end, device=device)[None, :]
    hidden = at > queries
    return hidden if window is None else hidden | (at <= queries - window)
