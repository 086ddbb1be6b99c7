"""Operators on sizes (plain integers), the same on every backend that computes, with an upper limit on every size.

Neighbours: each backend's `operators` includes these in its table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fusionai.primitives.errors import ExecutionError

MAX_SIZE: Final = 2**48
"""Upper limit on a size computed in a graph; chosen. Without it, repeated products could fill the memory with a single
integer."""


def _bounded(compute: Callable[..., int]) -> Callable[..., int]:
    def run(*sizes: int) -> int:
        size = compute(*sizes)
        if abs(size) > MAX_SIZE:
            raise ExecutionError(f"a size computed in the graph is above {MAX_SIZE}.")
        return size

    return run


def _size_of(x: Any, dim: int) -> int:
    return x.shape[dim]


SIZES: Final[Mapping[str, Callable[..., int]]] = MappingProxyType(
    {
        "sym.add": _bounded(operator.add),
        "sym.sub": _bounded(operator.sub),
        "sym.mul": _bounded(operator.mul),
        "sym.floordiv": _bounded(operator.floordiv),
        "sym.mod": _bounded(operator.mod),
        "sym.neg": _bounded(lambda size: -size),
        "sym.max": _bounded(max),
        "sym.min": _bounded(min),
        "aten.sym_size.int": _size_of,
    }
)
