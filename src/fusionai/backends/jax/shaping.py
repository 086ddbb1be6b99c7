"""Operators that rearrange, copy, join and make tensors, and that read or write at given indices, as torch defines
them.

Compiled code can't raise errors: a lookup outside a table of floats returns NaN, never another row. Indices that are
inputs of the graph are checked before the run (`program`). Neighbours: `tracing` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar, is_floating, result_type
from fusionai.backends.semantics import pad_widths, slice_bounds
from fusionai.primitives.errors import ExecutionError

Ints = Sequence[int]


def _axis(x: Array, dim: int) -> int:
    return dim % max(x.ndim, 1)


def _flatten(x: Array, start: int = 0, end: int = -1) -> Array:
    if not x.ndim:
        return x.reshape(1)
    first, last = _axis(x, start), _axis(x, end)
    return x.reshape((*x.shape[:first], -1, *x.shape[last + 1 :]))


def _unflatten(x: Array, dim: int, sizes: Ints) -> Array:
    at = _axis(x, dim)
    return x.reshape((*x.shape[:at], *_inferred(sizes, x.shape[at]), *x.shape[at + 1 :]))


def _inferred(sizes: Ints, total: int) -> list[int]:
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    return [total // known if size == -1 else size for size in sizes]


def _squeeze(x: Array, dims: int | Ints | None = None) -> Array:
    wanted = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    single = tuple(axis for dim in wanted if x.ndim and x.shape[axis := _axis(x, dim)] == 1)
    return jnp.squeeze(x, single)


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    first, last = slice_bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, first, last, step, _axis(x, dim))


def _within(x: Array, dim: int, index: int) -> int:
    size = x.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"expected an index from {-size} to {size - 1}, got {index}")
    return index % size


def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    first = start + x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, 1, _axis(x, dim))


def _expand(x: Array, sizes: Ints, implicit: bool = False) -> Array:  # noqa: ARG001
    lead = len(sizes) - x.ndim
    shape = [x.shape[place - lead] if size == -1 else size for place, size in enumerate(sizes)]
    return jnp.broadcast_to(x, shape)


def _split_sizes(x: Array, sizes: Ints, dim: int = 0) -> list[Array]:
    pieces: list[Array] = []
    start = 0
    for size in sizes:
        pieces.append(lax.slice_in_dim(x, start, start + size, 1, _axis(x, dim)))
        start += size
    return pieces


def _split(x: Array, size: int, dim: int = 0) -> list[Array]:
    total = x.shape[dim]
    return _split_sizes(x, [min(size, total - start) for start in range(0, total, size)] or [0], dim)


def _cast(x: Array, dtype: Any = None, *_: Any, **__: Any) -> Array:
    return x if dtype is None else x.astype(dtype)


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


def _roll(x: Array, shifts: int | Ints, dims: int | Ints = ()) -> Array:
    axes = tuple([dims] if isinstance(dims, int) else dims)
    steps = tuple([shifts] if isinstance(shifts, int) else shifts)
    if not axes:
        return jnp.roll(x.reshape(-1), steps[0]).reshape(x.shape)
    return jnp.roll(x, steps, axes)


def _placed(x: Array, dim: int, where: slice | int) -> tuple[slice | int, ...]:
    return (*(slice(None),) * _axis(x, dim), where)


def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    first, last = slice_bounds(x.shape[dim], start, end)
    return x.at[_placed(x, dim, slice(first, last, step))].set(source.astype(x.dtype))


def _full(size: Ints, value: Scalar, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(size), value, result_type(value) if dtype is None else dtype)


def _new_full(x: Array, size: Ints, value: Scalar, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(tuple(size), value, x.dtype if dtype is None else dtype)


def _made(value: float) -> Callable[..., Array]:
    return lambda size, dtype=None, **_: _full(size, value, dtype)


def _made_new(value: float) -> Callable[..., Array]:
    return lambda x, size, dtype=None, **_: _new_full(x, size, value, dtype)


def _made_like(value: float) -> Callable[..., Array]:
    return lambda x, dtype=None, **_: _new_full(x, x.shape, value, dtype)


def _arange(start: Scalar, end: Scalar, step: Scalar = 1, dtype: Any = None, **_: Any) -> Array:
    usual = jnp.float32 if any(isinstance(one, float) for one in (start, end, step)) else jnp.int64
    return jnp.arange(start, end, step, dtype=usual if dtype is None else dtype)


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    some = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    dtype = some[0].dtype
    for x in some[1:]:
        dtype = jnp.promote_types(dtype, x.dtype)
    return jnp.concatenate([x.astype(dtype) for x in some], axis=dim)


def _repeat(x: Array, repeats: Ints) -> Array:
    lead = len(repeats) - x.ndim
    return jnp.tile(x.reshape((*(1,) * lead, *x.shape)), tuple(repeats))


def _pad(x: Array, pad: Ints, value: Scalar = 0.0) -> Array:
    """Pad x; negative widths cut off."""
    return lax.pad(x, jnp.asarray(value, x.dtype), [(*width, 0) for width in pad_widths(pad, x.ndim)])


_PADDING_MODES: Final = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad_by(x: Array, pad: Ints, mode: str = "constant", value: Scalar | None = None) -> Array:
    if mode == "constant":
        return _pad(x, pad, 0.0 if value is None else value)
    return jnp.pad(x, pad_widths(pad, x.ndim), mode=_PADDING_MODES[mode])


def _diff(x: Array, n: int = 1, dim: int = -1, prepend: Array | None = None, append: Array | None = None) -> Array:
    parts = [one for one in (prepend, x, append) if one is not None]
    x = _cat(parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        later, earlier = _slice(x, dim, 1), _slice(x, dim, 0, x.shape[dim] - 1)
        x = later - earlier if is_floating(x.dtype) or x.dtype != jnp.bool_ else jnp.logical_xor(later, earlier)
    return x


def _unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Return windows along `dim`, with their elements in a new last dimension."""
    if not x.ndim:
        return x.reshape(1)
    axis, count = _axis(x, dim), (x.shape[_axis(x, dim)] - size) // step + 1
    parts = [lax.slice_in_dim(x, place, place + (count - 1) * step + 1, step, axis) for place in range(size)]
    return jnp.stack(parts, -1)


def _im2col(x: Array, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    """Return [..., C * kernel, places] for x [..., C, H, W]."""
    lead, channels = x.shape[:-3], x.shape[-3]
    padded = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *[(one, one) for one in padding]])
    counts = [
        (size - spread * (length - 1) - 1) // step + 1
        for size, length, spread, step in zip(padded.shape[-2:], kernel, dilation, stride, strict=True)
    ]
    parts = [
        padded[
            ...,
            row * dilation[0] : row * dilation[0] + (counts[0] - 1) * stride[0] + 1 : stride[0],
            column * dilation[1] : column * dilation[1] + (counts[1] - 1) * stride[1] + 1 : stride[1],
        ]
        for row in range(kernel[0])
        for column in range(kernel[1])
    ]
    stacked = jnp.stack(parts, x.ndim - 2)
    return stacked.reshape(*lead, channels * len(parts), counts[0] * counts[1])


def _col2im(x: Array, size: Ints, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    """Reverse `_im2col`, summing where windows overlap."""
    channels = x.shape[-2] // (kernel[0] * kernel[1])
    like = jax.ShapeDtypeStruct((*x.shape[:-2], channels, *size), x.dtype)
    (image,) = jax.linear_transpose(lambda whole: _im2col(whole, kernel, dilation, padding, stride), like)(x)
    return image


SHAPING: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": _same for name in ("alias", "clone", "contiguous", "lift_fresh_copy")},
    **dict.fromkeys(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"), _squeeze),
    "aten.reshape.default": lambda x, shape: jnp.reshape(x, tuple(shape)),
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.transpose.int": lambda x, one, other: jnp.swapaxes(x, one, other) if x.ndim else x,
    "aten.permute.default": lambda x, dims: jnp.transpose(x, tuple(dims)),
    "aten.t.default": lambda x: x.T,
    "aten.unsqueeze.default": lambda x, dim: jnp.expand_dims(x, dim),
    "aten.slice.Tensor": _slice,
    "aten.select.int": lambda x, dim, index: lax.index_in_dim(x, _within(x, dim, index), _axis(x, dim), keepdims=False),
    "aten.narrow.default": _narrow,
    "aten.diagonal.default": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    "aten.expand.default": _expand,
    "aten.expand_as.default": lambda x, other: jnp.broadcast_to(x, other.shape),
    "aten.broadcast_tensors.default": lambda tensors: list(jnp.broadcast_arrays(*tensors)),
    "aten.detach.default": lax.stop_gradient,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_sizes,
    "aten.chunk.default": lambda x, chunks, dim=0: _split(x, max(1, -(-x.shape[dim] // chunks)), dim),
    "aten.unbind.int": lambda x, dim=0: [
        lax.index_in_dim(x, index, _axis(x, dim), keepdims=False) for index in range(x.shape[dim])
    ],
    "aten._to_copy.default": lambda x, **options: _cast(x, options.get("dtype")),
    "aten.to.dtype": _cast,
    "aten.to.dtype_layout": lambda x, **options: _cast(x, options.get("dtype")),
    "aten.type_as.default": lambda x, other: x.astype(other.dtype),
    "aten.flip.default": lambda x, dims: jnp.flip(x, tuple(dims)),
    "aten.roll.default": _roll,
    "aten.select_scatter.default": lambda x, source, dim, index: x.at[_placed(x, dim, _within(x, dim, index))].set(
        source.astype(x.dtype)
    ),
    "aten.slice_scatter.default": _slice_scatter,
    "aten.full.default": _full,
    "aten.zeros.default": _made(0.0),
    "aten.ones.default": _made(1.0),
    "aten.empty.memory_format": _made(0.0),
    "aten.new_zeros.default": _made_new(0),
    "aten.new_ones.default": _made_new(1),
    "aten.new_full.default": _new_full,
    "aten.full_like.default": lambda x, value, dtype=None, **_: _new_full(x, x.shape, value, dtype),
    "aten.zeros_like.default": _made_like(0),
    "aten.ones_like.default": _made_like(1),
    "aten.empty_like.default": _made_like(0),
    "aten.scalar_tensor.default": lambda value, dtype=None, **_: jnp.asarray(
        value, jnp.float32 if dtype is None else dtype
    ),
    "aten.arange.default": lambda end, dtype=None, **_: _arange(0, end, 1, dtype),
    "aten.arange.start": lambda start, end, dtype=None, **_: _arange(start, end, 1, dtype),
    "aten.arange.start_step": _arange,
    "aten.linspace.default": lambda start, end, steps, dtype=None, **_: jnp.linspace(
        start, end, steps, dtype=jnp.float32 if dtype is None else dtype
    ),
    "aten.unfold.default": _unfold,
    "aten.im2col.default": _im2col,
    "aten.col2im.default": _col2im,
    "aten.diff.default": _diff,
    "aten.constant_pad_nd.default": _pad,
    "aten.pad.default": _pad_by,
    "aten.cat.default": _cat,
    "aten.stack.default": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": lambda x, repeats, dim=None, **_: jnp.repeat(
        x.reshape(-1) if dim is None else x, repeats, axis=0 if dim is None else dim
    ),
}


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


def _indexed(source: Array, indices: Array) -> Array:
    """Return the part of `source` that has an index."""
    return source[tuple(slice(size) for size in indices.shape)]


def _rows(x: Array, dim: int, indices: Array) -> tuple[slice | Array, ...]:
    places: list[slice | Array] = [slice(None)] * x.ndim
    places[dim % x.ndim] = indices.reshape(-1)
    return tuple(places)


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
    "aten.scatter.src": lambda x, dim, indices, source: (
        x.at[_grid(x, dim, indices)].set(_indexed(source, indices)) if x.ndim else source.reshape(())
    ),
    "aten.scatter_add.default": lambda x, dim, indices, source: (
        x.at[_grid(x, dim, indices)].add(_indexed(source, indices)) if x.ndim else x + source.reshape(())
    ),
    "aten.index_add.default": lambda x, dim, indices, source, alpha=1: x.at[_rows(x, dim, indices)].add(
        source if alpha == 1 else source * alpha
    ),
    "aten.index_copy.default": lambda x, dim, indices, source: x.at[_rows(x, dim, indices)].set(source),
    "aten.index_fill.int_Scalar": lambda x, dim, indices, value: x.at[_rows(x, dim, indices)].set(
        jnp.asarray(value, x.dtype)
    ),
    "aten.index_put.default": _index_put,
    "fusion.embedding_bag": _embedding_bag,
    "aten.bucketize.Tensor": _bucketize,
    "aten.one_hot.default": _one_hot,
}
