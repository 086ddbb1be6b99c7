"""`fusion.attention` as all backends understand it: how scores are made from products, and which keys a query sees.

Framework-free: each backend computes with its own operators. Neighbours: `torch.semantic`, `jax.semantic` and
`onnxruntime.products` compute dense attention, `serving.parted` and `torch.paged_attention` attention over caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Scores(NamedTuple):
    """How attention with a cache weighs its keys.

    A score is the product of a query and a key times `scale`, then `softcap` * tanh(score / `softcap`). `sinks` [query
    heads]: one extra score per head, which takes weight but adds no value.
    """

    scale: float
    softcap: float | None = None
    sinks: Any = None


def visible_keys(queries: Any, keys: Any, *, causal: bool, window: int | None) -> Any:
    """Return True where a query at position `queries` sees a key at position `keys` (arrays of one framework,
    broadcast); None if every query sees every key.

    A causal query sees itself and the `window - 1` positions before it. A query that is not causal sees up to `window`
    positions on either side. These are transformers' two conventions.
    """
    if not causal:
        return None if window is None else abs(keys - queries) <= window
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
