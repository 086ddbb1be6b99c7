"""Trace functions of PyTorch whose own trace a graph can't hold, in a form that it can.

Dropout and other draws with `inplace=True` become the function and a copy of its result: PyTorch's decomposition into
draws and products would hide that they are dropout, which evaluation leaves out. `fill_diagonal_` becomes a selection
by row and column instead of a strided view. `F.gaussian_nll_loss` does not check that variances are positive, a branch
on data. `take_along_dim` does not compare sizes, and `einsum` orders its products by the example's sizes: both would
fix a size that varies. Indices of a triangle are constants.

Neighbours: `capture.export` traces under `Functions`; `capture.by_mode` and `capture.draws` handle the draws.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.backends import opt_einsum
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from fusionai.primitives.errors import ModelError


class Functions(TorchFunctionMode):
    """While open, these functions are traced in their other form."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        functional = _IN_PLACE.get(func)
        if functional is None and func in _ASKED and named.pop("inplace", False):
            functional = func
        if functional is not None:
            return args[0].copy_(functional(*args, **named))
        return _OTHER.get(func, func)(*args, **(kwargs or {}))


def _fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    if wrap or x.ndim != 2:
        raise ModelError(
            "the model calls fill_diagonal_ with wrap or on a tensor that is no matrix, which a graph can't hold.",
            hint="Select by torch.where on rows and columns instead.",
        )
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.copy_(x.masked_fill(rows[:, None] == columns, fill_value))


def _take_along(
    input: torch.Tensor,  # noqa: A002 - PyTorch's names, which callers may use
    indices: torch.Tensor,
    dim: int | None = None,
) -> torch.Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    along = dim % input.ndim
    others = [at for at in range(input.ndim) if at != along]
    if indices.ndim == input.ndim and all(statically_known_true(input.shape[i] == indices.shape[i]) for i in others):
        return input.gather(along, indices)
    return torch.take_along_dim(input, indices, dim)


def _triangle(kept: Callable[[int, int], bool]) -> Callable[..., torch.Tensor]:
    """Return a function for the rows and columns of the places with `kept` (column, row + offset)."""

    def indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype = torch.int64, **how: Any) -> torch.Tensor:
        places = [(at, along) for at in range(row) for along in range(col) if kept(along, at + offset)]
        found = torch.tensor(places, dtype=dtype, device=how.get("device")).reshape(-1, 2)
        return found.transpose(0, 1).contiguous()

    return indices


def _einsum(equation: str, *operands: Any) -> torch.Tensor:
    """Multiply three or more operands in the order that opt_einsum finds best for the example's sizes."""
    given: list[torch.Tensor] = list(operands[0]) if isinstance(operands[0], list | tuple) else list(operands)
    if len(given) <= 2 or not opt_einsum.enabled or not opt_einsum.is_available():
        return torch.einsum(equation, *operands)
    shapes = [tuple(_example(size) for size in operand.shape) for operand in given]
    search = opt_einsum.get_opt_einsum()
    path = search.contract_path(equation, *shapes, optimize=opt_einsum.strategy, shapes=True)[0]
    return torch._VF.einsum(equation, given, path=list(chain.from_iterable(path)))  # pyright: ignore


def _example(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _gaussian_nll_loss(
    input: torch.Tensor,  # noqa: A002 - PyTorch's names, which callers may use
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    variance = var.clone() if isinstance(var, torch.Tensor) else var * torch.ones_like(input)
    if variance.ndim == input.ndim - 1:
        variance = variance.unsqueeze(-1)
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    match reduction:
        case "mean":
            return loss.mean()
        case "sum":
            return loss.sum()
        case _:
            return loss


_IN_PLACE: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.dropout_: torch.dropout,
    torch.feature_dropout_: torch.feature_dropout,
    torch.alpha_dropout_: torch.alpha_dropout,
    torch.feature_alpha_dropout_: torch.feature_alpha_dropout,
    torch.rrelu_: torch.rrelu,
}
_ASKED: Final = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}
)
"""Functions with an argument `inplace`, which PyTorch passes on by name."""
_OTHER: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.tril_indices: _triangle(operator.le),
    torch.triu_indices: _triangle(operator.ge),
    torch.einsum: _einsum,
    F.gaussian_nll_loss: _gaussian_nll_loss,
}
