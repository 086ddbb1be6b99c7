"""Compiles numeric loops to machine code where numba is installed; the results are the same either way.

Kernels are plain functions over numpy arrays in modules of this package. Numba is loaded by the first call of
`compiled`, never by an import: a kernel may also be called directly, so small problems are solved before numba has
loaded. The machine code is cached on disk beside the kernels (or in the user's cache directory), so only the first run
of an installation waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_COMPILED: Final[dict[Callable[..., object], Callable[..., Any]]] = {}


def compiled(kernel: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `kernel` as machine code, or unchanged if numba is missing. Kernels that it calls must be in its own
    module, because numba's disk cache only notices changes of that file."""
    if not available():
        return kernel
    return cast("Callable[Arguments, Result]", _compiled(cast("FunctionType", kernel)))


@cache
def available() -> bool:
    """Return whether kernels can run as machine code."""
    try:
        return find_spec("numba") is not None
    except ValueError:
        return False


def _compiled(kernel: FunctionType) -> Callable[..., Any]:
    known = _COMPILED.get(kernel)
    if known is not None:
        return known
    # Numba finds called functions in the globals and needs them compiled, so a copy of the kernel gets its own globals.
    names = dict(kernel.__globals__)
    for name in kernel.__code__.co_names:
        called = names.get(name)
        if isinstance(called, FunctionType) and called.__module__ == kernel.__module__:
            names[name] = _compiled(called)
    copy = FunctionType(kernel.__code__, names, kernel.__name__, kernel.__defaults__)
    copy.__qualname__ = kernel.__qualname__
    compiler = cast("Callable[..., Any]", import_module("numba").njit)
    made = cast("Callable[..., Any]", compiler(cache=True, error_model="numpy")(copy))
    _COMPILED[kernel] = made
    return made
