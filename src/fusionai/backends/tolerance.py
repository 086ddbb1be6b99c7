"""Tolerances for comparing results of different frameworks with each other or with exact results.

Differences are relative to the largest expected magnitude, because a small number computed among large ones is no more
exact than they are. `kernel` applies to one operator, forward or backward; `stage` to a chain of operators, such as a
few layers; `loss` to a training loss after any number of steps from the same state, with a takeover by another
framework in between. In bfloat16, a product of n terms is as exact as its operands, about 2**-8.

Neighbours: conformance suites and `backends` compare with these; `coordination` calls such takeovers tolerant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.primitives.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed differences, relative to the largest expected magnitude."""

    kernel: float
    stage: float
    loss: float


TOLERANCES: Final[dict[str, Tolerance]] = {
    "float32": Tolerance(kernel=1e-5, stage=5e-5, loss=1e-5),
    "bfloat16": Tolerance(kernel=2e-2, stage=5e-2, loss=2e-2),
}


def numbers(tensor: HostTensor) -> npt.NDArray[Any]:
    """Return the tensor's values as a numpy array; bfloat16, which numpy lacks, as float32."""
    if tensor.dtype == "bfloat16":
        halves = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Return the largest difference divided by the largest expected magnitude. Returns infinity if the shapes differ,
    or if a NaN or infinity in one has no equal in the other."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    wide = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(wide[1])
    if not np.array_equal(wide[0][~finite], wide[1][~finite], equal_nan=True) or not np.isfinite(wide[0][finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    largest = float(np.abs(wide[1][finite]).max())
    error = float(np.abs(wide[0][finite] - wide[1][finite]).max())
    return error / largest if largest > 0 else error
