"""How far results of one framework may be from another's, or from exact ones: the policy for every comparison.

Differences are taken relative to the largest magnitude of what is expected, for a number near 0 among large ones is not
known any better than they are. `kernel` is one operator, forward or backward; `stage` a chain of them, such as some
layers; `loss` a training's loss after any number of steps from the same state, as a takeover by another framework may
change it. In bfloat16 a product of n terms is as good as its operands, about 2**-8.

Neighbours: conformance suites and `backends` compare by these; `coordination` calls such takeovers tolerant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.primitives.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative to the largest magnitude expected."""

    kernel: float
    stage: float
    loss: float


TOLERANCES: Final[dict[str, Tolerance]] = {
    "float32": Tolerance(kernel=1e-5, stage=5e-5, loss=1e-5),
    "bfloat16": Tolerance(kernel=2e-2, stage=5e-2, loss=2e-2),
}


def numbers(tensor: HostTensor) -> npt.NDArray[Any]:
    """Its values; bfloat16, which numpy has not, as float32."""
    if tensor.dtype == "bfloat16":
        halves = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Largest difference by largest magnitude expected; infinite where one has a number that is none and the other has
    not."""
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
    apart = float(np.abs(wide[0][finite] - wide[1][finite]).max())
    return apart / largest if largest > 0 else apart
