"""How far two computations of the same tensors are apart: outputs and gradients, relative to what was expected.

Neighbours: `capture.self_check` and `capture.streamed_check` compare a graph with its module by these numbers.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from fusionai.primitives.tensors import HostTensor

_ROUNDING: Final = 1e-6
_LEAST: Final = 1e-30


def from_host(tensor: HostTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own memory."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def relative_difference(got: HostTensor | torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference over the largest magnitude expected; infinite where a NaN stands on one side."""
    if tuple(got.shape) != tuple(expected.shape):
        return math.inf
    value = (got.detach() if isinstance(got, torch.Tensor) else from_host(got, expected.dtype)).double()
    wanted = expected.detach().double()
    if not wanted.numel():
        return 0.0
    difference = (value - wanted).abs().max().item()
    if math.isnan(difference):
        return 0.0 if torch.equal(value.isnan(), wanted.isnan()) else math.inf
    return difference / max(wanted.abs().max().item(), _LEAST) if difference else 0.0


def gradient_difference(got: torch.Tensor, wanted: torch.Tensor, largest: float) -> float:
    """As `relative_difference`, of a parameter's gradient. `largest`: magnitude of the largest gradient of all
    parameters. What is as small as its rounding counts as zero: the bias of a key projection has no other gradient."""
    if got.shape != wanted.shape:
        return math.inf
    difference = (got - wanted).abs().max().item() if wanted.numel() else 0.0
    if difference <= _ROUNDING * largest:
        return difference / max(largest, _LEAST)
    return relative_difference(got, wanted)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0
