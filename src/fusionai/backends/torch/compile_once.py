"""Lets one process of a machine compile kernels while the others wait, and then read them from numba's disk cache.

Peers on one machine start together, and each would otherwise compile the same code for ten seconds of processor time.
Numba keeps the compiled code. Neighbours: `row_products` compiles under this
lock, `blocked_linear`, `row_program` and `compiled_attention` import their kernels through `kernel_module`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final

import platformdirs
from filelock import FileLock, Timeout

from fusionai.scheduling.kernels.compiled import available

log = logging.getLogger(__name__)

LONGEST_S: Final = 60.0
"""Longest wait for the lock, in seconds; chosen. Afterwards this process compiles too, because the lock's holder may
hang."""


@cache
def kernel_module(module: str, what: str) -> Any | None:
    """Import a module that compiles kernels; None if numba is missing or fails, and then operators compute `what`."""
    if not available():
        return None
    try:
        with compiled_once(what):
            return import_module(module)
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and operators serve instead
        log.warning("compiled %s: unavailable, using slower operators: %s: %s", what, type(error).__name__, error)
        return None


@contextmanager
def compiled_once(name: str) -> Iterator[None]:
    """Hold the machine-wide lock `name`, which names the code and all that it depends on. Continue without waiting if
    the lock can't be had."""
    lock = None
    try:
        lock = FileLock(platformdirs.user_cache_path("fusionai", ensure_exists=True) / f"{name}.lock")
        lock.acquire(timeout=LONGEST_S)
    except (OSError, NotImplementedError, Timeout) as problem:
        log.info("compiling %s without waiting for other processes: %s", name, problem)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
