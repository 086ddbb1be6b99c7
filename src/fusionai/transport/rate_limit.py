"""A provider's limit on what its machine sends or receives, as a debt that is paid off with time. Pure.

Decides how long the next bytes wait. Small frames go at once while the debt is small, so that heartbeats and decoded
tokens do not wait behind a tensor. They are counted like all other bytes, over all connections. `tcp_channel` asks
before it writes a slice and after it has read data.
"""

from __future__ import annotations

from typing import Final

from fusionai.transport.turns import Turns

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
        """Count `nbytes` and return the seconds until they are paid for.

        They count at once, whether the caller waits or not.
        """
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


class Limits:
    """Limits of one machine: `upload` and `download` rates (None: unlimited), and `turns`, the order of bulk sends."""

    def __init__(self, *, upload_bytes_per_s: float | None = None, download_bytes_per_s: float | None = None) -> None:
        self.upload = None if upload_bytes_per_s is None else RateLimit(upload_bytes_per_s)
        self.download = None if download_bytes_per_s is None else RateLimit(download_bytes_per_s)
        self.turns = Turns()
