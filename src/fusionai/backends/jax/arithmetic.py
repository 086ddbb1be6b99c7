"""Operators that compute element by element, or sum, select and sort along dimensions, as torch defines them.

Where a function has a kink, its gradient is torch's. Among equal elements the first is selected, and it alone gets the
gradient where torch gives it to one element. Neighbours: `dtypes` chooses dtypes, `tracing` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar, floating, is_floating, promoted, result_type

Operand = Array | Scalar


def _with_alpha(compute: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Return an operator that multiplies its second operand by `alpha` first."""

    def run(a: Operand, b: Operand, alpha: Scalar = 1) -> Array:
        left, right = promoted(a, b)
        return compute(left, right if alpha == 1 else right * jnp.asarray(alpha, right.dtype))

    return run


_add, _sub = _with_alpha(jnp.add), _with_alpha(jnp.subtract)


def _div_rounded(a: Operand, b: Operand, rounding_mode: Literal["floor", "trunc"] | None = None) -> Array:
    left, right = promoted(a, b)
    match rounding_mode:
        case None:
            return floating(left) / floating(right)
        case "floor":
            return jnp.floor_divide(left, right)
        case _:
            if is_floating(left.dtype):
                return jnp.trunc(left / right)
            return lax.div(*jnp.broadcast_arrays(left, right))  # towards zero, for integers


def _pow(base: Operand, exponent: Operand) -> Array:
    dtype = result_type(base, exponent)
    if isinstance(exponent, int | float) and float(exponent).is_integer() and abs(exponent) <= 64:
        x = jnp.asarray(base, dtype)
        if is_floating(dtype) or exponent >= 0:
            return lax.integer_pow(x, int(exponent))
    if isinstance(exponent, float) and exponent == 0.5:
        return jnp.sqrt(jnp.asarray(base, dtype))
    return jnp.power(jnp.asarray(base, dtype), jnp.asarray(exponent, dtype))


def _clamp(x: Array, low: Operand | None = None, high: Operand | None = None) -> Array:
    """Clamp x. Gradients also pass where x equals a limit, as in torch."""
    dtype = result_type(*(one for one in (x, low, high) if one is not None))
    x = x.astype(dtype)
    if low is not None:
        x = jnp.where(x < jnp.asarray(low, dtype), jnp.asarray(low, dtype), x)
    if high is not None:
        x = jnp.where(x > jnp.asarray(high, dtype), jnp.asarray(high, dtype), x)
    return x


def _softplus(x: Array, beta: Scalar = 1, threshold: Scalar = 20) -> Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


def _elu(x: Array, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Array:
    negative = jnp.where(x > 0, 0.0, x).astype(x.dtype)
    return jnp.where(x > 0, x * scale, jnp.expm1(negative * input_scale) * (alpha * scale)).astype(x.dtype)


def _where(condition: Array, a: Operand, b: Operand) -> Array:
    left, right = promoted(a, b)
    return jnp.where(condition, left, right)


def _prelu(x: Array, weight: Array) -> Array:
    if x.ndim > 1:
        weight = weight.reshape((1, -1, *(1,) * (x.ndim - 2)))
    return jnp.where(x > 0, x, weight * x)


def _glu(x: Array, dim: int = -1) -> Array:
    kept, gate = jnp.split(x, 2, dim)
    return kept * jax.nn.sigmoid(gate)


def _logit(x: Array, eps: float | None = None) -> Array:
    if eps is not None:
        x = jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


def _fmod(a: Operand, b: Operand) -> Array:
    left, right = promoted(a, b)
    whole = lax.stop_gradient(lax.div(*jnp.broadcast_arrays(left, right)))
    return left - (jnp.trunc(whole) if is_floating(whole.dtype) else whole) * right


def _cross(a: Array, b: Array, dim: int = -1) -> Array:
    left, right = jnp.broadcast_arrays(a, b)
    return jnp.cross(left, right, axis=dim)


def _unary(compute: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Wrap a function whose results are floats: integers are converted first."""
    return lambda x: compute(floating(x))


def _pairwise(compute: Callable[[Array, Array], Array]) -> Callable[[Operand, Operand], Array]:
    return lambda a, b: compute(*promoted(a, b))


def _rounded(compute: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: compute(x) if is_floating(x.dtype) else x


_SAME: Final = (
    *("square", "abs", "sign", "signbit", "isnan", "isinf"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_not"),
)
"""Functions that JAX has under torch's name."""
_UNARY: Final = (
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "reciprocal"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "sinc", "deg2rad", "rad2deg"),
)
"""The same, of functions whose results are floats."""
_ROUNDED: Final = ("floor", "ceil", "round", "trunc")
_PAIRWISE: Final = (
    *("maximum.default", "minimum.default", "fmax.default", "fmin.default", "logaddexp.default", "heaviside.default"),
    *("floor_divide.default", "remainder.Tensor", "remainder.Scalar"),
    *("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"),
)
"""Overloads of functions of two operands that JAX has under torch's name."""
_WITH_SCALARS: Final[dict[str, Callable[..., Any]]] = {
    "add": _add,
    "sub": _sub,
    "mul": _pairwise(jnp.multiply),
    "div": _pairwise(lambda a, b: floating(a) / floating(b)),
    "fmod": _fmod,
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "eq": _pairwise(jnp.equal),
    "ne": _pairwise(jnp.not_equal),
    "lt": _pairwise(jnp.less),
    "le": _pairwise(jnp.less_equal),
    "gt": _pairwise(jnp.greater),
    "ge": _pairwise(jnp.greater_equal),
}
"""Functions whose last operand may be a tensor or a number."""
ELEMENTWISE: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": getattr(jnp, name) for name in _SAME},
    **{f"aten.{name}.default": _unary(getattr(jnp, name)) for name in _UNARY},
    **{f"aten.{name}.default": _rounded(getattr(jnp, name)) for name in _ROUNDED},
    **{f"aten.{name}": _pairwise(getattr(jnp, name.partition(".")[0])) for name in _PAIRWISE},
    **{f"aten.{name}.{last}": run for name, run in _WITH_SCALARS.items() for last in ("Tensor", "Scalar")},
    **dict.fromkeys(("aten.div.Tensor_mode", "aten.div.Scalar_mode"), _div_rounded),
    **dict.fromkeys(("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar"), _pow),
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), _where),
    **{f"aten.{name}": _clamp for name in ("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor")},
    **dict.fromkeys(("aten.clamp_max.default", "aten.clamp_max.Tensor"), lambda x, high: _clamp(x, None, high)),
    "aten.atan2.default": _pairwise(jnp.arctan2),
    "aten.rsub.Scalar": lambda x, other, alpha=1: _sub(other, x, alpha),
    "aten.neg.default": jnp.negative,
    "aten.gelu.default": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "aten.silu.default": jax.nn.silu,
    "aten.softplus.default": _softplus,
    "aten.mish.default": lambda x: x * jnp.tanh(_softplus(x)),
    "aten.hardswish.default": lambda x: x * _clamp(x + 3, 0, 6) / 6,
    "aten.hardsigmoid.default": lambda x: _clamp(x + 3, 0, 6) / 6,
    "aten.leaky_relu.default": lambda x, slope=0.01: jnp.where(x > 0, x, x * slope).astype(x.dtype),
    "aten.elu.default": _elu,
    "aten.erf.default": _unary(jax.scipy.special.erf),
    "aten.hardtanh.default": lambda x, low=-1, high=1: _clamp(x, low, high),
    "aten.relu6.default": lambda x: _clamp(x, 0, 6),
    "aten.prelu.default": _prelu,
    "aten.lerp.Scalar": lambda a, b, weight: a + weight * (b - a) if abs(weight) < 0.5 else b - (b - a) * (1 - weight),
    "aten.lerp.Tensor": lambda a, b, weight: jnp.where(
        jnp.abs(weight) < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight)
    ),
    "aten.erfc.default": _unary(jax.scipy.special.erfc),
    "aten.erfinv.default": _unary(jax.scipy.special.erfinv),
    "aten.asin.default": _unary(jnp.arcsin),
    "aten.acos.default": _unary(jnp.arccos),
    "aten.atan.default": _unary(jnp.arctan),
    "aten.asinh.default": _unary(jnp.arcsinh),
    "aten.acosh.default": _unary(jnp.arccosh),
    "aten.atanh.default": _unary(jnp.arctanh),
    "aten.lgamma.default": _unary(jax.scipy.special.gammaln),
    "aten.logit.default": _logit,
    "aten.nan_to_num.default": lambda x, nan=None, posinf=None, neginf=None: jnp.nan_to_num(
        x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf
    ),
    "aten.celu.default": lambda x, alpha=1: _elu(x, alpha, 1, 1 / alpha),
    "aten.threshold.default": lambda x, threshold, value: jnp.where(x > threshold, x, jnp.asarray(value, x.dtype)),
    "aten.glu.default": _glu,
    "aten.addcmul.default": lambda x, a, b, value=1: x + value * (a * b),
    "aten.addcdiv.default": lambda x, a, b, value=1: x + value * (a / b),
    "aten.hypot.default": _pairwise(lambda a, b: jnp.sqrt(a * a + b * b)),
    "aten.xlogy.Tensor": _pairwise(lambda a, b: jax.scipy.special.xlogy(floating(a), floating(b))),
    "aten.copysign.Tensor": _pairwise(lambda a, b: jnp.where(jnp.signbit(b) == jnp.signbit(a), a, -a)),
    "aten.linalg_cross.default": _cross,
    "aten.frac.default": lambda x: x - lax.stop_gradient(jnp.trunc(x)),
    "aten.sgn.default": jnp.sign,
    "aten.relu.default": jax.nn.relu,
    "aten.sigmoid.default": _unary(jax.nn.sigmoid),
    "aten.rsqrt.default": _unary(lax.rsqrt),
    "aten.log_sigmoid.default": jax.nn.log_sigmoid,
    "aten.__and__.Tensor": _pairwise(jnp.bitwise_and),
    "aten.__or__.Tensor": _pairwise(jnp.bitwise_or),
}


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
    "aten.logsumexp.default": lambda x, dims, keepdim=False: jax.nn.logsumexp(
        floating(x), axis=_axes(dims), keepdims=keepdim
    ),
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
    "aten.nansum.default": lambda x, dim=None, keepdim=False, dtype=None: _sum(
        jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x), dim, keepdim, dtype
    ),
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
