"""Machines whose owners work on them: processes that stand still part of the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def standing_still(pids: Sequence[int], *, still_s: float, going_s: float) -> Iterator[None]:
    """By turns, all of them together, until the block ends; the first turn stands still."""
    over = threading.Event()
    processes = [psutil.Process(pid) for pid in pids]

    def stop_and_go() -> None:
        while not over.is_set():
            for process in processes:
                process.suspend()
            over.wait(still_s)
            for process in processes:
                process.resume()
            over.wait(going_s)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
