"""Operators that read or write at given places, as torch defines them. Decides what a place outside gives: NaN.

Compiled code can't refuse: what is looked up outside of a table of floats comes back as not a number, never as some
other row. Indices that come in as inputs are checked before the run (`program`). Neighbours: `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from fusionai.backends.jax.promotion import Scalar
from fusionai.primitives.errors import ExecutionError


def _embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001 — a hint about how gradients are kept
) -> jax.Array:
    if scale_grad_by_freq:
        raise ExecutionError("this backend has no embedding whose gradient is scaled by frequency.")
    rows = jnp.take(weight, _upwards(indices), axis=0, mode="fill")
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def _upwards(indices: jax.Array) -> jax.Array:
    """Negative ones are outside here, whatever numpy makes of them."""
    return jnp.where(indices < 0, jnp.iinfo(indices.dtype).max, indices)


def _index_select(x: jax.Array, dim: int, indices: jax.Array) -> jax.Array:
    if not x.ndim:
        return x
    return jnp.take(x, _upwards(indices.reshape(-1)), axis=dim, mode="fill")


def _gather(x: jax.Array, dim: int, indices: jax.Array, sparse_grad: bool = False) -> jax.Array:  # noqa: ARG001
    if not x.ndim:
        return x
    axis = dim % x.ndim
    for other in range(x.ndim):
        if other != axis and indices.shape[other] < x.shape[other]:
            x = lax.slice_in_dim(x, 0, indices.shape[other], 1, other)
    return jnp.take_along_axis(x, _upwards(indices), axis=axis, mode="fill")


def _index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    if any(one is not None and one.dtype == jnp.bool_ for one in indices):
        raise ExecutionError("this backend can't choose by a mask: how much is chosen would depend on the data.")
    places = tuple(slice(None) if one is None else one for one in indices)
    return x.at[places].get(mode="fill")


def _scatter(x: jax.Array, dim: int, indices: jax.Array, value: Scalar) -> jax.Array:
    if not x.ndim:
        return jnp.asarray(value, x.dtype)
    axis = dim % x.ndim
    grid = list(jnp.indices(indices.shape, sparse=True))
    grid[axis] = indices
    return x.at[tuple(grid)].set(jnp.asarray(value, x.dtype))


def _one_hot(indices: jax.Array, num_classes: int = -1) -> jax.Array:
    if num_classes < 0:
        raise ExecutionError("this backend needs one_hot's number of classes: it would depend on the data.")
    return jax.nn.one_hot(indices, num_classes, dtype=jnp.int64)


LOOKUPS: Final[dict[str, Callable[..., Any]]] = {
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.tril.default": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "aten.triu.default": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "aten.scatter.value": _scatter,
    "aten.one_hot.default": _one_hot,
}
