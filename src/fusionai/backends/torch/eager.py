"""Keeps torch's compiler out of processes that never compile: a second of imports and 70 MB for each of them.

Sizes are found on the `meta` device, whose kernels are Python functions marked "not to be compiled". To obey the mark,
torch imports the compiler at their first call, which would be in the middle of a takeover. Here each such function is
given the answer beforehand: itself. What they compute is the same; should torch change how it marks them, they import
what they did before, and a test says so. Neighbour: `backend` calls this once per process.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch._decomp
import torch._refs
import torch._refs.nn.functional


def without_compiler() -> None:
    """Harmless when called again, or when the compiler is there already."""
    mark = getattr(torch, "_disable_dynamo", None)
    if mark is None:
        return
    marked = mark(_nothing).__code__
    seen: set[types.FunctionType] = set()
    waiting = [kernel for kernel in _python_kernels() if isinstance(kernel, types.FunctionType)]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        around = [value for value in _closed_over(function) if isinstance(value, types.FunctionType)]
        if function.__code__ is marked:
            for inner in around:
                inner.__dict__.setdefault("__dynamo_disable", inner)
        waiting += around


def _closed_over(function: types.FunctionType) -> Iterator[object]:
    """What a wrapper wraps is among it; `__wrapped__` may name something else."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing in it yet
            yield cell.cell_contents


def _python_kernels() -> Iterator[object]:
    for table in torch._decomp.global_decomposition_table.values():
        yield from table.values()
    for module in (torch._refs, torch._refs.nn.functional):
        yield from vars(module).values()


def _nothing() -> None:
    """Wrapped to learn what a marked function looks like."""
