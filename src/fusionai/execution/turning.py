"""Groups of numbers turned so that they look normally distributed, and back. Decides the signs.

A Hadamard matrix behind signs of each group's own; the same bits on every machine, compiled or not.
Neighbours: `codecs` quantises what is turned, `codec_kernels` has the compiled loops.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from fusionai.execution import codec_kernels as kernels
from fusionai.scheduling.compiled import available, compiled
from fusionai.wire.codecs import GROUPS

Floats = npt.NDArray[np.float32]

_FACTOR: Final = np.float32(1 / 8)
"""Of a turned group. All factors are powers of two, hence exact."""
_WINDOWS: Final = 2**16
"""Signs of a group are those of a window of one sequence; there are so many."""


def turned(x: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """Orthogonal but for a power of two, which the scale takes up. `starts`: of each group's signs."""
    return butterflied(signed(x, starts)) * _FACTOR


def turned_back(y: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    x = signed(butterflied(y), starts)
    x *= np.float32(1 / (float(_FACTOR) * y.shape[1]))
    return x


def signed(x: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """Each group times signs of its own, the same for everybody and for ever: no library's random numbers are.

    Were they the same for all, what packing loses of rows that are alike would be alike too: it would not cancel out
    in a sum over rows, as gradients of weights are, and what rows have in common is most of them."""
    if available():
        out = np.empty_like(x)
        compiled(kernels.times_windows)(x, sequence(), starts, out)
        return out
    return x * sliding_window_view(sequence(), x.shape[1])[starts]


def starts_of(groups: int) -> npt.NDArray[np.int64]:
    """Where in the sequence each group's signs begin: its number, well mixed (the last steps of MurmurHash3)."""
    mixed = np.arange(groups, dtype=np.uint32)
    mixed += np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    return (mixed % np.uint32(_WINDOWS)).astype(np.int64)


@cache
def sequence() -> Floats:
    """1 and -1 from SHA-256."""
    length = _WINDOWS + max(group for groups in GROUPS.values() for group in groups)
    digests = b"".join(hashlib.sha256(b"fusionai %d" % number).digest() for number in range(-(-length // 256)))
    bits = np.unpackbits(np.frombuffer(digests, np.uint8))[:length]
    return 1 - 2 * bits.astype(np.float32)


def butterflied(x: Floats) -> Floats:
    """`x` is overwritten."""
    if available():
        compiled(kernels.butterflies)(x)
        return x
    rows, width = x.shape
    half = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while half < width:
            pairs = x.reshape(rows, width // (2 * half), 2, half)
            x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            half *= 2
    return x.reshape(rows, width)
