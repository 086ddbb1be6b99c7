"""When a machine that was lost counts as there again. Decides by what was heard of it since; asks nobody.

Neighbours: `client.replanning` and `simulator.job` ask before they plan with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SETTLE_S: Final = 1.0
"""A lost machine counts as back when the broker heard it so long after its loss; doubled for each time it was lost."""
LONGEST_SETTLE_S: Final = 30.0
STEADY_S: Final = 120.0
"""Losses that lie further apart do not add up: every machine is lost now and then in a long job."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The last of a row of `times`, at `at_s`."""

    at_s: float
    times: int

    def is_over(self, heard_s: float) -> bool:
        """Whether a machine last heard then is back."""
        return heard_s - self.at_s >= min(SETTLE_S * 2 ** (self.times - 1), LONGEST_SETTLE_S)

    def is_there(self, heard_s: float) -> bool:
        """Whether it is back as far as this loss goes, however many there were: enough for a job that waits for it and
        for nobody else."""
        return heard_s - self.at_s >= SETTLE_S


def lost(known: Loss | None, now_s: float) -> Loss:
    """It was lost just now; `known` is the loss before."""
    if known is None or now_s - known.at_s > STEADY_S:
        return Loss(now_s, 1)
    return Loss(now_s, known.times + 1)
