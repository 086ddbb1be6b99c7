"""What a peer learns from text it knows (template, document): how its own boundaries differ from the seen ones.

The result is a linear correction of its own boundaries towards the seen ones, by ridge regression, and the covariance
of the residual, for a Mahalanobis distance. The prior is "no difference": with little known text, little is corrected.
It returns the `Part` that the white-box attack compares. See `white_box`, `audit`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fusionai.privacy.white_box import Part

_RIDGES: Final = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8)
"""Candidate ridges, relative to the mean square of a boundary. The largest practically disables the correction."""
_HELD_OUT: Final = 5
"""Every n-th known row is held out to choose the ridge."""
_FLOOR: Final = 1e-8
"""Smallest variance, relative to the boundary's mean square: an exact correction would otherwise have covariance 0."""


def calibrated(depth: int, own: Tensor, seen: Tensor, target: Tensor) -> Part:
    """Return the part that compares the seen `target` [texts, tokens, width] with candidates, corrected and whitened.

    `own` and `seen` [rows, width]: the boundaries of the known text that the attacker computes, and those that it saw.
    """
    x, y = own.double(), seen.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    correction = _correction(x, y - x)
    residual = y - x - x @ correction
    rows, width = x.shape
    floor = _FLOOR * float(x.square().mean()) + 1e-30
    covariance = residual.T @ residual / max(1, rows - 1)
    diagonal = torch.eye(width, dtype=x.dtype, device=x.device)
    # Few rows estimate the covariance badly, so it is shrunk towards a sphere of the same size.
    trust = rows / (rows + width)
    size = float(covariance.diagonal().mean())
    covariance = trust * covariance + ((1 - trust) * size + floor) * diagonal
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    mapping = diagonal + correction.T
    projection = whitening @ mapping
    offset = whitening @ (mean_y - mapping @ mean_x)
    return Part(depth, (target.double() @ whitening.T - offset).float(), projection.float())


def _correction(x: Tensor, difference: Tensor) -> Tensor:
    """Return [width, width] such that `x @ correction` approximates `difference`, with the ridge that fits held-out
    rows best.
    """
    held = torch.arange(len(x), device=x.device) % _HELD_OUT == 0
    scale = float(x.square().mean()) * len(x)

    def fitted(ridge: float, rows: Tensor) -> Tensor:
        gram = x[rows].T @ x[rows] + ridge * scale * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return torch.linalg.solve(gram, x[rows].T @ difference[rows])

    def missed(ridge: float) -> float:
        return float((difference[held] - x[held] @ fitted(ridge, ~held)).square().sum())

    everything = torch.ones_like(held)
    return fitted(min(_RIDGES, key=missed), everything)
