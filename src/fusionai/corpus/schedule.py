"""The learning rate of a step, as a pure function with the same bits as torch's `LambdaLR` with transformers'
schedules.

Source: `transformers.optimization` (`get_constant_schedule_with_warmup`, `get_linear_schedule_with_warmup`,
`get_cosine_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup`). For the linear schedule,
`minimum_ratio` uses the cosine's formula, because transformers has none."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fusionai.corpus.tables import Replicas, Train


def learning_rate(train: Train, steps: int, step: int) -> float:
    """The learning rate of `step` (from 0) in a job of `steps` steps."""
    return train.learning_rate * factor(train, steps, step)


def factor(train: Train, steps: int, step: int) -> float:
    """Factor of the base learning rate. Computed in transformers' order, which decides the last bit."""
    warmup = train.warmup_steps
    if step < warmup:
        return float(step) / float(max(1, warmup))
    match train.schedule:
        case "constant":
            return 1.0
        case "linear":
            value = max(0.0, float(steps - step) / float(max(1, steps - warmup)))
        case "cosine":
            progress = float(step - warmup) / float(max(1, steps - warmup))
            value = 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))
    return max(0.0, value * (1 - train.minimum_ratio) + train.minimum_ratio)


SHORT_ROUNDS: Final = 40
"""Up to this many rounds, use the values for `SHORT_ROUNDS` rounds."""
LONG_ROUNDS: Final = 200
"""From this many rounds on, use the values for long jobs."""
SHORT_MOMENTUM: Final = 0.5
SHORT_RATE: Final = 1.0
LONG_MOMENTUM: Final = 0.9
LONG_RATE: Final = 0.7


class OuterRates(NamedTuple):
    learning_rate: float
    momentum: float


def outer_step(rounds: int) -> OuterRates:
    """Values for a job of `rounds` rounds, at least one."""
    goes_on_rounds = min(max(rounds, SHORT_ROUNDS), LONG_ROUNDS) / 20
    momentum = 1 - 1 / goes_on_rounds
    long = (momentum - SHORT_MOMENTUM) / (LONG_MOMENTUM - SHORT_MOMENTUM)
    return OuterRates(round(SHORT_RATE + long * (LONG_RATE - SHORT_RATE), 3), round(momentum, 3))


TIMES: Final = 5
"""Early rounds in one usual round."""
USUAL: Final = 32
"""Default number of early rounds. More were not tried."""
OF_JOB: Final = 5
"""By default early rounds take at most one in this many of the job's steps. With 5, a job that exchanges every 50 steps
in `int2` still sends 400 times less than it would by sending gradients at every step."""
LEAST_STEPS: Final = 5
"""Least length of an early round, by default, in steps; if it would be shorter, the usual rounds are short enough."""


class EarlyRounds(NamedTuple):
    """From step `first` to step `until` of the job (exclusive), rounds have `every` steps. All 0: no early rounds."""

    first: int
    until: int
    every: int


def usual_early_steps(every: int, steps: int, overlap: int) -> int:
    """Default number of steps in early rounds, for a job of `steps` steps whose model is trained from scratch.
    `overlap`: training steps during an exchange."""
    short = every // TIMES
    if every % TIMES or short < LEAST_STEPS or overlap >= short:
        return 0
    return short * min(USUAL, steps // OF_JOB // short)


def early_rounds(replicas: Replicas, train: Train, steps: int) -> EarlyRounds:
    """Early rounds of a job of `steps` steps. The first starts with the last round that ends in the warm-up."""
    if replicas.early_steps == 0:
        return EarlyRounds(0, 0, 0)
    short = replicas.every // TIMES
    first = min(train.warmup_steps // short * short, steps)
    return EarlyRounds(first, min(first + replicas.early_steps, steps), short)
