"""Exact search over stages, peers, order and cuts. Decides which pipeline has the shortest step, with proof.

Dynamic programming over (set of peers used, first peer, first block), from the last stage towards the first, one level
per stage. A state keeps every suffix that no other beats in period, transit and the two occupancies of its head's link;
a suffix that can't beat the best known step even if the rest were cut perfectly is dropped (branch and bound).
Worst case exponential in the number of peers, hence the budget of tried extensions: an argument, never a clock.

Neighbours: `pipeline` (costs), `improvement` (the first best), `planner` (what to do when the budget ends).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from fusionai.scheduling.pipeline import Pipeline, Suffix

State = tuple[int, int, int]
"""Bit mask of the peers used, head, start."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Which pipelines count: pool stages from `fewest` to `most`, using every peer in the mask `required`."""

    fewest: int
    most: int
    required: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """`complete`: the whole space was looked at, so `best` (None: nothing feasible beats `known`) is proven."""

    best: Suffix | None
    complete: bool
    explored: int


def search(pipeline: Pipeline, limits: Limits, *, known: Suffix | None, budget: int) -> Found:
    """The fastest pipeline, no slower than `known` (a feasible one or None); tries at most `budget` extensions."""
    return _Search(pipeline, limits, known, budget).run()


class _Search:
    def __init__(self, pipeline: Pipeline, limits: Limits, known: Suffix | None, budget: int) -> None:
        self.pipeline = pipeline
        self.limits = limits
        self.best = known
        self.best_s = inf if known is None else pipeline.step_s(known)
        self.budget = budget
        self.explored = 0
        self._rests: dict[tuple[int, int], _Rest] = {}
        self._twins = twins(pipeline, limits.required)
        length = pipeline.chain.length
        self._resident = [pipeline.resident[0][b] if b else 0.0 for b in range(length + 1)]
        cheapest = (pipeline.hop_s(i, j, c) for c in range(1, length) for i, j in _pairs(pipeline.owner))
        self._hop_s = min(cheapest, default=0.0)

    def run(self) -> Found:
        tail = self.pipeline.tail
        level: dict[State, list[Suffix]] = {(0, tail.head, tail.start): [tail]}
        for depth in range(1, self.limits.most + 1):
            following: dict[State, list[Suffix]] = {}
            # Promising suffixes first: what they lead to prunes the others.
            states = sorted(level.items(), key=lambda item: (item[0][2], item[0]))
            for (mask, _, _), suffixes in states:
                for suffix in suffixes:
                    self._grow(mask, suffix, depth, following)
                    if self.explored > self.budget:
                        return Found(self.best, complete=False, explored=self.explored)
            level = following
        return Found(self.best, complete=True, explored=self.explored)

    def _grow(self, mask: int, suffix: Suffix, depth: int, following: dict[State, list[Suffix]]) -> None:
        pipeline, rounds = self.pipeline, self.pipeline.microbatches - 1
        left = self.limits.most - depth
        for peer in range(pipeline.owner):
            bit = 1 << peer
            if mask & bit or self._twins[peer] & ~mask:
                continue
            used = mask | bit
            missing = (self.limits.required & ~used).bit_count()
            if missing > left:
                continue
            for start in range(suffix.start - 1, -1, -1):
                if start < max(missing, self.limits.fewest - depth):
                    break
                compute_s = pipeline.compute_s(peer, start, suffix.start)
                if rounds * max(suffix.period_s, compute_s) + suffix.transit_s + compute_s >= self.best_s:
                    break
                if start > 0 and left == 0:
                    continue
                self.explored += 1
                longer = pipeline.extend(suffix, peer, start)
                if longer is None:
                    continue
                if start == 0:
                    if not missing:
                        self._offer(longer)
                elif self._could_win(used, longer, left):
                    _keep(following.setdefault((used, peer, start), []), longer)

    def _offer(self, whole: Suffix) -> None:
        step_s = self.pipeline.step_s(whole)
        if step_s < self.best_s:
            self.best, self.best_s = whole, step_s

    def _could_win(self, used: int, suffix: Suffix, left: int) -> bool:
        rest = self._rests.get((used, left))
        if rest is None:
            rest = self._rests[used, left] = _Rest(self.pipeline, used, left)
        if rest.memory_bytes < self._resident[suffix.start] * (1 - 1e-12):
            return False
        flops = self.pipeline.chain.flops(0, suffix.start)
        step_s = rest.step_bound_s(self.pipeline.microbatches - 1, flops, suffix.period_s, suffix.transit_s)
        return step_s + self._hop_s < self.best_s


class _Rest:
    """What the unused peers could do at best, `left` of them: the bound of a suffix."""

    def __init__(self, pipeline: Pipeline, used: int, left: int) -> None:
        free = [p for p in range(pipeline.owner) if not used >> p & 1]
        self.memory_bytes = sum(sorted((pipeline.memory_bytes[p] for p in free), reverse=True)[:left])
        self._speeds = [pipeline.speed[p] for p in free[:left]]
        self._sums = [0.0, *accumulate(self._speeds)]

    def step_bound_s(self, rounds: int, flops: float, period_s: float, transit_s: float) -> float:
        """Least `rounds * T + transit` over periods T: the FLOPs are poured over the fastest peers, T's worth each.

        Convex and piecewise linear in T, so T grows from its least value only while that pays.
        """
        if not self._speeds:
            return inf
        sums, speeds = self._sums, self._speeds
        # A hair below, so that rounding can't push the bound above a step that is attained.
        flops *= 1 - 1e-12
        period_s = max(period_s, flops / sums[-1])
        full = min(bisect_right(sums, flops / period_s) - 1, len(speeds) - 1) if period_s > 0 else 0
        while full > 0 and rounds + full < sums[full] / speeds[full]:
            period_s = flops / sums[full]
            full -= 1
        rest_s = full * period_s + max(0.0, flops - period_s * sums[full]) / speeds[full]
        return rounds * period_s + transit_s + rest_s


def twins(pipeline: Pipeline, required: int) -> list[int]:
    """For each peer the mask of earlier peers that cost exactly the same: they must be used before it."""
    masks: list[int] = []
    for peer in range(pipeline.owner):
        mask = 0
        for earlier in range(peer):
            if pipeline.alike(earlier, peer) and (required >> peer & 1) == (required >> earlier & 1):
                mask |= 1 << earlier
        masks.append(mask)
    return masks


def _keep(kept: list[Suffix], suffix: Suffix) -> None:
    """Insert unless beaten; drop what it beats."""
    period_s, transit_s, up_s, down_s = suffix[3:7]
    for other in kept:
        if other[3] <= period_s and other[4] <= transit_s and other[5] <= up_s and other[6] <= down_s:
            return
    kept[:] = [
        other
        for other in kept
        if not (period_s <= other[3] and transit_s <= other[4] and up_s <= other[5] and down_s <= other[6])
    ]
    kept.append(suffix)


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(count) for j in range(count) if i != j)
