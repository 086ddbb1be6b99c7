"""Attention of a prompt's positions, tile by tile: a tile's bits do not depend on how the prompt is divided.

A tile is `TILE_POSITIONS` positions that end at a multiple of that, or at the end of the text so far. Its queries
attend to keys in blocks from the first visible key on, with a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). So the shape of every product follows
from the tile alone.

Neighbours: `paged_attention` calls this for prompts on accelerators, and where `compiled_attention` has no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from fusionai.backends.layer_shapes import first_key
from fusionai.backends.paged_table import Span
from fusionai.backends.serving import TILE_POSITIONS
from fusionai.backends.torch.paged_cache import cut

BLOCK_KEYS: Final = 512
"""Keys of a block; chosen."""


def tiles(span: Span) -> Iterator[tuple[int, int]]:
    """Yield the first position and the end of each tile of the span."""
    start = span.start
    while start < span.end:
        end = min(span.end, (start // TILE_POSITIONS + 1) * TILE_POSITIONS)
        yield start, end
        start = end


def tiled_attention(
    span: Span,
    window: int | None,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [1, Hq, rows, Dv] for q [1, Hq, rows, D] of the span and keys, values [1, Hkv, positions, D or Dv] from
    the first visible position on, all float32."""
    offset = first_key(span.start, window)
    parts: list[torch.Tensor] = []
    for start, end in tiles(span):
        first = first_key(start, window)
        seen = cut(keys, first - offset, end - offset), cut(values, first - offset, end - offset)
        tile = q[0, :, start - span.start : end - span.start]
        parts.append(_tile(tile, start, first, window, *seen, scale=scale, softcap=softcap, sinks=sinks))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[None]


def _tile(
    q: torch.Tensor,
    start: int,
    first: int,
    window: int | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [Hq, rows, Dv] for q [Hq, rows, D] at positions from `start` on, and keys and values from position `first`
    on."""
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
