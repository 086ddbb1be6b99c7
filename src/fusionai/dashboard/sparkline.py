"""A series of numbers as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#@"
_MISSING: Final = "x"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return at most `width` characters, oldest left, each the mean of an equal share of `values`; `x` if that is not
    finite."""
    if not values or width < 1:
        return ""
    levels = _ASCII if ascii_only else _BLOCKS
    columns = min(width, len(values))
    means = [_mean(values[i * len(values) // columns : (i + 1) * len(values) // columns]) for i in range(columns)]
    finite = [m for m in means if isfinite(m)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # A constant series becomes a low line.
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((m - low) * scale)] if isfinite(m) else _MISSING for m in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
