"""Who of one machine's connections sends bulk now: one after the other where they share a line.

Two tensors that share a line both come late; one after the other the first comes in half the time, and it is the one
that somebody waits for. It is also how plans count. And sent together, slightly faster than the line, they make a queue
in which the acknowledgements of what comes in wait, too.

Decides who waits. Connections whose other ends take less than the line carries have it together. Before the line is
measured nobody waits. It was measured once: where a pace just below that makes a queue the line counts as a little
slower, and where none ever stands as faster. Never reads a clock or a socket.
Neighbours: `bulk` takes turns and tells what it sees, the peer tells what it measured.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Final

RISE: Final = 0.003
FAST_RISE: Final = 0.03
FALL: Final = 0.006
"""Per look."""
CALM_LOOKS: Final = 20
"""A line that is full up to its pace for so long, and makes no queue, is another than was measured."""
LEAST: Final = 0.85
"""Of what was measured: a queue that stands although bulk goes slower than that is not its doing."""
QUEUE_LOOKS: Final = 3
"""A queue that stands for so long is no burst."""
SHARED_BELOW: Final = 0.4
"""Who uses less of the line than that has company."""


class Turns:
    """Of one machine."""

    def __init__(self) -> None:
        self.line_bytes_per_s: float | None = None
        """What the machine's line carries away; None: not known."""
        self._measured = 0.0
        self._standing = 0
        self._calm = 0
        self._holders: dict[object, float] = {}
        """Bytes per second that each has when alone, infinite until known."""
        self._waiting: deque[tuple[object, float, asyncio.Future[None]]] = deque()

    async def take(self, who: object, bytes_per_s: float | None) -> None:
        """Until it is `who`'s turn. `bytes_per_s`: what it had last. Whoever takes a turn gives it back."""
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
        """The line carries so much."""
        self.line_bytes_per_s = self._measured = bytes_per_s

    def seen(self, *, queues: bool, held: bool) -> None:
        """Somebody sends at the line's pace, gets there (`held`) or not, and makes a queue or not."""
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
        """Its turn is over, if it had one; who still waits for one is let go without."""
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
