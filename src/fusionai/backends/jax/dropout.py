"""Dropout and random numbers as pure functions of counters, with the same bits as on every other backend.

The hash is that of `backends.counters`, on unsigned 32-bit integers, whose products wrap. The run's keys are folded
outside and passed in as numbers, so that a new step compiles nothing. Neighbours: `attention`, `operators`.
"""

from __future__ import annotations

from math import floor, prod
from typing import Any

import jax
import jax.numpy as jnp

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS


def scaled_mask(shape: tuple[int, ...], p: float, key: jax.Array, *, dtype: Any) -> jax.Array:
    """Return 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1). `key` [2]: the node's two folds, uint32."""
    if p >= 1.0:
        return jnp.zeros(shape, dtype)
    keep = _hashed(prod(shape), key) >= jnp.uint32(floor(p * 2**32))
    # Multiplied as in torch: a boolean in the tensor's own precision times the rounded factor.
    return (keep.astype(dtype) * jnp.asarray(1.0 / (1.0 - p), dtype)).reshape(shape)


def dropout(x: jax.Array, p: float, key: jax.Array) -> jax.Array:
    return x * scaled_mask(x.shape, p, key, dtype=x.dtype)


def uniform(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
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
