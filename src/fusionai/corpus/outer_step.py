"""The outer step of local updates where a recipe does not say: its learning rate and momentum, by the rounds of a job.

Decides them. A long job takes what DiLoCo's authors found (0.7 and 0.9; arXiv 2311.08105). A momentum of 0.9 goes on
for ten rounds: of a job of twenty that is half, and with a learning rate that falls it ends beyond where it should. So
it goes on for a twentieth of the rounds, and what a step amounts to altogether, rate / (1 - momentum), shrinks with it.
Figures: `benchmarks/local_updates.py`, decision 25. Neighbour: `corpus.recipe` asks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SHORT_ROUNDS: Final = 40
"""Up to so many rounds, what is best for so many."""
LONG_ROUNDS: Final = 200
SHORT_MOMENTUM: Final = 0.5
SHORT_RATE: Final = 1.0
LONG_MOMENTUM: Final = 0.9
LONG_RATE: Final = 0.7


class OuterStep(NamedTuple):
    learning_rate: float
    momentum: float


def outer_step(rounds: int) -> OuterStep:
    """For a job of so many rounds, at least one."""
    goes_on_rounds = min(max(rounds, SHORT_ROUNDS), LONG_ROUNDS) / 20
    momentum = 1 - 1 / goes_on_rounds
    long = (momentum - SHORT_MOMENTUM) / (LONG_MOMENTUM - SHORT_MOMENTUM)
    return OuterStep(round(SHORT_RATE + long * (LONG_RATE - SHORT_RATE), 3), round(momentum, 3))
