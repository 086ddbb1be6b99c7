"""Dropout whose mask is a pure function of counters, the same bits as on every other backend. Keeps no random state.

The hash is that of `backends.counters`, which folds the keys; this is the element's part. Neighbours: `attention`,
`operators`.
"""

from __future__ import annotations

from math import floor, prod
from typing import Final

import torch

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, DropoutKey, folds

_MASK: Final = 0xFFFF_FFFF
_CHUNK_ELEMENTS: Final = 1 << 22
"""Hashing takes 16 bytes per element: done piecewise so that the workspace stays small."""


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
    first, second = folds(key, node)
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
    x.mul_(FIRST_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(SECOND_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    return x
