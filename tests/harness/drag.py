"""A process made slow: stopped and let go on many times a second, so that it answers and computes, only late.

Decides nothing. Neighbour: `harness.killer` stops processes for long; this is for machines that are busy with something
else, hot, or throttled.
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Final

RUNS_S: Final = 0.01


class Drag:
    """As a context: the process gets `1 / factor` of the time. Only for processes the test has started itself."""

    def __init__(self, pid: int, factor: float) -> None:
        if factor <= 1:
            raise ValueError(f"expected a factor above 1, got {factor}")
        self._pid = pid
        self._rests_s = RUNS_S * (factor - 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"drag of {pid}")

    def __enter__(self) -> Drag:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                self._over.wait(self._rests_s)
                os.kill(self._pid, signal.SIGCONT)
                self._over.wait(RUNS_S)
        except ProcessLookupError:
            return
