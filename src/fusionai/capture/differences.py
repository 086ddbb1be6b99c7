"""Measure how far two computations of the same tensors differ: outputs and gradients, relative to the expected ones.

Neighbours: `capture.self_check` and `capture.streamed_check` compare a graph with its module by these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from fusionai.primitives.tensors import HostTensor

_ROUNDING: Final = 1e-6
"""Differences of gradients up to this fraction of the largest gradient count as rounding: about 8 float32 epsilons."""
_LEAST: Final = 1e-30
"""Smallest divisor of a difference, so that tensors of zeros do not divide by zero."""
_PART_ELEMENTS: Final = 2**20
"""Elements compared at a time: float64 copies of two whole float32 tensors would take four times the memory of one."""


def from_host(tensor: HostTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with a copy of the data."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def relative_difference(got: HostTensor | torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest expected magnitude; infinite if only one side has a
    NaN."""
    if tuple(got.shape) != tuple(expected.shape):
        return math.inf
    value = got.detach() if isinstance(got, torch.Tensor) else from_host(got, expected.dtype)
    difference = _apart(value, expected)
    if math.isnan(difference):
        return 0.0 if torch.equal(value.isnan(), expected.isnan()) else math.inf
    return difference / max(magnitude(expected), _LEAST) if difference else 0.0


def gradient_difference(got: torch.Tensor, wanted: torch.Tensor, largest: float) -> float:
    """Return the relative difference of a parameter's gradient.

    `largest`: magnitude of the largest gradient of all parameters. A difference below float32 rounding of `largest` is
    taken relative to `largest`, because some gradients consist of rounding errors only: that of a key projection's bias
    is zero.
    """
    if got.shape != wanted.shape:
        return math.inf
    difference = _apart(got, wanted)
    if difference <= _ROUNDING * largest:
        return difference / max(largest, _LEAST)
    return relative_difference(got, wanted)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor, NaN if it contains one."""
    return _largest(part.double().abs().max().item() for part in _parts(tensor.detach()))


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors of the same shape."""
    pairs = zip(_parts(got.detach()), _parts(wanted.detach()), strict=True)
    return _largest((one.double() - other.double()).abs().max().item() for one, other in pairs)


def _largest(values: Iterable[float]) -> float:
    largest = 0.0
    for value in values:
        if math.isnan(value):
            return value
        largest = max(largest, value)
    return largest


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ranges of the first dimension, with at most `_PART_ELEMENTS` elements unless one row has more."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    step = max(1, _PART_ELEMENTS * len(rows) // rows.numel())
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
