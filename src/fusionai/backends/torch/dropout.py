"""Dropout whose mask is a pure function of counters. Decides the hash; keeps no random state.

The mask of element `i` (flat, row-major) of a node's input is

    word(0) = low 32 bits of seed      word(1) = high 32 bits of seed
    word(2) = low 32 bits of step      word(3) = high 32 bits of step
    word(4) = microbatch               word(5) = node id              (each modulo 2**32)
    mix(x)  = x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x *= 0x735A2D97; x ^= x >> 15     (modulo 2**32)
    key(k)  = fold of  h = mix(h ^ word(j))  for j = 0..5, starting from h = mix(k)
    u(i)    = mix(mix(low 32 bits of i ^ key(1)) ^ key(2) ^ mix(high 32 bits of i))
    keep(i) = u(i) >= floor(p * 2**32)

so every framework with 32-bit integers reproduces it bit for bit. Kept elements are multiplied by 1 / (1 - p). Both
multipliers are below 2**31, so the products fit into a signed 64-bit integer. Source of the mixer: C. Wellons,
"Prospecting for hash functions", 2018 (two rounds of xor-shift-multiply).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, prod
from typing import Final

import torch

_MASK: Final = 0xFFFF_FFFF
_FIRST_MULTIPLIER: Final = 0x21F0AAAD
_SECOND_MULTIPLIER: Final = 0x735A2D97
_CHUNK_ELEMENTS: Final = 1 << 22
"""Hashing takes 16 bytes per element: done piecewise so that the workspace stays small."""


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """What a mask depends on besides the node and the element."""

    seed: int
    step: int
    microbatch: int


def scaled_mask(
    shape: tuple[int, ...], p: float, key: DropoutKey, node: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of `shape` holding 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1)."""
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    count = prod(shape)
    mask = torch.empty(count, dtype=dtype, device=device)
    threshold = floor(p * 2**32)
    first, second = _fold(1, key, node), _fold(2, key, node)
    for start in range(0, count, _CHUNK_ELEMENTS):
        index = torch.arange(start, min(start + _CHUNK_ELEMENTS, count), dtype=torch.int64, device=device)
        high = _mix(index >> 32).bitwise_xor_(second)
        hashed = _mix(_mix(index.bitwise_and_(_MASK).bitwise_xor_(first)).bitwise_xor_(high))
        mask[start : start + _CHUNK_ELEMENTS] = hashed >= threshold
    return mask.mul_(scale).reshape(shape)


def dropout(x: torch.Tensor, p: float, key: DropoutKey, node: int) -> torch.Tensor:
    """x times its mask."""
    return x * scaled_mask(tuple(x.shape), p, key, node, dtype=x.dtype, device=x.device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x.mul_(_FIRST_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(_SECOND_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    return x


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * _FIRST_MULTIPLIER) & _MASK
    x ^= x >> 15
    x = (x * _SECOND_MULTIPLIER) & _MASK
    return x ^ (x >> 15)


def _fold(start: int, key: DropoutKey, node: int) -> int:
    words = (key.seed, key.seed >> 32, key.step, key.step >> 32, key.microbatch, node)
    folded = _mix_int(start)
    for word in words:
        folded = _mix_int(folded ^ (word & _MASK))
    return folded
