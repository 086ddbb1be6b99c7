"""Sharing of one machine's uplink: a scheduler of bulk sends, and the provider's rate limit.

Bulk sends are serialised over the uplink. The rate limit is a debt that is paid off with time; small frames go at once
while the debt is small, so that heartbeats and decoded tokens do not wait behind tensors.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Final

RISE: Final = 0.003
"""Rise of the estimate per sample at full pace without a queue, as a fraction."""
FAST_RISE: Final = 0.03
"""The same after `CALM_SAMPLES` such samples."""
FALL: Final = 0.006
"""Fall of the estimate per sample while a queue stands, as a fraction."""
CALM_SAMPLES: Final = 20
"""Samples at full pace without a queue after which the estimate rises faster: the line is faster than measured."""
LEAST: Final = 0.85
"""Lowest estimate, as a fraction of the measured bandwidth. Below it a standing queue is caused by other traffic."""
QUEUE_SAMPLES: Final = 3
"""Samples in a row with a queue after which it counts as standing, not as a burst."""
SHARED_BELOW: Final = 0.4
"""Fraction of the line. While the current senders use less than this together, another may send at the same time."""


class UplinkScheduler:
    """Grants the uplink of one machine to its connections, usually to one at a time."""

    def __init__(self) -> None:
        self.uplink_bytes_per_s: float | None = None
        """Estimated uplink bandwidth; None if unknown."""
        self._measured = 0.0
        self._standing = 0
        self._calm = 0
        self._holders: dict[object, float] = {}
        """Connections that have a grant, with the bytes per second each delivers alone; infinite if unknown."""
        self._waiting: deque[tuple[object, float, asyncio.Future[None]]] = deque()

    async def take(self, who: object, bytes_per_s: float | None) -> None:
        """Wait until `who` has a grant. `bytes_per_s`: its last delivery rate. The caller must call `release`
        afterwards."""
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
                self.release(who)
            raise

    def measured(self, bytes_per_s: float) -> None:
        """Set the measured uplink bandwidth."""
        self.uplink_bytes_per_s = self._measured = bytes_per_s

    def seen(self, *, queues: bool, held: bool) -> None:
        """Report a sample of a sender at the line's pace: whether it reached the pace (`held`) and whether a queue
        stands."""
        if self.uplink_bytes_per_s is None:
            return
        self._standing = self._standing + 1 if queues else 0
        if queues:
            self._calm = 0
            if self._standing >= QUEUE_SAMPLES:
                self.uplink_bytes_per_s = max((1 - FALL) * self.uplink_bytes_per_s, LEAST * self._measured)
        elif held:
            self._calm += 1
            self.uplink_bytes_per_s *= 1 + (RISE if self._calm < CALM_SAMPLES else FAST_RISE)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def release(self, who: object) -> None:
        """End the grant of `who`, if it has one. If it is still waiting, its `take` returns without a grant."""
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
        if not self._holders or self.uplink_bytes_per_s is None:
            return True
        return sum(self._holders.values()) < SHARED_BELOW * self.uplink_bytes_per_s


BURST_S: Final = 0.05
"""Unused allowance that may be sent at once, in seconds of the limit."""
SMALL_DEBT_S: Final = 0.25
"""Debt above which small frames wait too, in seconds of the limit: a stream of small frames must also keep the limit.
"""
SLICE_S: Final = 0.02
"""Duration of a slice of a large frame, in seconds of the limit."""


class RateLimit:
    """Limits all connections of one machine in one direction to `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"expected a limit above 0 bytes per second, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._credit_bytes = bytes_per_s * BURST_S
        self._at_s: float | None = None

    def take(self, nbytes: int, now_s: float) -> float:
        """Count `nbytes` and return the seconds until they are paid for. They count at once, whether the caller waits
        or not."""
        self._pay(now_s)
        self._credit_bytes -= nbytes
        return max(0.0, -self._credit_bytes / self.bytes_per_s)

    def admits_small(self, now_s: float) -> bool:
        """Whether a small frame may go without waiting."""
        self._pay(now_s)
        return -self._credit_bytes <= self.bytes_per_s * SMALL_DEBT_S

    def slice_bytes(self, largest: int) -> int:
        """Size of the pieces in which a large frame is sent."""
        return max(1024, min(largest, int(self.bytes_per_s * SLICE_S)))

    def _pay(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        most = self.bytes_per_s * BURST_S
        self._credit_bytes = min(most, self._credit_bytes + elapsed_s * self.bytes_per_s)


class TransferLimits:
    """Limits of one machine: `upload` and `download` rates (None: unlimited), and `uplink`, which orders bulk sends."""

    def __init__(self, *, upload_bytes_per_s: float | None = None, download_bytes_per_s: float | None = None) -> None:
        self.upload = None if upload_bytes_per_s is None else RateLimit(upload_bytes_per_s)
        self.download = None if download_bytes_per_s is None else RateLimit(download_bytes_per_s)
        self.uplink = UplinkScheduler()
