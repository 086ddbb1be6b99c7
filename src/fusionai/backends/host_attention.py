"""`fusion.attention` with a cache, in numpy: each session's new positions attend to all of that session's positions.

Sessions are computed one after the other, in shapes that depend on that session alone, so the bits of its rows do not
depend on the other sessions of the pass. A few positions after others (`FEW_POSITIONS`) are computed as if each had
come alone. Operands of matrix products are copied to the same alignment every time, because kernels may round
differently at another alignment. The arithmetic is that of `backends.torch.paged_attention`. Neighbours: `host_cache`
keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.host_cache import HostCache
from fusionai.backends.layer_shapes import first_key, one_by_one
from fusionai.backends.paged_table import Span

Array = npt.NDArray[Any]
ALIGNMENT_BYTES: Final = 64
"""Bytes of a cache line, to which operands of matrix products are aligned."""


def cached_attention(
    spans: Sequence[Span],
    cache: HostCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """Write the pass's k and v to the cache and return the attention's output [T, Hq, Dv].

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], all float32.
    """
    cache.write(spans, k, v)
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]), np.float32)
    for span in spans:
        keys, values = cache.read(span)
        begin, end = span.first, span.first + span.length
        offset = first_key(span.start, cache.window)
        if not one_by_one(span):
            mask = _mask(span, offset, cache.window)
            out[begin:end] = _attend(q[begin:end], keys, values, mask, scale, softcap, sinks)
            continue
        for row in range(span.length):
            seen = slice(first_key(span.start + row, cache.window) - offset, span.start + row + 1 - offset)
            out[begin + row] = _attend(
                q[begin + row : begin + row + 1], keys[seen], values[seen], None, scale, softcap, sinks
            )[0]
    return out


def _attend(
    q: Array, keys: Array, values: Array, mask: Array | None, scale: float, softcap: float | None, sinks: Array | None
) -> Array:
    """Return [S, Hq, Dv] for q [S, Hq, D], keys [T, Hkv, D], values [T, Hkv, Dv] and mask [S, T], True where a key is
    visible."""
    queries, heads, width = q.shape
    shared = keys.shape[1]
    grouped = _aligned(q.reshape(queries, shared, heads // shared, width).transpose(1, 2, 0, 3))
    weights = np.matmul(grouped.reshape(shared, -1, width), _aligned(keys.transpose(1, 2, 0))).reshape(
        shared, heads // shared, queries, -1
    ) * np.float32(scale)
    if softcap is not None:
        weights = np.tanh(weights / np.float32(softcap)) * np.float32(softcap)
    if mask is not None:
        weights = np.where(mask, weights, np.finfo(np.float32).min)
    largest = weights.max(axis=-1, keepdims=True)
    column = None if sinks is None else sinks.astype(np.float32).reshape(shared, heads // shared, 1, 1)
    if column is not None:
        largest = np.maximum(largest, column)
    weights = np.exp(weights - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if column is not None:
        total = total + np.exp(column - largest)
    weights = _aligned((weights / total).reshape(shared, -1, keys.shape[0]))
    mixed = np.matmul(weights, _aligned(values.transpose(1, 0, 2)))
    return mixed.reshape(shared, heads // shared, queries, -1).transpose(2, 0, 1, 3).reshape(queries, heads, -1)


def _mask(span: Span, first: int, window: int | None) -> Array:
    queries = np.arange(span.start, span.end)[:, None]
    keys = np.arange(first, span.end)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _aligned(values: Array) -> Array:
    """Return a contiguous copy of `values` that begins on a cache-line boundary."""
    nbytes = prod(values.shape) * values.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[begin : begin + nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
