"""A shuffled order with random access: a keyed bijection of range(size) that needs no storage.

A Feistel network over the smallest even number of bits that holds `size`, iterated until the value is in range (cycle
walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It uses only integer arithmetic and SHA-256
keys, so the order is the same on every machine and with every library version. Neighbours: `order` picks samples with
it; `split` and `source` derive keys.
"""

from __future__ import annotations

import hashlib
from typing import Final

_ROUNDS: Final = 6
_MASK_64: Final = 2**64 - 1


def derived_key(seed: int, *parts: int | str) -> int:
    """64 bits derived from the seed and the given purpose."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters its input."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class Permutation:
    """`at(0), ..., at(size - 1)` are 0..size-1 in an order determined by (seed, parts)."""

    def __init__(self, size: int, seed: int, *parts: int | str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = tuple(derived_key(seed, *parts, "round", number) for number in range(_ROUNDS))

    def at(self, index: int) -> int:
        """Element `index` of the order. Raises `IndexError` outside range(size)."""
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} is outside 0..{self._size - 1}")
        value = self._encrypt(index)
        # The domain is less than four times the size, so this takes under four turns on average. It always ends,
        # because the cycle of an element in range returns into the range.
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right
