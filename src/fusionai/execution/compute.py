"""The compute thread: one piece of work at a time, within the provider's share of the machine.

Decides how long to rest before the next piece: a share of 50 % rests as long as the last one used the machine. What a
piece made goes out before the rest. Never runs two pieces at once.
Neighbours: `execution.member` submits, `backends` do the work.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from fusionai.backends.interface import WorksIn
from fusionai.execution.allocator import keep_freed_memory
from fusionai.execution.numpy_threads import numpy_computes_alone

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """When a piece of work ran, on this machine's monotonic clock. The rest after it counts to its end, though it is
    still to come."""

    start_s: float
    end_s: float
    busy_s: float


Outcome = tuple[T, Timed] | Exception
"""What a piece of work gave, or raised."""


def _used_clock(works_in: WorksIn) -> Callable[[], float]:
    """Of a processor the time for which it was used: what another program took meanwhile is no reason to rest, and
    resting for it would make a busy machine slower by more than it is. Windows counts that in sixtieths of a second."""
    if sys.platform == "win32":
        return time.monotonic
    clocks: Mapping[WorksIn, Callable[[], float]] = {
        "caller": time.thread_time,
        "threads": time.process_time,
        "device": time.monotonic,
    }
    return clocks[works_in]


class ComputeThread:
    """`share` in (0, 1]: the part of the time the provider lends."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._used_s = _used_clock("device")
        self._free_at_s = 0.0
        keep_freed_memory()
        numpy_computes_alone()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def works_in(self, where: WorksIn) -> None:
        """What the machine is used by, from the next piece on: until told, all the time that a piece takes counts."""
        self._used_s = _used_clock(where)

    def run(self, work: Callable[[], T]) -> asyncio.Future[tuple[T, Timed]]:
        """Run `work` in the compute thread after everything submitted before it. Submitted now, not when awaited."""
        return asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work)

    def submit(self, work: Callable[[], T], done: Callable[[Outcome[T]], None]) -> None:
        """`run` for whoever does it hundreds of times a second: `done` is called on the event loop, in the first turn
        after the work. Not called for work that `close` kept from running."""
        loop = asyncio.get_running_loop()

        def piece() -> None:
            try:
                outcome: Outcome[T] = self._timed(work)
            except Exception as problem:  # noqa: BLE001 - whoever asked for the work is told, as by `run`
                outcome = problem
            with suppress(RuntimeError):  # the loop has ended meanwhile
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
        """Let the piece under way end; run nothing more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
