"""`fusion.attention` on dense tensors, for training and evaluation.

The formula is that of the explicit path in `backends.torch.attention`, with another order of sums; softmax runs in
float32. Grouped queries share their keys without copying them. Neighbours: `operators` maps the operator's name to this
module, `dropout` makes the mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fusionai.backends.jax.dropout import scaled_mask


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    key_mask: jax.Array | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return [B, Hq, S, Dv] for q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]; arguments as in the torch
    backend.

    `key`: key of this node's dropout, needed if `dropout` is above 0.
    """
    batch, heads, queries, _ = q.shape
    shared = k.shape[1]
    grouped = q.reshape(batch, shared, heads // shared, queries, q.shape[-1])
    weights = jnp.einsum("bhgsd,bhtd->bhgst", grouped, k).reshape(batch, heads, queries, k.shape[2]) * scale
    if softcap is not None:
        weights = jnp.tanh(weights / softcap) * softcap
    visible = _visible(q, k, causal=causal, window=window, key_mask=key_mask)
    if visible is not None:
        weights = jnp.where(visible, weights, jnp.finfo(weights.dtype).min)
    if sinks is None:
        weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(q.dtype)
    else:
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1).astype(weights.dtype), (batch, heads, queries, 1))
        weights = jax.nn.softmax(jnp.concatenate([weights, column], axis=-1), axis=-1)[..., :-1]
    if dropout > 0.0:
        assert key is not None, "a node that drops has a key"
        weights = weights * scaled_mask(weights.shape, dropout, key, dtype=weights.dtype)
    by_group = weights.astype(v.dtype).reshape(batch, shared, heads // shared, queries, k.shape[2])
    out = jnp.einsum("bhgst,bhtd->bhgsd", by_group, v)
    return out.reshape(batch, heads, queries, v.shape[-1])


def _visible(
    q: jax.Array, k: jax.Array, *, causal: bool, window: int | None, key_mask: jax.Array | None
) -> jax.Array | None:
    """Return bool [B or 1, 1, S, T], True where query s may see key t; None if every query sees every key."""
    queries = jnp.arange(q.shape[2])[:, None]
    keys = jnp.arange(k.shape[2])[None, :]
    visible = None
    if causal:
        visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window) if visible is not None else jnp.abs(keys - queries) <= window
    if visible is not None:
        visible = visible[None, None]
    if key_mask is not None:
        seen = key_mask.astype(jnp.bool_)[:, None, None, :]
        visible = seen if visible is None else visible & seen
    return visible
