"""The deadline of a frame: from its first byte on, its bytes must arrive at a floor speed.

A frame of n bytes therefore ends within n / `FLOOR_BYTES_PER_S` plus one window, and a frame that stops arriving ends
the connection after at most two windows. Only time in which this side reads counts: a full queue, the download limit
and a suspended process are this side's doing. Silence between two frames is the business of other deadlines.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

FLOOR_BYTES_PER_S: Final = 1024
"""Lowest speed of a frame. A modem of 56 kbit/s is six times faster (chosen)."""
WINDOW_S: Final = 120.0
"""Window in which a member with a ticket must keep the floor, in seconds. A sender's connections take turns on its
uplink, for 512 KiB each at most: at 1 Mbit/s, 28 connections have had their turn in one window."""
DOOR_WINDOW_S: Final = 10.0
"""The same for a side that has not shown a ticket. It sends a probe on an idle line, or one small message."""
LATE_S: Final = 1.0
"""Delay of a check that shows that this process was suspended, in seconds."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Counters of a connection: complete frames, and all bytes."""

    frames: int
    nbytes: int


class Receiving(Protocol):
    """The receiving half of a connection, as far as its pace goes."""

    def incomplete(self) -> Arrived | None:
        """Return the counters while a frame is incomplete, else None."""
        ...

    def reads(self) -> bool:
        """Return whether this side reads from the network now."""
        ...

    def fall_behind(self, reason: str) -> None:
        """End the connection, whose frame arrives too slowly."""
        ...


class FramePace:
    """Watches one connection. Refers to it only while a window runs, so that the two form no lasting cycle."""

    def __init__(self) -> None:
        self.window_s = DOOR_WINDOW_S
        self._timer: asyncio.TimerHandle | None = None
        self._excused = False

    @property
    def watching(self) -> bool:
        return self._timer is not None

    def watch(self, receiving: Receiving) -> None:
        """Start a window if a frame is incomplete and none is running."""
        if self._timer is None and (before := receiving.incomplete()) is not None:
            loop = asyncio.get_running_loop()
            self._excused = not receiving.reads()
            due_s = loop.time() + self.window_s
            self._timer = loop.call_at(due_s, self._check, receiving, before, due_s, self.window_s)

    def excuse(self) -> None:
        """Do not judge the present window, because this side has paused reading."""
        self._excused = True

    def end(self) -> None:
        """Stop watching. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, receiving: Receiving, before: Arrived, due_s: float, window_s: float) -> None:
        self._timer = None
        now = receiving.incomplete()
        if now is None:
            return
        needed = int(FLOOR_BYTES_PER_S * window_s)
        came = now.nbytes - before.nbytes
        late = asyncio.get_running_loop().time() > due_s + LATE_S
        if now.frames == before.frames and came < needed and not (self._excused or late):
            receiving.fall_behind(f"expected at least {needed} bytes of a frame within {window_s:g} s, got {came}.")
        else:
            self.watch(receiving)
