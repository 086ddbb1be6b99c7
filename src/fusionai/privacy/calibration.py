"""What a peer learns from text it knows (a chat template, a document): how what it sees differs from what it made.

A linear correction of its own boundaries towards the seen ones, by ridge regression, and the covariance of the rest,
for a Mahalanobis distance. The prior is no difference at all: where little is known, little is corrected. Decides the
`Part` that the white-box attack compares. Neighbours: `white_box`, `audit`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fusionai.privacy.white_box import Part

_RIDGES: Final = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8)
"""Relative to the mean square of a boundary; the last all but forbids a correction."""
_HELD_OUT: Final = 5
"""One in so many known rows chooses the ridge."""
_FLOOR: Final = 1e-8
"""Of the covariance, relative to the boundary's: what is exact would have none."""


def calibrated(depth: int, own: Tensor, seen: Tensor, target: Tensor) -> Part:
    """The part that compares `target` [texts, tokens, width], seen, with candidates, corrected and whitened.

    `own`, `seen` [rows, width]: what the attacker computes of the known text, and what it saw of it."""
    x, y = own.double(), seen.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    correction = _correction(x, y - x)
    residual = y - x - x @ correction
    rows, width = x.shape
    floor = _FLOOR * float(x.square().mean()) + 1e-30
    covariance = residual.T @ residual / max(1, rows - 1)
    diagonal = torch.eye(width, dtype=x.dtype, device=x.device)
    # Few rows say little of the covariance: pulled towards a sphere of the same size.
    trust = rows / (rows + width)
    size = float(covariance.diagonal().mean())
    covariance = trust * covariance + ((1 - trust) * size + floor) * diagonal
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    mapping = diagonal + correction.T
    projection = whitening @ mapping
    offset = whitening @ (mean_y - mapping @ mean_x)
    return Part(depth, (target.double() @ whitening.T - offset).float(), projection.float())


def _correction(x: Tensor, difference: Tensor) -> Tensor:
    """[width, width]: `x @ correction` is about `difference`, as far as rows not used for it bear that out."""
    held = torch.arange(len(x), device=x.device) % _HELD_OUT == 0
    scale = float(x.square().mean()) * len(x)

    def fitted(ridge: float, rows: Tensor) -> Tensor:
        gram = x[rows].T @ x[rows] + ridge * scale * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return torch.linalg.solve(gram, x[rows].T @ difference[rows])

    def missed(ridge: float) -> float:
        return float((difference[held] - x[held] @ fitted(ridge, ~held)).square().sum())

    everything = torch.ones_like(held)
    return fitted(min(_RIDGES, key=missed), everything)
