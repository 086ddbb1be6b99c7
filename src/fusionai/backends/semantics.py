"""What operators mean on every backend: their arguments, which keys attention sees, and the keys of random numbers.

Framework-free. The mask of element `i` (flat, row-major) of a node's input is

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

Neighbours: the backends' operator modules compute; `torch.semantic`, `jax.products` and `onnxruntime.products` hash the
part that depends on the element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fusionai.ir.schema import Arg, DeviceArg, DTypeArg, FloatArg, ListArg, MemoryFormatArg, Ref

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


Sizes = int | Sequence[int]


def argument(arg: Arg, known: Callable[[str], Any], dtype: Callable[[str], Any]) -> Any:
    """Return an argument of a node as an operator takes it. Devices and memory formats do not matter to frameworks that
    compile. `known`: value name -> value; `dtype`: dtype name -> dtype."""
    match arg:
        case Ref(name):
            return known(name)
        case DTypeArg(name):
            return dtype(name)
        case DeviceArg() | MemoryFormatArg():
            return None
        case FloatArg(name):
            return float(name)
        case ListArg(items):
            return [argument(item, known, dtype) for item in items]
        case _:
            return arg


def by_name(compute: Callable[..., Any], names: Sequence[str], *, behind: int, **fixed: Any) -> Callable[..., Any]:
    """Return `compute` for an operator that takes the arguments `names`, in this order, after the first `behind`."""
    return lambda *args, **options: compute(
        *args[:behind], **dict(zip(names, args[behind:], strict=False)), **options, **fixed
    )


CONV: Final = ("stride", "padding", "dilation", "groups")
"""Arguments of a convolution after input, weight and bias."""
CONV_TRANSPOSE: Final = ("stride", "padding", "output_padding", "groups", "dilation")
"""Arguments of a transposed convolution after input, weight and bias."""


def many(value: Sizes, count: int) -> tuple[int, ...]:
    """Return one size per dimension; a single size is that of every dimension."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * count if len(given) == 1 else given


def conv_pads(kernel: Sequence[int], dilation: Sequence[int], padding: Sizes | str) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension of a convolution; `padding` may be "valid" or "same"."""
    if not isinstance(padding, str):
        return [(one, one) for one in many(padding, len(kernel))]
    reach = [0 if padding == "valid" else step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [(one // 2, one - one // 2) for one in reach]


def pad_widths(pad: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension. `pad`: pairs for the last dimension, then for the one before,
    and so on."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the half-open bounds of a slice, counted from the front and clamped."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def adaptive_windows(size: int, count: int) -> list[tuple[int, int]]:
    """Return the inputs of each output of an adaptive pool: floor(i * size / count) to ceil((i + 1) * size / count)."""
    return [(index * size // count, -(-(index + 1) * size // count)) for index in range(count)]


class Scores(NamedTuple):
    """How attention with a cache weighs its keys. A score is the product of a query and a key times `scale`, then
    `softcap` * tanh(score / `softcap`). `sinks` [query heads]: one extra score per head, which takes weight but adds no
    value."""

    scale: float
    softcap: float | None = None
    sinks: Any = None


def visible_keys(queries: Any, keys: Any, *, causal: bool, window: int | None) -> Any:
    """Return True where a query at position `queries` sees a key at position `keys` (arrays of one framework,
    broadcast); None if every query sees every key. A causal query sees itself and the `window - 1` positions before it.
    A query that is not causal sees up to `window` positions on either side. These are transformers' two conventions."""
    if not causal:
        return None if window is None else abs(keys - queries) <= window
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
