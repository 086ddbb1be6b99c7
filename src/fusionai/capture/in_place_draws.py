"""Dropout and other draws that write in place (`inplace=True`), traced as the function and a copy of its result.

PyTorch decomposes the in-place forms into draws and products, which hides from the graph that they are dropout, to be
left out in evaluation.

Neighbours: `capture.export` traces under `InPlaceDraws`; `capture.by_mode` and `capture.draws` understand the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

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
"""Functions with an argument `inplace`, which PyTorch hands on by name."""


class InPlaceDraws(TorchFunctionMode):
    """While open, these functions write what their functional form returns."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        functional = _IN_PLACE.get(func)
        if functional is None and func in _ASKED and named.pop("inplace", False):
            functional = func
        if functional is None:
            return func(*args, **(kwargs or {}))
        return args[0].copy_(functional(*args, **named))
