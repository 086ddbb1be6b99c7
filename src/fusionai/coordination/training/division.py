"""Divides the parameters of a model among the replicas that sum them in an exchange.

Each parameter is flat and cut into rows of `ROW` numbers, so that groups of a codec never cross two shares. Every
replica sums one run of rows of each parameter, in proportion to its weight. The division follows from names, sizes and
weights alone, so every stage of every replica computes the same, whatever its cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Final
from zlib import crc32

ROW: Final = 4096
"""Numbers of a row: a multiple of every codec's group size (chosen: a larger row divides small parameters unevenly)."""

Span = tuple[int, int]
"""Half-open range of numbers of one flat parameter."""


def spans(key: str, size: int, weights: Sequence[float]) -> tuple[Span, ...]:
    """Return each member's span of the parameter; together they cover it. A parameter of few rows goes to few members,
    which differ from parameter to parameter."""
    rows, whole = -(-size // ROW), sum(weights)
    shift = crc32(key.encode()) / 2**32
    ends: list[int] = []
    before = 0.0
    for weight in weights[:-1]:
        before += weight
        ends.append(min(size, ROW * floor(rows * (before / whole) + shift)))
    return tuple(zip([0, *ends], [*ends, size], strict=True))
