"""The large frames of one TCP connection: when they are sent, with which congestion control, and how fast.

Samples the kernel's statistics while a large frame is in transit: paces the connection, changes to BBR if the path
loses packets, and ends the connection's turn as soon as all but a few milliseconds of its data have left, or if that
takes far too long. On platforms without statistics, turns end at once. Writes no data itself.

`tcp_channel` writes slices, `turns` decides which connection waits, `congestion` how fast it sends.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from fusionai.transport.congestion import (
    CLEAN_PATHS,
    LOOK_EVERY_S,
    LOSSY_PATHS,
    OWN_LIMIT,
    KernelView,
    Losses,
    Pacing,
    kernel_view,
    pace,
    use_for_bulk,
)
from fusionai.transport.turns import Turns

LEFT_S: Final = 0.005
LEAST_LEFT_BYTES: Final = 4 * 2**10
"""Remaining data (in seconds at the delivery rate, and the minimum in bytes) at which the next turn begins, so that the
line is never idle.
"""
TURN_S: Final = 0.2
LEAST_TURN_BYTES: Final = 512 * 2**10
"""Longest turn while others wait (in seconds at the line's rate, and the minimum in bytes), so that a connection that
sends a whole state shares the line with one that sends boundary tensors.
"""
TOO_LONG: Final = 4.0
"""Multiple of the time a turn needs at the line's rate after which it ends: the receiver or another line is the
bottleneck.
"""
LEAST_TOO_LONG_S: Final = 0.25
NEARBY_S: Final = 0.003
"""Round trip in seconds below which the receiver is in the local network, so that its data does not use the uplink."""
SURE_S: Final = 1.0
"""Seconds a turn must last before its samples adjust the bandwidth estimate: short bursts say little about it."""
_WATCH_S: Final = (0.001, 0.02)
"""Shortest and longest time between samples of the kernel's statistics, in seconds."""


class Bulk:
    """Bulk state of one connection. Call `end` when the connection is gone."""

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._turns = turns
        self._pacing = Pacing()
        self._losses: Losses | None = None
        """Loss detector; None once BBR is used."""
        if turns.line_bytes_per_s is None:
            use_for_bulk(self._socket, LOSSY_PATHS)
        elif use_for_bulk(self._socket, CLEAN_PATHS):
            self._losses = Losses()
        self._loop = asyncio.get_running_loop()
        self._look_at_s = self._loop.time() + LOOK_EVERY_S
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._over = asyncio.Event()
        """Set while no turn is held."""
        self._over.set()
        self._written = True
        """Whether everything of this turn has been written."""
        self._began_s = 0.0
        self._turn_bytes = 0
        self._rate: float | None = None

    async def slice(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be written."""
        line = self._turns.line_bytes_per_s
        if line is not None and not self._over.is_set() and self._turns.somebody_waits:
            most = max(LEAST_TURN_BYTES, TURN_S * line)
            if self._written or self._turn_bytes + nbytes > most:
                self.written()
                await self._over.wait()
        if self._over.is_set() and not self._gone:
            if line is not None and not self._is_near():
                await self._turns.take(self, self._rate)
                if self._gone:
                    return
            self._over.clear()
            self._began_s, self._turn_bytes = self._loop.time(), 0
            self._watch_in(_WATCH_S[1])
        self._written = False
        self._turn_bytes += nbytes

    def written(self) -> None:
        """The frame, or this turn's part of it, has been passed to the transport or the kernel."""
        self._written = True
        if not self._over.is_set():
            self._watch()

    def end(self) -> None:
        """The connection is gone: give back its turn."""
        self._gone = True
        self._end_turn()
        if self._timer is not None:
            self._timer.cancel()

    def _view(self) -> KernelView | None:
        try:
            return None if self._gone else kernel_view(self._socket)
        except (OSError, ValueError):  # uvloop raises either for a socket it has closed
            return None

    def _is_near(self) -> bool:
        view = self._view()
        return view is None or view.least_rtt_s < NEARBY_S

    def _watch(self) -> None:
        """Sample the connection repeatedly while a turn lasts."""
        if (view := self._view()) is None:
            self._end_turn()
            return
        now_s = self._loop.time()
        self._adapt(view, now_s)
        rate = view.delivered_bytes_per_s
        self._rate = rate if rate > 0 else None
        # Data in flight beyond one round trip's worth waits in a router's queue: the line still has to send it.
        left_bytes = self._transport.get_write_buffer_size() + view.unsent_bytes
        left_bytes += max(0, view.in_flight_bytes - int(rate * view.least_rtt_s))
        if self._is_over(left_bytes, rate, view, now_s):
            self._end_turn()
            return
        expected_s = 0.8 * left_bytes / rate if rate > 0 else _WATCH_S[1]
        self._watch_in(min(max(expected_s, _WATCH_S[0]), _WATCH_S[1]))

    def _watch_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._watch)

    def _is_over(self, left_bytes: int, rate: float, view: KernelView, now_s: float) -> bool:
        if self._written and left_bytes <= max(LEAST_LEFT_BYTES, rate * LEFT_S):
            return True
        line = self._turns.line_bytes_per_s
        due_s = 0.0 if line is None else TOO_LONG * self._turn_bytes / line
        return now_s - self._began_s > max(LEAST_TOO_LONG_S, 3 * view.least_rtt_s, due_s)

    def _adapt(self, view: KernelView, now_s: float) -> None:
        """Adjust the pace every `LOOK_EVERY_S`, so that the line's queue stays short."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        if self._losses is not None and self._losses.look(view):
            use_for_bulk(self._socket, LOSSY_PATHS)
            self._losses = None
        known = self._pacing.bytes_per_s
        self._pacing.look(view, self._turns.line_bytes_per_s)
        if self._pacing.keeps_line and now_s - self._began_s > SURE_S and view.least_rtt_s >= NEARBY_S:
            self._turns.seen(queues=view.queues, held=view.delivered_bytes_per_s >= OWN_LIMIT * (known or math.inf))
        if self._pacing.bytes_per_s != known:
            pace(self._socket, self._pacing.bytes_per_s)

    def _end_turn(self) -> None:
        self._over.set()
        self._turns.give_back(self)
