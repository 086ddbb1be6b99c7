"""When replicas that train apart exchange more often: for a while after the warm-up, five times in a usual round.

Decides how long where a recipe does not say, and which steps these are. A model that begins from nothing changes most
when the learning rate is highest and it knows least; replicas then go farther apart in a round than averaging brings
back, and what is lost so stays lost. A model that is only tuned has that behind it.

Figures: `benchmarks/local_updates.py`, decision 25. Neighbours: `corpus.recipe` asks, `coordination.exchanges` counts
rounds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fusionai.corpus.tables import Replicas, Train

TIMES: Final = 5
"""Early rounds in a usual one."""
USUAL: Final = 32
"""So many early rounds there are, unless told. More were not tried."""
OF_JOB: Final = 5
"""But they take no more than such a part of the job: with that, one that exchanges every 50 steps in `int2` still sends
400 times less than gradients at every step would be."""
LEAST_STEPS: Final = 5
"""Shorter early rounds are left out unless told: then the usual ones are short enough."""


class EarlyRounds(NamedTuple):
    """From step `first` until step `until` of the job rounds have `every` steps. All 0: there are none such."""

    first: int
    until: int
    every: int


def usual_early_steps(every: int, steps: int, overlap: int) -> int:
    """Of a job of so many steps whose model begins from nothing. `overlap`: steps that go on during an exchange."""
    short = every // TIMES
    if every % TIMES or short < LEAST_STEPS or overlap >= short:
        return 0
    return short * min(USUAL, steps // OF_JOB // short)


def early_rounds(replicas: Replicas, train: Train, steps: int) -> EarlyRounds:
    """They begin with the last round that would end in the warm-up. `steps`: of the whole job."""
    if replicas.early_steps == 0:
        return EarlyRounds(0, 0, 0)
    short = replicas.every // TIMES
    first = min(train.warmup_steps // short * short, steps)
    return EarlyRounds(first, min(first + replicas.early_steps, steps), short)
