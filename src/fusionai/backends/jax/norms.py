"""Normalisation and softmax, as torch defines them. 16-bit floats are normalised in float32.

Batch normalisation depends on the mode: outside training it uses the learned statistics. Neighbours: `tracing`.

Losses: `reduction` is torch's number: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusionai.backends.jax.dtypes import Scalar, is_floating, promoted
from fusionai.primitives.errors import ExecutionError

Maybe = Array | None


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _normalised(x: Array, axes: tuple[int, ...], eps: Scalar) -> tuple[Array, Array, Array]:
    """Return (normalised, mean, inverse deviation) in float32 or wider; the last two keep all dimensions."""
    wide = _wide(x)
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide - mean), axis=axes, keepdims=True) + eps)
    return (wide - mean) * inverse, mean, inverse


def _scaled(x: Array, weight: Maybe, bias: Maybe, dtype: Any) -> Array:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).astype(dtype)


def _native_layer_norm(
    x: Array, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: Scalar
) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    normal, mean, inverse = _normalised(x, axes, eps)
    return _scaled(normal, weight, bias, x.dtype), mean, inverse


def _rms_norm(x: Array, shape: Sequence[int], weight: Maybe = None, eps: Scalar | None = None) -> Array:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = _wide(x)
    least = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    normal = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + least)
    return _scaled(normal, weight, None, x.dtype)


def _by_channel(values: Maybe, rank: int) -> Maybe:
    return None if values is None else values.reshape((1, -1, *(1,) * (rank - 2)))


def _native_group_norm(
    x: Array, weight: Maybe, bias: Maybe, batch: int, channels: int, area: int, groups: int, eps: Scalar
) -> tuple[Array, Array, Array]:
    grouped = x.reshape(batch, groups, channels // groups * area)
    normal, mean, inverse = _normalised(grouped, (2,), eps)
    y = _scaled(normal.reshape(x.shape), _by_channel(weight, x.ndim), _by_channel(bias, x.ndim), x.dtype)
    return y, mean.reshape(batch, groups), inverse.reshape(batch, groups)


def _group_norm(x: Array, groups: int, weight: Maybe = None, bias: Maybe = None, eps: Scalar = 1e-5, *_: Any) -> Array:
    batch, channels = x.shape[:2]
    return _native_group_norm(x, weight, bias, batch, channels, x.size // max(1, batch * channels), groups, eps)[0]


def _with_batch_statistics(x: Array, weight: Maybe, bias: Maybe, eps: Scalar) -> tuple[Array, Array, Array]:
    axes = (0, *range(2, x.ndim))
    normal, mean, inverse = _normalised(x, axes, eps)
    y = _scaled(normal, _by_channel(weight, x.ndim), _by_channel(bias, x.ndim), x.dtype)
    return y, mean.reshape(-1), inverse.reshape(-1)


def _with_learned_statistics(x: Array, weight: Maybe, bias: Maybe, mean: Array, variance: Array, eps: Scalar) -> Array:
    shape = (1, -1, *(1,) * (x.ndim - 2))
    inverse = lax.rsqrt(_wide(variance) + eps).reshape(shape)
    normal = (_wide(x) - mean.reshape(shape)) * inverse
    return _scaled(normal, _by_channel(weight, x.ndim), _by_channel(bias, x.ndim), x.dtype)


def batch_norm_functional(
    training: bool, x: Array, weight: Maybe, bias: Maybe, mean: Array, variance: Array, in_training: bool, *rest: float
) -> tuple[Array, ...]:
    """Return (y, saved mean, saved inverse deviation, new running mean, new running variance); the last two are
    unchanged outside training. `training`: the run's mode. `rest`: momentum, eps."""
    momentum, eps = rest
    if not (training and in_training):
        y = _with_learned_statistics(x, weight, bias, mean, variance, eps)
        nothing = jnp.zeros((0,), x.dtype)
        return y, nothing, nothing, mean, variance
    y, found, inverse = _with_batch_statistics(x, weight, bias, eps)
    still = lax.stop_gradient(_wide(x))
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    spread = jnp.var(still, axis=axes) * (count / max(1, count - 1))
    new_mean = (1 - momentum) * mean + momentum * lax.stop_gradient(found)
    new_variance = (1 - momentum) * variance + momentum * spread
    return y, found, inverse, new_mean.astype(mean.dtype), new_variance.astype(variance.dtype)


def batch_norm(
    training: bool, x: Array, weight: Maybe, bias: Maybe, mean: Maybe, variance: Maybe, in_training: bool, *rest: Any
) -> Array:
    """`rest`: momentum, eps."""
    eps: float = rest[1]
    if in_training and training and mean is not None:
        raise ExecutionError(
            "aten.batch_norm.default would change its running statistics in place.",
            hint="Capture the model functionalised (aten._native_batch_norm_legit_functional.default).",
        )
    if mean is None or variance is None:
        return _with_batch_statistics(x, weight, bias, eps)[0]
    return _with_learned_statistics(x, weight, bias, mean, variance, eps)


def _batch_norm_no_training(
    x: Array, weight: Any, bias: Any, mean: Array, variance: Array, _momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    nothing = jnp.zeros((0,), x.dtype)
    return _with_learned_statistics(x, weight, bias, mean, variance, eps), nothing, nothing


def softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    x = x if dtype is None else x.astype(dtype)
    return jax.nn.softmax(_wide(x), axis=dim).astype(x.dtype)


def log_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    x = x if dtype is None else x.astype(dtype)
    return jax.nn.log_softmax(_wide(x), axis=dim).astype(x.dtype)


def _half_to_float(compute: Callable[..., Array]) -> Callable[..., Array]:
    def run(x: Array, dim: int, half_to_float: bool) -> Array:
        return compute(x, dim, jnp.float32 if half_to_float and is_floating(x.dtype) else None)

    return run


def _weight_norm(direction: Array, length: Array, dim: int = 0) -> tuple[Array, Array]:
    """Return (weights of these lengths along `dim`, lengths of the directions)."""
    others = tuple(axis for axis in range(direction.ndim) if axis != dim)
    norm = jnp.sqrt(jnp.sum(jnp.square(direction), axis=others, keepdims=True))
    return direction * (length / norm), norm


NORMS: Final[dict[str, Callable[..., Any]]] = {
    "aten.layer_norm.default": lambda x, shape, weight=None, bias=None, eps=1e-05, *_: _native_layer_norm(
        x, shape, weight, bias, eps
    )[0],
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.native_group_norm.default": _native_group_norm,
    "aten._native_batch_norm_legit.no_stats": lambda x, weight, bias, _training, _momentum, eps: _with_batch_statistics(
        x, weight, bias, eps
    ),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_no_training,
    "aten._weight_norm_interface.default": _weight_norm,
    "aten.softmax.int": softmax,
    "aten._softmax.default": _half_to_float(softmax),
    "aten.log_softmax.int": log_softmax,
    "aten._log_softmax.default": _half_to_float(log_softmax),
}


def _reduced(x: Array, reduction: int) -> Array:
    match reduction:
        case 0:
            return x
        case 1:
            return jnp.mean(x)
        case _:
            return jnp.sum(x)


def _picked(log_probabilities: Array, target: Array, weight: Maybe, ignore_index: int) -> tuple[Array, Array]:
    """Return (-log p of each target, its weight), both 0 where ignored. Classes are along dimension 1, or the only
    one."""
    axis = 1 if log_probabilities.ndim > 1 else 0
    counted = target != ignore_index
    classes = jnp.where(counted, target, 0)
    found = jnp.take_along_axis(log_probabilities, jnp.expand_dims(classes, axis), axis=axis, mode="fill")
    own = jnp.ones((), log_probabilities.dtype) if weight is None else weight[classes]
    weights = jnp.where(counted, own, 0).astype(log_probabilities.dtype)
    return -jnp.squeeze(found, axis) * weights, weights


def _nll(x: Array, target: Array, weight: Maybe = None, reduction: int = 1, ignore_index: int = -100) -> Array:
    return nll_forward(x, target, weight, reduction, ignore_index)[0]


def nll_forward(x: Array, target: Array, weight: Maybe, reduction: int, ignore_index: int) -> tuple[Array, Array]:
    """Return (loss, sum of weights)."""
    lost, weights = _picked(x, target, weight, ignore_index)
    total = jnp.sum(weights)
    match reduction:
        case 0:
            return lost, jnp.zeros((), x.dtype)
        case 1:
            return jnp.sum(lost) / total, total
        case _:
            return jnp.sum(lost), total


def _cross_entropy(
    x: Array,
    target: Array,
    weight: Maybe = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    axis = 1 if x.ndim > 1 else 0
    logs = log_softmax(x, axis)
    shape = [1] * x.ndim
    shape[axis] = -1
    weighted = logs if weight is None else logs * weight.reshape(shape)
    if is_floating(target.dtype):  # probabilities of classes
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / x.shape[axis]
        lost = -jnp.sum(weighted * target, axis=axis)
        return jnp.sum(lost) / max(1, lost.size) if reduction == 1 else _reduced(lost, reduction)
    lost, weights = _picked(logs, target, weight, ignore_index)
    if not label_smoothing:
        return jnp.sum(lost) / jnp.sum(weights) if reduction == 1 else _reduced(lost, reduction)
    counted = target != ignore_index
    smooth = jnp.where(counted, -jnp.sum(weighted, axis=axis), 0)
    mixed = (1 - label_smoothing) * lost + label_smoothing / x.shape[axis] * smooth
    return jnp.sum(mixed) / jnp.sum(weights) if reduction == 1 else _reduced(mixed, reduction)


def _of_difference(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Return a loss computed from the difference of input and target; `compute` takes that and the loss's limit."""

    def run(x: Array, target: Array, reduction: int = 1, *limit: Scalar, **options: Scalar) -> Array:
        left, right = promoted(x, target)
        return _reduced(compute(left - right, *limit, **options), reduction)

    return run


def _smooth_l1(difference: Array, beta: Scalar = 1.0) -> Array:
    size = jnp.abs(difference)
    return size if beta == 0 else jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta)


def _huber(difference: Array, delta: Scalar = 1.0) -> Array:
    size = jnp.abs(difference)
    return jnp.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def _binary_cross_entropy_with_logits(
    x: Array, target: Array, weight: Maybe = None, pos_weight: Maybe = None, reduction: int = 1
) -> Array:
    logs = jax.nn.log_sigmoid(x)
    lost = (1 - target) * x - logs if pos_weight is None else (1 - target) * x - (1 + (pos_weight - 1) * target) * logs
    return _reduced(lost if weight is None else lost * weight, reduction)


def _binary_cross_entropy(x: Array, target: Array, weight: Maybe = None, reduction: int = 1) -> Array:
    """Return binary cross-entropy; logarithms are at least -100, as in torch."""
    lost = -target * jnp.maximum(jnp.log(x), -100) - (1 - target) * jnp.maximum(jnp.log1p(-x), -100)
    return _reduced(lost if weight is None else lost * weight, reduction)


LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.nll_loss_nd.default": _nll,
    "aten.nll_loss.default": _nll,
    "aten.nll_loss_forward.default": nll_forward,
    "aten.mse_loss.default": _of_difference(jnp.square),
    "aten.l1_loss.default": _of_difference(jnp.abs),
    "aten.smooth_l1_loss.default": _of_difference(_smooth_l1),
    "aten.huber_loss.default": _of_difference(_huber),
    "aten.binary_cross_entropy.default": _binary_cross_entropy,
    "aten.soft_margin_loss.default": lambda x, target, reduction=1: _reduced(
        jnp.log1p(jnp.exp(-target * x)), reduction
    ),
    "aten.binary_cross_entropy_with_logits.default": _binary_cross_entropy_with_logits,
}
