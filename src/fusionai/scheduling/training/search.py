"""Searches for the pipeline with the shortest step, over stages, peers, order and cuts: exactly, or by local changes.

`improve` finds a good pipeline quickly in small pools. For a range of target periods and orders of peers, stages are
filled from the last to the first with as many blocks as the period and the memory allow. Then cuts, stages and peers
are changed one at a time while the step gets shorter.

`search` is exact: dynamic programming over (set of peers used, first peer, first block), from the last stage towards
the first, one level per stage. A state keeps every suffix that no other one beats in period, transit, update and the
two occupancies of its head's link. A suffix is dropped if it can't beat the best known step, given a relaxation's bound
on everything before it (branch and bound). The worst case is exponential in the number of peers. Therefore the search
has a budget of tried extensions, an argument and never a clock, so that results are reproducible.

`annealed` serves larger pools. Stages are filled for many target periods and rankings of peers, and the best few
pipelines are changed at random, with noise that shrinks to zero (simulated annealing). The effort is a number of
rounds, random numbers come from a fixed seed, and the result carries no bound.

`kernels.training_pipeline` has the loops, `pipeline` the costs; `solving` decides what happens when a budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import Integers, available, compiled
from fusionai.scheduling.kernels.training_pipeline import Before, Labels, PeerTables, anneal, fill, grow, step_s
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.training.pipeline import Pipeline, Suffix, cost_tables

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Order of peers, first stage first, and cuts (from 0 to the chain's length)."""

FIRST_PERIODS: Final = 8
FIRST_STARTS: Final = 2


def construct(pipeline: Pipeline, limits: PipelineLimits) -> list[Layout]:
    """Feasible layouts, the fastest first; empty if none was found."""
    found: dict[Layout, float] = {}
    filling = _Filling(pipeline, limits.fewest)
    for order in dict.fromkeys(_first_orders(pipeline, limits)):
        for period_s in _first_periods(pipeline, limits):
            for count in sorted({limits.fewest, limits.most}):
                layout = filling.filled(order, period_s, count)
                if layout is not None and layout not in found:
                    step_s = _step_s(pipeline, layout, limits)
                    if step_s < inf:
                        found[layout] = step_s
    return sorted(found, key=lambda layout: (found[layout], layout))


def improve(pipeline: Pipeline, limits: PipelineLimits, *, budget: int) -> tuple[Suffix | None, int]:
    """Return the best pipeline that local search reaches within `budget` evaluations, and the evaluations used."""
    best: Layout | None = None
    best_s = inf
    spent = 0
    for layout in construct(pipeline, limits)[:FIRST_STARTS]:
        layout, step_s, tried = descend(pipeline, layout, limits, (budget - spent) // 2)
        spent += tried
        if step_s < best_s:
            best, best_s = layout, step_s
    return (None if best is None else pipeline.fold(*best)), spent


def descend(pipeline: Pipeline, layout: Layout, limits: PipelineLimits, budget: int) -> tuple[Layout, float, int]:
    """Change `layout` while the step gets shorter. Returns the layout, its step time and the layouts evaluated."""
    step_s = _step_s(pipeline, layout, limits)
    spent = 1
    improved = True
    while improved and spent < budget:
        improved = False
        for neighbour in _neighbours(pipeline, layout):
            spent += 1
            neighbour_s = _step_s(pipeline, neighbour, limits)
            if neighbour_s < step_s:
                layout, step_s, improved = neighbour, neighbour_s, True
                break
            if spent >= budget:
                break
    return layout, step_s, spent


def _step_s(pipeline: Pipeline, layout: Layout, limits: PipelineLimits) -> float:
    order, cuts = layout
    if not limits.fewest <= len(order) <= limits.most:
        return inf
    used = sum(1 << peer for peer in order)
    if limits.required & ~used:
        return inf
    whole = pipeline.fold(order, cuts)
    return inf if whole is None else pipeline.step_s(whole)


def _neighbours(pipeline: Pipeline, layout: Layout) -> Iterator[Layout]:
    order, cuts = layout
    unused = [p for p in range(pipeline.owner) if p not in order]
    last = len(order) - 1
    for k in range(1, len(order)):
        for cut in (cuts[k] - 1, cuts[k] + 1):
            if cuts[k - 1] < cut < cuts[k + 1]:
                yield order, (*cuts[:k], cut, *cuts[k + 1 :])
    # Moving a block from one stage to another moves every cut between them.
    for i in range(last + 1):
        for j in range(i + 1, last + 1):
            for shift in (-1, 1):
                moved = tuple(c + shift if i < k <= j else c for k, c in enumerate(cuts))
                if all(a < b for a, b in pairwise(moved)):
                    yield order, moved
    for i in range(last + 1):
        for j in range(i + 1, last + 1):
            swapped = list(order)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            yield tuple(swapped), cuts
            # The peers keep their number of blocks.
            sizes = [b - a for a, b in pairwise(cuts)]
            sizes[i], sizes[j] = sizes[j], sizes[i]
            yield tuple(swapped), (0, *accumulate(sizes))
    for k in range(last + 1):
        for peer in unused:
            yield (*order[:k], peer, *order[k + 1 :]), cuts
    for k in range(last + 1):
        if last > 0:
            yield (*order[:k], *order[k + 1 :]), (*cuts[: max(k, 1)], *cuts[max(k, 1) + 1 :])
        for cut in range(cuts[k] + 1, cuts[k + 1]):
            for peer in unused:
                yield (*order[:k], peer, *order[k:]), (*cuts[: k + 1], cut, *cuts[k + 1 :])


class _Filling:
    """Fills stages from the last to the first. Target periods share most of their stages, so each is priced once."""

    def __init__(self, pipeline: Pipeline, fewest: int) -> None:
        self._pipeline = pipeline
        self._fewest = fewest
        self._priced: dict[Layout, Suffix | None] = {}

    def filled(self, order: Sequence[int], period_s: float, most: int) -> Layout | None:
        """Fill stages of at most `period_s` with the peers in this order; None if they don't reach the first block."""
        suffix: Suffix = self._pipeline.tail
        taken: tuple[int, ...] = ()
        cuts: tuple[int, ...] = (suffix.start,)
        for peer in order:
            if suffix.start == 0 or len(taken) == most:
                break
            # Leave a block for each stage that must still come.
            for start in range(max(0, self._fewest - len(taken) - 1), suffix.start):
                if self._pipeline.compute_s(peer, start, suffix.start) > period_s:
                    continue
                layout: Layout = ((peer, *taken), (start, *cuts))
                if layout not in self._priced:
                    grown = self._pipeline.longer(suffix, peer, start)
                    self._priced[layout] = min(grown, key=self._pipeline.step_s, default=None)
                longer = self._priced[layout]
                if longer is not None and longer.period_s <= max(period_s, suffix.period_s):
                    suffix = longer
                    taken, cuts = layout
                    break
        return (taken, cuts) if suffix.start == 0 else None


def _first_orders(pipeline: Pipeline, limits: PipelineLimits) -> Iterator[tuple[int, ...]]:
    """Orders in which stages are filled from the end: required peers first, then by speed, memory or access link."""
    everyone = range(pipeline.owner)
    keys: tuple[Callable[[int], float], ...] = (
        lambda p: pipeline.machines[p].flops_per_s,
        lambda p: -pipeline.machines[p].flops_per_s,
        lambda p: pipeline.machines[p].memory_bytes,
        lambda p: -pipeline.machines[p].memory_bytes,
        lambda p: -pipeline.access_s(p, 0, 1) if pipeline.chain.length > 1 else 0.0,
    )
    for key in keys:
        ranked = sorted(everyone, key=lambda p: (not limits.required >> p & 1, -key(p), p))
        # The same peers in reverse order too: small memories suit the last stages, where little is in flight.
        chosen = ranked[: limits.most]
        for order in (ranked, [*reversed(chosen), *ranked[limits.most :]]):
            yield tuple(sorted(order, key=lambda p: p == pipeline.front))  # The peer of the first blocks comes last.


def _first_periods(pipeline: Pipeline, limits: PipelineLimits) -> list[float]:
    """Target periods from the ideal (all chosen peers share the work by speed) to that of one slow peer."""
    chain = pipeline.chain
    total = chain.flops(0, chain.length)
    speeds = [machine.flops_per_s for machine in pipeline.machines[: pipeline.owner]]
    low_s, high_s = total / sum(speeds[: limits.most]), 2 * total / min(speeds)
    if low_s <= 0:
        return [inf]
    ratio = (high_s / low_s) ** (1 / (FIRST_PERIODS - 1))
    # Most good plans lie within twice the ideal, so the first part of the range is sampled more densely.
    fine = [low_s * (1 + 0.15 * step) for step in range(FIRST_PERIODS)]
    return [*fine, *(low_s * ratio**step for step in range(FIRST_PERIODS)), inf]


GLANCE_BUDGET: Final = 6_000
"""Extensions tried in plain Python before the compiled search is loaded, which takes time."""
SLOW_BUDGET: Final = 400_000
"""Extensions tried if loops can't be compiled: a second or two."""
MOST_PEERS: Final = 40
"""Largest number of peers, so that a state's number (peers used, head, start) fits into 63 bits."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search. `complete`: the whole space was searched, so `best` is proven optimal. `best` is None if no
    feasible pipeline was found or known."""

    best: Suffix | None
    complete: bool
    explored: int


def search(
    pipeline: Pipeline,
    limits: PipelineLimits,
    *,
    known: Suffix | None,
    budget: int,
    glance: int = GLANCE_BUDGET,
    before: Before | None = None,
    below_s: float = inf,
) -> SearchResult:
    """Return the fastest pipeline found, no slower than `known`, which is a feasible pipeline or None.

    Tries about `budget` extensions at most, `glance` of them before it loads the compiled loops, on at most
    `MOST_PEERS` peers. `before`: a `Relaxation`'s bounds on what lies before a stage, for steps shorter than `known`.
    `below_s`: longer steps are ignored.
    """
    tables = chain_tables(pipeline, limits.required, before)
    if not available():
        budget = glance = min(budget, max(glance, SLOW_BUDGET))
    if glance > 0:
        found = _searched(pipeline, tables, limits, known, below_s, min(budget, glance), fast=False)
        if found.complete or budget <= glance:
            return found
        known = found.best
    return _searched(pipeline, tables, limits, known, below_s, budget, fast=True)


def chain_tables(pipeline: Pipeline, required: int = 0, before: Before | None = None) -> PeerTables:
    """Return the costs of `pipeline` as arrays; `required`: mask of peers that can't be exchanged with others."""
    chain, peers, tail = pipeline.chain, pipeline.owner, pipeline.tail
    everyone = range(len(pipeline.machines))
    hops = [[pipeline.hop(i, j) for j in everyone] for i in everyone]
    costs = cost_tables(pipeline, range(peers))
    return PeerTables(
        costs=costs,
        bandwidth=np.array([[hop.bandwidth_bytes_per_s for hop in row] for row in hops]),
        latency_s=np.array([[hop.latency_s for hop in row] for row in hops]),
        shared=np.array([[hop.shared for hop in row] for row in hops]),
        up=np.array([machine.up for machine in pipeline.machines]),
        down=np.array([machine.down for machine in pipeline.machines]),
        forward_bytes=np.array(chain.forward_bytes),
        gradient_bytes=np.array(chain.gradient_bytes),
        least_bytes=costs.stage_bytes[:, 0, :].min(axis=0),
        roomiest=np.argsort(-costs.memory_bytes, kind="stable").astype(np.int64),
        twins=np.array(twins(pipeline, required) if peers <= MOST_PEERS else [0] * peers, dtype=np.int64),
        before=_simply_before(pipeline) if before is None else before,
        tail=(tail.start, tail.head, tail.period_s, tail.transit_s, tail.up_s, tail.down_s, tail.update_s),
    )


def _simply_before(pipeline: Pipeline) -> Before:
    """Return a simple bound: the fastest machine computes everything before a stage."""
    work = pipeline.tables.flops[0, 0] * (1 - 1e-12)
    least_s = work / max(machine.variant_flops_per_s[0] for machine in pipeline.machines[: pipeline.owner])
    return Before(
        periods=np.array([0.0, np.inf]),
        before_s=np.broadcast_to(least_s, (1, pipeline.owner, len(least_s))).copy(),
        prices_s=np.zeros((1, pipeline.owner)),
        all_s=np.zeros(1),
    )


def twins(pipeline: Pipeline, required: int) -> list[int]:
    """Return for each peer the mask of earlier peers with equal costs; these must be used before it."""
    return [
        sum(
            1 << earlier
            for earlier in range(peer)
            if pipeline.alike(earlier, peer) and (required >> peer & 1) == (required >> earlier & 1)
        )
        for peer in range(pipeline.owner)
    ]


def _searched(
    pipeline: Pipeline,
    tables: PeerTables,
    limits: PipelineLimits,
    known: Suffix | None,
    below_s: float,
    budget: int,
    *,
    fast: bool,
) -> SearchResult:
    labels = _labels(tables, budget + pipeline.chain.length + 2)
    known_s = below_s if known is None else min(below_s, pipeline.step_s(known))
    run = compiled(grow) if fast else grow
    rest, peer, _, explored, complete = run(
        tables, labels, limits.fewest, limits.most, limits.required, known_s, budget
    )
    if peer >= 0:
        order, cuts = [int(peer)], [0, int(labels.start[rest])]
        while rest:
            order.append(int(labels.head[rest]))
            rest = labels.rest[rest]
            cuts.append(int(labels.start[rest]))
        known = pipeline.fold(order, cuts)
    return SearchResult(known, complete=bool(complete), explored=int(explored))


def _labels(tables: PeerTables, size: int) -> Labels:
    """Return `size` labels, the first of them the tail: a peer's extensions are counted at once, so the last ones may
    exceed the budget."""
    integers = [np.zeros(size, dtype=np.int64) for _ in range(5)]
    floats = [np.zeros(size, dtype=np.float64) for _ in range(5)]
    mask, head, start, rest, after = integers
    period_s, transit_s, up_s, down_s, update_s = floats
    start[0], head[0] = tables.tail[:2]
    for array, value in zip(floats, tables.tail[2:], strict=True):
        array[0] = value
    return Labels(
        mask=mask,
        head=head,
        start=start,
        period_s=period_s,
        transit_s=transit_s,
        up_s=up_s,
        down_s=down_s,
        update_s=update_s,
        rest=rest,
        after=after,
        beaten=np.zeros(size, dtype=np.bool_),
        first=np.zeros(2 * size + 1, dtype=np.int64),
        heads=len(tables.twins),
        cuts=len(tables.forward_bytes),
    )


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
    limits: PipelineLimits,
    *,
    known: Suffix | None = None,
    others: Sequence[Suffix] = (),
    afresh: bool = True,
    rounds: int = ROUNDS,
) -> tuple[Suffix | None, int]:
    """Return the fastest pipeline found, no slower than `known` (None if none fits), and the number of pipelines
    evaluated. `others`: more pipelines to start from; `afresh`: start from simple guesses as well."""
    if not available():
        rounds = min(rounds, SLOW_ROUNDS)
    tables = chain_tables(pipeline, limits.required)
    required = np.array([bool(limits.required >> peer & 1) for peer in range(pipeline.owner)], dtype=np.bool_)
    guesses = list(_guesses(pipeline, tables, limits)) if afresh else []
    looked_at = len(guesses)
    guesses += [_written(pipeline, one) for one in (*others, *([] if known is None else [known]))]
    guesses = sorted(_distinct(guesses), key=lambda one: one.step_s)[:STARTS]
    best, best_s = known, np.inf if known is None else pipeline.step_s(known)
    for turn, guess in enumerate(guesses):
        order, cuts = guess.order.copy(), guess.cuts.copy()
        count, found_s = compiled(anneal)(
            tables, limits.fewest, limits.most, required, order, cuts, guess.count, rounds // len(guesses),
            HEATS[turn % len(HEATS)], turn,
        )  # fmt: skip
        looked_at += rounds // len(guesses)
        if found_s < best_s:
            best = pipeline.fold([int(peer) for peer in order[:count]], [int(cut) for cut in cuts[: count + 1]])
            best_s = found_s
    return best, looked_at


def _guesses(pipeline: Pipeline, tables: PeerTables, limits: PipelineLimits) -> Iterator[_Guess]:
    """Yield pipelines that fit and use every required peer."""
    for ranked in _rankings(pipeline, limits):
        for period_s in _periods(pipeline, limits):
            order, cuts = _empty(pipeline)
            count = int(compiled(fill)(tables, ranked, period_s, limits.most, order, cuts))
            used = sum(1 << int(peer) for peer in order[:count])
            if count < max(limits.fewest, 1) or limits.required & ~used:
                continue
            seconds = compiled(step_s)(tables, order, cuts, count, np.inf)
            if seconds < np.inf:
                yield _Guess(float(seconds), order, cuts, count)


def _empty(pipeline: Pipeline) -> tuple[Integers, Integers]:
    """Return room for an order of peers and its cuts."""
    return np.zeros(pipeline.owner, dtype=np.int64), np.zeros(pipeline.owner + 1, dtype=np.int64)


def _rankings(pipeline: Pipeline, limits: PipelineLimits) -> Iterator[Integers]:
    """Orders in which peers are filled; required peers come before all others."""
    peers = pipeline.owner
    speed = np.array([machine.flops_per_s for machine in pipeline.machines[:peers]])
    memory = np.array([machine.memory_bytes for machine in pipeline.machines[:peers]])
    access_s = np.array([pipeline.access_s(p, 0, 1) if pipeline.chain.length > 1 else 0.0 for p in range(peers)])
    free = np.array([not limits.required >> peer & 1 for peer in range(peers)])
    for key in (-speed, speed, -memory, memory, access_s, -np.minimum(speed / speed.max(), memory / memory.max())):
        ranked = np.lexsort((key, free)).astype(np.int64)
        # The same peers in reverse order too: small memories suit the last stages, where little is in flight.
        most = min(limits.most, peers)
        for order in (ranked, np.concatenate([ranked[:most][::-1], ranked[most:]])):
            first = order == (-1 if pipeline.front is None else pipeline.front)
            yield np.concatenate([order[~first], order[first]])  # The peer of the first blocks is filled last.


def _periods(pipeline: Pipeline, limits: PipelineLimits) -> list[float]:
    """Target periods from the ideal (all chosen peers share the work by speed) to that of one slow peer."""
    total = pipeline.chain.flops(0, pipeline.chain.length)
    speeds = [machine.flops_per_s for machine in pipeline.machines[: pipeline.owner]]
    low_s, high_s = total / sum(speeds[: limits.most]), 2 * total / min(speeds)
    if low_s <= 0:
        return [np.inf]
    count = PERIODS if available() else SLOW_PERIODS
    # Most good plans lie within a few times the ideal, so that part of the range is sampled more densely.
    return [*np.geomspace(low_s, min(4 * low_s, high_s), count), *np.geomspace(low_s, high_s, count), np.inf]


def _written(pipeline: Pipeline, known: Suffix) -> _Guess:
    pool = list(pipeline.pool_stages(known))
    order, cuts = _empty(pipeline)
    order[: len(pool)] = [stage.head for stage in pool]
    cuts[: len(pool) + 1] = [*(stage.start for stage in pool), pipeline.chain.length]
    return _Guess(pipeline.step_s(known), order, cuts, len(pool))


def _distinct(guesses: list[_Guess]) -> list[_Guess]:
    seen: dict[tuple[bytes, bytes], _Guess] = {}
    for guess in guesses:
        seen.setdefault((guess.order[: guess.count].tobytes(), guess.cuts[: guess.count + 1].tobytes()), guess)
    return list(seen.values())
