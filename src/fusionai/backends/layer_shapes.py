"""Sizes of the caches that a serving stage needs: one per attention node, in pages or, with a window, in rings.

Framework-free: each backend allocates its own caches. Neighbours: `paged_table` keeps the sessions, `serving_base`
calls this at load, `host_cache` and `torch.paged_cache` allocate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from fusionai.backends.paged_table import Span
from fusionai.backends.serving import FEW_POSITIONS
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.wire.serving import CacheFormat, ServeOptions

CACHE_NAMES: Final[Mapping[CacheFormat, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Cache format -> dtype name of `primitives.tensors`."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Cache shape of one attention node. `window` is None if all positions are kept, in pages. `heads` counts key and
    value heads, `query_heads` the query heads."""

    node: int
    query_heads: int
    heads: int
    key_width: int
    value_width: int
    window: int | None

    def nbytes(self, options: ServeOptions) -> int:
        """Return the bytes of the whole cache."""
        per_position = self.heads * (self.key_width + self.value_width) * ITEMSIZE_BYTES[CACHE_NAMES[options.cache]]
        if self.window is None:
            return options.pages * options.page_tokens * per_position
        return options.sessions * ring_tokens(self.window, options) * per_position


def layer_shapes(graph: Graph, options: ServeOptions) -> tuple[LayerShape, ...]:
    """Return the cache shape of every attention node, in graph order. A window that no session can outgrow counts as
    none.

    Raises `ExecutionError` on an attention that can't use a cache.
    """
    found: list[LayerShape] = []
    for node in graph.nodes:
        if node.op != "fusion.attention":
            continue
        query, key, value = (_sizes(graph, node, number) for number in range(3))
        if node.kwargs.get("causal") is not True or node.kwargs.get("key_mask") is not None:
            raise ExecutionError(f"node {node.id}: attention with a cache must be causal and without a padding mask.")
        window = node.kwargs.get("window")
        longest = options.pages * options.page_tokens
        ringed = window if isinstance(window, int) and window < longest else None
        found.append(LayerShape(node.id, query[0], key[0], key[1], value[1], ringed))
    return tuple(found)


def ring_tokens(window: int, options: ServeOptions) -> int:
    """Return the positions of a ring: one window and one pass, rounded up to whole pages."""
    return -(-(window + options.pass_tokens) // options.page_tokens) * options.page_tokens


def first_key(position: int, window: int | None) -> int:
    """Return the earliest position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def one_by_one(span: Span) -> bool:
    """Return whether a span's positions are computed as if each came alone."""
    return span.start > 0 and span.length <= FEW_POSITIONS


def _sizes(graph: Graph, node: Node, position: int) -> tuple[int, int]:
    """Return (heads, width) of the node's queries (`position` 0), keys (1) or values (2)."""
    arg = node.args[position] if position < len(node.args) else None
    shape = graph.values[arg.name].shape if isinstance(arg, Ref) else ()
    match shape:
        case (_, int(heads), _, int(width)) if prod((heads, width)) > 0:
            return heads, width
        case _:
            raise ExecutionError(
                f"node {node.id}: its queries, keys and values must have fixed heads and widths, got {shape!r}."
            )
