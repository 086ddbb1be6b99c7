"""Settings of the C library's allocator (glibc on Linux) in a process that computes.

Every microbatch frees and allocates the same large tensors again. By default glibc returns such memory to the system
and faults it in again page by page, and it gives threads heaps that are too small for it. That costs a few percent of a
training step. Keeping freed memory usually keeps the process below its former peak, but fragmentation can add to it, so
a stage that trades time for memory (recomputation, offloading) returns memory instead. On macOS, Windows and musl the
functions do nothing.

Memory of a dropped stage is returned at once, and so are code pages that only startup needed.

Called by `execution.compute` before its thread exists, by `execution.training.loading` according to the stage's
options, and by `execution.training.stages` after a stage is dropped."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

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
    """Return every freed large tensor to the system, so that it leaves no hole too small for the next tensor.

    Measured with recomputed activations: one third less memory at the peak of a step, one fifth more time. Applies to
    later allocations. Return whether all settings were accepted.
    """
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
    """Drop the resident pages of libraries' machine code; code that is called again is read from its file.

    Starting and compiling touch four times as many of these pages as normal work, about 100 MB. Return False if the
    platform offers no way to drop them.
    """
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
