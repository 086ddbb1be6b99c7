"""For every operator of the allow-list calls that use it as models do: what conformance suites run on each backend.

A case is an operator with arguments: arrays are operands, everything else is part of the graph. Gradients are taken of
all float operands but those that are `Still`. Decides sizes and values; compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DType:
    """An argument that is a dtype."""

    name: str


@dataclass(frozen=True)
class Still:
    """A float operand that has no gradient: statistics, weights of classes."""

    values: Array


@dataclass(frozen=True)
class Case:
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exact: bool = False
    """Whether results must be equal, not close: what only moves or compares."""

    @property
    def name(self) -> str:
        shapes = [
            "x".join(map(str, arg.shape)) or "point" if isinstance(arg, np.ndarray) else str(arg)[:12]
            for arg in self.args
        ]
        return f"{self.op}({','.join(shapes)}{',' + ','.join(self.kwargs) if self.kwargs else ''})"


class Draw:
    """Arrays from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def f(self, *shape: int) -> Array:
        return self._rng.standard_normal(shape).astype(np.float32)

    def apart(self, *shape: int) -> Array:
        """All different by more than rounding: an order that every backend finds."""
        count = int(np.prod(shape))
        return (self._rng.permutation(count).astype(np.float32).reshape(shape) - count / 2) / 7

    def positive(self, *shape: int) -> Array:
        return self._rng.uniform(0.2, 3.0, shape).astype(np.float32)

    def off(self, *shape: int) -> Array:
        """No number near 0, +-1, +-3: functions with a kink there."""
        x = self._rng.uniform(0.1, 0.9, shape) + self._rng.integers(-5, 5, shape)
        return x.astype(np.float32)

    def i(self, high: int, *shape: int, low: int = 0) -> Array:
        return self._rng.integers(low, high, shape)

    def b(self, *shape: int) -> Array:
        return self._rng.integers(0, 2, shape).astype(bool)


def cases(seed: int = 0) -> Iterator[Case]:
    """Every operator that a graph may hold, but sizes, attention and dropout."""
    d = Draw(seed)
    yield from _shaping(d)
    yield from _made(d)
    yield from _elementwise(d)
    yield from _reductions(d)
    yield from _products(d)
    yield from _norms(d)
    yield from _losses(d)
    yield from _lookups(d)
    yield from _scans(d)
    yield from _experts(d)


def _of(op: str, *args: Any, exact: bool = False, **kwargs: Any) -> Case:
    return Case(f"aten.{op}", args, kwargs, exact)


def _experts(d: Draw) -> Iterator[Case]:
    for rows in (1, 9):
        chosen = d.i(2, rows) * 2  # the second of three has no row
        yield Case("fusion.expert_linear", (d.f(rows, 4), d.f(3, 5, 4), chosen))
        yield Case("fusion.expert_linear", (d.f(rows, 4), d.f(3, 4, 5), chosen), {"transposed": True})


def _scans(d: Draw) -> Iterator[Case]:
    for shape in ((2, 7, 3), (1, 1, 2, 3), (2, 5)):
        yield Case("fusion.linear_scan", (d.positive(*shape) / 3, d.f(*shape)))
    for positions in (1, 5, 64, 70):
        shape = (2, positions, 3)
        keys = d.f(*shape, 4)
        # A key longer than one would make a state grow that is corrected by it.
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        given = (d.f(*shape, 4), keys, d.f(*shape, 2))
        decay = -d.positive(*shape)
        yield Case("fusion.linear_attention", given, {"decay": decay})
        yield Case("fusion.linear_attention", given, {"decay": decay, "beta": d.positive(*shape) / 3})
        by_channel = -d.positive(*shape, 4)
        yield Case("fusion.linear_attention", given, {"decay": by_channel})
        yield Case("fusion.linear_attention", given, {"decay": by_channel, "beta": d.positive(*shape) / 3})


def _shaping(d: Draw) -> Iterator[Case]:
    x = d.f(2, 3, 4)
    moved: Sequence[tuple[Any, ...]] = (
        ("reshape.default", x, [6, -1]),
        ("flatten.using_ints", x, 1),
        ("unflatten.int", x, 2, [2, -1]),
        ("transpose.int", x, 0, -1),
        ("permute.default", x, [2, 0, 1]),
        ("t.default", d.f(3, 4)),
        ("alias.default", x),
        ("unsqueeze.default", x, -1),
        ("squeeze.default", d.f(2, 1, 3, 1)),
        ("squeeze.dim", d.f(2, 1, 3), 1),
        ("squeeze.dim", d.f(2, 2, 3), 1),
        ("squeeze.dims", d.f(2, 1, 3, 1), [1, 3]),
        ("slice.Tensor", x, 1, 1, 3),
        ("slice.Tensor", x, 2, -3, 9223372036854775807, 2),
        ("select.int", x, 1, -1),
        ("narrow.default", x, 2, 1, 2),
        ("diagonal.default", x, 1, 1, 2),
        ("expand.default", d.f(2, 1, 4), [-1, 3, 4]),
        ("expand.default", d.f(4), [2, 3, 4]),
        ("expand_as.default", d.f(3, 1), d.f(2, 3, 4)),
        ("broadcast_tensors.default", [d.f(3, 1), d.f(2, 1, 4)]),
        ("detach.default", x),
        ("split.Tensor", d.f(5, 3), 2),
        ("split_with_sizes.default", d.f(2, 6), [1, 2, 3], 1),
        ("chunk.default", d.f(7, 2), 3),
        ("unbind.int", x, 1),
        ("_to_copy.default", x),
        ("to.dtype", x, DType("float64")),
        ("to.dtype", d.off(3, 4), DType("int64")),
        ("to.dtype_layout", x),
        ("clone.default", x),
        ("contiguous.default", x),
        ("type_as.default", d.i(5, 3), d.f(2)),
        ("flip.default", x, [0, 2]),
        ("roll.default", x, [1, -2], [0, 2]),
        ("roll.default", x, [5]),
        ("lift_fresh_copy.default", x),
        ("select_scatter.default", x, d.f(2, 4), 1, -2),
        ("slice_scatter.default", x, d.f(2, 3, 2), 2, 1, 4, 2),
        ("constant_pad_nd.default", x, [1, 2, -1, 1], 0.5),
        ("pad.default", x, [1, 2], "reflect"),
        ("pad.default", x, [2, 1], "replicate"),
        ("pad.default", x, [2, 1], "circular"),
        ("pad.default", x, [1, 0, 0, 2]),
        ("cat.default", [d.f(2, 3), d.f(2, 1)], 1),
        ("cat.default", [d.f(0), d.f(2, 3)]),
        ("stack.default", [d.f(2, 3), d.f(2, 3)], -1),
        ("repeat.default", d.f(2, 3), [2, 1, 2]),
        ("repeat_interleave.self_int", d.f(2, 3), 3, 1),
        ("unfold.default", d.f(2, 7, 3), 1, 3, 2),
        ("im2col.default", d.f(2, 3, 6, 5), [3, 2], [1, 2], [1, 0], [2, 1]),
        ("index_fill.int_Scalar", x, -1, np.array([0, -2]), 0.5),
        ("index_copy.default", x, 1, np.array([2, 0]), d.f(2, 2, 4)),
        ("scatter.src", d.f(3, 5), 1, np.array([[4, 0], [1, 2]]), d.f(2, 2)),
        ("index_put.default", x, [None, np.array([0, 2])], d.f(2, 4)),
        ("index_put.default", x, [d.b(2, 3, 4)], np.full((), 0.5, np.float32)),
        ("tril.default", d.f(2, 4, 5), 1),
        ("triu.default", d.f(4, 3), -1),
    )
    for name, *args in moved:
        yield _of(name, *args, exact=True)
    yield _of("_to_copy.default", x, exact=True, dtype=DType("bfloat16"))
    yield _of("to.dtype_layout", d.b(3, 2), exact=True, dtype=DType("float32"))
    yield _of("diff.default", d.f(3, 5), 2, -1)
    yield _of("col2im.default", d.f(2, 12, 12), [5, 4], [2, 2], [1, 1], [0, 0], [1, 1])
    yield _of("col2im.default", d.f(2, 6, 9), [5, 5], [3, 2], [1, 2], [1, 0], [2, 1])


def _made(d: Draw) -> Iterator[Case]:
    x = d.f(2, 3)
    for name, *args in (
        ("full.default", [2, 3], 1.5),
        ("full.default", [2], 3),
        ("full.default", [2], True),
        ("zeros.default", [2, 3]),
        ("ones.default", [4]),
        ("new_zeros.default", x, [4]),
        ("new_ones.default", x, [2, 2]),
        ("new_full.default", x, [3], 2.5),
        ("full_like.default", x, 7.0),
        ("zeros_like.default", d.i(4, 3)),
        ("ones_like.default", x),
        ("empty.memory_format", [0, 2]),
        ("empty_like.default", d.f(0, 3)),
        ("scalar_tensor.default", 2.5),
        ("arange.default", 5),
        ("arange.default", 2.5),
        ("arange.start", 2, 7),
        ("arange.start_step", 1, 8, 3),
    ):
        yield _of(str(name), *args, exact=True)
    yield _of("linspace.default", -1.0, 2.0, 7)
    yield _of("zeros.default", [3], exact=True, dtype=DType("int64"))
    yield _of("arange.default", 4, exact=True, dtype=DType("float32"))


def _elementwise(d: Draw) -> Iterator[Case]:
    x, y, row, point = d.f(3, 4), d.f(3, 4), d.f(4), np.full((), 0.7, np.float32)
    off, positive, whole, truth = d.off(3, 4), d.positive(3, 4), d.i(6, 3, 4, low=-5), d.b(3, 4)
    for name in ["add", "sub", "mul"]:
        yield _of(f"{name}.Tensor", x, row)
        yield _of(f"{name}.Tensor", whole, point)
        yield _of(f"{name}.Scalar", x, 2.5)
        yield _of(f"{name}.Scalar", whole, 2)
        yield _of(f"{name}.Scalar", whole, 0.5)
    yield _of("add.Tensor", x, y, alpha=0.5)
    yield _of("sub.Tensor", x, y, alpha=2)
    yield _of("rsub.Scalar", x, 1.5)
    yield _of("rsub.Scalar", whole, 2)
    yield _of("div.Tensor", x, positive)
    yield _of("div.Tensor", whole, d.i(4, 3, 4, low=1))
    yield _of("div.Scalar", x, 3)
    for mode in ("floor", "trunc"):
        yield _of("div.Tensor_mode", off, positive, rounding_mode=mode)
        yield _of("div.Tensor_mode", whole, d.i(4, 3, 4, low=1), exact=True, rounding_mode=mode)
        yield _of("div.Scalar_mode", whole, 3, exact=True, rounding_mode=mode)
    for exponent in (2, 3.0, -1, 0.5):
        yield _of("pow.Tensor_Scalar", positive, exponent)
    yield _of("pow.Tensor_Scalar", x, 2)
    yield _of("pow.Tensor_Scalar", whole, 2, exact=True)
    yield _of("pow.Tensor_Tensor", positive, x)
    yield _of("pow.Scalar", 2.0, x)
    for name in (
        *("neg", "square", "abs", "sin", "cos", "gelu", "silu", "mish", "erf", "tanh", "sigmoid", "exp", "expm1"),
        *("log_sigmoid", "softplus", "relu", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "relu6"),
    ):
        yield _of(f"{name}.default", off if name in _KINKED else x)
    for name in ("erfc", "tan", "atan", "sinh", "cosh", "asinh", "sinc", "exp2", "deg2rad", "rad2deg"):
        yield _of(f"{name}.default", x)
    inside = d.positive(3, 4) / 4
    for name in ("asin", "acos", "atanh", "erfinv", "logit"):
        yield _of(f"{name}.default", inside)
    yield _of("logit.default", d.off(3, 4), 0.2)
    for name in ("log2", "log10", "lgamma"):
        yield _of(f"{name}.default", positive)
    yield _of("acosh.default", positive + 1)
    yield _of("nan_to_num.default", np.array([1.5, np.nan, np.inf, -np.inf], np.float32), 0.5, 3.0, -7.0)
    yield _of("celu.default", off, 0.7)
    yield _of("threshold.default", off, 0.05, -0.5)
    yield _of("glu.default", d.f(3, 4, 2), 1)
    yield _of("clamp_min.Tensor", off, d.off(4) + 0.05)
    yield _of("clamp_max.Tensor", off, d.off(4) + 0.05)
    yield _of("addcmul.default", x, y, row, value=0.5)
    yield _of("addcdiv.default", x, y, positive, value=-2)
    yield _of("lerp.Tensor", x, y, inside)
    for name in ("fmax", "fmin", "logaddexp", "hypot", "atan2"):
        yield _of(f"{name}.default", x, y)
    yield _of("xlogy.Tensor", positive, d.positive(4))
    yield _of("copysign.Tensor", off, Still(d.off(3, 4)))
    yield _of("fmod.Scalar", off, 0.7)
    yield _of("fmod.Tensor", off, d.positive(3, 4) + 0.01)
    yield _of("linalg_cross.default", d.f(2, 3), d.f(2, 3))
    yield _of("linalg_cross.default", d.f(3, 2), d.f(3, 2), dim=0)
    for name in ("trunc", "sgn", "signbit"):
        yield _of(f"{name}.default", off, exact=True)
    yield _of("frac.default", off)
    yield _of("heaviside.default", np.array([-1.0, 0.0, 2.0], np.float32), Still(np.full((), 0.5, np.float32)))
    yield _of("gelu.default", x, approximate="tanh")
    yield _of("softplus.default", d.f(3, 4) * 10, 2.0, 5.0)
    yield _of("elu.default", off, 0.7)
    yield _of("leaky_relu.default", off, 0.2)
    for name in ["log", "log1p", "sqrt", "rsqrt", "reciprocal"]:
        yield _of(f"{name}.default", positive)
    yield _of("sqrt.default", d.i(9, 3))
    yield _of("clamp.default", off, -1.0, 2.0)
    yield _of("clamp.default", off, None, 1.0)
    yield _of("clamp.Tensor", off, d.off(4), None)
    yield _of("clamp_min.default", off, 0.0)
    yield _of("clamp_max.default", off, 1.0)
    yield _of("maximum.default", x, y)
    yield _of("minimum.default", x, row)
    yield _of("where.self", truth, x, row)
    yield _of("where.ScalarOther", truth, x, 0.5)
    yield _of("where.ScalarSelf", truth, -1.0, x)
    yield _of("masked_fill.Scalar", x, truth, -1e9)
    yield _of("masked_fill.Tensor", x, truth, point)
    yield _of("prelu.default", d.off(2, 3, 4), d.f(3))
    yield _of("lerp.Scalar", x, y, 0.3)
    yield _of("lerp.Scalar", x, y, 0.8)
    for name in ["eq", "ne", "lt", "le", "gt", "ge"]:
        yield _of(f"{name}.Tensor", whole, d.i(6, 4, low=-5), exact=True)
        yield _of(f"{name}.Scalar", x, 0.1, exact=True)
    for name in ["and", "or", "xor"]:
        yield _of(f"logical_{name}.default", truth, d.b(4), exact=True)
        yield _of(f"bitwise_{name}.Tensor", whole, d.i(6, 4), exact=True)
    yield _of("logical_not.default", truth, exact=True)
    yield _of("bitwise_not.default", whole, exact=True)
    yield _of("__and__.Tensor", truth, d.b(4), exact=True)
    yield _of("__or__.Tensor", truth, d.b(4), exact=True)
    yield _of("floor_divide.default", whole, d.i(4, 3, 4, low=1), exact=True)
    yield _of("floor_divide.default", off, positive)
    for name in ["floor", "ceil", "round", "sign", "isnan", "isinf"]:
        yield _of(f"{name}.default", off, exact=True)
    yield _of("remainder.Scalar", whole, 3, exact=True)
    yield _of("remainder.Tensor", off, positive)


_KINKED: Final = frozenset({"abs", "relu", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "relu6"})


def _reductions(d: Draw) -> Iterator[Case]:
    x, apart, whole, truth = d.f(2, 3, 4), d.apart(2, 3, 4), d.i(9, 3, 4), d.b(3, 4)
    yield _of("sum.default", x)
    yield _of("sum.default", whole, exact=True)
    yield _of("sum.default", truth, exact=True)
    yield _of("sum.dim_IntList", x, [0, -1], True)
    yield _of("sum.dim_IntList", x, [1])
    yield _of("mean.default", x)
    yield _of("mean.dim", x, [-1], True)
    yield _of("mean.dim", x, [0, 1])
    yield _of("cumsum.default", x, 1)
    yield _of("cumsum.default", whole, 0, exact=True)
    yield _of("amax.default", apart, [1], True)
    yield _of("amin.default", apart, [0, 2])
    yield _of("amax.default", apart)
    yield _of("var.correction", x, [1])
    yield _of("var.correction", x, [0, 2], correction=0, keepdim=True)
    yield _of("std.correction", x, [-1], correction=1)
    yield _of("logsumexp.default", x, [-1])
    yield _of("linalg_vector_norm.default", x)
    yield _of("linalg_vector_norm.default", d.off(3, 4), 1, [1], True)
    yield _of("linalg_vector_norm.default", d.positive(3, 4), 3, [0])
    yield _of("max.default", apart)
    yield _of("min.default", apart)
    yield _of("max.dim", apart, 1)
    yield _of("min.dim", apart, -1, True)
    yield _of("topk.default", apart, 2)
    yield _of("topk.default", apart, 2, 1, False)
    yield _of("sort.default", apart, 1)
    yield _of("sort.default", apart, -1, True)
    yield _of("cumprod.default", x, 1)
    yield _of("logcumsumexp.default", x, -1)
    yield _of("prod.default", x)
    yield _of("prod.dim_int", x, 1, True)
    yield _of("nansum.default", np.array([[1.0, np.nan], [2.0, 3.0]], np.float32), [1])
    yield _of("trace.default", d.f(3, 4))
    yield _of("kthvalue.default", apart, 2, 1)
    yield _of("median.dim", apart, 2, True)
    yield _of("cummax.default", apart, 1)
    yield _of("cummin.default", apart, 1)
    yield _of("aminmax.default", apart, dim=1)
    yield _of("aminmax.default", apart)
    yield _of("var_mean.correction", x, [1], correction=1)
    yield _of("std_mean.correction", x, [0, 2], correction=0, keepdim=True)
    yield _of("count_nonzero.default", whole, exact=True)
    yield _of("count_nonzero.dim_IntList", truth, [0], exact=True)
    yield _of("argmax.default", apart, 1, exact=True)
    yield _of("argmax.default", apart, exact=True)
    yield _of("argmin.default", apart, -1, True, exact=True)
    yield _of("any.default", truth, exact=True)
    yield _of("any.dim", truth, 1, exact=True)
    yield _of("all.default", truth, exact=True)
    yield _of("all.dim", truth, 0, True, exact=True)


def _products(d: Draw) -> Iterator[Case]:
    yield _of("linear.default", d.f(2, 3, 4), d.f(5, 4))
    yield _of("linear.default", d.f(3, 4), d.f(5, 4), d.f(5))
    yield _of("matmul.default", d.f(2, 3, 4), d.f(4, 5))
    yield _of("matmul.default", d.f(2, 1, 3, 4), d.f(3, 4, 2))
    yield _of("matmul.default", d.f(4), d.f(4, 2))
    yield _of("mm.default", d.f(3, 4), d.f(4, 2))
    yield _of("bmm.default", d.f(2, 3, 4), d.f(2, 4, 2))
    yield _of("addmm.default", d.f(2), d.f(3, 4), d.f(4, 2))
    yield _of("addmm.default", d.f(3, 2), d.f(3, 4), d.f(4, 2), beta=0.5, alpha=2)
    yield _of("baddbmm.default", d.f(2, 3, 2), d.f(2, 3, 4), d.f(2, 4, 2), beta=1, alpha=0.5)
    yield _of("mv.default", d.f(3, 4), d.f(4))
    yield _of("dot.default", d.f(4), d.f(4))
    yield _of("_trilinear.default", d.f(2, 3), d.f(5, 3, 4), d.f(2, 4), [1, 3], [0], [1, 2], [2, 3])
    for p in (1.0, 2.0, 3.0):
        yield _of("_cdist_forward.default", d.f(2, 3, 4), d.f(2, 5, 4), p, None)
    yield _of("conv1d.default", d.f(2, 4, 9), d.f(6, 2, 3), d.f(6), [2], [1], [1], 2)
    yield _of("conv1d.default", d.f(2, 4, 9), d.f(4, 1, 4), None, [1], [3], [1], 4)
    yield _of("conv2d.default", d.f(2, 3, 7, 8), d.f(4, 3, 3, 2), d.f(4), [2, 1], [1, 0], [1, 2])
    yield _of("conv2d.default", d.f(3, 6, 6), d.f(4, 3, 3, 3))
    yield _of("conv1d.padding", d.f(2, 3, 8), d.f(4, 3, 4), None, [1], "same")
    yield _of("conv2d.padding", d.f(2, 3, 6, 5), d.f(4, 3, 3, 3), d.f(4), [1, 1], "valid")
    yield _of("convolution.default", d.f(2, 3, 6, 6), d.f(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield _of("convolution.default", d.f(2, 4, 5), d.f(4, 3, 3), d.f(6), [2], [1], [1], True, [1], 2)
    yield _of("conv_transpose2d.input", d.f(2, 4, 5, 4), d.f(4, 3, 3, 2), d.f(3), [2, 2], [1, 0], [1, 0])
    yield _of("conv_transpose2d.input", d.f(2, 4, 5, 4), d.f(4, 2, 3, 3), None, [1, 2], [0, 1], [0, 1], 2, [2, 1])
    yield _of("max_pool2d.default", d.apart(2, 3, 7, 8), [3, 2], [2, 2], [1, 1])
    yield _of("max_pool2d.default", d.apart(2, 3, 7, 8), [2, 2], [2, 2], [0, 0], [1, 1], True)
    yield _of("max_pool2d_with_indices.default", d.apart(2, 3, 7, 8), [3, 3], [2, 2], [1, 1])
    yield _of("avg_pool2d.default", d.f(2, 3, 7, 8), [3, 2], [2, 2], [1, 1])
    yield _of("avg_pool2d.default", d.f(2, 3, 7, 8), [3, 3], [2, 2], [1, 1], True, False)
    yield _of("avg_pool2d.default", d.f(2, 3, 7, 8), [3, 3], [2, 2], [1, 1], True, True)
    yield _of("avg_pool1d.default", d.f(2, 3, 9), [3], [2], [1])
    yield _of("avg_pool3d.default", d.f(2, 3, 5, 4, 6), [2, 2, 3], [2, 1, 2], [1, 0, 1])
    yield _of("max_pool3d_with_indices.default", d.apart(2, 3, 5, 4, 6), [2, 3, 2], [2, 1, 2], [1, 1, 0])
    yield _of("_adaptive_avg_pool3d.default", d.f(2, 3, 5, 4, 6), [2, 3, 1])
    yield _of("adaptive_max_pool2d.default", d.apart(2, 3, 5, 4), [2, 3])
    yield _of("adaptive_max_pool3d.default", d.apart(2, 3, 5, 4, 6), [2, 3, 1])
    places = np.array([[[[0, 3], [9, 14]]]])
    yield _of("max_unpool2d.default", d.f(1, 1, 2, 2), places, [4, 4])
    grid = (d.f(2, 3, 4, 2) / 2).clip(-0.95, 0.95)
    yield _of("grid_sampler_2d.default", d.f(2, 3, 5, 4), grid, 0, 0, False)
    yield _of("grid_sampler_3d.default", d.f(2, 3, 5, 4, 6), (d.f(2, 3, 4, 2, 3) / 3).clip(-0.95, 0.95), 0, 1, True)
    yield _of("adaptive_avg_pool1d.default", d.f(2, 3, 9), [4])
    yield _of("adaptive_avg_pool2d.default", d.f(2, 3, 7, 5), [3, 2])
    yield _of("_adaptive_avg_pool2d.default", d.f(2, 3, 6, 6), [1, 1])


def _norms(d: Draw) -> Iterator[Case]:
    x, image = d.f(2, 3, 4), d.f(4, 6, 3, 2)
    yield _of("layer_norm.default", x, [4], d.f(4), d.f(4))
    yield _of("layer_norm.default", x, [3, 4])
    yield _of("rms_norm.default", x, [4], d.f(4), 1e-5)
    yield _of("rms_norm.default", x, [4])
    yield _of("group_norm.default", image, 3, d.f(6), d.f(6))
    yield _of("native_layer_norm.default", x, [4], d.f(4), d.f(4), 1e-5)
    yield _of("native_group_norm.default", image, d.f(6), d.f(6), 4, 6, 6, 2, 1e-5)
    known = Still(d.f(6)), Still(d.positive(6))
    functional = (image, d.f(6), d.f(6), *known)
    yield _of("_native_batch_norm_legit_functional.default", *functional, True, 0.1, 1e-5)
    yield _of("_native_batch_norm_legit_functional.default", *functional, False, 0.1, 1e-5)
    yield _of("_native_batch_norm_legit.no_stats", image, d.f(6), d.f(6), True, 0.1, 1e-5)
    yield _of("_native_batch_norm_legit_no_training.default", *functional, 0.1, 1e-5)
    yield _of("batch_norm.default", *functional, False, 0.1, 1e-5, True)
    yield _of("_weight_norm_interface.default", d.f(4, 3, 2), d.f(4, 1, 1))
    yield _of("_weight_norm_interface.default", d.f(3, 4), d.f(1, 4), 1)
    yield _of("softmax.int", x, -1)
    yield _of("softmax.int", x, 1)
    yield _of("_softmax.default", x, 0, False)
    yield _of("log_softmax.int", x, -1)
    yield _of("_log_softmax.default", x, 1, False)


def _losses(d: Draw) -> Iterator[Case]:
    logits, classes = d.f(6, 5), d.i(5, 6)
    some = classes.copy()
    some[[1, 4]] = -100
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    yield _of("cross_entropy_loss.default", logits, classes)
    yield _of("cross_entropy_loss.default", logits, some)
    yield _of("cross_entropy_loss.default", logits, some, Still(d.positive(5)), 1, -100, 0.1)
    yield _of("cross_entropy_loss.default", logits, some, None, 2)
    yield _of("cross_entropy_loss.default", logits, some, None, 0)
    yield _of("cross_entropy_loss.default", d.f(2, 5, 3), d.i(5, 2, 3))
    weights = d.positive(6, 5)
    yield _of("cross_entropy_loss.default", logits, weights / weights.sum(1, keepdims=True))
    for name in ("nll_loss_nd.default", "nll_loss.default"):
        yield _of(name, logs, some)
        yield _of(name, logs, some, Still(d.positive(5)), 2)
    yield _of("nll_loss_forward.default", logs, some, Still(d.positive(5)), 1, -100)
    target = d.f(3, 4)
    for reduction in (0, 1, 2):
        yield _of("mse_loss.default", d.f(3, 4), target, reduction)
        yield _of("l1_loss.default", d.f(3, 4), target, reduction)
    yield _of("smooth_l1_loss.default", d.f(3, 4) * 3, target, 1, 0.7)
    yield _of("huber_loss.default", d.f(3, 4) * 3, target, 2, 1.3)
    yield _of("binary_cross_entropy.default", d.positive(3, 4) / 4, Still(d.positive(3, 4) / 4))
    yield _of("binary_cross_entropy.default", d.positive(3, 4) / 4, Still(d.positive(3, 4) / 4), Still(d.f(4)), 2)
    yield _of("soft_margin_loss.default", d.f(3, 4), Still(np.sign(d.off(3, 4))))
    yield _of("binary_cross_entropy_with_logits.default", d.f(3, 4), d.b(3, 4).astype(np.float32))
    yield _of(
        "binary_cross_entropy_with_logits.default",
        d.f(3, 4),
        d.b(3, 4).astype(np.float32),
        Still(d.positive(3, 4)),
        Still(d.positive(4)),
        2,
    )


def _lookups(d: Draw) -> Iterator[Case]:
    x = d.f(5, 4)
    yield _of("embedding.default", x, d.i(5, 2, 3))
    yield _of("embedding.default", x, d.i(5, 2, 3), 2)
    yield _of("index_select.default", x, 1, d.i(4, 6))
    yield _of("gather.default", x, 0, d.i(5, 3, 4))
    yield _of("gather.default", x, 1, d.i(4, 3, 2))
    yield _of("index.Tensor", x, [d.i(5, 2, 3)])
    yield _of("index.Tensor", x, [None, d.i(4, 3, low=-4)])
    yield _of("index.Tensor", d.f(3, 4, 5), [d.i(3, 2), None, d.i(5, 2)])
    places = np.stack([np.random.default_rng(3).permutation(5)[:3] for _ in range(4)], 1)
    yield _of("scatter.value", x, 0, places, 2.5)
    yield _of("scatter_add.default", x, 1, d.i(4, 3, 6), d.f(3, 6))
    yield _of("index_add.default", x, 0, d.i(5, 7), d.f(7, 4), alpha=0.5)
    yield _of("index_put.default", x, [d.i(5, 7)], d.f(7, 4), True)
    for kind in ("sum", "mean", "amax", "prod"):
        yield _of("scatter_reduce.two", x, 1, d.i(4, 3, 6), d.apart(3, 6) + 0.03, kind)
    ids, bags = np.array([0, 3, 2, 2, 4, 1, 3]), np.array([0, 2, 2, 5])
    for mode in (0, 1, 2):
        yield Case("fusion.embedding_bag", (x, ids, bags), {"mode": mode})
    yield Case("fusion.embedding_bag", (x, ids, bags), {"mode": 0, "weights": d.f(7)})
    last = {"mode": 1, "last_offset": True, "padding": 3}
    yield Case("fusion.embedding_bag", (x, ids, np.array([0, 2, 5, 7])), last)
    edges = np.array([-1.0, 0.1, 0.8], np.float32)
    yield _of("bucketize.Tensor", x, edges, exact=True, right=True)
    yield _of("searchsorted.Tensor", np.sort(d.f(2, 5)), d.f(2, 3), exact=True)
    yield _of("one_hot.default", d.i(4, 2, 3), 4, exact=True)


def tried(make: Callable[[int], Iterator[Case]] = cases) -> frozenset[str]:
    """Names of operators that some case uses."""
    return frozenset(case.op for case in make(0))
