"""`fusion.attention` on dense tensors, for training and evaluation.

The formula is that of the explicit path in `backends.torch.semantic`, with another order of sums; softmax runs in
float32. Grouped queries share their keys without copying them. Neighbours: `operators` maps the operator's name to this
module, `dropout` makes the mask.

Also dropout and random numbers as pure functions of counters, with the hash of `backends.counters` on unsigned 32-bit
integers, whose products wrap; the run's keys are folded outside and passed in as numbers, so that a new step compiles
nothing. The recurrences of state-space and linear-attention models sum in the order of `backends.torch.semantic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import floor, prod
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array

from fusionai.backends.arguments import visible_keys
from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    key_mask: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
) -> Array:
    """Return [B, Hq, S, Dv] for q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]; arguments as in the torch
    backend. `key`: key of this node's dropout, needed if `dropout` is above 0."""
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


def _visible(q: Array, k: Array, *, causal: bool, window: int | None, key_mask: Array | None) -> Array | None:
    """Return bool [B or 1, 1, S, T], True where query s may see key t; None if every query sees every key."""
    queries = jnp.arange(q.shape[2])[:, None]
    keys = jnp.arange(k.shape[2])[None, :]
    visible = visible_keys(queries, keys, causal=causal, window=window)
    if visible is not None:
        visible = visible[None, None]
    if key_mask is not None:
        seen = key_mask.astype(jnp.bool_)[:, None, None, :]
        visible = seen if visible is None else visible & seen
    return visible


def scaled_mask(shape: tuple[int, ...], p: float, key: Array, *, dtype: Any) -> Array:
    """Return 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1). `key` [2]: the node's two folds, uint32."""
    if p >= 1.0:
        return jnp.zeros(shape, dtype)
    keep = _hashed(prod(shape), key) >= jnp.uint32(floor(p * 2**32))
    # Multiplied as in torch: a boolean in the tensor's own precision times the rounded factor.
    return (keep.astype(dtype) * jnp.asarray(1.0 / (1.0 - p), dtype)).reshape(shape)


def dropout(x: Array, p: float, key: Array) -> Array:
    return x * scaled_mask(x.shape, p, key, dtype=x.dtype)


def uniform(x: Array, key: Array) -> Array:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    bits = UNIFORM_BITS[str(x.dtype)]
    drawn = (_hashed(x.size, key) >> (32 - bits)).astype(x.dtype)
    return (drawn * jnp.asarray(2.0**-bits, x.dtype)).reshape(x.shape)


def _hashed(count: int, key: Array) -> Array:
    index = jnp.arange(count, dtype=jnp.uint64)
    low, high = index.astype(jnp.uint32), (index >> 32).astype(jnp.uint32)
    return _mix(_mix(low ^ key[0]) ^ (_mix(high) ^ key[1]))


def _mix(x: Array) -> Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(FIRST_MULTIPLIER)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(SECOND_MULTIPLIER)
    return x ^ (x >> 15)


CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""


def linear_scan(decay: Array, x: Array) -> Array:
    """Return all `h[t] = decay[t] * h[t - 1] + x[t]`; decay, x and the result have the same shape [batch, positions,
    ...]."""
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")

    def step(state: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        faded, entering = now
        state = faded * state + entering
        return state, state

    by_position = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(x, 1, 0))
    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), by_position)
    return jnp.moveaxis(states, 0, 1)


def linear_attention(query: Array, key: Array, value: Array, *, decay: Array, beta: Array | None = None) -> Array:
    """Compute the formula of `backends.torch.semantic.linear_attention`. query and key [batch, positions, heads, key
    width], value [batch, positions, heads, value width], decay and beta [batch, positions, heads]; the result has
    value's shape."""
    batch, positions, heads, width = value.shape
    chunk = max(1, min(CHUNK, positions))
    missing = -positions % chunk

    def chunked(x: Array) -> Array:
        x = jnp.moveaxis(x, 1, 2)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])
        return x.reshape(batch, heads, -1, chunk, *x.shape[3:])

    q, k, v = chunked(query), chunked(key), chunked(value)
    total = jnp.cumsum(chunked(decay), axis=3)
    earlier = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))
    # Masked before exp: later positions could overflow, and so could their gradients.
    between = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    inside = (q @ jnp.swapaxes(k, -1, -2)) * between
    faded = k * jnp.exp(total)[..., None]
    if beta is not None:
        share = chunked(beta)[..., None]
        system = (k * share) @ jnp.swapaxes(k, -1, -2) * between
        solved = jax.scipy.linalg.solve_triangular(
            system, jnp.concatenate([v * share, faded * share], axis=-1), lower=True, unit_diagonal=True
        )
        v, faded = solved[..., :width], solved[..., width:]
    reading = q * jnp.exp(total)[..., None]
    leaving = k * jnp.exp(total[..., -1:] - total)[..., None]
    fading = jnp.exp(total[..., -1])[..., None, None]
    state = jnp.zeros((batch, heads, key.shape[-1], width), value.dtype)
    made: list[Array] = []
    for at in range(q.shape[2]):
        taken = v[:, :, at] if beta is None else v[:, :, at] - faded[:, :, at] @ state
        made.append(reading[:, :, at] @ state + inside[:, :, at] @ taken)
        state = state * fading[:, :, at] + jnp.swapaxes(leaving[:, :, at], -1, -2) @ taken
    joined = jnp.stack(made, axis=2).reshape(batch, heads, -1, width)
    return jnp.moveaxis(joined[:, :, :positions], 1, 2)


SCANS: Final[Mapping[str, Callable[..., Any]]] = {
    "fusion.linear_scan": linear_scan,
    "fusion.linear_attention": linear_attention,
}
