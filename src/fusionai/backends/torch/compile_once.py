"""Lets one process of a machine compile kernels while the others wait, and then read them from numba's disk cache.

Peers on one machine start together, and each would otherwise compile the same code for ten seconds of processor time.
Numba keeps the compiled code. Neighbours: `row_products`, `row_program` and `compiled_attention` compile under this
lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import platformdirs
from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

LONGEST_S: Final = 60.0
"""Longest wait for the lock, in seconds; chosen. Afterwards this process compiles too, because the lock's holder may
hang."""


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
