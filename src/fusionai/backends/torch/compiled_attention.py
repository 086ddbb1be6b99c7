"""Attention of a prompt's positions in one compiled call that reads a cache's pages and rings directly.

Checks whether the compiled kernel is available and divides heads among threads. Available only on CPUs and with numba;
`paged_attention` does the same with the framework's operators. A row's bits follow from its own position, so any number
of threads gives the same bits. Neighbours: `attention_kernels` computes, `paged_attention` calls, `serving` counts the
scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from fusionai.backends.arguments import Scores
from fusionai.backends.serving.page_table import LayerShape, RowSpan
from fusionai.backends.torch.blocked_linear import in_threads
from fusionai.backends.torch.compile_once import kernel_module
from fusionai.backends.torch.paged_cache import LayerCache
from fusionai.backends.torch.row_code import Form
from fusionai.primitives.errors import ExecutionError

_FORMS: Final = {torch.float32: Form.FP32, torch.bfloat16: Form.BF16, torch.float16: Form.FP16}
_LINE_FLOATS: Final = 16
"""Floats in a cache line."""


@cache
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


def compiled_attention(span: RowSpan, cache: LayerCache, q: torch.Tensor, scores: Scores) -> torch.Tensor:
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
    task[[places.OUT, places.KEYS, places.VALUES, places.FORM]] = out.data_ptr(), keys, values, _FORMS[cache.dtype]
    task[[places.HEADS, places.SHARED, places.KEY_WIDTH, places.VALUE_WIDTH]] = (
        heads, shape.heads, key_width, shape.value_width
    )  # fmt: skip
    task[[places.START, places.STOP]] = span.start, span.end
    task[[places.WINDOW, places.CAPACITY, places.RING]] = cache.window or 0, cache.capacity, span.ring
    task[places.PAGE_TOKENS] = cache.page_tokens
    table = np.array(span.pages, dtype=np.int64)
    added = np.zeros(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
    task[places.SWEEP] = sweep = _sweep()
    floats = _scratch_floats(made, shape, rows)

    def share(first: int, end: int) -> None:
        own = task.copy()
        own[[places.FIRST, places.END]] = first, end
        room = np.empty(floats, dtype=np.float32)
        scratch = room[-room.ctypes.data % (4 * _LINE_FLOATS) // 4 :]
        made.attend(own, scale, softcap or 0.0, table, added, scratch, scratch.ctypes.data)

    in_threads(share, made.items(span.start, span.end, heads, shape.heads, sweep))
    return out
