"""Matrix products, convolutions and pooling, as torch defines them.

Neighbours: `operators` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusionai.backends.arguments import CONV, CONV_TRANSPOSE, Sizes, adaptive_windows, by_name, conv_pads, many
from fusionai.backends.jax.dtypes import Scalar

_LETTERS: Final = "DHW"


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return [..., O] for x [..., I], weight [O, I]."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
    return y if bias is None else y + bias


def expert_linear(x: Array, weight: Array, experts: Array, *, transposed: bool = False) -> Array:
    """Return [rows, out] for x [rows, in], weight [experts, out, in] (`transposed`: [experts, in, out]), experts
    [rows]."""
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=weight.shape[0]).astype(jnp.int32)
    made = lax.ragged_dot(x[order], weight if transposed else jnp.swapaxes(weight, 1, 2), counts)
    return made[jnp.argsort(order)]


def _addmm(bias: Array, a: Array, b: Array, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    product = jnp.matmul(a, b)
    return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
    groups: int = 1,
) -> Array:
    """Convolve x [N, C, ...] or [C, ...] with weight [O, C / groups, ...], or [C, O / groups, ...] if `transposed`."""
    spatial = weight.ndim - 2
    batched = x.ndim == weight.ndim
    x = x if batched else x[None]
    steps, spread = many(stride, spatial), many(dilation, spatial)
    kernel = weight.shape[2:]
    pads = conv_pads(kernel, spread, padding)
    letters = _LETTERS[3 - spatial :]
    names = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    if transposed:
        extra = many(output_padding, spatial)
        given = many(padding, spatial) if not isinstance(padding, str) else (0,) * spatial
        pads = [(d * (k - 1) - p, d * (k - 1) - p + e) for k, d, p, e in zip(kernel, spread, given, extra, strict=True)]
        split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        turned = jnp.flip(jnp.swapaxes(split, 1, 2), tuple(range(3, 3 + spatial)))
        weight = turned.reshape(-1, *turned.shape[2:])
        y = lax.conv_general_dilated(x, weight, (1,) * spatial, pads, steps, spread, names, feature_group_count=groups)
    else:
        y = lax.conv_general_dilated(x, weight, steps, pads, None, spread, names, feature_group_count=groups)
    if bias is not None:
        y = y + bias.reshape((1, -1, *(1,) * spatial))
    return y if batched else y[0]


_conv = by_name(_convolution, CONV, behind=3)
_conv_transpose = by_name(_convolution, CONV_TRANSPOSE, behind=3, transposed=True)


class _Window:
    """A window that moves over the last dimensions of x."""

    def __init__(
        self, x: Array, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil: bool, spatial: int
    ) -> None:
        lead = x.ndim - spatial
        self.sizes = many(kernel, spatial)
        steps = many(stride, spatial) if stride not in (None, (), []) else self.sizes
        self.given = many(padding, spatial)
        spread = many(dilation, spatial)
        pads: list[tuple[int, int]] = []
        for size, k, s, p, d in zip(x.shape[lead:], self.sizes, steps, self.given, spread, strict=True):
            span = size + 2 * p - d * (k - 1) - 1
            outputs = (-(-span // s) if ceil else span // s) + 1
            if ceil and (outputs - 1) * s >= size + p:
                outputs -= 1  # a window that begins in the padding at the end is left out
            pads.append((p, max(p, (outputs - 1) * s + d * (k - 1) + 1 - size - p)))
        self.window = (*(1,) * lead, *self.sizes)
        self.strides = (*(1,) * lead, *steps)
        self.pads = [*[(0, 0)] * lead, *pads]
        self.dilation = (*(1,) * lead, *spread)

    def reduced(self, x: Any, initial: Any, compute: Callable[..., Any]) -> Any:
        return lax.reduce_window(
            x, initial, compute, self.window, self.strides, self.pads, window_dilation=self.dilation
        )


def _max_pool(
    x: Array,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    spatial: int = 2,
) -> Array:
    window = _Window(x, kernel, stride, padding, dilation, ceil_mode, spatial)
    return window.reduced(x, np.array(-np.inf, x.dtype), lax.max)


def _max_pool_with_places(
    x: Array,
    kernel: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    spatial: int = 2,
) -> tuple[Array, Array]:
    """Return (maxima, their flat places in the last dimensions); among equal elements, the first counts."""
    window = _Window(x, kernel, stride, padding, dilation, ceil_mode, spatial)
    image = x.shape[-spatial:]
    places = jnp.broadcast_to(jnp.arange(prod(image), dtype=jnp.int64).reshape(image), x.shape)

    def larger(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(first, one[0], other[0]), jnp.where(first, one[1], other[1])

    still = lax.stop_gradient(x)
    start = (np.array(-np.inf, x.dtype), np.array(np.iinfo(np.int64).max))
    _, found = window.reduced((still, places), start, larger)
    return _max_pool(x, kernel, stride, padding, dilation, ceil_mode, spatial), found


def _average_pool(spatial: int) -> Callable[..., Array]:
    def pool(
        x: Array,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        window = _Window(x, kernel, stride, padding, 1, ceil_mode, spatial)
        zero = np.zeros((), x.dtype)  # JAX can differentiate a window reduction only if it starts from a constant
        total = window.reduced(x, zero, lax.add)
        if divisor_override is not None:
            return total / divisor_override
        inside = jnp.ones(x.shape[x.ndim - spatial :], x.dtype)
        if count_include_pad:  # padding counts, but not what the last window covers beyond it
            inside = jnp.pad(inside, [(one, one) for one in window.given], constant_values=1)
            again = _Window(inside, kernel, stride, 0, 1, ceil_mode, spatial)
            again.pads = [
                (0, max(0, behind - given))
                for (_, behind), given in zip(window.pads[x.ndim - spatial :], window.given, strict=True)
            ]
            return total / again.reduced(inside, zero, lax.add)
        return total / _Window(inside, kernel, stride, padding, 1, ceil_mode, spatial).reduced(inside, zero, lax.add)

    return pool


def _adaptive(spatial: int) -> Callable[..., Array]:
    """Return a pool whose output i of n is the mean of inputs floor(i * size / n) to ceil((i + 1) * size / n). Computed
    as a product with one matrix per dimension."""

    def pool(x: Array, output: Sizes) -> Array:
        wanted = many(output, spatial)
        for place, count in enumerate(wanted):
            axis = x.ndim - spatial + place
            size = x.shape[axis]
            weights = np.zeros((count, size), np.float32)
            for row, (first, last) in enumerate(adaptive_windows(size, count)):
                weights[row, first:last] = 1 / (last - first)
            mixed = jnp.tensordot(x, jnp.asarray(weights, x.dtype), ((axis,), (1,)))
            x = jnp.moveaxis(mixed, -1, axis)
        return x

    return pool


def _trilinear(
    one: Array,
    two: Array,
    three: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,  # noqa: ARG001 - the order of torch's loops
) -> Array:
    factors = zip((one, two, three), (expand1, expand2, expand3), strict=True)
    first, second, third = (jnp.expand_dims(x, tuple(dims)) for x, dims in factors)
    return jnp.sum(first * second * third, axis=tuple(sumdim))


def _distances(one: Array, two: Array, p: float, compute_mode: int | None = None) -> Array:  # noqa: ARG001
    """Return the distances of all pairs of points; for equal points the distance and its gradient are 0."""
    apart = jnp.abs(one[..., :, None, :] - two[..., None, :, :])
    if p == float("inf"):
        return jnp.max(apart, axis=-1)
    if p == 0:
        return jnp.sum(apart != 0, axis=-1).astype(one.dtype)
    if p == 1:
        return jnp.sum(apart, axis=-1)
    total = jnp.sum(jnp.square(apart) if p == 2 else jnp.power(jnp.where(apart > 0, apart, 1), p) * (apart > 0), -1)
    return jnp.where(total > 0, jnp.power(jnp.where(total > 0, total, 1), 1 / p), 0)


PRODUCTS: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": jnp.matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    **{f"aten.{name}.default": _addmm for name in ("addmm", "baddbmm")},
    **{f"aten.{name}": _conv for name in ("conv1d.default", "conv2d.default", "conv1d.padding", "conv2d.padding")},
    "aten.linear.default": linear,
    "fusion.expert_linear": expert_linear,
    "aten.convolution.default": _convolution,
    "aten.conv_transpose2d.input": _conv_transpose,
    "aten.max_pool2d.default": _max_pool,
    "aten.max_pool2d_with_indices.default": _max_pool_with_places,
    "aten.avg_pool2d.default": _average_pool(2),
    "aten.avg_pool1d.default": _average_pool(1),
    "aten.adaptive_avg_pool1d.default": _adaptive(1),
    "aten.adaptive_avg_pool2d.default": _adaptive(2),
    "aten._adaptive_avg_pool2d.default": _adaptive(2),
    "aten._adaptive_avg_pool3d.default": _adaptive(3),
    "aten.avg_pool3d.default": _average_pool(3),
    "aten.max_pool3d_with_indices.default": partial(_max_pool_with_places, spatial=3),
    "aten._trilinear.default": _trilinear,
    "aten._cdist_forward.default": _distances,
}
