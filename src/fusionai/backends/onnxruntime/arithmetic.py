"""Elementwise operators in ONNX; every name is in `ir.operators`.

Neighbours: `building` casts and names, `program` joins the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fusionai.backends.onnxruntime.building import Builder, Operand, Tensor

_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})


def _pair(kind: str) -> Callable[..., Tensor]:
    return lambda b, x, y: b.op(kind, [b.cast(x, b.out.dtype), b.cast(y, b.out.dtype)])


def _scaled(b: Builder, x: Operand, factor: float) -> Operand:
    return x if factor == 1 else b.op("Mul", [b.cast(x, b.out.dtype), b.number(factor, b.out.dtype)])


def _add(b: Builder, x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return _pair("Add")(b, x, _scaled(b, y, alpha))


def _sub(b: Builder, x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    return _pair("Sub")(b, x, _scaled(b, y, alpha))


def _div_rounded(b: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    dtype = b.out.dtype
    if rounding_mode is None:
        return _pair("Div")(b, x, y)
    if dtype in _FLOATS:
        quotient = _pair("Div")(b, x, y)
        return b.op("Floor", [quotient]) if rounding_mode == "floor" else _truncated(b, quotient)
    if rounding_mode == "trunc":
        return _pair("Div")(b, x, y)
    wide = Tensor("", "float64", b.out.shape)
    quotient = b.op("Div", [b.cast(x, "float64"), b.cast(y, "float64")], like=wide)
    return b.cast(b.op("Floor", [quotient], like=wide), dtype)


def _truncated(b: Builder, x: Tensor) -> Tensor:
    return b.op("Mul", [b.op("Sign", [x], like=x), b.op("Floor", [b.op("Abs", [x], like=x)], like=x)], like=x)


def _remainder(b: Builder, x: Operand, y: Operand) -> Tensor:
    if b.out.dtype not in _FLOATS:
        return _pair("Mod")(b, x, y)
    whole = b.op("Floor", [_pair("Div")(b, x, y)])
    return b.op("Sub", [b.cast(x, b.out.dtype), b.op("Mul", [whole, b.cast(y, b.out.dtype)])])


def _pow(b: Builder, base: Operand, exponent: Operand) -> Tensor:
    x = b.cast(base, b.out.dtype)
    match exponent:
        case 2:
            return b.op("Mul", [x, x])
        case 3:
            return b.op("Mul", [b.op("Mul", [x, x]), x])
        case 0.5:
            return b.op("Sqrt", [x])
        case -0.5:
            return b.op("Reciprocal", [b.op("Sqrt", [x])])
        case -1:
            return b.op("Reciprocal", [x])
        case _:
            return b.op("Pow", [x, b.cast(exponent, b.out.dtype)])


def _unary(kind: str, **options: Any) -> Callable[..., Tensor]:
    return lambda b, x: b.op(kind, [b.cast(x, b.out.dtype)], **options)


def _rounded(kind: str) -> Callable[..., Tensor]:
    return lambda b, x: b.op(kind, [x]) if x.dtype in _FLOATS else x


def _log1p(b: Builder, x: Tensor) -> Tensor:
    wide = Tensor("", "float64", b.out.shape)
    one = b.op("Add", [b.cast(x, "float64"), b.number(1.0, "float64")], like=wide)
    return b.op("Log", [one], like=wide)


def _expm1(b: Builder, x: Tensor) -> Tensor:
    wide = Tensor("", "float64", b.out.shape)
    power = b.op("Exp", [b.cast(x, "float64")], like=wide)
    return b.op("Sub", [power, b.number(1.0, "float64")], like=wide)


def _softplus(b: Builder, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = _as_tensor(b, _scaled(b, x, beta))
    soft = _scaled(b, b.op("Softplus", [scaled]), 1 / beta)
    truth = Tensor("", "bool", x.shape)
    above = b.op("Greater", [scaled, b.number(float(threshold), x.dtype)], like=truth)
    return b.op("Where", [above, x, _as_tensor(b, soft)])


def _as_tensor(b: Builder, x: Operand) -> Tensor:
    return b.cast(x, b.out.dtype)


def _elu(b: Builder, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    if input_scale == 1:
        return _as_tensor(b, _scaled(b, b.op("Elu", [x], alpha=float(alpha)), scale))
    inner = b.op("Exp", [_as_tensor(b, _scaled(b, x, input_scale))])
    low = _scaled(b, b.op("Sub", [inner, b.number(1.0, x.dtype)]), alpha * scale)
    above = b.op("Greater", [x, b.number(0.0, x.dtype)], like=Tensor("", "bool", x.shape))
    return b.op("Where", [above, _as_tensor(b, _scaled(b, x, scale)), _as_tensor(b, low)])


def _clamp(b: Builder, x: Tensor, low: Operand | None = None, high: Operand | None = None) -> Tensor:
    found = b.cast(x, b.out.dtype)
    if low is not None:
        found = b.op("Max", [found, b.cast(low, b.out.dtype)])
    return found if high is None else b.op("Min", [found, b.cast(high, b.out.dtype)])


def _where(b: Builder, condition: Tensor, x: Operand, y: Operand) -> Tensor:
    return b.op("Where", [condition, b.cast(x, b.out.dtype), b.cast(y, b.out.dtype)])


def _prelu(b: Builder, x: Tensor, weight: Tensor) -> Tensor:
    if x.rank > 1:
        weight = b.reshape(weight, (1, -1, *(1,) * (x.rank - 2)))
    above = b.op("Greater", [x, b.number(0.0, x.dtype)], like=Tensor("", "bool", x.shape))
    return b.op("Where", [above, x, b.op("Mul", [weight, x])])


def _lerp(b: Builder, x: Tensor, y: Tensor, weight: float) -> Tensor:
    difference = b.op("Sub", [y, x])
    return b.op("Add", [x, _as_tensor(b, _scaled(b, difference, weight))])


def _common(x: Operand, y: Operand) -> str:
    """Return the dtype in which two operands are compared."""
    tensors = [one for one in (x, y) if isinstance(one, Tensor)]
    solid = [one.dtype for one in tensors if one.rank] or [one.dtype for one in tensors]
    found = solid[0]
    for dtype in solid[1:]:
        if found != dtype:
            wide = "bfloat16" in (found, dtype)
            found = "float32" if wide else str(np.promote_types(found, dtype))
    fractional = any(isinstance(one, float) for one in (x, y))
    return "float32" if fractional and found not in _FLOATS else "int64" if found == "bool" else found


def _comparison(kind: str, *, negated: bool = False) -> Callable[..., Tensor]:
    def run(b: Builder, x: Operand, y: Operand) -> Tensor:
        dtype = _common(x, y)
        found = b.op(kind, [b.cast(x, dtype), b.cast(y, dtype)])
        return b.op("Not", [found]) if negated else found

    return run


def _logical(kind: str) -> Callable[..., Tensor]:
    return lambda b, x, y: b.op(kind, [b.cast(x, "bool"), b.cast(y, "bool")])


def _bitwise(kind: str) -> Callable[..., Tensor]:
    def run(b: Builder, x: Operand, y: Operand) -> Tensor:
        prefix = "" if b.out.dtype == "bool" else "Bitwise"
        return b.op(f"{prefix}{kind}", [b.cast(x, b.out.dtype), b.cast(y, b.out.dtype)])

    return run


def _bounded(low: float, high: float) -> Callable[..., Tensor]:
    return lambda b, x: _clamp(b, x, low, high)


def _hard(b: Builder, x: Tensor) -> Tensor:
    """Return min(max(x + 3, 0), 6) / 6."""
    six = _clamp(b, b.op("Add", [x, b.number(3.0, x.dtype)]), 0.0, 6.0)
    return b.op("Div", [six, b.number(6.0, x.dtype)])


def _glu(b: Builder, x: Tensor, dim: int = -1) -> Tensor:
    half = x.size(dim) // 2
    kept, gate = b.slice(x, dim, 0, half), b.slice(x, dim, half, None)
    return b.op("Mul", [kept, b.op("Sigmoid", [gate])])


def _threshold(b: Builder, x: Tensor, threshold: float, value: float) -> Tensor:
    above = b.op("Greater", [x, b.cast(threshold, x.dtype)], like=Tensor("", "bool", x.shape))
    return b.op("Where", [above, x, b.cast(value, x.dtype)])


def _third(kind: str) -> Callable[..., Tensor]:
    """Return an operator for x + value * (y `kind` z)."""
    return lambda b, x, y, z, value=1: _add(b, x, _pair(kind)(b, y, z), value)


def _of_base(kind: str, factor: float) -> Callable[..., Tensor]:
    """Return a function of base e with its result scaled by `factor`."""
    return lambda b, x: _as_tensor(b, _scaled(b, b.op(kind, [b.cast(x, b.out.dtype)]), factor))


_UNARY: Final = (
    *("neg", "abs", "exp", "log", "sqrt", "reciprocal", "erf", "relu", "sigmoid", "sin", "cos", "tan", "tanh"),
    *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
)
"""Functions that ONNX has under torch's name, capitalised."""
_WITH_SCALARS: Final[dict[str, Callable[..., Tensor]]] = {
    "add": _add,
    "sub": _sub,
    "mul": _pair("Mul"),
    "div": _pair("Div"),
    "remainder": _remainder,
    "masked_fill": lambda b, x, mask, value: _where(b, mask, value, x),
    "eq": _comparison("Equal"),
    "ne": _comparison("Equal", negated=True),
    "lt": _comparison("Less"),
    "le": _comparison("LessOrEqual"),
    "gt": _comparison("Greater"),
    "ge": _comparison("GreaterOrEqual"),
}
"""Functions whose last operand may be a tensor or a number."""
ARITHMETIC: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": _unary(name.capitalize()) for name in _UNARY},
    **{f"aten.{name}.{last}": run for name, run in _WITH_SCALARS.items() for last in ("Tensor", "Scalar")},
    **dict.fromkeys(("aten.div.Tensor_mode", "aten.div.Scalar_mode"), _div_rounded),
    **dict.fromkeys(("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar"), _pow),
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), _where),
    **{f"aten.{name}": _clamp for name in ("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor")},
    **dict.fromkeys(("aten.clamp_max.default", "aten.clamp_max.Tensor"), lambda b, x, high: _clamp(b, x, None, high)),
    "aten.rsub.Scalar": lambda b, x, other, alpha=1: _sub(b, other, x, alpha),
    "aten.floor_divide.default": lambda b, x, y: _div_rounded(b, x, y, "floor"),
    "aten.square.default": lambda b, x: b.op("Mul", [x, x]),
    "aten.log1p.default": _log1p,
    "aten.expm1.default": _expm1,
    "aten.rsqrt.default": lambda b, x: b.op("Reciprocal", [b.op("Sqrt", [b.cast(x, b.out.dtype)])]),
    "aten.gelu.default": lambda b, x, approximate="none": b.op("Gelu", [x], approximate=approximate),
    "aten.silu.default": lambda b, x: b.op("Mul", [x, b.op("Sigmoid", [x])]),
    "aten.softplus.default": _softplus,
    "aten.mish.default": lambda b, x: b.op("Mul", [x, b.op("Tanh", [_softplus(b, x)])]),
    "aten.hardswish.default": lambda b, x: b.op("Mul", [x, _hard(b, x)]),
    "aten.hardsigmoid.default": _hard,
    "aten.leaky_relu.default": lambda b, x, slope=0.01: b.op("LeakyRelu", [x], alpha=float(slope)),
    "aten.elu.default": _elu,
    "aten.hardtanh.default": lambda b, x, low=-1, high=1: _clamp(b, x, low, high),
    "aten.relu6.default": _bounded(0, 6),
    "aten.maximum.default": _pair("Max"),
    "aten.minimum.default": _pair("Min"),
    "aten.prelu.default": _prelu,
    "aten.lerp.Scalar": _lerp,
    "aten.log_sigmoid.default": lambda b, x: b.op("Neg", [b.op("Softplus", [b.op("Neg", [x])])]),
    "aten.log2.default": _of_base("Log", 1 / math.log(2)),
    "aten.log10.default": _of_base("Log", 1 / math.log(10)),
    "aten.exp2.default": lambda b, x: b.op("Pow", [b.number(2.0, b.out.dtype), b.cast(x, b.out.dtype)]),
    "aten.deg2rad.default": lambda b, x: b.op("Mul", [b.cast(x, b.out.dtype), b.number(math.pi / 180, b.out.dtype)]),
    "aten.rad2deg.default": lambda b, x: b.op("Mul", [b.cast(x, b.out.dtype), b.number(180 / math.pi, b.out.dtype)]),
    "aten.celu.default": lambda b, x, alpha=1.0: b.op("Celu", [x], alpha=float(alpha)),
    "aten.threshold.default": _threshold,
    "aten.glu.default": _glu,
    "aten.addcmul.default": _third("Mul"),
    "aten.addcdiv.default": _third("Div"),
    "aten.lerp.Tensor": lambda b, x, y, weight: b.op("Add", [x, b.op("Mul", [weight, b.op("Sub", [y, x])])]),
    "aten.trunc.default": lambda b, x: _truncated(b, x) if x.dtype in _FLOATS else x,
    "aten.frac.default": lambda b, x: b.op("Sub", [x, _truncated(b, x)]),
    "aten.sgn.default": lambda b, x: b.op("Sign", [x]),
    "aten.logical_and.default": _logical("And"),
    "aten.logical_or.default": _logical("Or"),
    "aten.logical_xor.default": _logical("Xor"),
    "aten.logical_not.default": lambda b, x: b.op("Not", [b.cast(x, "bool")]),
    "aten.bitwise_and.Tensor": _bitwise("And"),
    "aten.bitwise_or.Tensor": _bitwise("Or"),
    "aten.bitwise_xor.Tensor": _bitwise("Xor"),
    "aten.bitwise_not.default": lambda b, x: b.op("Not" if x.dtype == "bool" else "BitwiseNot", [x]),
    "aten.__and__.Tensor": _bitwise("And"),
    "aten.__or__.Tensor": _bitwise("Or"),
    "aten.floor.default": _rounded("Floor"),
    "aten.ceil.default": _rounded("Ceil"),
    "aten.round.default": _rounded("Round"),
    "aten.sign.default": lambda b, x: b.op("Sign", [x]),
    "aten.isnan.default": lambda b, x: b.op("IsNaN", [x]),
    "aten.isinf.default": lambda b, x: b.op("IsInf", [x]),
}
