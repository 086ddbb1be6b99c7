"""Express grids of sampling positions (`F.affine_grid`) by a product of pixel positions and transformations.

The positions and the product are those of PyTorch's own kernel. Neighbours: `capture.export` replaces PyTorch's
operator by this function; `F.grid_sample`, which reads such a grid, is an operator of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def sampling_grids() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement in operators of the vocabulary."""
    return {torch.ops.aten.affine_grid_generator.default: _affine_grid}


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """theta [n, d, d + 1], size (n, c, *d sizes); returns [n, *d sizes, d], with the last dimension's coordinate
    first."""
    batch, _, *spatial = size
    axes = [
        _positions(count, align_corners, theta).reshape(-1, *[1] * (len(spatial) - 1 - place)).expand(spatial)
        for place, count in enumerate(spatial)
    ]
    axes.reverse()
    homogeneous = torch.stack([*axes, torch.ones(spatial, dtype=theta.dtype, device=theta.device)], -1)
    points = homogeneous.reshape(-1, len(spatial) + 1).expand(batch, -1, -1)
    return torch.bmm(points, theta.transpose(1, 2)).reshape(batch, *spatial, len(spatial))


def _positions(count: int, align_corners: bool, like: torch.Tensor) -> torch.Tensor:
    """Return the centres of `count` pixels in [-1, 1]; with `align_corners` the first and last centre are -1 and 1."""
    if count <= 1:
        return torch.zeros([count], dtype=like.dtype, device=like.device)
    positions = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    return positions if align_corners else positions * ((count - 1) / count)
