"""Losses, as torch defines them. `reduction` is torch's number: 0 none, 1 mean, 2 sum.

Neighbours: `operators` joins the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from fusionai.backends.jax.norms import log_softmax
from fusionai.backends.jax.promotion import Scalar, is_floating, promoted


def _reduced(x: jax.Array, reduction: int) -> jax.Array:
    match reduction:
        case 0:
            return x
        case 1:
            return jnp.mean(x)
        case _:
            return jnp.sum(x)


def _picked(
    log_probabilities: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Return (-log p of each target, its weight), both 0 where ignored. Classes are along dimension 1, or the only
    one."""
    axis = 1 if log_probabilities.ndim > 1 else 0
    counted = target != ignore_index
    classes = jnp.where(counted, target, 0)
    found = jnp.take_along_axis(log_probabilities, jnp.expand_dims(classes, axis), axis=axis, mode="fill")
    own = jnp.ones((), log_probabilities.dtype) if weight is None else weight[classes]
    weights = jnp.where(counted, own, 0).astype(log_probabilities.dtype)
    return -jnp.squeeze(found, axis) * weights, weights


def _nll(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> jax.Array:
    return nll_forward(x, target, weight, reduction, ignore_index)[0]


def nll_forward(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
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
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
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


def _mse(x: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    left, right = promoted(x, target)
    return _reduced(jnp.square(left - right), reduction)


def _l1(x: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    left, right = promoted(x, target)
    return _reduced(jnp.abs(left - right), reduction)


def _smooth_l1(x: jax.Array, target: jax.Array, reduction: int = 1, beta: Scalar = 1.0) -> jax.Array:
    left, right = promoted(x, target)
    size = jnp.abs(left - right)
    if beta == 0:
        return _reduced(size, reduction)
    return _reduced(jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta), reduction)


def _huber(x: jax.Array, target: jax.Array, reduction: int = 1, delta: Scalar = 1.0) -> jax.Array:
    left, right = promoted(x, target)
    size = jnp.abs(left - right)
    return _reduced(jnp.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta)), reduction)


def _binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = 1,
) -> jax.Array:
    logs = jax.nn.log_sigmoid(x)
    lost = (1 - target) * x - logs if pos_weight is None else (1 - target) * x - (1 + (pos_weight - 1) * target) * logs
    return _reduced(lost if weight is None else lost * weight, reduction)


def _binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    """Return binary cross-entropy; logarithms are at least -100, as in torch."""
    lost = -target * jnp.maximum(jnp.log(x), -100) - (1 - target) * jnp.maximum(jnp.log1p(-x), -100)
    return _reduced(lost if weight is None else lost * weight, reduction)


def _soft_margin(x: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    return _reduced(jnp.log1p(jnp.exp(-target * x)), reduction)


LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.nll_loss_nd.default": _nll,
    "aten.nll_loss.default": _nll,
    "aten.nll_loss_forward.default": nll_forward,
    "aten.mse_loss.default": _mse,
    "aten.l1_loss.default": _l1,
    "aten.smooth_l1_loss.default": _smooth_l1,
    "aten.huber_loss.default": _huber,
    "aten.binary_cross_entropy.default": _binary_cross_entropy,
    "aten.soft_margin_loss.default": _soft_margin,
    "aten.binary_cross_entropy_with_logits.default": _binary_cross_entropy_with_logits,
}
