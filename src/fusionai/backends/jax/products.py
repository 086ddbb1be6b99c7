"""Matrix products, convolutions, pooling and the semantic operators. Neighbours: `tracing` joins the tables.

Attention is that of the explicit path in `backends.torch.semantic`, with another order of sums; softmax runs in
float32. Grouped queries share their keys without copying them. Dropout and random numbers are pure functions of
counters, with the hash of `backends.semantics` on unsigned 32-bit integers, whose products wrap. A run's keys are
folded outside and passed in as numbers, so that a new step compiles nothing. The recurrences sum in the order of
`backends.torch.semantic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import floor, prod
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar
from fusionai.backends.semantics import (
    CONV,
    CONV_TRANSPOSE,
    FIRST_MULTIPLIER,
    SECOND_MULTIPLIER,
    UNIFORM_BITS,
    Sizes,
    adaptive_windows,
    by_name,
    conv_pads,
    many,
    visible_keys,
)

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
        flipped = jnp.flip(jnp.swapaxes(split, 1, 2), tuple(range(3, 3 + spatial)))
        weight = flipped.reshape(-1, *flipped.shape[2:])
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
        self,
        x: Array,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        *,
        spatial: int = 2,
    ) -> None:
        lead = x.ndim - spatial
        self.sizes = many(kernel, spatial)
        steps = many(stride, spatial) if stride not in (None, (), []) else self.sizes
        self.given = many(padding, spatial)
        spread = many(dilation, spatial)
        pads: list[tuple[int, int]] = []
        for size, k, s, p, d in zip(x.shape[lead:], self.sizes, steps, self.given, spread, strict=True):
            span = size + 2 * p - d * (k - 1) - 1
            outputs = (-(-span // s) if ceil_mode else span // s) + 1
            if ceil_mode and (outputs - 1) * s >= size + p:
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


def _max_pool(x: Array, *args: Any, **options: Any) -> Array:
    return _Window(x, *args, **options).reduced(x, np.array(-np.inf, x.dtype), lax.max)


def _max_pool_with_places(x: Array, *args: Any, spatial: int = 2) -> tuple[Array, Array]:
    """Return (maxima, their flat places in the last dimensions); among equal elements, the first counts."""
    window = _Window(x, *args, spatial=spatial)
    image = x.shape[-spatial:]
    places = jnp.broadcast_to(jnp.arange(prod(image), dtype=jnp.int64).reshape(image), x.shape)

    def larger(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(first, one[0], other[0]), jnp.where(first, one[1], other[1])

    still = lax.stop_gradient(x)
    start = (np.array(-np.inf, x.dtype), np.array(np.iinfo(np.int64).max))
    _, found = window.reduced((still, places), start, larger)
    return _max_pool(x, *args, spatial=spatial), found


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
        window = _Window(x, kernel, stride, padding, 1, ceil_mode, spatial=spatial)
        zero = np.zeros((), x.dtype)  # JAX can differentiate a window reduction only if it starts from a constant
        total = window.reduced(x, zero, lax.add)
        if divisor_override is not None:
            return total / divisor_override
        inside = jnp.ones(x.shape[x.ndim - spatial :], x.dtype)
        if count_include_pad:  # padding counts, but not what the last window covers beyond it
            inside = jnp.pad(inside, [(one, one) for one in window.given], constant_values=1)
            again = _Window(inside, kernel, stride, 0, 1, ceil_mode, spatial=spatial)
            again.pads = [
                (0, max(0, behind - given))
                for (_, behind), given in zip(window.pads[x.ndim - spatial :], window.given, strict=True)
            ]
            return total / again.reduced(inside, zero, lax.add)
        return total / _Window(inside, kernel, stride, padding, 1, ceil_mode, spatial=spatial).reduced(
            inside, zero, lax.add
        )

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


def _trilinear(*args: Any) -> Array:
    """Multiply three tensors. `args`: they, the dimensions that each gets, those to sum over, and the order of torch's
    loops."""
    first, second, third = (jnp.expand_dims(x, tuple(dims)) for x, dims in zip(args[:3], args[3:6], strict=True))
    return jnp.sum(first * second * third, axis=tuple(args[6]))


def _distances(one: Array, two: Array, p: float, compute_mode: int | None = None) -> Array:  # noqa: ARG001
    """Return the distances of all pairs of points; for equal points the distance and its gradient are 0."""
    distance = jnp.abs(one[..., :, None, :] - two[..., None, :, :])
    if p == float("inf"):
        return jnp.max(distance, axis=-1)
    if p == 0:
        return jnp.sum(distance != 0, axis=-1).astype(one.dtype)
    if p == 1:
        return jnp.sum(distance, axis=-1)
    total = jnp.sum(
        jnp.square(distance) if p == 2 else jnp.power(jnp.where(distance > 0, distance, 1), p) * (distance > 0), -1
    )
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


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    key_mask: Array | None = None,
    dropout: float = 0.0,
    key: Array | None = None,
) -> Array:
    """Return [B, Hq, S, Dv] for q [B, Hq, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]; arguments as in the torch
    backend. `key`: key of this node's dropout, needed if `dropout` is above 0."""
    batch, heads, queries, _ = q.shape
    shared = k.shape[1]
    grouped = q.reshape(batch, shared, heads // shared, queries, q.shape[-1])
    weights = jnp.einsum("bhgsd,bhtd->bhgst", grouped, k).reshape(batch, heads, queries, k.shape[2]) * scale
    if softcap is not None:
        weights = jnp.tanh(weights / softcap) * softcap
    visible = _visible(q, k, causal=causal, window=window, key_mask=key_mask)
    if visible is not None:
        weights = jnp.where(visible, weights, jnp.finfo(weights.dtype).min)
    if sinks is None:
        weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(q.dtype)
    else:
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1).astype(weights.dtype), (batch, heads, queries, 1))
        weights = jax.nn.softmax(jnp.concatenate([weights, column], axis=-1), axis=-1)[..., :-1]
    if dropout > 0.0:
        assert key is not None, "a node that drops has a key"
        weights = weights * scaled_mask(weights.shape, dropout, key, dtype=weights.dtype)
    by_group = weights.astype(v.dtype).reshape(batch, shared, heads // shared, queries, k.shape[2])
    out = jnp.einsum("bhgst,bhtd->bhgsd", by_group, v)
    return out.reshape(batch, heads, queries, v.shape[-1])


def _visible(q: Array, k: Array, *, causal: bool, window: int | None, key_mask: Array | None) -> Array | None:
    """Return bool [B or 1, 1, S, T], True where query s may see key t; None if every query sees every key."""
    queries = jnp.arange(q.shape[2])[:, None]
    keys = jnp.arange(k.shape[2])[None, :]
    visible = visible_keys(queries, keys, causal=causal, window=window)
    if visible is not None:
        visible = visible[None, None]
    if key_mask is not None:
        seen = key_mask.astype(jnp.bool_)[:, None, None, :]
        visible = seen if visible is None else visible & seen
    return visible


def scaled_mask(shape: tuple[int, ...], p: float, key: Array, *, dtype: Any) -> Array:
    """Return 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1). `key` [2]: the node's two folds, uint32."""
    if p >= 1.0:
        return jnp.zeros(shape, dtype)
    keep = _hashed(prod(shape), key) >= jnp.uint32(floor(p * 2**32))
    # Multiplied as in torch: a boolean in the tensor's own precision times the rounded factor.
    return (keep.astype(dtype) * jnp.asarray(1.0 / (1.0 - p), dtype)).reshape(shape)


def dropout(x: Array, p: float, key: Array) -> Array:
    return x * scaled_mask(x.shape, p, key, dtype=x.dtype)


def uniform(x: Array, key: Array) -> Array:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    bits = UNIFORM_BITS[str(x.dtype)]
    drawn = (_hashed(x.size, key) >> (32 - bits)).astype(x.dtype)
    return (drawn * jnp.asarray(2.0**-bits, x.dtype)).reshape(x.shape)


def _hashed(count: int, key: Array) -> Array:
    index = jnp.arange(count, dtype=jnp.uint64)
    low, high = index.astype(jnp.uint32), (index >> 32).astype(jnp.uint32)
    return _mix(_mix(low ^ key[0]) ^ (_mix(high) ^ key[1]))


def _mix(x: Array) -> Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(FIRST_MULTIPLIER)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(SECOND_MULTIPLIER)
    return x ^ (x >> 15)


CHUNK: Final = 64
"""Positions whose mutual influence is computed at once."""
CHANNEL_CHUNK: Final = 16
"""The same if each channel has its own decay, which takes memory for each channel of each pair of positions."""


def linear_scan(decay: Array, x: Array) -> Array:
    """Return all `h[t] = decay[t] * h[t - 1] + x[t]`; decay, x and the result have the same shape [batch, positions,
    ...]."""
    if decay.shape != x.shape:
        raise ValueError(f"expected decays and inputs of one shape, got {list(decay.shape)} and {list(x.shape)}")

    def step(state: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        faded, entering = now
        state = faded * state + entering
        return state, state

    by_position = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(x, 1, 0))
    _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), by_position)
    return jnp.moveaxis(states, 0, 1)


def linear_attention(query: Array, key: Array, value: Array, *, decay: Array, beta: Array | None = None) -> Array:
    """Compute the formula of `backends.torch.semantic.linear_attention`. query and key [batch, positions, heads, key
    width], value [batch, positions, heads, value width], decay and beta [batch, positions, heads], decay also with the
    key's width; the result has value's shape."""
    batch, positions, heads, width = value.shape
    by_channel = decay.ndim == key.ndim
    chunk = max(1, min(CHANNEL_CHUNK if by_channel else CHUNK, positions))
    missing = -positions % chunk

    def chunked(x: Array) -> Array:
        x = jnp.moveaxis(x, 1, 2)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])
        return x.reshape(batch, heads, -1, chunk, *x.shape[3:])

    q, k, v = chunked(query), chunked(key), chunked(value)
    faded_by = jnp.cumsum(chunked(decay), axis=3)
    total = faded_by if by_channel else faded_by[..., None]
    earlier = jnp.tril(jnp.ones((chunk, chunk), jnp.bool_))[..., None]
    # Masked before exp: later positions could overflow, and so could their gradients.
    between = jnp.exp(jnp.where(earlier, total[..., :, None, :] - total[..., None, :, :], -jnp.inf))

    def pairs(left: Array, right: Array) -> Array:
        if by_channel:
            return (left[..., :, None, :] * right[..., None, :, :] * between).sum(axis=-1)
        return left @ jnp.swapaxes(right, -1, -2) * between[..., 0]

    inside = pairs(q, k)
    faded = k * jnp.exp(total)
    if beta is not None:
        share = chunked(beta)[..., None]
        system = pairs(k * share, k)
        solved = jax.scipy.linalg.solve_triangular(
            system, jnp.concatenate([v * share, faded * share], axis=-1), lower=True, unit_diagonal=True
        )
        v, faded = solved[..., :width], solved[..., width:]
    reading = q * jnp.exp(total)
    leaving = k * jnp.exp(total[..., -1:, :] - total)
    fading = jnp.exp(total[..., -1, :])[..., None]
    state = jnp.zeros((batch, heads, key.shape[-1], width), value.dtype)
    made: list[Array] = []
    for at in range(q.shape[2]):
        taken = v[:, :, at] if beta is None else v[:, :, at] - faded[:, :, at] @ state
        made.append(reading[:, :, at] @ state + inside[:, :, at] @ taken)
        state = state * fading[:, :, at] + jnp.swapaxes(leaving[:, :, at], -1, -2) @ taken
    joined = jnp.stack(made, axis=2).reshape(batch, heads, -1, width)
    return jnp.moveaxis(joined[:, :, :positions], 1, 2)


SCANS: Final[Mapping[str, Callable[..., Any]]] = {
    "fusion.linear_scan": linear_scan,
    "fusion.linear_attention": linear_attention,
}
