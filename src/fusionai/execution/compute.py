"""The compute thread: one piece of work at a time, within the provider's share of the machine.

Decides how long to rest after each piece: a share of 50 % rests as long as it worked. Never runs two pieces at once.
Neighbours: `execution.member` submits, `backends` do the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from fusionai.execution.allocator import keep_freed_memory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """When a piece of work ran, on this machine's monotonic clock. The rest after it counts to its end."""

    start_s: float
    end_s: float
    busy_s: float


Outcome = tuple[T, Timed] | Exception
"""What a piece of work gave, or raised."""


class ComputeThread:
    """`share` in (0, 1]: the part of the time the provider lends."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        keep_freed_memory()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

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
        start_s = time.monotonic()
        result = work()
        worked_s = time.monotonic() - start_s
        rest_s = worked_s * (1 / self.share - 1)
        if rest_s > 0:
            time.sleep(rest_s)
        return result, Timed(start_s, time.monotonic(), worked_s)

    def close(self) -> None:
        """Let the piece under way end; run nothing more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
