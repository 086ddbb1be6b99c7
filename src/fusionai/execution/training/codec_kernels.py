"""Inner loops of `execution.training.codecs` over groups of numbers, compiled with numba.

Each loop does in one pass what `codecs` does with whole-array operations, in the same float32 operation order. Both
give the same bits, so a machine without a compiler replays a step exactly. Compiled through
`scheduling.kernels.compiled`."""

from __future__ import annotations

from typing import Any

import numpy as np


def largest_bits(bits: Any, largest: Any) -> None:
    """Write the float32 bits of each group's largest magnitude, uint32 [groups]. `bits`: float32 bits [groups,
    width]."""
    groups, width = bits.shape
    for group in range(groups):
        most = np.uint32(0)
        for at in range(width):
            most = max(most, bits[group, at] & np.uint32(0x7FFFFFFF))
        largest[group] = most


def to_levels(x: Any, inverse: Any, most: Any, levels: Any) -> None:
    """Write levels int8: x float32 [groups, width] times inverse [groups], rounded half to even, clipped to +-most."""
    groups, width = x.shape
    for group in range(groups):
        factor = inverse[group]
        for at in range(width):
            level = np.rint(x[group, at] * factor)
            levels[group, at] = np.int8(min(max(level, -most), most))


def from_levels(levels: Any, scales: Any, x: Any) -> None:
    """Write x float32: levels int8 [groups, width] times scales float32 [groups]."""
    groups, width = levels.shape
    for group in range(groups):
        scale = scales[group]
        for at in range(width):
            x[group, at] = np.float32(levels[group, at]) * scale


def times_windows(x: Any, sequence: Any, starts: Any, out: Any) -> None:
    """Write each row of x float32 [groups, width] times `sequence` from its entry of starts int64 [groups] onwards."""
    groups, width = x.shape
    for group in range(groups):
        start = starts[group]
        for at in range(width):
            out[group, at] = x[group, at] * sequence[start + at]


def butterflies(x: Any) -> None:
    """Multiply each row of x float32 [groups, width] by the Hadamard matrix in place. `width` is a power of two."""
    groups, width = x.shape
    for group in range(groups):
        half = 1
        while half < width:
            for start in range(0, width, 2 * half):
                for at in range(start, start + half):
                    a, b = x[group, at], x[group, at + half]
                    x[group, at] = a + b
                    x[group, at + half] = a - b
            half *= 2
