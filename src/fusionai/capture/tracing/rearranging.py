"""Express operators that only move elements, or are longer names of another operator, by operators of the vocabulary.

Forward and gradients have the bits of PyTorch's own kernels, because no number is computed differently. Neighbours:
`capture.tracing.export` replaces PyTorch's operators by these functions.

Composite operators that have no kernel and no derivative of their own are decomposed as PyTorch does, unless the
vocabulary contains them. `torch.linalg.solve_triangular` is substitution, one row after the other, for small systems of
fixed size; it rounds in another order than LAPACK, so results agree within a few units of the last place times the
condition number of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
