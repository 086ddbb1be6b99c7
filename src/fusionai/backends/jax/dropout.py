"""Dropout and random numbers as pure functions of counters, the same bits as on every other backend.

The hash is that of `backends.counters`; here it runs on unsigned 32-bit integers, whose products wrap. Keys of the run
are folded outside and come in as numbers, so that a step compiles nothing anew. Neighbours: `attention`, `operators`.
"""

from __future__ import annotations

from math import floor, prod
from typing import Any

import jax
import jax.numpy as jnp

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS


def scaled_mask(shape: tuple[int, ...], p: float, key: jax.Array, *, dtype: Any) -> jax.Array:
    """0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1). `key` [2]: the node's two folds, uint32."""
    if p >= 1.0:
        return jnp.zeros(shape, dtype)
    keep = _hashed(prod(shape), key) >= jnp.uint32(floor(p * 2**32))
    # As torch multiplies: a truth value in the tensor's own precision by the rounded factor.
    return (keep.astype(dtype) * jnp.asarray(1.0 / (1.0 - p), dtype)).reshape(shape)


def dropout(x: jax.Array, p: float, key: jax.Array) -> jax.Array:
    return x * scaled_mask(x.shape, p, key, dtype=x.dtype)


def uniform(x: jax.Array, key: jax.Array) -> jax.Array:
    """Numbers in [0, 1) of the shape and the dtype of x, whose values don't matter."""
    bits = UNIFORM_BITS[str(x.dtype)]
    drawn = (_hashed(x.size, key) >> (32 - bits)).astype(x.dtype)
    return (drawn * jnp.asarray(2.0**-bits, x.dtype)).reshape(x.shape)


def _hashed(count: int, key: jax.Array) -> jax.Array:
    index = jnp.arange(count, dtype=jnp.uint64)
    low, high = index.astype(jnp.uint32), (index >> 32).astype(jnp.uint32)
    return _mix(_mix(low ^ key[0]) ^ (_mix(high) ^ key[1]))


def _mix(x: jax.Array) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(FIRST_MULTIPLIER)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(SECOND_MULTIPLIER)
    return x ^ (x >> 15)
