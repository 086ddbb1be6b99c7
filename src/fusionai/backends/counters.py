"""Keys of dropout masks and random numbers, and how the keys are folded: the same on every backend.

Pure integer arithmetic, no framework. The mask of element `i` (flat, row-major) of a node's input is

    word(0) = low 32 bits of seed      word(1) = high 32 bits of seed
    word(2) = low 32 bits of step      word(3) = high 32 bits of step
    word(4) = microbatch               word(5) = node id              (each modulo 2**32)
    mix(x)  = x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x *= 0x735A2D97; x ^= x >> 15     (modulo 2**32)
    key(k)  = fold of  h = mix(h ^ word(j))  for j = 0..5, starting from h = mix(k)
    u(i)    = mix(mix(low 32 bits of i ^ key(1)) ^ key(2) ^ mix(high 32 bits of i))
    keep(i) = u(i) >= floor(p * 2**32)

so every framework with 32-bit integers reproduces it bit for bit. Kept elements are multiplied by 1 / (1 - p). A random
number (`fusion.uniform`) is the first UNIFORM_BITS of u(i), as many as its dtype holds exactly, read as a fraction in
[0, 1). Both multipliers are below 2**31, so the products fit into a signed 64-bit integer. Source of the mixer: C.
Wellons, "Prospecting for hash functions", 2018 (two rounds of xor-shift-multiply).

Neighbours: `torch.semantic`, `jax.semantic` and `onnxruntime.semantic` compute the part that depends on the element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_MULTIPLIER: Final = 0x21F0AAAD
"""First multiplier of the mixer."""
SECOND_MULTIPLIER: Final = 0x735A2D97
"""Second multiplier of the mixer."""
UNIFORM_BITS: Final = {"float64": 32, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a random number per dtype: as many as the dtype's significand holds, at most 32."""
_MASK: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """Inputs of a dropout mask besides the node and the element."""

    seed: int
    step: int
    microbatch: int


def folds(key: DropoutKey, node: int) -> tuple[int, int]:
    """Return key(1) and key(2)."""
    return _fold(1, key, node), _fold(2, key, node)


def _fold(start: int, key: DropoutKey, node: int) -> int:
    words = (key.seed, key.seed >> 32, key.step, key.step >> 32, key.microbatch, node)
    folded = _mix(start)
    for word in words:
        folded = _mix(folded ^ (word & _MASK))
    return folded


def _mix(x: int) -> int:
    x ^= x >> 16
    x = (x * FIRST_MULTIPLIER) & _MASK
    x ^= x >> 15
    x = (x * SECOND_MULTIPLIER) & _MASK
    return x ^ (x >> 15)
