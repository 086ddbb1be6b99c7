"""Frozen weights in fewer bits on JAX: unpacked to float32 where they are read.

Neighbours: `ir.stored` defines the forms; `tracing` unpacks inside functions that backward recomputes, so that only the
packed bytes are kept.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp

from fusionai.ir.schema import ParamSpec
from fusionai.ir.stored import group_of


def opened(data: jax.Array, spec: ParamSpec) -> jax.Array:
    """Return flat uint8 unpacked as float32 in the parameter's shape."""
    shape, count = tuple(spec.shape), prod(spec.shape)
    columns = shape[-1]
    match spec.stored:
        case "int8":
            codes = jax.lax.bitcast_convert_type(data[:count], jnp.int8).reshape(-1, columns)
            found = codes.astype(jnp.float32) * _halves(data[count:]).reshape(-1, 1)
        case "int4":
            group = group_of(shape)
            assert group is not None, "a graph is checked before it is loaded"
            codes = data[: count // 2]
            levels = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, group).astype(jnp.float32)
            pairs = _halves(data[count // 2 :]).reshape(-1, 2)
            found = (levels - 8) * pairs[:, :1] + pairs[:, 1:]
        case _:
            found = _halves(data)
    return found.reshape(shape)


def _halves(data: jax.Array) -> jax.Array:
    """Return bfloat16 given as bytes as float32."""
    return jax.lax.bitcast_convert_type(data.reshape(-1, 2), jnp.bfloat16).astype(jnp.float32)
