"""Operators that sum, select, sort and normalise along dimensions, in ONNX.

Neighbours: `building` casts and names, `program` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from fusionai.backends.onnxruntime.building import Builder, DType, Tensor

Dims = int | Sequence[int] | None
Maybe = Tensor | None


def _axes(x: Tensor, dims: Dims) -> list[int]:
    """Return the axes as a list; all axes if none is named."""
    named = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % x.rank for dim in named] if named and x.rank else list(range(x.rank))


def _reduced(b: Builder, kind: str, x: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """Reduce x along `axes`, in x's dtype."""
    shape = tuple(1 if at in axes else size for at, size in enumerate(x.shape))
    kept = shape if keepdim else tuple(size for at, size in enumerate(x.shape) if at not in axes)
    if not x.rank:
        return x
    return b.op(kind, [x, b.ints(axes)], like=Tensor("", x.dtype, kept), keepdims=int(keepdim))


def _reduction(kind: str) -> Callable[..., Tensor]:
    def run(b: Builder, x: Tensor, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:  # noqa: ARG001
        if isinstance(dims, DType):
            dims = None
        return _reduced(b, kind, b.cast(x, b.out.dtype), _axes(x, dims), keepdim)

    return run


def _truth(kind: str) -> Callable[..., Tensor]:
    def run(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return b.cast(_reduced(b, kind, b.cast(b.cast(x, "bool"), "int32"), _axes(x, dim), keepdim), "bool")

    return run


def _spread(b: Builder, x: Tensor, axes: Sequence[int], lost: float, keepdim: bool) -> Tensor:
    """Return the sum of squared distances to the mean, divided by the count minus `lost`."""
    mean = _reduced(b, "ReduceMean", x, axes, True)
    centred = b.op("Sub", [x, mean], like=x)
    total = _reduced(b, "ReduceSumSquare", centred, axes, keepdim)
    count = prod(x.size(at) for at in axes) - lost
    return b.op("Div", [total, b.number(float(max(0.0, count)), x.dtype)], like=total)


def _variance(b: Builder, x: Tensor, dims: Dims = None, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    return _spread(b, x, _axes(x, dims), 1 if correction is None else correction, keepdim)


def _deviation(b: Builder, *args: Any, **options: Any) -> Tensor:
    found = _variance(b, *args, **options)
    return b.op("Sqrt", [found], like=found)


def _norm(b: Builder, x: Tensor, order: float = 2, dim: Dims = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = b.cast(x, b.out.dtype)
    match order:
        case 2:
            return _reduced(b, "ReduceL2", x, _axes(x, dim), keepdim)
        case 1:
            return _reduced(b, "ReduceL1", x, _axes(x, dim), keepdim)
        case _ if order in (float("inf"), float("-inf")):
            kind = "ReduceMax" if order > 0 else "ReduceMin"
            return _reduced(b, kind, b.op("Abs", [x], like=x), _axes(x, dim), keepdim)
        case 0:
            zero = b.op("Equal", [x, b.number(0.0, x.dtype)], like=Tensor("", "bool", x.shape))
            other = b.cast(b.op("Not", [zero], like=zero), x.dtype)
            return _reduced(b, "ReduceSum", other, _axes(x, dim), keepdim)
        case _:
            powers = b.op("Pow", [b.op("Abs", [x], like=x), b.number(float(order), x.dtype)], like=x)
            total = _reduced(b, "ReduceSum", powers, _axes(x, dim), keepdim)
            return b.op("Pow", [total, b.number(1 / order, x.dtype)], like=total)


def _cumsum(b: Builder, x: Tensor, dim: int, **_: Any) -> Tensor:
    x = b.cast(x, b.out.dtype)
    return b.op("CumSum", [x, b.number(dim % x.rank, "int64")]) if x.rank else x


def _extreme(values: str, places: str) -> Callable[..., list[Tensor]]:
    def run(b: Builder, x: Tensor, dim: int, keepdim: bool = False) -> list[Tensor]:
        if not x.rank:
            return [x, b.number(0, "int64")]
        found = _reduced(b, values, x, [dim % x.rank], keepdim)
        like = Tensor("", "int64", found.shape)
        return [found, b.op(places, [x], like=like, axis=dim % x.rank, keepdims=int(keepdim))]

    return run


def _place(kind: str) -> Callable[..., Tensor]:
    def run(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            flat = b.reshape(x, (-1,))
            return b.reshape(b.op(kind, [flat], like=Tensor("", "int64", ()), axis=0, keepdims=0), b.out.shape)
        return b.op(kind, [x], axis=dim % max(x.rank, 1), keepdims=int(keepdim))

    return run


def _topk(
    b: Builder,
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002 - torch's name
) -> list[Tensor]:
    del sorted  # a sorted result is valid for either value
    return b.op("TopK", [x, b.ints([k])], count=2, axis=dim % x.rank, largest=int(largest), sorted=1)


def _sort(b: Builder, x: Tensor, dim: int = -1, descending: bool = False) -> list[Tensor]:
    return _topk(b, x, x.size(dim), dim, descending) if x.rank else [x, b.number(0, "int64")]


def _softmax(kind: str) -> Callable[..., Tensor]:
    def run(b: Builder, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
        x = b.cast(x, b.out.dtype)
        if x.rank:
            return b.op(kind, [x], axis=dim % x.rank)
        return b.reshape(b.op(kind, [b.reshape(x, (1,))], like=Tensor("", x.dtype, (1,)), axis=0), ())

    return run


# ------------------------------------------------------------------------------------------------------- normalising


def _centred(b: Builder, x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normalised, mean, inverse deviation); the last two keep all dimensions."""
    mean = _reduced(b, "ReduceMean", x, axes, True)
    centred = b.op("Sub", [x, mean], like=x)
    spread = _reduced(b, "ReduceMean", b.op("Mul", [centred, centred], like=x), axes, True)
    inverse = _inverse_root(b, spread, eps)
    return b.op("Mul", [centred, inverse], like=x), mean, inverse


def _inverse_root(b: Builder, x: Tensor, eps: float) -> Tensor:
    return b.op("Reciprocal", [b.op("Sqrt", [b.op("Add", [x, b.number(eps, x.dtype)], like=x)], like=x)], like=x)


def _times(b: Builder, x: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    x = x if weight is None else b.op("Mul", [x, weight], like=x)
    return x if bias is None else b.op("Add", [x, bias], like=x)


def _native_layer_norm(
    b: Builder, x: Tensor, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> list[Tensor]:
    axes = list(range(x.rank - len(shape), x.rank))
    normal, mean, inverse = _centred(b, x, axes, eps)
    return [_times(b, normal, weight, bias), mean, inverse]


def _layer_norm(
    b: Builder, x: Tensor, shape: Sequence[int], weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    if weight is None or x.dtype != "float32":
        return _native_layer_norm(b, x, shape, weight, bias, eps)[0]
    return b.op("LayerNormalization", [x, weight, bias], axis=-len(shape), epsilon=float(eps))


def _rms_norm(b: Builder, x: Tensor, shape: Sequence[int], weight: Maybe = None, eps: float | None = None) -> Tensor:
    axes = list(range(x.rank - len(shape), x.rank))
    spread = _reduced(b, "ReduceMean", b.op("Mul", [x, x], like=x), axes, True)
    least = 1.1920928955078125e-07 if eps is None else eps
    return _times(b, b.op("Mul", [x, _inverse_root(b, spread, least)], like=x), weight, None)


def _by_channel(b: Builder, values: Maybe, rank: int) -> Maybe:
    return None if values is None else b.reshape(values, (1, -1, *(1,) * (rank - 2)))


def _native_group_norm(
    b: Builder, x: Tensor, weight: Maybe, bias: Maybe, batch: int, channels: int, area: int, groups: int, eps: float
) -> list[Tensor]:
    grouped = b.reshape(x, (batch, groups, channels // groups * area))
    normal, mean, inverse = _centred(b, grouped, [2], eps)
    y = _times(b, b.reshape(normal, x.shape), _by_channel(b, weight, x.rank), _by_channel(b, bias, x.rank))
    return [y, b.reshape(mean, (batch, groups)), b.reshape(inverse, (batch, groups))]


def _group_norm(
    b: Builder, x: Tensor, groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    batch, channels = x.size(0), x.size(1)
    area = prod(x.size(at) for at in range(2, x.rank))
    return _native_group_norm(b, x, weight, bias, batch, channels, area, groups, eps)[0]


def _batch_norm(b: Builder, x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, variance: Maybe, *rest: Any) -> Tensor:
    """Normalise with the learned statistics, as outside training. `rest`: whether it trains, momentum, eps."""
    eps: float = rest[2]
    weight, bias = _by_channel(b, weight, x.rank), _by_channel(b, bias, x.rank)
    if mean is None or variance is None:
        return _times(b, _centred(b, x, [0, *range(2, x.rank)], eps)[0], weight, bias)
    middle, spread = _by_channel(b, mean, x.rank), _by_channel(b, variance, x.rank)
    assert middle is not None
    assert spread is not None
    centred = b.op("Sub", [x, middle], like=x)
    return _times(b, b.op("Mul", [centred, _inverse_root(b, spread, eps)], like=x), weight, bias)


def _batch_norm_functional(b: Builder, x: Tensor, *args: Any) -> list[Tensor]:
    mean, variance = args[2], args[3]
    return [_batch_norm(b, x, *args), mean, variance, mean, variance]


def _batch_norm_no_training(
    b: Builder, x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> list[Tensor]:
    y = _batch_norm(b, x, weight, bias, mean, variance, False, momentum, eps)
    return [y, mean, variance]


def _weight_norm(b: Builder, direction: Tensor, length: Tensor, dim: int = 0) -> list[Tensor]:
    norm = _reduced(b, "ReduceL2", direction, [axis for axis in range(direction.rank) if axis != dim], True)
    factor = b.op("Div", [length, norm], like=norm)
    return [b.op("Mul", [direction, factor], like=direction), norm]


REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "aten.sum.default": _reduction("ReduceSum"),
    "aten.sum.dim_IntList": _reduction("ReduceSum"),
    "aten.mean.default": _reduction("ReduceMean"),
    "aten.mean.dim": _reduction("ReduceMean"),
    "aten.amax.default": _reduction("ReduceMax"),
    "aten.amin.default": _reduction("ReduceMin"),
    "aten.max.default": _reduction("ReduceMax"),
    "aten.min.default": _reduction("ReduceMin"),
    "aten.logsumexp.default": _reduction("ReduceLogSumExp"),
    "aten.cumsum.default": _cumsum,
    "aten.var.correction": _variance,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten.std.correction": _deviation,
    "aten.linalg_vector_norm.default": _norm,
    "aten.max.dim": _extreme("ReduceMax", "ArgMax"),
    "aten.min.dim": _extreme("ReduceMin", "ArgMin"),
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.argmax.default": _place("ArgMax"),
    "aten.argmin.default": _place("ArgMin"),
    "aten.any.default": _truth("ReduceMax"),
    "aten.any.dim": _truth("ReduceMax"),
    "aten.all.default": _truth("ReduceMin"),
    "aten.all.dim": _truth("ReduceMin"),
    "aten.softmax.int": _softmax("Softmax"),
    "aten._softmax.default": _softmax("Softmax"),
    "aten.log_softmax.int": _softmax("LogSoftmax"),
    "aten._log_softmax.default": _softmax("LogSoftmax"),
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_group_norm.default": _native_group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_no_training,
}
