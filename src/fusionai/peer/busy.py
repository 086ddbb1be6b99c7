"""Whether a machine's owner needs it: what other programs compute, with patience both ways. Pure: figures come in.

Decides when lending pauses and when it goes on. A game that starts is noticed within seconds; a machine between two
compilations is not lent for a moment. Neighbours: `peer.lending` measures and obeys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BUSY_SHARE: Final = 0.25
"""Of the processor (all cores), or of the accelerator, used by other programs: the owner is at work."""
QUIET_SHARE: Final = 0.10
BUSY_AFTER_S: Final = 8.0
QUIET_AFTER_S: Final = 120.0


@dataclass(slots=True)
class BusyWatch:
    """`busy`: whether lending pauses."""

    busy: bool = False
    _since_s: float | None = None
    """Since when what is measured speaks for a change without a break."""

    def measured(self, others_share: float, now_s: float) -> bool:
        """`others_share`: what other programs used since the last call, in [0, 1]. Gives `busy`."""
        for_change = others_share < QUIET_SHARE if self.busy else others_share > BUSY_SHARE
        if not for_change:
            self._since_s = None
            return self.busy
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (QUIET_AFTER_S if self.busy else BUSY_AFTER_S):
            self.busy, self._since_s = not self.busy, None
        return self.busy
