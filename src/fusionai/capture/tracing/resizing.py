"""Express nearest and linear resizing (`F.interpolate`, `nn.Upsample`) by selections of rows and their weighted sums.

Positions and weights are those of PyTorch's own kernels. The spatial dimensions are resized one after another, the last
first. Bicubic, area and antialiased resizing are not covered.

Grids of sampling positions (`F.affine_grid`) are a product of pixel positions and transformations; positions and
product are those of PyTorch's own kernel.

Neighbours: `capture.tracing.export` replaces PyTorch's operators by these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Scales = Sequence[float | None]


def resizing() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement in operators of the vocabulary."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {}
    for packet, offset in (
        (aten.upsample_nearest1d, 0.0),
        (aten.upsample_nearest2d, 0.0),
        (aten.upsample_nearest3d, 0.0),
        (aten._upsample_nearest_exact1d, 0.5),
        (aten._upsample_nearest_exact2d, 0.5),
        (aten._upsample_nearest_exact3d, 0.5),
    ):
        table[packet.vec] = partial(_nearest_of_factors, offset)
        table[packet.default] = partial(_nearest_of_scales, offset)
    for packet in (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d):
        table[packet.vec] = _linear_of_factors
        table[packet.default] = _linear_of_scales
    return table


def _nearest_of_factors(
    offset: float, x: torch.Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    return _nearest(x, *_asked(x, output_size, scale_factors), offset)


def _nearest_of_scales(
    offset: float, x: torch.Tensor, output_size: Sequence[int], *scales: float | None
) -> torch.Tensor:
    return _nearest(x, output_size, _filled(scales, output_size), offset)


def _linear_of_factors(
    x: torch.Tensor, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    return _linear(x, *_asked(x, output_size, scale_factors), align_corners)


def _linear_of_scales(
    x: torch.Tensor, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor:
    return _linear(x, output_size, _filled(scales, output_size), align_corners)


def _filled(scales: Scales, output_size: Sequence[int]) -> Scales:
    return (*scales, *[None] * (len(output_size) - len(scales)))


def _asked(
    x: torch.Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> tuple[Sequence[int], Scales]:
    """Return the output sizes and the given scale factors; PyTorch takes one of the two."""
    if output_size is not None:
        return output_size, [None] * len(output_size)
    factors = scale_factors or ()
    return [int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)], factors


def _nearest(x: torch.Tensor, output_size: Sequence[int], scales: Scales, offset: float) -> torch.Tensor:
    for dim, size, scale in _from_the_last(x, output_size, scales):
        places = torch.arange(size, dtype=torch.float32, device=x.device)
        if offset:
            places = places + offset
        places = (places * _step(x.shape[dim], size, scale)).to(torch.int64)
        x = x.index_select(dim, places.clamp(max=x.shape[dim] - 1))
    return x


def _linear(x: torch.Tensor, output_size: Sequence[int], scales: Scales, align_corners: bool) -> torch.Tensor:
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.to(torch.float32)
    for dim, size, scale in _from_the_last(x, output_size, scales):
        last = x.shape[dim] - 1
        places = torch.arange(size, dtype=torch.float32, device=x.device)
        if align_corners:
            places = places * (last / (size - 1) if size > 1 else 0.0)
        else:
            places = ((places + 0.5) * _step(x.shape[dim], size, scale) - 0.5).clamp(min=0.0)
        below = places.to(torch.int64).clamp(max=last)
        above = (below + 1).clamp(max=last)
        weight = (places - below.to(torch.float32)).clamp(min=0.0, max=1.0).to(x.dtype)
        weight = weight.reshape([size] + [1] * (x.ndim - 1 - dim))
        x = x.index_select(dim, below) * (1.0 - weight) + x.index_select(dim, above) * weight
    return x.to(dtype)


def _from_the_last(x: torch.Tensor, output_size: Sequence[int], scales: Scales) -> list[tuple[int, int, float | None]]:
    return list(zip(range(2, x.ndim), output_size, scales, strict=True))[::-1]


def _step(size: int, reached: int, scale: float | None) -> float:
    return 1.0 / scale if scale is not None and scale > 0 else size / reached


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
