"""Trace losses per row (`reduction="none"`) of a batch of class indices by the operator that PyTorch computes them
with.

When PyTorch's composite operators are traced a second time, they give such a loss the shape of a scalar. The operator
beneath has the right shape and is what eager PyTorch runs, so forward and backward have the same bits.

Neighbours: `capture.export` replaces PyTorch's operators by these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NO_REDUCTION = 0
_MEAN = 1


def losses_per_row() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement without reduction. With a reduction the operator stays unchanged."""
    aten = torch.ops.aten
    return {
        aten.nll_loss_nd.default: _negative_log_likelihood,
        aten.nll_loss.default: _negative_log_likelihood,
        aten.cross_entropy_loss.default: _cross_entropy,
    }


def _negative_log_likelihood(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    if reduction != _NO_REDUCTION or x.ndim != 2:
        return NotImplemented
    return torch.ops.aten.nll_loss_forward.default(x, target, weight, reduction, ignore_index)[0]


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if reduction != _NO_REDUCTION or x.ndim != 2 or target.ndim != 1 or label_smoothing:
        return NotImplemented
    scores = torch.ops.aten.log_softmax.int(x, 1, x.dtype)
    return torch.ops.aten.nll_loss_forward.default(scores, target, weight, reduction, ignore_index)[0]
