"""`fusion.attention` with a cache: each session's new positions against all of its own. Decides kernels.

Sessions are computed one after the other, in shapes that depend on nothing but the session, so their bits do not depend
on who else is in the pass. Kernels round differently for one query and for several: a few positions that follow others
are computed as if they had come one by one, which guesses that turn out right rely on. Arithmetic is float32 whatever
the cache's format. Neighbours: `paged_cache` keeps keys and values, `attention` is the same operator on dense tensors.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.serving import FEW_POSITIONS
from fusionai.backends.torch.paged_cache import LayerCache, PassLayout, first_key, heads_first
from fusionai.primitives.errors import ExecutionError


def cached_attention(
    layout: PassLayout,
    cache: LayerCache,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] of the pass -> [1, Hq, T, Dv]. k and v go to the cache."""
    if q.shape[0] != 1:
        raise ExecutionError(f"a pass packs its sessions along the sequence, got a batch of {q.shape[0]}.")
    cache.write(layout, k, v)
    parts: list[torch.Tensor] = []
    for number, span in enumerate(layout.spans):
        keys, values = cache.read(layout, number)
        queries = q[:, :, span.first : span.first + span.length]
        queries = queries.float() if queries.dtype != torch.float32 else queries
        if span.start > 0 and span.length <= FEW_POSITIONS:
            offset = first_key(span.start, cache.window)
            for row, position in enumerate(range(span.start, span.end)):
                seen = slice(first_key(position, cache.window) - offset, position + 1 - offset)
                one = queries[:, :, row : row + 1]
                parts.append(_attended(one, keys[seen], values[seen], None, scale=scale, softcap=softcap, sinks=sinks))
            continue
        # From position 0 without a window is what the kernel itself calls causal.
        plain = cache.window is None and span.start == 0 and softcap is None and sinks is None
        mask = None if plain else layout.mask(number, cache.window)
        part = _attended(queries, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks, plain=plain)
        parts.append(part)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return joined if joined.dtype == q.dtype else joined.to(q.dtype)


def _attended(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    plain: bool = False,
) -> torch.Tensor:
    k, v = heads_first(keys), heads_first(values)
    if softcap is None and sinks is None:
        return _fused(q, k, v, mask, scale=scale, plain=plain)
    return _explicit(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, scale: float, plain: bool
) -> torch.Tensor:
    _, heads, queries, width = q.shape
    shared = k.shape[1]
    groups = heads // shared
    q = q.contiguous()
    if queries == 1 and mask is None:
        if groups > 1:
            # One key head at a time for all queries that share it.
            q = q.reshape(1, shared, groups, width)
        out = scaled_dot_product_attention(q, k, v, scale=scale)
        return out.reshape(1, heads, 1, v.shape[-1])
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if plain:
        return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
    return scaled_dot_product_attention(q, k, v, scale=scale, attn_mask=mask)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As transformers' eager attention computes it."""
    _, heads, queries, width = q.shape
    shared = k.shape[1]
    groups = heads // shared
    grouped = q.reshape(1, shared, groups * queries, width)
    weights = (torch.matmul(grouped, k.transpose(2, 3)) * scale).reshape(1, heads, queries, -1)
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    if sinks is None:
        weights = torch.softmax(weights, dim=-1)
    else:
        column = sinks.to(weights.dtype).reshape(1, -1, 1, 1).expand(1, -1, queries, -1)
        weights = torch.softmax(torch.cat([weights, column], dim=-1), dim=-1)[..., :-1]
    mixed = torch.matmul(weights.reshape(1, shared, groups * queries, -1), v)
    return mixed.reshape(1, heads, queries, v.shape[-1])
