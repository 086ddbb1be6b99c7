"""The large frames of one TCP connection: when they go, by which rules, and how fast.

Watches the kernel's account while something large is on its way: paces it, changes to BBR where the path loses packets,
and ends the connection's turn as soon as the line has all but a few milliseconds of it, or when it takes far too long.
Where the platform gives no account, turns end at once. Never writes a byte.
Neighbours: `tcp_channel` writes slices, `turns` decides who waits, `congestion` how fast.
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
"""Of a turn, that much may still be to be sent when the next begins, so that the line is never without work."""
TURN_S: Final = 0.2
LEAST_TURN_BYTES: Final = 512 * 2**10
"""A turn is so long while others wait: who sends a whole state shares the line with who sends boundary tensors."""
TOO_LONG: Final = 4.0
"""Of the time that a turn takes at the line's pace: then the other end, or another line, is what it waits for."""
LEAST_TOO_LONG_S: Final = 0.25
NEARBY_S: Final = 0.003
"""Round trips below that are those of a house: what goes there does not take the line that was measured."""
SURE_S: Final = 1.0
"""What a shorter burst does to a queue says little of the line."""
_WATCH_S: Final = (0.001, 0.02)


class Bulk:
    """Of one connection; `end` when it has gone."""

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._turns = turns
        self._pacing = Pacing()
        self._losses: Losses | None = None
        """While it goes by CUBIC."""
        if turns.line_bytes_per_s is None:
            use_for_bulk(self._socket, LOSSY_PATHS)
        elif use_for_bulk(self._socket, CLEAN_PATHS):
            self._losses = Losses()
        self._loop = asyncio.get_running_loop()
        self._look_at_s = self._loop.time() + LOOK_EVERY_S
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._over = asyncio.Event()
        """No turn is held."""
        self._over.set()
        self._written = True
        """Nothing more is written in this turn."""
        self._began_s = 0.0
        self._turn_bytes = 0
        self._rate: float | None = None

    async def slice(self, nbytes: int) -> None:
        """Until so much may be written next."""
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
        """The frame, or a turn's part of it, is in the kernel's hands or the transport's."""
        self._written = True
        if not self._over.is_set():
            self._watch()

    def end(self) -> None:
        """The connection has gone."""
        self._gone = True
        self._end_turn()
        if self._timer is not None:
            self._timer.cancel()

    def _view(self) -> KernelView | None:
        try:
            return None if self._gone else kernel_view(self._socket)
        except (OSError, ValueError):  # so says uvloop of a socket it has closed
            return None

    def _is_near(self) -> bool:
        view = self._view()
        return view is None or view.least_rtt_s < NEARBY_S

    def _watch(self) -> None:
        """Again and again while a turn lasts."""
        if (view := self._view()) is None:
            self._end_turn()
            return
        now_s = self._loop.time()
        self._adapt(view, now_s)
        rate = view.delivered_bytes_per_s
        self._rate = rate if rate > 0 else None
        # What is in flight beyond a round trip's worth stands in a router's queue: the line has it still to send.
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
        """Now and then: at the pace that keeps the line's queue short."""
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
