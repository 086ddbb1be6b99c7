"""Loops over numbers, compiled where numba is installed. Decides how a function runs, never what it returns.

Kernels are plain functions over numpy arrays in modules named `*_kernels`. `compiled(kernel)` gives the same function
as machine code; the kernels it calls are compiled with it. Where numba is missing it gives the function itself, which
returns the same numbers, only later. Numba is loaded by the first call of `compiled`, never by an import, and what it
has compiled is kept on disk beside the kernels (or in the user's cache directory): only the first run of an
installation waits for the compiler.

A kernel may be called as it is: small problems end sooner than numba loads. Neighbours: `search`, `improvement`,
`coverage`, `latency` choose between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, cast

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_COMPILED: Final[dict[Callable[..., object], Callable[..., Any]]] = {}


def compiled(kernel: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`kernel` as machine code; as it is where numba is missing. It and the kernels it calls are of one module: numba's
    cache on disk notices changes of that file alone."""
    if not available():
        return kernel
    return cast("Callable[Arguments, Result]", _compiled(cast("FunctionType", kernel)))


@cache
def available() -> bool:
    """Whether kernels run as machine code."""
    try:
        return find_spec("numba") is not None
    except ValueError:
        return False


def _compiled(kernel: FunctionType) -> Callable[..., Any]:
    known = _COMPILED.get(kernel)
    if known is not None:
        return known
    # Numba looks called functions up among the globals and wants them compiled: a copy of the function gets its own.
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
