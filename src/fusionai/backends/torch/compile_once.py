"""Kernels are compiled by one process of this machine while the others wait and then read them from the disk.

Peers of one machine begin together, and each would compile the same code for ten seconds of processor time. Decides
nothing about what is compiled: numba keeps it. Neighbours: `row_products` and `row_program` compile within.
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
"""Then it is compiled here as well: whoever holds the lock may stand still."""


@contextmanager
def compiled_once(name: str) -> Iterator[None]:
    """`name`: of what is compiled and all it depends on. Where no lock can be had, nobody waits."""
    lock = None
    try:
        lock = FileLock(platformdirs.user_cache_path("fusionai", ensure_exists=True) / f"{name}.lock")
        lock.acquire(timeout=LONGEST_S)
    except (OSError, NotImplementedError, Timeout) as problem:
        log.info("%s is compiled without waiting for others: %s", name, problem)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
