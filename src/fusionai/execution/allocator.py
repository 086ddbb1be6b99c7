"""How the C library gives out memory in a process that computes. Decides its settings, once, where glibc is.

Every microbatch frees and takes the same large tensors again. By default glibc hands such memory back to the system and
faults it in anew, page by page, and gives threads heaps too small for it: a few percent of a training step. Kept memory
mostly stays below what the process needed at its peak, but not always: pieces that lie between others add up. So a
stage that saves memory otherwise does without. Elsewhere (macOS, Windows, musl) nothing is done.

A stage that is dropped gives its memory back at once, and so does a machine the code that only starting needed.

Neighbours: `execution.compute`, before its thread exists; `execution.loading`, by what a stage was told;
`execution.stages`, when one has gone.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MADV_DONTNEED: Final = 4
_NAMED: Final = 6
"""Fields of a mapping whose file has a name without spaces."""
_LARGEST_MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
"""glibc takes no larger one on 64-bit machines."""
_KEPT_BYTES: Final = 2**30
_TOP_PAD_BYTES: Final = 64 * 2**20
_SPARED_BYTES: Final = 2**20


def keep_freed_memory() -> bool:
    """Call before the first thread is started. True if the settings were taken."""
    return _settle(
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )


def spare_memory() -> bool:
    """Every large tensor goes back to the system when it is freed, and leaves no hole that the next does not fit: a
    third less at the peak of a step that makes activations again, for a fifth more time. Counts for what is taken from
    now on. True if the settings were taken."""
    return _settle((_M_MMAP_THRESHOLD, _SPARED_BYTES), (_M_TRIM_THRESHOLD, _SPARED_BYTES), (_M_TOP_PAD, 0))


def _settle(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    taken = [mallopt(name, value) for name, value in settings]  # each is tried, whatever became of the one before
    return all(answer == 1 for answer in taken)


def return_code_pages() -> bool:
    """Pages of libraries' machine code: what is called again comes back from its file. Starting and compiling touch
    four times as many as working does, a hundred megabytes. False where there is no way to."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        advise = ctypes.CDLL(None).madvise
        # Code alone: pages that are written to while a library is loaded would not come back as they were.
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
    """To the system, all pages that hold nothing. Takes milliseconds. False where there is no way to."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes = (ctypes.c_size_t,)
    trim(0)
    return True
