"""Decides when a process that ended unexpectedly is restarted: how long to wait, and when to give up.

It uses no clock and starts nothing. `client.pool.local_pool` keeps one `Restarts` for each of its processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_S: Final = 1.0
"""Delay before the first restart, in seconds (chosen); doubled with each further one within `WINDOW_S`."""
MOST: Final = 6
"""Most restarts within `WINDOW_S` (chosen). A process that ends more often would end again."""
WINDOW_S: Final = 600.0
"""Time after which an end of the process no longer counts, in seconds (chosen)."""


@dataclass(slots=True)
class Restarts:
    """Restarts of one process."""

    _ended_s: list[float] = field(default_factory=list[float])

    def ended(self, now_s: float) -> float | None:
        """Record an end at `now_s`. Returns the seconds until the restart, None if it must not be restarted."""
        self._ended_s = [at_s for at_s in self._ended_s if now_s - at_s < WINDOW_S]
        count = len(self._ended_s)
        self._ended_s.append(now_s)
        return FIRST_S * 2**count if count < MOST else None
