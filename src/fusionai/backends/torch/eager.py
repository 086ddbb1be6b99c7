"""Keeps torch's compiler out of processes that never compile: importing it costs a second and 70 MB per process.

Sizes are computed on the `meta` device, whose kernels are Python functions marked "not to be compiled". To honour the
mark, torch imports the compiler at the first call of such a function, which could be in the middle of a takeover. Torch
caches the unmarked function on the marked one; this module fills that cache in advance, so the compiler is not needed.
Results do not change. If a later torch marks functions differently, the import happens as before, and a test fails.
Neighbour: `backend` calls this once per process.
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
    """Prepare torch's Python kernels. Does nothing when called again, or if the compiler is already loaded."""
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
    """Yield the objects in a function's closure, among them the function that a wrapper wraps; `__wrapped__` may name
    another."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents


def _python_kernels() -> Iterator[object]:
    for table in torch._decomp.global_decomposition_table.values():
        yield from table.values()
    for module in (torch._refs, torch._refs.nn.functional):
        yield from vars(module).values()


def _nothing() -> None:
    """Function that is marked only to learn what a marked function looks like."""
