"""Arithmetic of `execution.training.codecs` over groups of numbers: compiled loops and the Hadamard rotation.

The rotation multiplies each group by fixed random signs, then by a Hadamard matrix, which makes its numbers nearly
normally distributed. Each compiled loop does in one pass what `codecs` does with whole-array operations, in the same
float32 operation order. Both give the same bits, so a machine without a compiler replays a step exactly. Compiled
through `scheduling.kernels.compiled`."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.wire.codecs import GROUPS


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


def rotate(x: Any, sequence: Any, starts: Any, factor: Any, out: Any) -> None:
    """Write each row of x float32 [groups, width] times its signs, times the Hadamard matrix, times `factor`. The signs
    are those of `sequence` from the row's entry of starts int64 [groups] onwards. `width` is a power of two from 8."""
    groups, width = x.shape
    for group in range(groups):
        start, row = starts[group], out[group]
        for at in range(width):
            row[at] = x[group, at] * sequence[start + at]
        butterflies(row)
        for at in range(width):
            row[at] *= factor


def rotate_back(y: Any, sequence: Any, starts: Any, factor: Any, out: Any) -> None:
    """Write each row of y float32 [groups, width] times the Hadamard matrix, times its signs, times `factor`."""
    groups, width = y.shape
    for group in range(groups):
        start, row = starts[group], out[group]
        for at in range(width):
            row[at] = y[group, at]
        butterflies(row)
        for at in range(width):
            row[at] = row[at] * sequence[start + at] * factor


def butterflies(row: Any) -> None:
    """Multiply a row float32 [width] by the Hadamard matrix in place. The first three of its steps, over neighbouring
    numbers, take eight numbers at a time, the others run along the row."""
    width = row.shape[0]
    for at in range(0, width, 8):
        a0, a1, a2, a3 = row[at], row[at + 1], row[at + 2], row[at + 3]
        a4, a5, a6, a7 = row[at + 4], row[at + 5], row[at + 6], row[at + 7]
        b0, b1, b2, b3 = a0 + a1, a0 - a1, a2 + a3, a2 - a3
        b4, b5, b6, b7 = a4 + a5, a4 - a5, a6 + a7, a6 - a7
        a0, a1, a2, a3 = b0 + b2, b1 + b3, b0 - b2, b1 - b3
        a4, a5, a6, a7 = b4 + b6, b5 + b7, b4 - b6, b5 - b7
        row[at], row[at + 1], row[at + 2], row[at + 3] = a0 + a4, a1 + a5, a2 + a6, a3 + a7
        row[at + 4], row[at + 5], row[at + 6], row[at + 7] = a0 - a4, a1 - a5, a2 - a6, a3 - a7
    half = 8
    while half < width:
        for start in range(0, width, 2 * half):
            for at in range(start, start + half):
                a, b = row[at], row[at + half]
                row[at] = a + b
                row[at + half] = a - b
        half *= 2


Floats = npt.NDArray[np.float32]

_FACTOR: Final = np.float32(1 / 8)
"""Scale of a transformed group. All factors are powers of two, hence exact."""
_WINDOWS: Final = 2**16
"""Number of windows of the sign sequence; a group's signs are one window."""
_KNOWN: Final = 2**16
"""Groups whose windows are computed once (chosen: 512 KiB)."""


def turned(x: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """Transform groups [groups, width]. Orthogonal up to a power of two. `starts`: where each group's signs begin."""
    if available():
        out = np.empty_like(x)
        compiled(rotate)(x, sequence(), starts, _FACTOR, out)
        return out
    return _butterflied(x * _signs(starts, x.shape[1])) * _FACTOR


def turned_back(y: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    factor = np.float32(1 / (float(_FACTOR) * y.shape[1]))
    if available():
        out = np.empty_like(y)
        compiled(rotate_back)(y, sequence(), starts, factor, out)
        return out
    return _butterflied(y) * _signs(starts, y.shape[1]) * factor


def _signs(starts: npt.NDArray[np.int64], width: int) -> Floats:
    """Return each group's own signs. They are fixed for ever and do not depend on a library's random numbers. With
    equal signs for all groups, the quantisation errors of similar rows would be similar too. They would not cancel out
    in sums over rows, such as gradients of weights, and similar rows are the normal case."""
    return sliding_window_view(sequence(), width)[starts]


def starts_of(groups: int) -> npt.NDArray[np.int64]:
    """Return where in the sequence each group's signs begin: a hash of its number (final mix of MurmurHash3)."""
    return _known_starts()[:groups] if groups <= _KNOWN else _starts(groups)


@cache
def _known_starts() -> npt.NDArray[np.int64]:
    return _starts(_KNOWN)


def _starts(groups: int) -> npt.NDArray[np.int64]:
    mixed = np.arange(groups, dtype=np.uint32)
    mixed += np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return (mixed % np.uint32(_WINDOWS)).astype(np.int64)


@cache
def sequence() -> Floats:
    """Return the sequence of signs, 1 and -1, derived from SHA-256."""
    length = _WINDOWS + max(group for groups in GROUPS.values() for group in groups)
    digests = b"".join(hashlib.sha256(b"fusionai %d" % number).digest() for number in range(-(-length // 256)))
    bits = np.unpackbits(np.frombuffer(digests, np.uint8))[:length]
    return 1 - 2 * bits.astype(np.float32)


def _butterflied(x: Floats) -> Floats:
    rows, width = x.shape
    half = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while half < width:
            pairs = x.reshape(rows, width // (2 * half), 2, half)
            x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            half *= 2
    return x.reshape(rows, width)
