"""Memory and threads of this process that computing needs set: the allocator, code pages, numpy's library.

- numpy's OpenBLAS is limited to one thread. Its threads busy-wait for the next product, and small products (mostly
  sketches) beside a model's own threads took twice the time on all cores. Other frameworks have their own libraries.
- The allocator (glibc on Linux) keeps freed memory, because every microbatch frees and allocates the same large tensors
  again, and faulting them in page by page costs a few percent of a training step. Fragmentation can raise the peak, so
  a stage that trades time for memory (recomputation, offloading) returns memory instead. On macOS, Windows and musl
  these functions do nothing.
- Memory of a dropped stage, and code pages that only startup needed, are returned at once.

Used by every process that computes: `execution.host` in the owner's and the daemon's, `backends.worker` in a worker.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path, PurePath
from typing import Final

import numpy as np
from threadpoolctl import ThreadpoolController


@cache
def numpy_computes_alone() -> int:
    """Return the number of libraries limited: 0 if numpy uses a system library (Accelerate on macOS)."""
    near = PurePath(np.__file__).parent
    count = 0
    for library in ThreadpoolController().lib_controllers:
        path = PurePath(library.filepath)
        if library.internal_api == "openblas" and (path.is_relative_to(near) or path.parent.name == "numpy.libs"):
            library.set_num_threads(1)
            count += 1
    return count


_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Parameter numbers of glibc's `mallopt`, from malloc.h."""
_MADV_DONTNEED: Final = 4
"""Advice number of `madvise`: drop the pages."""
_NAMED: Final = 6
"""Fields of a line of /proc/self/maps whose file has a name without spaces."""
_LARGEST_MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
"""Largest M_MMAP_THRESHOLD that glibc accepts on 64-bit machines."""
_KEPT_BYTES: Final = 2**30
"""Free bytes at the heap's end above which glibc returns memory while freed memory is kept (chosen)."""
_TOP_PAD_BYTES: Final = 64 * 2**20
"""Extra bytes that glibc requests whenever the heap grows, so that it grows less often (chosen)."""
_SPARED_BYTES: Final = 2**20
"""Smallest allocation with its own mapping while memory is spared; it is unmapped when freed (chosen)."""


def keep_freed_memory() -> bool:
    """Keep freed memory in the process. Call before the first thread starts. Return whether all settings were
    accepted."""
    return _settle(
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )


def spare_memory() -> bool:
    """Return every freed large tensor to the system, so that it leaves no hole too small for the next tensor. Measured
    with recomputed activations: one third less memory at the peak of a step, one fifth more time. Applies to later
    allocations. Return whether all settings were accepted."""
    return _settle((_M_MMAP_THRESHOLD, _SPARED_BYTES), (_M_TRIM_THRESHOLD, _SPARED_BYTES), (_M_TOP_PAD, 0))


def _settle(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    taken = [mallopt(name, value) for name, value in settings]  # a setting is tried even if an earlier one failed
    return all(answer == 1 for answer in taken)


def return_code_pages() -> bool:
    """Drop the resident pages of libraries' machine code; code that is called again is read from its file. Starting and
    compiling touch four times as many of these pages as normal work, about 100 MB. Return False if the platform offers
    no way to drop them."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        advise = ctypes.CDLL(None).madvise
        # Code only: pages that are written while a library is loaded would lose their contents.
        mapped = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    except (OSError, AttributeError):
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for fields in mapped:
        if len(fields) == _NAMED and fields[1] == "r-xp" and fields[5].startswith("/"):
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            advise(begin, end - begin, _MADV_DONTNEED)
    return True


def return_freed_memory() -> bool:
    """Return all unused heap pages to the system. Takes milliseconds. Return False if the platform offers no way to."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes = (ctypes.c_size_t,)
    trim(0)
    return True
