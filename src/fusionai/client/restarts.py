"""When a process that ended by itself is started again. Decides how long to wait, and when to give it up.

Knows no clock and starts nothing. Neighbours: `client.local_pool` keeps one for each of its processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_S: Final = 1.0
"""Before the first start; doubled with each within `WINDOW_S`."""
MOST: Final = 6
"""Starts within `WINDOW_S`: what ends so often would end again."""
WINDOW_S: Final = 600.0


@dataclass(slots=True)
class Restarts:
    """Of one process."""

    _ended_s: list[float] = field(default_factory=list[float])

    def ended(self, now_s: float) -> float | None:
        """It ended just now: seconds until it is started again; None: it is given up."""
        self._ended_s = [at_s for at_s in self._ended_s if now_s - at_s < WINDOW_S]
        count = len(self._ended_s)
        self._ended_s.append(now_s)
        return FIRST_S * 2**count if count < MOST else None
