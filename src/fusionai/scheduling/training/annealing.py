"""Finds a good pipeline in pools that are too large for an exact search, by simulated annealing.

First guesses: for a range of target periods and rankings of peers, stages are filled from the last to the first with as
many blocks as period and memory allow (`chain_kernels.fill`). The best few are changed at random, with noise that
shrinks to zero (`chain_kernels.anneal`). Deterministic: the effort is a number of rounds, random numbers come from a
seed. The result carries no bound.

`solving` calls this module where `search` can't finish. `relaxation` preselects the peers and bounds the distance from
the optimum. `improvement` makes the first guess for small pools without a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fusionai.scheduling.kernels import chain as chain_kernels
from fusionai.scheduling.kernels.chain import Integers, Tables, anneal, fill, step_s
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.scheduling.problem.limits import Limits
from fusionai.scheduling.training.pipeline import Pipeline, Suffix
from fusionai.scheduling.training.search import chain_tables

ROUNDS: Final = 40_000
SLOW_ROUNDS: Final = 10_000
"""Upper limit on `rounds` where nothing can be compiled."""
STARTS: Final = 4
PERIODS: Final = 24
SLOW_PERIODS: Final = 6
HEATS: Final = (0.02, 0.02, 0.05, 0.005)
"""Initial noise of each start, as a fraction of the step time; the starts take these values in turn."""


@dataclass(frozen=True, slots=True)
class _Guess:
    step_s: float
    order: Integers
    cuts: Integers
    count: int


def annealed(
    pipeline: Pipeline,
    limits: Limits,
    *,
    known: Suffix | None = None,
    others: Sequence[Suffix] = (),
    afresh: bool = True,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> tuple[Suffix | None, int]:
    """Return the fastest pipeline found, no slower than `known` (None if none fits), and the number of pipelines
    evaluated. `others`: more pipelines to start from; `afresh`: start from simple guesses as well."""
    if not available():
        rounds = min(rounds, SLOW_ROUNDS)
    tables = chain_tables(pipeline, limits.required)
    tail = pipeline.tail
    end = (tail.start, tail.head, tail.period_s, tail.transit_s, tail.up_s, tail.down_s, tail.update_s)
    required = np.array([bool(limits.required >> peer & 1) for peer in range(pipeline.owner)], dtype=np.bool_)
    guesses = list(_guesses(pipeline, tables, end, limits)) if afresh else []
    looked_at = len(guesses)
    guesses += [_written(pipeline, one) for one in (*others, *([] if known is None else [known]))]
    guesses = sorted(_distinct(guesses), key=lambda one: one.step_s)[:STARTS]
    best, best_s = known, np.inf if known is None else pipeline.step_s(known)
    for turn, guess in enumerate(guesses):
        order, cuts = guess.order.copy(), guess.cuts.copy()
        count, found_s = compiled(anneal)(
            tables, end, pipeline.microbatches, tail.stages, limits.fewest, limits.most, required, order, cuts,
            guess.count, rounds // len(guesses), HEATS[turn % len(HEATS)], seed * STARTS + turn,
        )  # fmt: skip
        looked_at += rounds // len(guesses)
        if found_s < best_s:
            best = pipeline.fold([int(peer) for peer in order[:count]], [int(cut) for cut in cuts[: count + 1]])
            best_s = found_s
    return best, looked_at


def _guesses(pipeline: Pipeline, tables: Tables, end: chain_kernels.Suffix, limits: Limits) -> Iterator[_Guess]:
    """Pipelines that fit and use every required peer."""
    peers = pipeline.owner
    stages = pipeline.tail.stages
    for ranked in _rankings(pipeline, limits):
        for period_s in _periods(pipeline, limits):
            order, cuts = np.zeros(peers, dtype=np.int64), np.zeros(peers + 1, dtype=np.int64)
            count = compiled(fill)(
                tables, end, pipeline.microbatches, stages, ranked, period_s, limits.most, order, cuts
            )  # fmt: skip
            used = sum(1 << int(peer) for peer in order[:count])
            if count < max(limits.fewest, 1) or limits.required & ~used:
                continue
            seconds = compiled(step_s)(tables, end, pipeline.microbatches, stages, order, cuts, count, np.inf)
            if seconds < np.inf:
                yield _Guess(float(seconds), order, cuts, int(count))


def _rankings(pipeline: Pipeline, limits: Limits) -> Iterator[Integers]:
    """Orders in which peers are filled; required peers come before all others."""
    peers = pipeline.owner
    speed = np.array(pipeline.speed[:peers])
    memory = np.array(pipeline.memory_bytes[:peers])
    access_s = np.array([pipeline.access_s(p, 0, 1) if pipeline.chain.length > 1 else 0.0 for p in range(peers)])
    free = np.array([not limits.required >> peer & 1 for peer in range(peers)])
    for key in (-speed, speed, -memory, memory, access_s, -np.minimum(speed / speed.max(), memory / memory.max())):
        ranked = np.lexsort((key, free)).astype(np.int64)
        # The same peers in reverse order too: small memories suit the last stages, where little is in flight.
        most = min(limits.most, peers)
        for order in (ranked, np.concatenate([ranked[:most][::-1], ranked[most:]])):
            first = order == (-1 if pipeline.front is None else pipeline.front)
            yield np.concatenate([order[~first], order[first]])  # The peer of the first blocks is filled last.


def _periods(pipeline: Pipeline, limits: Limits) -> list[float]:
    """Target periods from the ideal (all chosen peers share the work by speed) to that of one slow peer."""
    total = pipeline.chain.flops(0, pipeline.chain.length)
    low_s = total / sum(pipeline.speed[: limits.most])
    high_s = 2 * total / min(pipeline.speed[: pipeline.owner])
    if low_s <= 0:
        return [np.inf]
    count = PERIODS if available() else SLOW_PERIODS
    # Most good plans lie within a few times the ideal, so that part of the range is sampled more densely.
    return [*np.geomspace(low_s, min(4 * low_s, high_s), count), *np.geomspace(low_s, high_s, count), np.inf]


def _written(pipeline: Pipeline, known: Suffix) -> _Guess:
    pool = list(pipeline.pool_stages(known))
    order, cuts = np.zeros(pipeline.owner, dtype=np.int64), np.zeros(pipeline.owner + 1, dtype=np.int64)
    order[: len(pool)] = [stage.head for stage in pool]
    cuts[: len(pool) + 1] = [*(stage.start for stage in pool), pipeline.chain.length]
    return _Guess(pipeline.step_s(known), order, cuts, len(pool))


def _distinct(guesses: list[_Guess]) -> list[_Guess]:
    seen: dict[tuple[bytes, bytes], _Guess] = {}
    for guess in guesses:
        seen.setdefault((guess.order[: guess.count].tobytes(), guess.cuts[: guess.count + 1].tobytes()), guess)
    return list(seen.values())
