"""How many microbatches each stage must have in flight so that neither links nor its neighbours' rhythm hold it up.

Little's law alone (round trip / period, + 2) is too few: a stage that is hardly ever idle can begin a backward only
when its forwards leave room, so a microbatch that comes back a little late waits for the next period, and everybody
above with it. Here each wait is counted. In a schedule of period T stage k begins the backward of a microbatch

    x_k = x_(k+1) + c_(k+1) + r_k        c: forward and backward of a microbatch, r: there and back between both stages

after the end of its forward, or, where x_k mod T leaves the backward less than its time before the next forward
(x_k mod T > T - c_k), at the next multiple of T. In flight at stage k are floor(x_k / T) + 1 microbatches then. Without
links that is 1F1B's number of stages from k on; with r small against T, but larger than the idle time, twice that. One
more is given because the shipped machine works off what is there instead of keeping a timetable. The last stage needs
one: its backward follows its forward at once. Stages that put weight gradients off need fewer; these do for them too.

Decides nothing else. Neighbours: `pipeline` asks, `placement` writes the credits into plans, the shipped stage machine
keeps them, `simulator` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

TARGET: Final = 0.97
"""Of the closed form's speed: the idle time this leaves in a period saves credits where delays are short."""
SPARE: Final = 1
"""Beyond what the timetable needs."""
_EXACT: Final = 1e-9


def credits_needed(compute_s: Sequence[float], round_trip_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """Per stage, first to last. `compute_s`: of each stage; `round_trip_s[k]`: both transfers, latencies and waits
    between stages k and k + 1; `period_s`: the closed form's, above 0. Never fewer than stages from k on, nor than the
    closed form's period takes by Little's law; never fewer for a longer round trip."""
    turn_s = period_s / TARGET
    needed = [1]
    since_s = trip_s = 0.0  # from a forward's end to its backward's begin, with waits and without
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
