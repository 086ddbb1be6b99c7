"""Operators that read or write at given indices, as torch defines them. An index out of range gives NaN.

Compiled code can't raise errors: a lookup outside a table of floats returns NaN, never another row. Indices that are
inputs of the graph are checked before the run (`program`). Neighbours: `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar
from fusionai.primitives.errors import ExecutionError


def _embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001 — a hint about how gradients are stored
) -> Array:
    if scale_grad_by_freq:
        raise ExecutionError("this backend has no embedding whose gradient is scaled by frequency.")
    rows = jnp.take(weight, _upwards(indices), axis=0, mode="fill")
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def _upwards(indices: Array) -> Array:
    """Return indices with negative ones moved out of range; numpy would count them from the end."""
    return jnp.where(indices < 0, jnp.iinfo(indices.dtype).max, indices)


def _index_select(x: Array, dim: int, indices: Array) -> Array:
    if not x.ndim:
        return x
    return jnp.take(x, _upwards(indices.reshape(-1)), axis=dim, mode="fill")


def _gather(x: Array, dim: int, indices: Array, sparse_grad: bool = False) -> Array:  # noqa: ARG001
    if not x.ndim:
        return x
    axis = dim % x.ndim
    for other in range(x.ndim):
        if other != axis and indices.shape[other] < x.shape[other]:
            x = lax.slice_in_dim(x, 0, indices.shape[other], 1, other)
    return jnp.take_along_axis(x, _upwards(indices), axis=axis, mode="fill")


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    if any(one is not None and one.dtype == jnp.bool_ for one in indices):
        raise ExecutionError("this backend can't index by a boolean mask: the result's size would depend on the data.")
    places = tuple(slice(None) if one is None else one for one in indices)
    return x.at[places].get(mode="fill")


def _scatter(x: Array, dim: int, indices: Array, value: Scalar) -> Array:
    if not x.ndim:
        return jnp.asarray(value, x.dtype)
    axis = dim % x.ndim
    grid = list(jnp.indices(indices.shape, sparse=True))
    grid[axis] = indices
    return x.at[tuple(grid)].set(jnp.asarray(value, x.dtype))


def _grid(x: Array, dim: int, indices: Array) -> tuple[Array, ...]:
    """Return the places in x for each of `indices` along `dim`."""
    places = list(jnp.indices(indices.shape, sparse=True))
    places[dim % x.ndim] = indices
    return tuple(places)


def _within(source: Array, indices: Array) -> Array:
    """Return the part of `source` that has an index."""
    return source[tuple(slice(size) for size in indices.shape)]


def _scatter_from(x: Array, dim: int, indices: Array, source: Array) -> Array:
    return x.at[_grid(x, dim, indices)].set(_within(source, indices)) if x.ndim else source.reshape(())


def _scatter_add(x: Array, dim: int, indices: Array, source: Array) -> Array:
    return x.at[_grid(x, dim, indices)].add(_within(source, indices)) if x.ndim else x + source.reshape(())


def _rows(x: Array, dim: int, indices: Array) -> tuple[slice | Array, ...]:
    places: list[slice | Array] = [slice(None)] * x.ndim
    places[dim % x.ndim] = indices.reshape(-1)
    return tuple(places)


def _index_add(x: Array, dim: int, indices: Array, source: Array, alpha: Scalar = 1) -> Array:
    return x.at[_rows(x, dim, indices)].add(source if alpha == 1 else source * alpha)


def _index_copy(x: Array, dim: int, indices: Array, source: Array) -> Array:
    return x.at[_rows(x, dim, indices)].set(source)


def _index_fill(x: Array, dim: int, indices: Array, value: Scalar) -> Array:
    return x.at[_rows(x, dim, indices)].set(jnp.asarray(value, x.dtype))


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    places = tuple(slice(None) if one is None else one for one in indices)
    masks = [one for one in indices if one is not None and one.dtype == jnp.bool_]
    if masks:
        if len(indices) > 1 or values.size != 1:
            raise ExecutionError("with a boolean mask, this backend can write only a single number, not a tensor.")
        mask = masks[0].reshape(masks[0].shape + (1,) * (x.ndim - masks[0].ndim))
        value = values.reshape(()).astype(x.dtype)
        return jnp.where(mask, x + value if accumulate else value, x)
    return x.at[places].add(values) if accumulate else x.at[places].set(values)


def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    *,
    mode: int,
    weights: Array | None = None,
    by_frequency: bool = False,
    last_offset: bool = False,
    padding: int = -1,
) -> Array:
    """Return sums (mode 0), means (1) or maxima (2) of bags of rows: indices [n], `offsets` [bags] with each bag's
    first index."""
    if by_frequency:
        raise ExecutionError("this backend has no embedding whose gradient is scaled by frequency.")
    count = offsets.shape[0] - (1 if last_offset else 0)
    bags = jnp.searchsorted(offsets[:count], jnp.arange(indices.shape[0]), side="right") - 1
    rows = _embedding(weight, indices)
    counted = jnp.ones(indices.shape, bool) if padding < 0 else indices != padding
    sizes = jax.ops.segment_sum(counted.astype(jnp.int64), bags, count)[:, None]
    if mode == 2:
        found = jax.ops.segment_max(jnp.where(counted[:, None], rows, -jnp.inf), bags, count)
        return jnp.where(sizes > 0, found, 0)
    factors = counted.astype(rows.dtype) if weights is None else counted.astype(rows.dtype) * weights
    total = jax.ops.segment_sum(rows * factors[:, None], bags, count)
    return total / jnp.maximum(sizes, 1).astype(total.dtype) if mode == 1 else total


def _bucketize(x: Array, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    places = jnp.searchsorted(boundaries, x, side="right" if right else "left")
    return places.astype(jnp.int32 if out_int32 else jnp.int64)


def _one_hot(indices: Array, num_classes: int = -1) -> Array:
    if num_classes < 0:
        raise ExecutionError("one_hot needs num_classes on this backend: the result's size would depend on the data.")
    return jax.nn.one_hot(indices, num_classes, dtype=jnp.int64)


LOOKUPS: Final[dict[str, Callable[..., Any]]] = {
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.tril.default": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "aten.triu.default": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter_from,
    "aten.scatter_add.default": _scatter_add,
    "aten.index_add.default": _index_add,
    "aten.index_copy.default": _index_copy,
    "aten.index_fill.int_Scalar": _index_fill,
    "aten.index_put.default": _index_put,
    "fusion.embedding_bag": _embedding_bag,
    "aten.bucketize.Tensor": _bucketize,
    "aten.one_hot.default": _one_hot,
}
