"""Computes the microbatches that each stage must have in flight so that links and neighbouring stages don't delay it.

Little's law alone (round trip / period, + 2) gives too few: a stage that is rarely idle can begin a backward only when
its forwards leave room. So a microbatch that comes back a little late waits for the next period, and all stages before
it wait too. This module counts each wait. In a schedule of period T stage k begins the backward of a microbatch

    x_k = x_(k+1) + c_(k+1) + r_k        c: forward and backward of a microbatch, r: round trip between both stages

after the end of its forward. If the time left before the next forward is too short for the backward
(x_k mod T > T - c_k), it begins at the next multiple of T. Then floor(x_k / T) + 1 microbatches are in flight at stage
k. With free links that is the number of stages from k on, as in 1F1B; with an r that is small against T, but larger
than the idle time, it is twice that number. One credit is added because the stage machine takes the next microbatch
that has arrived instead of following a timetable. The last stage needs one: its backward follows its forward at once.
Stages that defer weight gradients need fewer, and get the same number.

`pipeline` calls this module, `placement` writes the credits into plans, and the stage machine (also in the simulator)
enforces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

TARGET: Final = 0.97
"""Fraction of the closed form's speed that is aimed at: the idle time this leaves in a period saves credits if delays
are short."""
SPARE: Final = 1
"""Credits beyond what the timetable needs."""
_EXACT: Final = 1e-9


def credits_needed(compute_s: Sequence[float], round_trip_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """Credits per stage, first to last. `compute_s`: forward and backward time of each stage; `round_trip_s[k]`: both
    transfers, latencies and waits between stages k and k + 1; `period_s`: period of the closed form, above 0. Stage k
    gets at least as many credits as there are stages from k on, and as Little's law needs for the closed form's period;
    a longer round trip never gives fewer."""
    turn_s = period_s / TARGET
    needed = [1]
    since_s = trip_s = 0.0  # From the end of a forward to the begin of its backward, with waits and without.
    for stage in range(len(compute_s) - 2, -1, -1):
        away_s = compute_s[stage + 1] + round_trip_s[stage]
        trip_s += away_s
        turns, late_s = divmod(since_s + away_s, turn_s)
        since_s += away_s
        if late_s > turn_s - compute_s[stage] + _EXACT * turn_s:
            turns += 1
            since_s = turns * turn_s
        least = max(len(needed) + 1, ceil((trip_s + compute_s[stage]) / period_s - _EXACT))
        needed.append(max(least, int(turns) + 1 + SPARE))
    return tuple(reversed(needed))
