"""Dropout and random numbers as pure functions of counters, with the same bits as on every other backend.

Keeps no random state. The hash is that of `backends.counters`, which folds the keys; this module computes the part that
depends on the element. Neighbours: `attention`, `operators`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, prod
from typing import Final

import torch

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS, DropoutKey, folds
from fusionai.backends.torch.host import DTYPE_NAMES

_MASK: Final = 0xFFFF_FFFF
_CHUNK_ELEMENTS: Final = 1 << 22
"""Elements hashed at a time. Hashing needs 16 bytes per element, so pieces keep the workspace at 64 MiB."""


def scaled_mask(
    shape: tuple[int, ...], p: float, key: DropoutKey, node: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of `shape` with 0 where dropped and 1 / (1 - p) where kept (all 0 for p = 1)."""
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    count = prod(shape)
    mask = torch.empty(count, dtype=dtype, device=device)
    threshold = floor(p * 2**32)
    for piece, hashed in _hashed(count, key, node, device):
        mask[piece] = hashed >= threshold
    return mask.mul_(scale).reshape(shape)


def dropout(x: torch.Tensor, p: float, key: DropoutKey, node: int) -> torch.Tensor:
    """Return x times its mask."""
    return x * scaled_mask(tuple(x.shape), p, key, node, dtype=x.dtype, device=x.device)


def uniform(x: torch.Tensor, key: DropoutKey, node: int) -> torch.Tensor:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    if x.device.type == "meta":
        return torch.empty_like(x)
    bits = UNIFORM_BITS[DTYPE_NAMES[x.dtype]]
    drawn = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    for piece, hashed in _hashed(x.numel(), key, node, x.device):
        drawn[piece] = hashed >> (32 - bits)
    return drawn.mul_(2.0**-bits).reshape(x.shape)


def _hashed(count: int, key: DropoutKey, node: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield u(i) of the elements as int64, piece by piece."""
    first, second = folds(key, node)
    for start in range(0, count, _CHUNK_ELEMENTS):
        stop = min(start + _CHUNK_ELEMENTS, count)
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        high = _mix(index >> 32).bitwise_xor_(second)
        yield slice(start, stop), _mix(_mix(index.bitwise_and_(_MASK).bitwise_xor_(first)).bitwise_xor_(high))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x.mul_(FIRST_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    x.mul_(SECOND_MULTIPLIER).bitwise_and_(_MASK)
    x ^= x >> 15
    return x
