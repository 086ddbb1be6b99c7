"""Clocks. Decisions take `now_s` as an argument; only the outer layers read a clock, through this interface."""

from __future__ import annotations

import sys
import time
from typing import Protocol


class Clock(Protocol):
    """`now_s` is monotonic seconds for durations; `wall_s` is seconds since 1970 for expiry dates."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class PoolClock:
    """A machine's clock with the broker's time of day. Tickets are valid for minutes by the broker's clock, and a home
    machine's clock may be hours off. `now_s` is the machine's own. `wall_s` is corrected by the broker's last report;
    until then it is the machine's own."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self.ahead_s = 0.0
        """How far the machine's own clock is ahead of the broker's, in seconds; negative if it is behind."""

    def set_by(self, broker_wall_s: float) -> None:
        """Correct `wall_s`: the broker's clock shows `broker_wall_s` now, up to the answer's latency. 0.0 is
        ignored."""
        if broker_wall_s > 0:
            self.ahead_s = self._own.wall_s() - broker_wall_s

    def now_s(self) -> float:
        return self._own.now_s()

    def wall_s(self) -> float:
        return self._own.wall_s() - self.ahead_s


def elapsed_s() -> float:
    """Return monotonic seconds that also pass while this machine sleeps. `time.monotonic` stands still then on Linux
    and macOS, and a lease that was granted by another machine does not wait."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()
