"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Implements `primitives.clock.Clock`."""

    def __init__(self, start_s: float = 0.0, wall_offset_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_offset_s = wall_offset_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock never goes back (asked for {seconds} s)")
        self._now_s += seconds
