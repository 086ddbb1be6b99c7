"""What determines the exact bits of CPU results besides the framework: instruction sets and kernel libraries.

Every backend includes this in its fingerprint. Two processors of the same model may differ in the instructions that a
hypervisor exposes, and environment variables may restrict a process to fewer than the processor has. Neighbours:
`torch.probe`, `jax.probe`, `onnxruntime.backend`.
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
    """Return the processor's architecture and instruction sets, library versions, and environment variables that limit
    them."""
    limits = (f"{name}={value}" for name, value in sorted(arithmetic_limits().items()))
    return (platform.machine(), _instructions(), *(f"{name} {_version(name)}" for name in _LIBRARIES), *limits)


def _instructions() -> str:
    """Return the instruction sets that numpy detected. Every backend has loaded numpy anyway; asking LLVM would keep 44
    MB of it in memory."""
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
