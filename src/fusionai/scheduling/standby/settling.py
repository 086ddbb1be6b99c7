"""When a machine that was lost, or that failed as a standby, may be used in plans again.

The wait doubles with each consecutive loss. A machine that has joined again waits for at most `LONGEST_SETTLE_S`,
because a new process may work better. A process that fails repeatedly without ending waits for up to `LONGEST_RETRY_S`:
each attempt costs a plan, a load of weights and a log line, and its cause has not changed.

`client.pool.replanning` and `simulator.replanning` consult this module before they plan with the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

SETTLE_S: Final = 1.0
"""Wait after a first loss, in seconds. The broker must have heard from the machine at least this long after its
loss."""
LONGEST_SETTLE_S: Final = 30.0
"""Longest wait of a machine that has joined again since its loss, in seconds."""
LONGEST_RETRY_S: Final = 3600.0
"""Longest wait of a process that was lost but never ended, in seconds. Losing one machine for an hour costs less than
an attempt every half minute costs the others."""
STEADY_S: Final = 120.0
"""Seconds of working between two losses after which the count of losses starts again: in a long job every machine is
lost occasionally."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The last of `times` consecutive losses, at `at_s`."""

    at_s: float
    times: int
    sound_s: float | None = None
    """Time since which the machine works again: it runs a stage, or could take one over. None: not yet."""

    def wait_s(self, *, rejoined: bool) -> float:
        """Return how many seconds after the loss the broker must have heard from the machine.

        `rejoined`: the machine has joined again since.
        """
        return min(_doubled_s(self.times), LONGEST_SETTLE_S if rejoined else LONGEST_RETRY_S)

    def is_over(self, heard_s: float, *, rejoined: bool) -> bool:
        """Return whether a machine last heard at `heard_s` may be used again."""
        return heard_s - self.at_s >= self.wait_s(rejoined=rejoined)

    def is_there(self, heard_s: float) -> bool:
        """Return whether the machine was heard since this loss, whatever the number of losses.

        That is enough for a job that waits for this machine and for no other.
        """
        return heard_s - self.at_s >= SETTLE_S

    @property
    def is_given_up(self) -> bool:
        """Whether this is the first of the consecutive losses whose wait exceeds `LONGEST_SETTLE_S`; callers report
        it."""
        return self.times > 1 and _doubled_s(self.times - 1) <= LONGEST_SETTLE_S < _doubled_s(self.times)


def _doubled_s(times: int) -> float:
    """Return the doubled wait; the exponent is bounded so that the float can't overflow."""
    return SETTLE_S * 2.0 ** min(times - 1, 32)


def lost(known: Loss | None, now_s: float) -> Loss:
    """Return the state after a loss at `now_s`; `known` is the loss before."""
    if known is None or (known.sound_s is not None and now_s - known.sound_s > STEADY_S):
        return Loss(now_s, 1)
    return Loss(now_s, known.times + 1)


def sound(known: Loss, now_s: float) -> Loss:
    """Return the state after the machine was seen working at `now_s`; only the first time after a loss counts."""
    return known if known.sound_s is not None else replace(known, sound_s=now_s)
