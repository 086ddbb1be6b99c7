"""Trace batch normalisation with `momentum=None` (the average of all batches) without reading its counter.

PyTorch computes the weight of a batch, one over the number of batches, as a Python number, which a graph can't hold.
Here the operator computes the batch's own statistics (momentum 1), and operators of the graph average them with the
running ones.

Neighbours: `capture.export` traces under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def averaged_statistics() -> Iterator[None]:
    """While open, modules with `momentum=None` that keep statistics trace as arithmetic on tensors."""
    forward = _BatchNorm.forward

    def averaged(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that callers may use
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if self.momentum is not None or mean is None or variance is None or count is None:
            return forward(self, input)
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(input, mean, variance, self.weight, self.bias, False, 1.0, self.eps)
        own_mean, own_variance = mean.clone(), variance.clone()
        result = F.batch_norm(input, own_mean, own_variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            count.add_(1)
            share = 1.0 / count.double()
            # In float64, like PyTorch's kernel.
            for running, own in ((mean, own_mean), (variance, own_variance)):
                running.copy_((share * own.double() + (1.0 - share) * running.double()).to(running.dtype))
        return result

    _BatchNorm.forward = averaged
    try:
        yield
    finally:
        _BatchNorm.forward = forward
