"""What a machine brings to every job it takes part in: backend, compute thread, transport and limits.

The compute thread runs one piece of work at a time, within the share of the machine that the provider lends: with a
share of 50 % it rests as long as the last piece used the machine. Results are delivered before the rest.

Process-wide settings that computing needs are here too:

- numpy's OpenBLAS is limited to one thread. Its threads busy-wait for the next product, and small products (mostly
  sketches) beside a model's own threads took twice the time on all cores. Other frameworks have their own libraries.
- The allocator (glibc on Linux) keeps freed memory, because every microbatch frees and allocates the same large tensors
  again, and faulting them in page by page costs a few percent of a training step. Fragmentation can raise the peak, so
  a stage that trades time for memory (recomputation, offloading) returns memory instead. On macOS, Windows and musl
  these functions do nothing.
- Memory of a dropped stage, and code pages that only startup needed, are returned at once.

`peer.daemon` and `client` build hosts; `execution.training.member` and `execution.serving.member` use them.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Final, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from fusionai.backends.interface import Backend, WorksIn
from fusionai.ir.validate import GraphLimits
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Transport
from fusionai.transport.security.signed import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Resources of one machine. `memory_limit_bytes` covers stages and snapshots together; None if the provider set no
    limit. `weights`: cache of served models' weights; None on a machine that does not serve other owners' models.
    `seal`: signs the placements of this machine's own jobs; None if it has no jobs."""

    peer: PeerId
    backend: Backend
    compute: ComputeThread
    transport: Transport
    fingerprint: str
    clock: Clock
    memory_limit_bytes: int | None = None
    weights: WeightStore | None = None
    seal: Seal | None = None
    graph_limits: GraphLimits = field(default_factory=GraphLimits)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """When a piece of work ran, on this machine's monotonic clock, in seconds. `end_s` includes the rest after the
    work, although that rest is still to come. `busy_s` is the work alone."""

    start_s: float
    end_s: float
    busy_s: float


Outcome = tuple[T, Timed] | Exception
"""Result of a piece of work, or the exception it raised."""


def _used_clock(works_in: WorksIn) -> Callable[[], float]:
    """Return the clock that measures how long a piece of work used the machine. On a processor it is CPU time: time
    taken by other programs is no reason to rest. On other devices and on Windows it is wall time, on Windows because
    CPU time has a resolution of only about 1/60 s there."""
    if sys.platform == "win32":
        return time.monotonic
    clocks: Mapping[WorksIn, Callable[[], float]] = {
        "caller": time.thread_time,
        "threads": time.process_time,
        "device": time.monotonic,
    }
    return clocks[works_in]


class ComputeThread:
    """Runs work in one thread. `share` in (0, 1]: the fraction of time that the provider lends."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._used_s = _used_clock("device")
        self._free_at_s = 0.0
        keep_freed_memory()
        numpy_computes_alone()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def works_in(self, where: WorksIn) -> None:
        """Set what does the work, from the next piece on. Until this is called, the whole duration of a piece
        counts."""
        self._used_s = _used_clock(where)

    def run(self, work: Callable[[], T]) -> asyncio.Future[tuple[T, Timed]]:
        """Run `work` in the compute thread after everything submitted earlier. It is submitted now, not when
        awaited."""
        return asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)

    def submit(self, work: Callable[[], T], done: Callable[[Outcome[T]], None]) -> None:
        """Like `run`, with less overhead for callers that submit hundreds of times a second. `done` is called on the
        event loop, in its first turn after the work. It is not called for work that `close` cancelled."""
        loop = asyncio.get_running_loop()

        def piece() -> None:
            try:
                outcome: Outcome[T] = self._timed(work)
            except Exception as problem:  # noqa: BLE001 - the submitter gets the exception, as with `run`
                outcome = problem
            with suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(done, outcome)

        self._executor.submit(piece)

    def _timed(self, work: Callable[[], T]) -> tuple[T, Timed]:
        rest_s = self._free_at_s - time.monotonic()
        if rest_s > 0:
            time.sleep(rest_s)
        start_s, used_s = time.monotonic(), self._used_s()
        try:
            result = work()
        finally:
            ran_until_s = time.monotonic()
            used_s = min(ran_until_s - start_s, self._used_s() - used_s)
            self._free_at_s = ran_until_s + used_s * (1 / self.share - 1)
        return result, Timed(start_s, self._free_at_s, ran_until_s - start_s)

    def close(self) -> None:
        """Let the current piece finish and run no further ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)


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
