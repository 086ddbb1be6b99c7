"""Random numbers as pure functions of counters, with the same bits as on every other backend. Keeps no random state.

The hash is that of `backends.counters`, which folds the keys, on unsigned 32-bit integers, whose products wrap. The
folds of a call are inputs of the model, so one session serves every call. Neighbours: `building` declares those inputs,
`program` gives their values at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS, DropoutKey, folds
from fusionai.backends.onnxruntime.building import Builder, Tensor, key_name
from fusionai.ir.schema import Node
from fusionai.ir.serving import RANDOM


def drawing(nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the ids of the nodes that draw random numbers."""
    return tuple(node.id for node in nodes if node.op == RANDOM)


def keys(nodes: Iterable[int], key: DropoutKey) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the inputs that a model with these drawing nodes takes at a call."""
    return {key_name(node): np.array(folds(key, node), np.uint32) for node in nodes}


def uniform(b: Builder, x: Tensor) -> Tensor:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    count = prod(x.size(dim) for dim in range(x.rank))
    bits = UNIFORM_BITS[b.declared_dtype]
    word = _Words(b, count)
    key = b.key()
    first, second = (b.slice(key, 0, at, at + 1) for at in (0, 1))
    low, high = word.index()
    drawn = word.mix(word.both(word.mix(word.both(low, first)), word.both(word.mix(high), second)))
    dtype = b.out.dtype
    fraction = b.cast(word.shifted(drawn, 32 - bits), dtype)
    return b.reshape(b.op("Mul", [fraction, b.number(2.0**-bits, dtype)], like=fraction), x.shape)


class _Words:
    """Arithmetic modulo 2**32 on `count` words."""

    def __init__(self, b: Builder, count: int) -> None:
        self._b = b
        self._like = Tensor("", "uint32", (count,))
        self._count = count

    def index(self) -> tuple[Tensor, Tensor]:
        """Return the lower and upper 32 bits of 0, 1, ..., count - 1."""
        b, wide = self._b, Tensor("", "int64", (self._count,))
        place = b.op("Range", [b.number(end, "int64") for end in (0, self._count, 1)], like=wide)
        upper = b.op("Div", [place, b.number(2**32, "int64")], like=wide)
        lower = b.op("Mod", [place, b.number(2**32, "int64")], like=wide)
        return b.cast(lower, "uint32"), b.cast(upper, "uint32")

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return self._b.op("BitwiseXor", [x, y], like=self._like)

    def shifted(self, x: Tensor, bits: int) -> Tensor:
        """Shift x right by `bits`; for 0 bits no node is added."""
        if bits == 0:
            return x
        return self._b.op("BitShift", [x, self._b.number(bits, "uint32")], like=self._like, direction="RIGHT")

    def mix(self, x: Tensor) -> Tensor:
        b = self._b
        x = self.both(x, self.shifted(x, 16))
        x = b.op("Mul", [x, b.number(FIRST_MULTIPLIER, "uint32")], like=self._like)
        x = self.both(x, self.shifted(x, 15))
        x = b.op("Mul", [x, b.number(SECOND_MULTIPLIER, "uint32")], like=self._like)
        return self.both(x, self.shifted(x, 15))


DRAWING: Final[Mapping[str, Callable[..., Any]]] = {RANDOM: uniform}
