"""Default learning rate and momentum of the outer step of local updates, by the job's number of rounds.

Long jobs use the values of the DiLoCo paper (0.7 and 0.9; arXiv 2311.08105). A momentum of 0.9 acts for ten rounds. In
a job of twenty rounds that is half of it, and as the learning rate falls, the momentum would overshoot. So the momentum
acts for a twentieth of the rounds, and the total size of a step, rate / (1 - momentum), shrinks with it. Measurements:
`benchmarks/local_updates.py`, decision 25. Neighbour: `corpus.recipe` asks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SHORT_ROUNDS: Final = 40
"""Up to this many rounds, use the values for `SHORT_ROUNDS` rounds."""
LONG_ROUNDS: Final = 200
"""From this many rounds on, use the values for long jobs."""
SHORT_MOMENTUM: Final = 0.5
SHORT_RATE: Final = 1.0
LONG_MOMENTUM: Final = 0.9
LONG_RATE: Final = 0.7


class OuterStep(NamedTuple):
    learning_rate: float
    momentum: float


def outer_step(rounds: int) -> OuterStep:
    """Values for a job of `rounds` rounds, at least one."""
    goes_on_rounds = min(max(rounds, SHORT_ROUNDS), LONG_ROUNDS) / 20
    momentum = 1 - 1 / goes_on_rounds
    long = (momentum - SHORT_MOMENTUM) / (LONG_MOMENTUM - SHORT_MOMENTUM)
    return OuterStep(round(SHORT_RATE + long * (LONG_RATE - SHORT_RATE), 3), round(momentum, 3))
