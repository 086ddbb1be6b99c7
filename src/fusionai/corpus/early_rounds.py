"""Early rounds of local updates: for a while after the warm-up, replicas exchange five times as often as usual.

Decides which steps these are, and how many if the recipe does not say. Models trained from scratch change fastest right
after the warm-up, when the learning rate is highest; replicas then diverge more in a round than averaging can bring
back, and the loss in quality stays. A fine-tuned model is past that phase, so it gets no early rounds by default.

Measurements: `benchmarks/local_updates.py`, decision 25. Neighbours: `corpus.recipe` asks,
`coordination.training.exchanges` counts rounds."""

from __future__ import annotations

from typing import Final, NamedTuple

from fusionai.corpus.tables import Replicas, Train

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
    """Early rounds of a job of `steps` steps. The first one starts with the last round that would end in the
    warm-up."""
    if replicas.early_steps == 0:
        return EarlyRounds(0, 0, 0)
    short = replicas.every // TIMES
    first = min(train.warmup_steps // short * short, steps)
    return EarlyRounds(first, min(first + replicas.early_steps, steps), short)
