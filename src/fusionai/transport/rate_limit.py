"""A provider's limit on what its machine sends or receives, as a debt that time pays off. Pure: `now_s` comes in.

Decides how long the next bytes wait. Small frames go at once as long as the debt is small, so that signs of life and
decoded tokens do not stand behind a tensor; they count all the same, and so does everything, whichever connection it
takes. Neighbours: `tcp_channel` asks before it writes a slice and after it has read one.
"""

from __future__ import annotations

from typing import Final

from fusionai.transport.turns import Turns

BURST_S: Final = 0.05
"""What was not used for so long may be sent at once."""
SMALL_DEBT_S: Final = 0.25
"""Small frames wait behind more debt than this: a stream of them keeps the limit too."""
SLICE_S: Final = 0.02
"""A slice of a large frame takes about so long."""


class RateLimit:
    """`bytes_per_s` over all connections of one machine in one direction."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"expected a limit above 0 bytes per second, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._credit_bytes = bytes_per_s * BURST_S
        self._at_s: float | None = None

    def take(self, nbytes: int, now_s: float) -> float:
        """Seconds until `nbytes` are paid for. They count from now on, whether they wait or not."""
        self._pay(now_s)
        self._credit_bytes -= nbytes
        return max(0.0, -self._credit_bytes / self.bytes_per_s)

    def admits_small(self, now_s: float) -> bool:
        """Whether a small frame need not wait."""
        self._pay(now_s)
        return -self._credit_bytes <= self.bytes_per_s * SMALL_DEBT_S

    def slice_bytes(self, largest: int) -> int:
        """How much of a large frame goes at a time."""
        return max(1024, min(largest, int(self.bytes_per_s * SLICE_S)))

    def _pay(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        most = self.bytes_per_s * BURST_S
        self._credit_bytes = min(most, self._credit_bytes + elapsed_s * self.bytes_per_s)


class Limits:
    """Of one machine: `upload`, `download` (None: as fast as the line is), and in which order its bulk goes."""

    def __init__(self, *, upload_bytes_per_s: float | None = None, download_bytes_per_s: float | None = None) -> None:
        self.upload = None if upload_bytes_per_s is None else RateLimit(upload_bytes_per_s)
        self.download = None if download_bytes_per_s is None else RateLimit(download_bytes_per_s)
        self.turns = Turns()
