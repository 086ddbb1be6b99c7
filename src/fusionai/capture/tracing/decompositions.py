"""Express operators and functions that the vocabulary lacks by operators that it has. `capture.tracing.export` uses
them.

- Operators that only move elements, or are longer names of others: the bits of PyTorch's own kernels, forward and
  backward, because no number is computed differently.
- Nearest and linear resizing (`F.interpolate`, `nn.Upsample`): selections of rows and their weighted sums, one spatial
  dimension after another from the last, with the positions and weights of PyTorch's kernels. Bicubic, area and
  antialiased resizing are not covered. Grids of sampling positions (`F.affine_grid`): a product as in PyTorch's kernel.
- `torch.linalg.solve_triangular`: substitution, one row after the other, for small systems of fixed size. It rounds in
  another order than LAPACK, so results agree within a few units of the last place times the matrix's condition number.
- Composite operators without kernel and derivative of their own: as PyTorch decomposes them.
- Discrete Fourier transforms (`torch.fft`): products with matrices of cosines and sines, one along each dimension, for
  varying sizes too. It takes n * n steps instead of n log n and rounds differently: results agree to about 1e-6 of the
  largest, not bit for bit. Angles are reduced modulo the full circle in integers first, so they are as exact for long
  dimensions as for short ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace, _get_decomp_for_cia
from torch.fx.experimental.symbolic_shapes import statically_known_true

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
        aten.norm.ScalarOpt_dim: lambda x, p, dim, keepdim=False: torch.linalg.vector_norm(
            x, 2 if p is None else p, dim, keepdim
        ),
        aten.dist.default: lambda x, other, p=2: torch.linalg.vector_norm(x - other, p),
        aten.linalg_solve_triangular.default: _solved,
        aten.affine_grid_generator.default: _affine_grid,
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


LARGEST_SYSTEM: Final = 64
"""Most rows of a matrix (chosen): each row becomes several nodes of the graph."""


def _solved(
    matrix: torch.Tensor, given: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Return X of `matrix` @ X = `given`, or without `left` of X @ `matrix` = `given`."""
    if not left:
        transposed = _solved(matrix.mT, given.mT, upper=not upper, unitriangular=unitriangular)
        return transposed.mT
    size = matrix.shape[-1]
    if not isinstance(size, int) or size > LARGEST_SYSTEM:
        raise ModelError(
            f"a triangular system of {size} equations is too large for a graph, which solves it row by row.",
            hint=f"Solve systems of a fixed size of at most {LARGEST_SYSTEM}.",
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

    def solves(op: Any) -> bool:
        name = op.overloadpacket.__name__
        return name.startswith("linalg_") and name not in _SIMPLE

    lacking = [op for op in _collect_all_valid_cia_ops_for_aten_namespace() if not spelt(str(op))]
    return {op: _get_decomp_for_cia(op) for op in lacking if not solves(op)}


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
        resized = partial(_nearest, offset)
        table[packet.vec] = lambda x, size, factors, resized=resized: resized(x, *_asked(x, size, factors))
        table[packet.default] = lambda x, size, *scales, resized=resized: resized(x, size, _filled(scales, size))
    for packet in (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d):
        table[packet.vec] = lambda x, size, corners, factors: _linear(x, *_asked(x, size, factors), corners)
        table[packet.default] = lambda x, size, corners, *scales: _linear(x, size, _filled(scales, size), corners)
    return table


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


def _nearest(offset: float, x: torch.Tensor, output_size: Sequence[int], scales: Scales) -> torch.Tensor:
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


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """theta [n, d, d + 1], size (n, c, *d sizes); returns [n, *d sizes, d], the last dimension's coordinate first."""
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


LARGEST_TRANSFORM: Final = 32_768
"""Largest size of a transform. Above, position times frequency exceeds 31 bits, and a matrix takes 4 GiB."""
Parts = tuple[torch.Tensor, torch.Tensor | None]
"""Real and imaginary part; None is zero."""


def _split(x: torch.Tensor) -> Parts:
    if x.is_complex():
        return x.real, x.imag
    return (x if x.is_floating_point() else x.to(torch.get_default_dtype())), None


def _tables(rows: Any, columns: Any, size: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angle of position times frequency, [rows, columns]."""
    if isinstance(size, int) and size > LARGEST_TRANSFORM:
        raise ModelError(
            f"a Fourier transform over {size} numbers is too large for a product with a matrix.",
            hint=f"Transform at most {LARGEST_TRANSFORM} numbers at once.",
        )
    places = torch.arange(rows, device=like.device)[:, None] * torch.arange(columns, device=like.device)
    turns = (places % size).to(like.dtype) / size
    angle = turns * (2 * math.pi)
    return torch.cos(angle), torch.sin(angle)


def _scaled(x: torch.Tensor, size: Any, norm: str | None, inverse: bool) -> torch.Tensor:
    if norm not in (None, "backward", "forward", "ortho"):
        raise ModelError(f"the normalisation {norm!r} of a Fourier transform is not 'backward', 'forward' or 'ortho'.")
    if norm == "ortho":
        count = torch.full((1,), size, dtype=x.dtype, device=x.device)
        return x * torch.rsqrt(count)
    return x / size if (norm == "forward") != inverse else x


class _Dimension:
    """One dimension of some tensors, moved to the second-last place unless it is the last."""

    def __init__(self, x: torch.Tensor, dim: int) -> None:
        self._dim = dim % x.ndim
        self._place = x.ndim - 1 if self._dim == x.ndim - 1 else x.ndim - 2

    def taken(self, x: torch.Tensor, count: Any) -> torch.Tensor:
        """Move the dimension into place and keep at most `count` elements of it."""
        x = x.transpose(self._dim, self._place) if self._dim != self._place else x
        if count is None or statically_known_true(count == x.shape[self._place]):
            return x
        return x[..., :count] if self._place == x.ndim - 1 else x[..., :count, :]

    def size(self, x: torch.Tensor) -> Any:
        return x.shape[self._place]

    def product(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x @ table if self._place == x.ndim - 1 else table.transpose(0, 1) @ x

    def back(self, x: torch.Tensor) -> torch.Tensor:
        # In the layout of torch.fft: strides in another order would be compared by sizes that vary.
        return x.transpose(self._dim, self._place).contiguous() if self._dim != self._place else x


def _transform(parts: Parts, size: Any, dim: int, norm: str | None, *, inverse: bool, half: bool = False) -> Parts:
    """Transform along one dimension; `half`: only frequencies up to the middle one."""
    along = _Dimension(parts[0], dim)
    real, imaginary = (None if part is None else along.taken(part, size) for part in parts)
    assert real is not None
    size = parts[0].shape[dim] if size is None else size
    cosine, sine = (
        _scaled(table, size, norm, inverse)
        for table in _tables(along.size(real), size // 2 + 1 if half else size, size, real)
    )
    # e^(-ix) forward, e^(ix) inverse.
    made, turned = along.product(real, cosine), along.product(real, sine)
    turned = turned if inverse else -turned
    if imaginary is not None:
        crossed, kept = along.product(imaginary, sine), along.product(imaginary, cosine)
        made, turned = made - crossed if inverse else made + crossed, turned + kept
    return along.back(made), along.back(turned)


def _real_from_half(parts: Parts, size: Any, dim: int, norm: str | None, *, inverse: bool) -> torch.Tensor:
    """Return the real signal with these frequencies up to the middle one; the others are their conjugates."""
    along = _Dimension(parts[0], dim)
    size = 2 * (parts[0].shape[dim] - 1) if size is None else size
    real, imaginary = (None if part is None else along.taken(part, size // 2 + 1) for part in parts)
    assert real is not None
    cosine, sine = _tables(along.size(real), size, size, real)
    places = torch.arange(along.size(real), device=real.device)
    twice = ((places != 0) & (2 * places != size)).to(real.dtype)[:, None] + 1.0
    made = along.product(real, _scaled(cosine, size, norm, inverse) * twice)
    if imaginary is not None:
        crossed = along.product(imaginary, _scaled(sine, size, norm, inverse) * twice)
        made = made - crossed if inverse else made + crossed
    return along.back(made)


def _joined(parts: Parts) -> torch.Tensor:
    real, imaginary = parts
    return torch.complex(real, torch.zeros_like(real) if imaginary is None else imaginary)


def _function(
    *, inverse: bool, half: bool = False, real: bool = False, dims: tuple[int, ...] | None = None
) -> Callable[..., torch.Tensor]:
    """Return a transform over several dimensions, by default `dims` or all. `half`: of real numbers, to frequencies up
    to the middle one. `real`: from such frequencies to real numbers."""

    def function(
        x: torch.Tensor,
        s: Sequence[int] | None = None,
        dim: Sequence[int] | int | None = dims,
        norm: str | None = None,
    ) -> torch.Tensor:
        parts, (*others, (last, size)) = _split(x), _dims(x, s, dim)
        if real:
            for at, own in others:
                parts = _transform(parts, own, at, norm, inverse=True)
            return _real_from_half(parts, size, last, norm, inverse=inverse)
        parts = _transform(parts, size, last, norm, inverse=inverse, half=half)
        for at, own in reversed(others):
            parts = _transform(parts, own, at, norm, inverse=inverse)
        return _joined(parts)

    return function


def _one(*, inverse: bool, half: bool = False, real: bool = False) -> Callable[..., torch.Tensor]:
    along = _function(inverse=inverse, half=half, real=real)

    def function(x: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> torch.Tensor:
        return along(x, None if n is None else (n,), (dim,), norm)

    return function


def _dims(x: torch.Tensor, sizes: Sequence[int] | None, dim: Sequence[int] | int | None) -> list[tuple[int, Any]]:
    """Return each dimension with its requested size; None keeps the dimension's own size."""
    if isinstance(dim, int):
        dim = (dim,)
    if dim is None:
        dim = range(-len(sizes), 0) if sizes is not None else range(x.ndim)
    given = [None] * len(dim) if sizes is None else [None if size == -1 else size for size in sizes]
    return list(zip(dim, given, strict=True))


FOURIER: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.fft.fft: _one(inverse=False),
    torch.fft.ifft: _one(inverse=True),
    torch.fft.rfft: _one(inverse=False, half=True),
    torch.fft.ihfft: _one(inverse=True, half=True),
    torch.fft.irfft: _one(inverse=True, real=True),
    torch.fft.hfft: _one(inverse=False, real=True),
    torch.fft.fft2: _function(inverse=False, dims=(-2, -1)),
    torch.fft.ifft2: _function(inverse=True, dims=(-2, -1)),
    torch.fft.rfft2: _function(inverse=False, half=True, dims=(-2, -1)),
    torch.fft.irfft2: _function(inverse=True, real=True, dims=(-2, -1)),
    torch.fft.fftn: _function(inverse=False),
    torch.fft.ifftn: _function(inverse=True),
    torch.fft.rfftn: _function(inverse=False, half=True),
    torch.fft.irfftn: _function(inverse=True, real=True),
}
"""Function of `torch.fft` -> its products."""
