"""Operators that rearrange, copy, join and make tensors, in ONNX.

Neighbours: `building` knows sizes, `program` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from fusionai.backends.onnxruntime.building import ROWS, Builder, Operand, Rows, Size, Tensor
from fusionai.backends.semantics import pad_widths, slice_bounds
from fusionai.primitives.errors import ExecutionError

_TO_THE_START: Final = -(2**62)
"""End of a backwards slice that reaches to the start of its dimension."""


def _known(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Reshape to the result's declared shape."""
    return b.reshape(x, b.out.shape)


def _transpose(b: Builder, x: Tensor, one: int, other: int) -> Tensor:
    if not x.rank:
        return x
    order = list(range(x.rank))
    first, second = one % x.rank, other % x.rank
    order[first], order[second] = order[second], order[first]
    return b.permute(x, order)


def _slice(
    b: Builder, x: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> Tensor:
    size = x.shape[dim]
    first = 0 if start is None else start
    if isinstance(first, Rows):
        raise ExecutionError("this backend can't begin a slice at a place that depends on the number of rows.")
    if isinstance(size, int):
        if isinstance(end, Rows):
            raise ExecutionError("this backend can't end a slice of a fixed dimension at the number of rows.")
        first, end = slice_bounds(size, first, end)
    return b.slice(x, dim, first, end, step)


def _select(b: Builder, x: Tensor, dim: int, index: int) -> Tensor:
    return b.op("Gather", [x, b.number(index, "int64")], axis=dim % x.rank)


def _narrow(b: Builder, x: Tensor, dim: int, start: int, length: Size) -> Tensor:
    if isinstance(length, Rows):
        return b.slice(x, dim, start, None)
    first = start + x.size(dim) if start < 0 else start
    return b.slice(x, dim, first, first + length)


def _expand(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return b.expand(x, b.out.shape)


def _split(b: Builder, x: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    """Split along the dimension in which the declared pieces differ from the whole."""
    at = next((at for at in range(x.rank) if any(piece.shape[at] != x.shape[at] for piece in b.outs)), None)
    if at is None:
        return [x]
    first, pieces = 0, []
    for piece in b.outs:
        pieces.append(b.slice(x, at, first, first + piece.size(at)))
        first += piece.size(at)
    return pieces


def _cast(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return b.cast(x, b.out.dtype)


def _same(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG001 - all operators get these arguments
    return x


def _flip(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    count = len(dims)
    given = ([-1] * count, [_TO_THE_START] * count, [dim % x.rank for dim in dims], [-1] * count)
    return b.op("Slice", [x, *(b.ints(one) for one in given)])


def _roll(b: Builder, x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    axes = [dims] if isinstance(dims, int) else list(dims)
    steps = [shifts] if isinstance(shifts, int) else list(shifts)
    flat = not axes
    found = b.reshape(x, (-1,)) if flat else x
    for axis, step in zip(axes or [0], steps, strict=True):
        size = found.size(axis)
        cut = size - step % size if size else 0
        parts = [b.slice(found, axis, cut, size), b.slice(found, axis, 0, cut)]
        found = b.op("Concat", parts, like=found, axis=axis % found.rank)
    return b.reshape(found, x.shape) if flat else found


def _replaced(b: Builder, x: Tensor, source: Tensor, dim: int, first: int, end: int) -> Tensor:
    at = dim % x.rank
    parts = [b.slice(x, at, 0, first), b.cast(source, x.dtype), b.slice(x, at, end, None)]
    return b.op("Concat", [part for part in parts if part.shape[at] != 0], axis=at)


def _select_scatter(b: Builder, x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    place = index % x.size(dim)
    return _replaced(b, x, b.unsqueeze(source, dim % x.rank), dim, place, place + 1)


def _slice_scatter(
    b: Builder, x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    first, last = slice_bounds(x.size(dim), start, end)
    if step != 1:
        at = dim % x.rank
        places = b.ints(range(first, last, step))
        spread = b.expand(b.reshape(places, (*(1,) * at, -1, *(1,) * (x.rank - at - 1))), source.shape)
        return b.op("ScatterElements", [x, spread, b.cast(source, x.dtype)], axis=at)
    return _replaced(b, x, source, dim, first, last)


def _filled(b: Builder, value: Operand) -> Tensor:
    one = b.cast(value, b.out.dtype)
    return b.expand(b.reshape(one, (1,) * len(b.out.shape)), b.out.shape)


def _made(value: float) -> Callable[..., Tensor]:
    return lambda b, *_, **__: _filled(b, value)


def _arange(b: Builder, start: Operand | Rows, end: Operand | Rows, step: Operand = 1, *_: Any, **__: Any) -> Tensor:
    if isinstance(end, Rows):
        if start != 0 or step != 1:
            raise ExecutionError("this backend supports an arange to the number of rows only from 0 with step 1.")
        ones = b.expand(b.ints([1]), (ROWS,))
        counted = b.op("CumSum", [ones, b.number(0, "int64")], like=ones, exclusive=1)
        return b.cast(counted, b.out.dtype)
    if isinstance(start, Tensor | Rows) or isinstance(end, Tensor) or isinstance(step, Tensor):
        raise ExecutionError("this backend supports an arange only between fixed numbers.")
    return b.constant(np.arange(start, end, step).astype(b.out.dtype))


def _cat(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    some = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    return b.op("Concat", [b.cast(x, b.out.dtype) for x in some], axis=dim % len(b.out.shape))


def _stack(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    at = dim % len(b.out.shape)
    return b.op("Concat", [b.unsqueeze(x, at) for x in tensors], axis=at)


def _repeat(b: Builder, x: Tensor, repeats: Sequence[Size]) -> Tensor:
    lead = len(repeats) - x.rank
    return b.op("Tile", [b.reshape(x, (*(1,) * lead, *x.shape)), b.sizes(repeats)])


def _repeat_interleave(b: Builder, x: Tensor, repeats: int, dim: int | None = None, **_: Any) -> Tensor:
    if dim is None:
        x, dim = b.reshape(x, (-1,)), 0
    at = dim % x.rank
    wide = b.expand(b.unsqueeze(x, at + 1), (*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return b.reshape(wide, b.out.shape)


_MODES: Final = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(b: Builder, x: Tensor, pad: Sequence[int], mode: str = "constant", value: Operand | None = None) -> Tensor:
    widths = pad_widths(pad, x.rank)
    given: list[Tensor | None] = [x, b.ints([before for before, _ in widths] + [after for _, after in widths])]
    if mode == "constant":
        given.append(b.number(0 if value is None or isinstance(value, Tensor) else value, x.dtype))
    return b.op("Pad", given, mode=_MODES[mode])


def _diff(b: Builder, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    parts = [one for one in (prepend, x, append) if one is not None]
    at = dim % x.rank
    if len(parts) > 1:
        size = sum(part.size(at) for part in parts)
        x = b.op("Concat", parts, like=Tensor("", x.dtype, (*x.shape[:at], size, *x.shape[at + 1 :])), axis=at)
    for _ in range(n):
        later, earlier = b.slice(x, at, 1, None), b.slice(x, at, 0, x.size(at) - 1)
        x = b.op("Xor" if x.dtype == "bool" else "Sub", [later, earlier], like=later)
    return x


def _filled_with(place: int) -> Callable[..., Tensor]:
    """Return an operator that fills its result with its argument at `place`."""
    return lambda b, *args, **_: _filled(b, args[place])


SHAPING: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": _same for name in ("alias", "clone", "contiguous", "detach", "lift_fresh_copy")},
    **{f"aten.{name}": _known for name in ("flatten.using_ints", "unflatten.int")},
    **{f"aten.squeeze.{overload}": _known for overload in ("default", "dim", "dims")},
    **{f"aten.{name}": _split for name in ("split.Tensor", "split_with_sizes.default", "chunk.default")},
    **{f"aten.{name}": _cast for name in ("_to_copy.default", "to.dtype", "to.dtype_layout", "type_as.default")},
    **{f"aten.{name}.default": _made(0) for name in ("zeros", "new_zeros", "zeros_like", "empty_like")},
    **{f"aten.{name}.default": _made(1) for name in ("ones", "new_ones", "ones_like")},
    "aten.empty.memory_format": _made(0),
    "aten.reshape.default": lambda b, x, shape: b.reshape(x, shape),
    "aten.transpose.int": _transpose,
    "aten.permute.default": lambda b, x, dims: b.permute(x, dims),
    "aten.t.default": lambda b, x: b.permute(x, (1, 0)) if x.rank == 2 else x,
    "aten.unsqueeze.default": lambda b, x, dim: b.unsqueeze(x, dim),
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": _narrow,
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.broadcast_tensors.default": lambda b, tensors: [
        b.expand(x, out.shape) for x, out in zip(tensors, b.outs, strict=True)
    ],
    "aten.unbind.int": lambda b, x, dim=0: [_select(b, x, dim, index) for index in range(x.size(dim))],
    "aten.flip.default": _flip,
    "aten.roll.default": _roll,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.full.default": _filled_with(1),
    "aten.new_full.default": _filled_with(2),
    "aten.full_like.default": _filled_with(1),
    "aten.scalar_tensor.default": lambda b, value, *_, **__: b.cast(value, b.out.dtype),
    "aten.arange.default": lambda b, end, _dtype=None, **__: _arange(b, 0, end),
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.diff.default": _diff,
    "aten.constant_pad_nd.default": lambda b, x, pad, value=0.0: _pad(b, x, pad, "constant", value),
    "aten.pad.default": _pad,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
}
