"""Serialises bulk sends of one machine over its uplink.

Two tensors that share a line both arrive late. Sent one after another, the first arrives in half the time, and that is
the one a peer waits for; plans assume this order too. Two senders that together exceed the line's rate slightly also
build a queue, in which the acknowledgements of incoming data wait.

Decides which connection waits. Connections whose receivers take less than the line carries send at the same time.
Until the uplink bandwidth is measured, no connection waits. The measured value is adjusted: if a pace just below it
builds a queue, the estimate falls slightly; if no queue ever stands, it rises. Reads no clock and no socket.

`bulk` requests turns and reports its observations; the peer reports the measured bandwidth.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Final

RISE: Final = 0.003
"""Rise of the estimate per sample at full pace without a queue, as a fraction."""
FAST_RISE: Final = 0.03
"""The same after `CALM_LOOKS` such samples."""
FALL: Final = 0.006
"""Fall of the estimate per sample while a queue stands, as a fraction."""
CALM_LOOKS: Final = 20
"""Samples at full pace without a queue after which the estimate rises faster: the line is faster than measured."""
LEAST: Final = 0.85
"""Lowest estimate, as a fraction of the measured bandwidth. Below it a standing queue is caused by other traffic."""
QUEUE_LOOKS: Final = 3
"""Samples in a row with a queue after which it counts as standing, not as a burst."""
SHARED_BELOW: Final = 0.4
"""Fraction of the line. While the current senders use less than this together, another may send at the same time."""


class Turns:
    """Uplink scheduler of one machine: grants turns to its connections."""

    def __init__(self) -> None:
        self.line_bytes_per_s: float | None = None
        """Estimated uplink bandwidth; None if unknown."""
        self._measured = 0.0
        self._standing = 0
        self._calm = 0
        self._holders: dict[object, float] = {}
        """Connections that have a turn, with the bytes per second each delivers alone; infinite if unknown."""
        self._waiting: deque[tuple[object, float, asyncio.Future[None]]] = deque()

    async def take(self, who: object, bytes_per_s: float | None) -> None:
        """Wait until `who` has a turn.

        `bytes_per_s`: its last delivery rate. The caller must call `give_back` afterwards.
        """
        rate = math.inf if bytes_per_s is None else bytes_per_s
        if not self._waiting and self._admits():
            self._holders[who] = rate
            return
        granted = asyncio.get_running_loop().create_future()
        entry = (who, rate, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self.give_back(who)
            raise

    def measured(self, bytes_per_s: float) -> None:
        """Set the measured uplink bandwidth."""
        self.line_bytes_per_s = self._measured = bytes_per_s

    def seen(self, *, queues: bool, held: bool) -> None:
        """Report a sample of a sender at the line's pace: whether it reached the pace (`held`) and whether a queue
        stands.
        """
        if self.line_bytes_per_s is None:
            return
        self._standing = self._standing + 1 if queues else 0
        if queues:
            self._calm = 0
            if self._standing >= QUEUE_LOOKS:
                self.line_bytes_per_s = max((1 - FALL) * self.line_bytes_per_s, LEAST * self._measured)
        elif held:
            self._calm += 1
            self.line_bytes_per_s *= 1 + (RISE if self._calm < CALM_LOOKS else FAST_RISE)

    @property
    def somebody_waits(self) -> bool:
        return bool(self._waiting)

    def give_back(self, who: object) -> None:
        """End the turn of `who`, if it has one. If it is still waiting, its `take` returns without a turn."""
        self._holders.pop(who, None)
        for entry in [one for one in self._waiting if one[0] is who]:
            self._waiting.remove(entry)
            if not entry[2].cancelled():
                entry[2].set_result(None)
        while self._waiting and self._admits():
            next_one, rate, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._holders[next_one] = rate
                granted.set_result(None)

    def _admits(self) -> bool:
        if not self._holders or self.line_bytes_per_s is None:
            return True
        return sum(self._holders.values()) < SHARED_BELOW * self.line_bytes_per_s
