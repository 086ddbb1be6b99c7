"""Solve triangular systems of equations (`torch.linalg.solve_triangular`) by substitution, one row after the other.

For small systems of fixed size, such as the covariance of `torch.distributions.MultivariateNormal`. Rounds in another
order than LAPACK, so results agree within a few units of the last place times the condition number of the matrix.

Neighbours: `capture.export` replaces PyTorch's operator by this function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from fusionai.primitives.errors import ModelError

LARGEST: Final = 64
"""Most rows of a matrix (chosen): each row becomes several nodes of the graph."""


def triangular() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement in operators of the vocabulary."""
    return {torch.ops.aten.linalg_solve_triangular.default: _solved}


def _solved(
    matrix: torch.Tensor, given: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Return X of `matrix` @ X = `given`, or without `left` of X @ `matrix` = `given`."""
    if not left:
        transposed = _solved(matrix.mT, given.mT, upper=not upper, unitriangular=unitriangular)
        return transposed.mT
    size = matrix.shape[-1]
    if not isinstance(size, int) or size > LARGEST:
        raise ModelError(
            f"a triangular system of {size} equations is too large for a graph, which solves it row by row.",
            hint=f"Solve systems of a fixed size of at most {LARGEST}.",
        )
    rows: dict[int, torch.Tensor] = {}
    for row in reversed(range(size)) if upper else range(size):
        value = given[..., row, :]
        if rows:
            known = sorted(rows)
            first, last = known[0], known[-1] + 1
            held = torch.stack([rows[at] for at in known], -2)
            value = value - (matrix[..., row, first:last, None] * held).sum(-2)
        rows[row] = value if unitriangular else value / matrix[..., row, row, None]
    return torch.stack([rows[at] for at in range(size)], -2)
