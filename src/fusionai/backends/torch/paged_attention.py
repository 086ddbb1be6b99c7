"""`fusion.attention` with a cache: each session's new positions attend to all of that session. Chooses the kernels.

Sessions are computed one after the other, in shapes that depend on that session alone, so their bits do not depend on
other sessions in the pass. Kernels round differently for one query and for several. So a few positions after others
are computed as if each came alone, which accepted speculative tokens rely on. Prompts are computed by a compiled kernel
on CPUs and elsewhere in tiles, which chunks of any length rely on. Arithmetic is float32 whatever the cache's format.

Neighbours: `paged_cache` keeps keys and values, `compiled_attention` has the kernel, `tiled_attention` the tiles,
`attention` is the same operator on dense tensors.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from fusionai.backends.layer_shapes import first_key, one_by_one
from fusionai.backends.torch.compiled_attention import attention_kernels, compiled_attention
from fusionai.backends.torch.paged_cache import ALIGNMENT_BYTES, LayerCache, PassLayout, cut
from fusionai.backends.torch.tiled_attention import tiled_attention
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
    """Write the pass's k and v to the cache and return the attention's output [1, Hq, T, Dv].

    q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv].
    """
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
            parts.append(compiled_attention(span, cache, queries, scale=scale, softcap=softcap, sinks=sinks))
            continue
        keys, values = cache.read(layout, number)
        if one_by_one(span):
            offset = first_key(span.start, cache.window)
            for row in range(span.length):
                first, end = first_key(span.start + row, cache.window) - offset, span.start + row + 1 - offset
                seen = cut(keys, first, end), cut(values, first, end)
                part = _single(singles[span.first + row], *seen, scale=scale, softcap=softcap, sinks=sinks)
                parts.append(part)
            continue
        queries = q[:, :, span.first : span.first + span.length]
        part = tiled_attention(span, cache.window, queries, keys, values, scale=scale, softcap=softcap, sinks=sinks)
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


def _single(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [1, Hq, Dv] of one position that sees all of `keys`."""
    _, shared, groups, width = q.shape
    if softcap is None and sinks is None:
        # One key head at a time, for all queries that share it.
        out = scaled_dot_product_attention(q, keys, values, scale=scale)
    else:
        whole = q.reshape(1, shared * groups, 1, width)
        out = _explicit(whole, keys, values, scale=scale, softcap=softcap, sinks=sinks)
    return out.reshape(1, shared * groups, -1)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the explicit formula of transformers' eager attention."""
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
