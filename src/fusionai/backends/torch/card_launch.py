"""Whether a card runs this project's own kernels, and the one place where they are launched.

The kernels are written in Triton, which PyTorch's builds for CUDA and ROCm bring on Linux. If it is missing or
can't compile a kernel, operators compute instead: they are the reference, and slower. Neighbours:
`card_rows`, `card_products` and `card_attention` are the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from fusionai.backends.binding import first_line

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failure:
    """Why kernels are not used any more in this process; None while they are."""

    reason: str | None = None


_FAILED: Final = _Failure()
SIZES: Final = (
    *("first", "count", "fixed", "width", "row", "fed_width", "made_width", "x_width", "y_width", "columns", "biased"),
    *("chosen_experts", "x_step", "known", "rows", "shares", "table_width", "page_tokens", "capacity", "window"),
    *("chunk", "split"),
)
"""Arguments of kernels for whose values Triton compiles nothing anew."""
ANYWHERE: Final = ("mem", "fed", "made", "chosen", "slots", "tiles", "table", "rings", "line", "parts")
ANYWHERE_OF_PRODUCTS: Final = ("x", "y", "rows_at", "bias", "indices")
"""Pointers for whose alignment Triton compiles nothing anew."""


def unused(device: torch.device) -> str | None:
    """Return why operators compute on this device instead of the kernels; None if the kernels do."""
    if device.type != "cuda":
        return f"the kernels are for CUDA and ROCm, not for {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return _FAILED.reason


def failed(error: Exception) -> None:
    """Record that a kernel could not be compiled or launched, and warn once."""
    if _FAILED.reason is None:
        _FAILED.reason = f"{type(error).__name__}: {first_line(error)}"
        log.warning("compiled kernels for this card: unavailable, using slower operators: %s", _FAILED.reason)


def precision() -> str:
    """Return how products of float32 are made: on NVIDIA's cards from three products of parts, almost as exact."""
    return "ieee" if torch.version.hip else "tf32x3"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on as many groups of threads as `grid` says."""
    run: Callable[..., None] = kernel[grid]
    run(*args, **options)
