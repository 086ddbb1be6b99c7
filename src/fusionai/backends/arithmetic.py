"""What results on a CPU depend on besides the framework: instructions, and libraries that choose kernels by them.

Every backend's fingerprint holds it. Two processors of one name may differ in what a hypervisor lets through, and one
process may be told to use less than there is. Neighbours: `torch.probe`, `jax.probe`, `onnxruntime.backend`.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from fusionai.primitives.environment import arithmetic_limits

_LIBRARIES = ("numpy", "numba", "llvmlite")


@cache
def arithmetic() -> tuple[str, ...]:
    """The processor's architecture and instructions, the libraries' versions, and the variables that limit them."""
    limits = (f"{name}={value}" for name, value in sorted(arithmetic_limits().items()))
    return (platform.machine(), _instructions(), *(f"{name} {_version(name)}" for name in _LIBRARIES), *limits)


def _instructions() -> str:
    """As numpy finds them, which every backend has loaded anyway; asking LLVM would keep 44 MB of it in memory."""
    found = getattr(import_module("numpy._core._multiarray_umath"), "__cpu_features__", None)
    if not isinstance(found, dict):
        return platform.processor()
    known = cast("dict[str, bool]", found)
    return " ".join(sorted(name for name, there in known.items() if there))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
