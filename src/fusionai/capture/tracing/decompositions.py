"""Express operators that the vocabulary lacks by operators that it has. `capture.tracing.export` traces with these.

- Operators that only move elements, or are longer names of others: the bits of PyTorch's own kernels, forward and
  backward, because no number is computed differently.
- Nearest and linear resizing (`F.interpolate`, `nn.Upsample`): selections of rows and their weighted sums, one spatial
  dimension after another from the last, with the positions and weights of PyTorch's kernels. Bicubic, area and
  antialiased resizing are not covered. Grids of sampling positions (`F.affine_grid`): a product as in PyTorch's kernel.
- `torch.linalg.solve_triangular`: substitution, one row after the other, for small systems of fixed size. It rounds in
  another order than LAPACK, so results agree within a few units of the last place times the matrix's condition number.
- Composite operators without kernel and derivative of their own: as PyTorch decomposes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace, _get_decomp_for_cia

from fusionai.capture.graph.lowering import spelt
from fusionai.primitives.errors import ModelError


def rearranging() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its replacement in operators of the vocabulary."""
    aten = torch.ops.aten
    return {
        aten.pixel_shuffle.default: _pixel_shuffle,
        aten.pixel_unshuffle.default: _pixel_unshuffle,
        aten.channel_shuffle.default: _channel_shuffle,
        aten.native_channel_shuffle.default: _channel_shuffle,
        aten.rot90.default: _rot90,
        aten.diag_embed.default: _diag_embed,
        aten.eye.default: lambda size, **how: _eye(size, size, **how),
        aten.eye.m: _eye,
        aten.norm.Scalar: lambda x, p=2: torch.linalg.vector_norm(x, p),
        aten.norm.ScalarOpt_dim: _norm,
        aten.dist.default: lambda x, other, p=2: torch.linalg.vector_norm(x - other, p),
    }


def _pixel_shuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    first = len(lead)
    order = (*range(first + 1), first + 3, first + 1, first + 4, first + 2)
    return split.permute(order).reshape(*lead, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    *lead, channels, height, width = x.shape
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    first = len(lead)
    order = (*range(first + 1), first + 2, first + 4, first + 1, first + 3)
    return split.permute(order).reshape(*lead, channels * factor**2, height // factor, width // factor)


def _channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    batch, channels, *rest = x.shape
    return x.reshape(batch, groups, channels // groups, *rest).transpose(1, 2).reshape(batch, channels, *rest)


def _rot90(x: torch.Tensor, turns: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    first, second = dims
    match turns % 4:
        case 1:
            return x.flip(second).transpose(first, second)
        case 2:
            return x.flip([first, second])
        case 3:
            return x.flip(first).transpose(first, second)
        case _:
            return x.clone()


def _diag_embed(x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> torch.Tensor:
    """Return a diagonal matrix with exact zeros elsewhere, even if the diagonal holds NaN or infinity."""
    size = x.shape[-1] + abs(offset)
    rows = torch.arange(size, device=x.device)[:, None]
    columns = torch.arange(size, device=x.device)[None, :]
    # Above the main diagonal the elements start in a later column; below it they end in an earlier one.
    placed = torch.nn.functional.pad(x, (max(offset, 0), max(-offset, 0)))[..., None, :]
    zeros = torch.zeros((), dtype=x.dtype, device=x.device)
    made = torch.where(columns == rows + offset, placed, zeros)
    return made.movedim((-2, -1), (dim1, dim2))


def _eye(rows: int, columns: int, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    down, across = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    return (down == across).to(dtype or torch.get_default_dtype())


def _norm(x: torch.Tensor, p: float | None, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim)


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


_SIMPLE: Final = ("linalg_norm", "linalg_matrix_norm", "linalg_matmul", "linalg_vecdot", "linalg_multi_dot")
"""Linear-algebra operators that consist of sums and products. The other ones solve systems and check whether a solution
exists, which is a branch on data that a trace can't hold."""


def composed() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its composition, for all operators that the vocabulary lacks."""
    lacking = [op for op in _collect_all_valid_cia_ops_for_aten_namespace() if not spelt(str(op))]
    return {op: _get_decomp_for_cia(op) for op in lacking if not _solves(op)}


def _solves(op: Any) -> bool:
    name = op.overloadpacket.__name__
    return name.startswith("linalg_") and name not in _SIMPLE


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
