"""When a machine that was lost, or that failed as a standby, may be planned with again. Asks nobody.

The wait doubles with each loss in a row. A machine that has joined anew waits for at most `LONGEST_SETTLE_S`: a new
process may do better. A process that fails again and again without ending waits for up to `LONGEST_RETRY_S`: each
attempt costs a plan, a load of weights and a line in the log, and nothing of it has changed.

Neighbours: `client.replanning` and `simulator.job` ask before they plan with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SETTLE_S: Final = 1.0
"""Wait after a first loss, in seconds. The broker must have heard the machine that long after its loss."""
LONGEST_SETTLE_S: Final = 30.0
"""Longest wait of a machine that has joined anew since its loss, in seconds."""
LONGEST_RETRY_S: Final = 3600.0
"""Longest wait of a process that was lost and never ended, in seconds: an hour of one machine is less than an attempt
every half minute costs the others."""
STEADY_S: Final = 120.0
"""Losses do not add up where the machine did its work for so long between them, in seconds: every machine is lost now
and then in a long job."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The last of a row of `times`, at `at_s`."""

    at_s: float
    times: int
    sound_s: float | None = None
    """Since when the machine has done its work again: a stage runs on it, or it could take one over. None: not yet."""

    def wait_s(self, *, rejoined: bool) -> float:
        """How long after the loss the machine must have been heard. `rejoined`: it has joined anew since."""
        return min(_doubled_s(self.times), LONGEST_SETTLE_S if rejoined else LONGEST_RETRY_S)

    def is_over(self, heard_s: float, *, rejoined: bool) -> bool:
        """Whether a machine last heard then is back."""
        return heard_s - self.at_s >= self.wait_s(rejoined=rejoined)

    def is_there(self, heard_s: float) -> bool:
        """Whether it is back as far as this loss goes, however many there were: enough for a job that waits for it and
        for nobody else."""
        return heard_s - self.at_s >= SETTLE_S

    @property
    def is_given_up(self) -> bool:
        """Whether the wait exceeds `LONGEST_SETTLE_S` for the first time in this row: that is worth a word."""
        return self.times > 1 and _doubled_s(self.times - 1) <= LONGEST_SETTLE_S < _doubled_s(self.times)


def _doubled_s(times: int) -> float:
    """The exponent is bounded, because a float is."""
    return SETTLE_S * 2.0 ** min(times - 1, 32)


def lost(known: Loss | None, now_s: float) -> Loss:
    """It was lost just now; `known` is the loss before."""
    if known is None or (known.sound_s is not None and now_s - known.sound_s > STEADY_S):
        return Loss(now_s, 1)
    return Loss(now_s, known.times + 1)


def sound(known: Loss, now_s: float) -> Loss:
    """It does its work now; the first such word after a loss counts."""
    return known if known.sound_s is not None else replace(known, sound_s=now_s)
