"""Finds a good pipeline quickly at any pool size: greedy construction, then local search, without a guarantee.

Construction: for a range of target periods and orders of peers, fill stages from the last to the first with as many
blocks as the period and the memory allow. Improvement: move a cut, exchange two stages, bring in an unused peer, drop
or split a stage, while the step gets shorter. Deterministic; effort is bounded by counts.

`search` starts from the result in small pools; `annealing` replaces this module in large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Final

from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.training.pipeline import Pipeline, Suffix

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Order of peers, first stage first, and cuts (from 0 to the chain's length)."""

_PERIODS: Final = 8
_STARTS: Final = 2


def construct(pipeline: Pipeline, limits: PipelineLimits) -> list[Layout]:
    """Feasible layouts, the fastest first; empty if none was found."""
    found: dict[Layout, float] = {}
    filling = _Filling(pipeline, limits.fewest)
    for order in dict.fromkeys(_orders(pipeline, limits)):
        for period_s in _periods(pipeline, limits):
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
    for layout in construct(pipeline, limits)[:_STARTS]:
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
            yield tuple(swapped), _cuts(sizes)
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
                    self._priced[layout] = self._pipeline.best_longer(suffix, peer, start)
                longer = self._priced[layout]
                if longer is not None and longer.period_s <= max(period_s, suffix.period_s):
                    suffix = longer
                    taken, cuts = layout
                    break
        return (taken, cuts) if suffix.start == 0 else None


def _orders(pipeline: Pipeline, limits: PipelineLimits) -> Iterator[tuple[int, ...]]:
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


def _periods(pipeline: Pipeline, limits: PipelineLimits) -> list[float]:
    """Target periods from the ideal (all chosen peers share the work by speed) to that of one slow peer."""
    chain = pipeline.chain
    total = chain.flops(0, chain.length)
    speeds = [machine.flops_per_s for machine in pipeline.machines[: pipeline.owner]]
    low_s, high_s = total / sum(speeds[: limits.most]), 2 * total / min(speeds)
    if low_s <= 0:
        return [inf]
    ratio = (high_s / low_s) ** (1 / (_PERIODS - 1))
    # Most good plans lie within twice the ideal, so the first part of the range is sampled more densely.
    fine = [low_s * (1 + 0.15 * step) for step in range(_PERIODS)]
    return [*fine, *(low_s * ratio**step for step in range(_PERIODS)), inf]


def _cuts(sizes: list[int]) -> tuple[int, ...]:
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    return tuple(cuts)
