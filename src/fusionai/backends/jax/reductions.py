"""Operators that sum, select and sort along dimensions, as torch defines them.

Among equal elements the first is selected, and it alone gets the gradient where torch gives it to one element.
Neighbours: `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar, floating, is_floating

Dims = int | Sequence[int] | None


def _axes(dims: Dims) -> tuple[int, ...] | None:
    """Return the axes as a tuple; None means all axes, for which torch also uses an empty list."""
    if dims is None:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims) or None


def _summable(x: Array, dtype: Any) -> Array:
    """Return x as summed: integers and booleans as int64."""
    if dtype is not None:
        return x.astype(dtype)
    return x if is_floating(x.dtype) else x.astype(jnp.int64)


def _sum(x: Array, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.sum(_summable(x, dtype), axis=_axes(dims), keepdims=keepdim)


def _mean(x: Array, dims: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.mean(x if dtype is None else x.astype(dtype), axis=_axes(dims), keepdims=keepdim)


def _cumsum(x: Array, dim: int, dtype: Any = None) -> Array:
    x = _summable(x, dtype)
    return jnp.cumsum(x, axis=dim) if x.ndim else x


def _variance(x: Array, dims: Dims = None, correction: Scalar | None = 1, keepdim: bool = False) -> Array:
    axes = _axes(dims)
    spread = jnp.square(x - jnp.mean(x, axis=axes, keepdims=True))
    counted = range(x.ndim) if axes is None else axes
    count = 1
    for axis in counted:
        count *= x.shape[axis]
    return jnp.sum(spread, axis=axes, keepdims=keepdim) / max(0, count - (1 if correction is None else correction))


def _deviation(x: Array, dims: Dims = None, correction: Scalar | None = 1, keepdim: bool = False) -> Array:
    return jnp.sqrt(_variance(x, dims, correction, keepdim))


def _logsumexp(x: Array, dims: Dims, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(floating(x), axis=_axes(dims), keepdims=keepdim)


def _norm(x: Array, order: Scalar = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    x = x if dtype is None else x.astype(dtype)
    axes = _axes(dim)
    if order == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=keepdim))
    size = jnp.abs(x)
    if order == float("inf"):
        return jnp.max(size, axis=axes, keepdims=keepdim)
    if order == float("-inf"):
        return jnp.min(size, axis=axes, keepdims=keepdim)
    if order == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim).astype(x.dtype)
    if order == 1:
        return jnp.sum(size, axis=axes, keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.power(size, order), axis=axes, keepdims=keepdim), 1 / order)


def _chosen(x: Array, indices: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    kept = jnp.expand_dims(indices, dim)
    values = jnp.take_along_axis(x, kept, axis=dim)
    return (values, kept) if keepdim else (jnp.squeeze(values, dim), indices)


def _along(place: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """Return (extreme, its place) along a dimension; `place`: argmax or argmin."""

    def run(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        return _chosen(x, place(x, axis=dim), dim, keepdim) if x.ndim else (x, jnp.zeros((), jnp.int64))

    return run


def _topk(
    x: Array,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002, ARG001 — torch's name; a sorted result is valid for either value
) -> tuple[Array, Array]:
    keys = x if largest else -x if is_floating(x.dtype) else ~x
    _, places = lax.top_k(jnp.moveaxis(keys, dim, -1), k)
    indices = jnp.moveaxis(places, -1, dim).astype(jnp.int64)
    return jnp.take_along_axis(x, indices, axis=dim), indices


def _sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    indices = jnp.argsort(x, axis=dim, stable=True, descending=descending).astype(jnp.int64)
    return jnp.take_along_axis(x, indices, axis=dim), indices


def _kth(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True).astype(jnp.int64)
    return _chosen(x, jnp.take(order, k - 1, axis=dim), dim, keepdim)


def _median(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Return the median; for an even number of elements, the lower of the two middle ones."""
    return _kth(x, (x.shape[dim] + 1) // 2 if x.ndim else 1, dim, keepdim)


def _prod(x: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(_summable(x, dtype), axis=_axes(dim), keepdims=keepdim)


def _nansum(x: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return _sum(jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x), dim, keepdim, dtype)


def _both_extremes(x: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    return jnp.min(x, axis=dim, keepdims=keepdim), jnp.max(x, axis=dim, keepdims=keepdim)


def _with_mean(compute: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    def run(x: Array, dim: Dims = None, correction: Scalar | None = 1, keepdim: bool = False) -> tuple[Array, Array]:
        return compute(x, dim, correction, keepdim), jnp.mean(x, axis=_axes(dim), keepdims=keepdim)

    return run


def _extreme_place(compute: Callable[..., Array]) -> Callable[..., Array]:
    def place(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        return compute(x, axis=dim, keepdims=keepdim).astype(jnp.int64)

    return place


REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "aten.sum.default": lambda x, dtype=None: _sum(x, dtype=dtype),
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": lambda x, dtype=None: _mean(x, dtype=dtype),
    "aten.mean.dim": _mean,
    "aten.cumsum.default": _cumsum,
    "aten.amax.default": lambda x, dims=(), keepdim=False: jnp.max(x, axis=_axes(dims), keepdims=keepdim),
    "aten.amin.default": lambda x, dims=(), keepdim=False: jnp.min(x, axis=_axes(dims), keepdims=keepdim),
    "aten.var.correction": _variance,
    "aten.std.correction": _deviation,
    "aten.logsumexp.default": _logsumexp,
    "aten.linalg_vector_norm.default": _norm,
    "aten.max.default": jnp.max,
    "aten.min.default": jnp.min,
    "aten.max.dim": _along(jnp.argmax),
    "aten.min.dim": _along(jnp.argmin),
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.cumprod.default": lambda x, dim, dtype=None: jnp.cumprod(_summable(x, dtype), axis=dim) if x.ndim else x,
    "aten.logcumsumexp.default": lambda x, dim: lax.cumlogsumexp(x, axis=dim % x.ndim) if x.ndim else x,
    "aten.prod.default": lambda x, dtype=None: _prod(x, dtype=dtype),
    "aten.prod.dim_int": _prod,
    "aten.nansum.default": _nansum,
    "aten.trace.default": jnp.trace,
    "aten.kthvalue.default": _kth,
    "aten.median.dim": _median,
    "aten.aminmax.default": _both_extremes,
    "aten.var_mean.correction": _with_mean(_variance),
    "aten.std_mean.correction": _with_mean(_deviation),
    "aten.count_nonzero.default": lambda x, dim=None: jnp.count_nonzero(x, axis=dim).astype(jnp.int64),
    "aten.count_nonzero.dim_IntList": lambda x, dim: jnp.count_nonzero(x, axis=_axes(dim)).astype(jnp.int64),
    "aten.argmax.default": _extreme_place(jnp.argmax),
    "aten.argmin.default": _extreme_place(jnp.argmin),
    "aten.any.default": jnp.any,
    "aten.any.dim": lambda x, dim, keepdim=False: jnp.any(x, axis=dim, keepdims=keepdim),
    "aten.all.default": jnp.all,
    "aten.all.dim": lambda x, dim, keepdim=False: jnp.all(x, axis=dim, keepdims=keepdim),
}
