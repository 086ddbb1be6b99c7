"""Searches the pipeline that a token crosses in the least time: peers, their order and the cuts, with proof.

Best-first search (A*) over (set of peers used, last peer, blocks placed). Costs add up and each stage's memory is
independent of the others, so only the fastest way to a state matters. The remaining blocks are bounded from below by
assigning them to the peers that compute them fastest, hop included, each as many as its memory can hold. However the
search ends, the least bound of the unexplored states proves how good the best known pipeline is. The worst case is
exponential in the number of peers. Therefore the search has a budget of tried extensions, an argument and never a
clock, so that results are reproducible.

Of thousands of peers, `shortlist` selects those that are searched: the ones with the least seconds per block, their
share of a hop included, and some fast or large ones. Its bound assigns the blocks to the best of all peers, so the
certificate also covers the peers that were left out.

`evened` then moves the cuts so that no stage computes much longer than the others: the speed of many sessions together
is that of the slowest stage, while a single session's token passes all stages in turn. Of the cuts that cost one
session at most the fraction `SLACK` more, those with the fastest slowest stage are chosen.

`serving.pipeline` has the costs, `serving.planning` the limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

import numpy as np

from fusionai.scheduling.kernels.compiled import Floats, Integers, available, compiled
from fusionai.scheduling.kernels.serving_pipeline import LineTables, Steps, cross
from fusionai.scheduling.problem.constraints import must_use
from fusionai.scheduling.problem.embedding_and_head import middle
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem, ServingNeeds
from fusionai.scheduling.serving.pipeline import (
    ServingPipeline,
    block_s,
    least_tokens,
    ring_bytes,
    row_bytes,
    stage_bytes,
)

LARGE: Final = 40
"""Number of peers up to which the search examines all of them."""
LISTED: Final = 12
"""Peers listed by seconds per block, hops included. Half as many are listed for each end, a quarter by speed alone and
a quarter by memory."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The listed peers, and a bound for all. `bound_s`: no pipeline of any peers takes less through the pool's blocks;
    0.0 if all peers are listed."""

    peers: list[PeerProfile]
    bound_s: float


def shortlist(
    problem: Problem, needs: ServingNeeds, usable: Sequence[PeerProfile], blocks: Sequence[BlockCost], *, room: int = 1
) -> Shortlist:
    """Return the shortlist of `usable` for a pipeline through `blocks`, with `room` times the usual number of peers."""
    wanted = room * LISTED + (problem.stages or 0) + (problem.spares_wanted or 0)
    if len(usable) <= max(LARGE, 2 * wanted):
        return Shortlist(list(usable), 0.0)
    seconds = _block_seconds(usable, blocks)
    most = _most_blocks(usable, needs, blocks)
    crossing = min(block.output_bytes for block in blocks[:-1]) if len(blocks) > 1 else 0
    into = _least_hop_s(problem, usable, crossing)
    out = np.array([crossing / p.uplink.bandwidth_bytes_per_s + p.uplink.latency_s for p in usable])
    held = np.maximum(most, 1)
    fits = most > 0
    mean = seconds.mean(axis=1)
    # The first stage receives nothing from a peer and the last sends nothing to one: rank those by the other direction.
    inner, first, last = (mean + seconds_each / held for seconds_each in (into + out, out, into))
    ranked = [*(np.where(fits, key, np.inf) for key in (inner, first, last, mean)), -most - 1e-9 / mean]
    counts = [wanted, wanted // 2, wanted // 2, wanted // 4, wanted // 4]
    chosen = {int(i) for key, count in zip(ranked, counts, strict=True) for i in np.argsort(key, kind="stable")[:count]}
    named = must_use(problem) | {problem.owner_id}
    chosen |= {i for i, peer in enumerate(usable) if peer.peer in named}
    least = seconds.min(axis=1)
    bound = float(seconds.min(axis=0).sum())
    # The first stage has no hop from a peer. So hops are capped, the cap is subtracted once, and the best cap is used.
    for cap in np.quantile(into, (0.0, 0.02, 0.1, 0.3, 0.6)):
        bound = max(bound, _poured_s(least + np.minimum(into, cap) / held, most, len(blocks)) - float(cap))
    bound *= 1 - 1e-12
    return Shortlist([usable[i] for i in sorted(chosen)], bound)


def with_fastest(
    problem: Problem, needs: ServingNeeds, usable: list[PeerProfile], listed: list[PeerProfile]
) -> list[PeerProfile]:
    """Return `listed` plus the fastest of the machines that hold all pool blocks and one context."""
    if len(listed) == len(usable):
        return listed
    blocks = middle(problem)
    needed = stage_bytes(blocks, needs, row_bytes(blocks[-1], needs) if needs.retain else 0, least_tokens(needs))

    def token_s(peer: PeerProfile) -> float:
        latency_s = peer.uplink.latency_s + peer.downlink.latency_s
        return sum(block_s(block, peer) for block in blocks) + latency_s

    roomy = [peer for peer in usable if peer.memory_bytes >= needed]
    fastest = min(roomy, key=lambda peer: (token_s(peer), peer.peer), default=None)
    return listed if fastest is None or fastest in listed else [*listed, fastest]


def _block_seconds(peers: Sequence[PeerProfile], blocks: Sequence[BlockCost]) -> Floats:
    """Return [N, L]: seconds of one position through each block."""
    flops = np.array([block.forward_flops for block in blocks])
    streamed = np.array([float(block.parameter_bytes - block.looked_up_bytes) for block in blocks])
    speed = np.array([peer.effective_flops_per_s for peer in peers])
    bandwidth = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])
    bandwidth = np.where(bandwidth > 0, bandwidth, np.inf)
    return np.maximum(flops[None, :] / speed[:, None], streamed[None, :] / bandwidth[:, None])


def _most_blocks(peers: Sequence[PeerProfile], needs: ServingNeeds, blocks: Sequence[BlockCost]) -> Integers:
    """Return [N]: consecutive blocks that fit with one context, without workspace and retained boundary."""
    tokens = needs.context_tokens
    sizes = [float(b.parameter_bytes + tokens * b.cache_token_bytes + ring_bytes([b], needs)) for b in blocks]
    sums = np.concatenate([[0.0], np.cumsum(np.array(sizes))])
    least = np.array([float((sums[count:] - sums[:-count]).min()) for count in range(1, len(blocks) + 1)])
    lent = np.array([float(peer.memory_bytes) for peer in peers])
    return np.searchsorted(np.maximum.accumulate(least), lent, side="right").astype(np.int64)


def _least_hop_s(problem: Problem, peers: Sequence[PeerProfile], crossing: float) -> Floats:
    """Return [N]: least seconds of a hop from any other peer; 0 for peers with an exceptional link into them."""
    up = max(peer.uplink.bandwidth_bytes_per_s for peer in peers)
    latency_s = min(peer.uplink.latency_s for peer in peers)
    free = {problem.owner_id, *(key.split(">")[1] for key in problem.links)}
    return np.array(
        [
            0.0
            if peer.peer in free
            else crossing / min(up, peer.downlink.bandwidth_bytes_per_s) + latency_s + peer.downlink.latency_s
            for peer in peers
        ]
    )


def _poured_s(each: Floats, most: Integers, length: int) -> float:
    """Return the seconds of `length` blocks on the peers that take them fastest, at most `most` blocks on each."""
    order = np.argsort(np.where(most > 0, each, np.inf), kind="stable")
    taken = np.minimum(np.cumsum(most[order]), length)
    return float((np.diff(taken, prepend=0) * each[order]).sum())


SETTLED_PEERS: Final = 16
"""Number of peers up to which compiled loops settle exhaustively what the best-first search leaves open."""
SETTLED_STEPS: Final = 2_000_000
"""Upper limit on pipelines that the compiled loops keep."""
BEAM: Final = 12
"""Lines kept per number of stages during the search for a first good pipeline."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits on pipelines: `fewest` to `most` stages, all peers of the mask `required`, room for `cache_tokens`."""

    fewest: int
    most: int
    cache_tokens: int
    required: int = 0


class PartialPipeline(NamedTuple):
    """The stages of a pipeline so far: `order[k]` holds positions [`cuts[k]`, `cuts[k + 1]`). `seconds` excludes the
    way back to the job owner."""

    seconds: float
    mask: int
    order: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """Result of a search. `seconds`: whole trip of `best`. `bound_s`: no pipeline takes less."""

    best: PartialPipeline | None
    seconds: float
    bound_s: float
    explored: int

    @property
    def proven(self) -> bool:
        return self.bound_s >= self.seconds


def fastest_pipeline(
    pipeline: ServingPipeline, limits: ServingLimits, *, budget: int, settle: bool = True
) -> FoundPipeline:
    """Return the fastest pipeline found with at most `budget` extensions. `settle`: with few peers, compiled loops
    settle what the budget leaves open. `best` is None if no pipeline within the limits was found; an infinite bound
    then proves that there is none."""
    return _Search(pipeline, limits, budget, settle).run()


class _Search:
    def __init__(self, pipeline: ServingPipeline, limits: ServingLimits, budget: int, settle: bool) -> None:
        self.line = pipeline
        self.settle = settle
        self.limits = limits
        self.budget = budget
        self.explored = 0
        self.best: PartialPipeline | None = None
        self.best_s = inf
        needed = [
            [pipeline.bytes(a, b, limits.cache_tokens) if a < b else 0 for b in range(pipeline.length + 1)]
            for a in range(pipeline.length)
        ]
        self._fits = [
            [
                [a < b and needed[a][b] <= lent and pipeline.allowed(peer, a, b) for b in range(pipeline.length + 1)]
                for a in range(pipeline.length)
            ]
            for peer, lent in ((peer, pipeline.lent_bytes(peer, limits.cache_tokens)) for peer in range(pipeline.count))
        ]
        # The retained boundary may shrink with a further block: a shorter stage does not always fit where a longer one
        # does.
        self._reach = [
            [max((b for b in range(pipeline.length + 1) if ends[b]), default=a) for a, ends in enumerate(starts)]
            for starts in self._fits
        ]
        self._rest_s = self._rests()
        self._twins = [
            sum(
                1 << earlier
                for earlier in range(peer)
                if pipeline.alike(earlier, peer) and (limits.required >> earlier & 1) == (limits.required >> peer & 1)
            )
            for peer in range(pipeline.count)
        ]

    def run(self) -> FoundPipeline:
        self._glance()
        bound_s = self._prove()
        if bound_s < self.best_s and self.settle and self.line.count <= SETTLED_PEERS and available():
            settled = self._settle()
            bound_s = self.best_s if settled else bound_s
        total_s = self.best_s + self.line.ends_s
        return FoundPipeline(self.best, total_s, min(bound_s + self.line.ends_s, total_s), self.explored)

    def _prove(self) -> float:
        """Return a lower bound on the seconds of any pipeline: `best_s` itself if nothing is left to explore."""
        frontier: list[tuple[float, int, PartialPipeline]] = []
        known: dict[tuple[int, int, int], float] = {}
        number = 0
        for begun in self._extensions(PartialPipeline(0.0, 0, (), (0,))):
            number += 1
            heappush(frontier, (begun.seconds + self._rest_s[begun.cuts[-1]], number, begun))
        while frontier:
            bound_s, _, pipeline = heappop(frontier)
            if bound_s >= self.best_s:
                return self.best_s
            if self.explored > self.budget:
                return bound_s
            state = (pipeline.mask, pipeline.order[-1], pipeline.cuts[-1])
            if known.get(state, inf) <= pipeline.seconds:
                continue
            known[state] = pipeline.seconds
            if pipeline.cuts[-1] == self.line.length:
                self._offer(pipeline)
                continue
            for longer in self._extensions(pipeline):
                number += 1
                bound = longer.seconds + self._rest_s[longer.cuts[-1]]
                if bound < self.best_s:
                    heappush(frontier, (bound, number, longer))
        return self.best_s

    def _settle(self) -> bool:
        """Repeat the whole search in compiled loops, below the best known pipeline; return whether it was completed."""
        pipeline, limits = self.line, self.limits
        size = SETTLED_STEPS + 2
        steps = Steps(
            mask=np.zeros(size, dtype=np.int64),
            last=np.zeros(size, dtype=np.int64),
            end=np.zeros(size, dtype=np.int64),
            seconds=np.zeros(size, dtype=np.float64),
            before=np.zeros(size, dtype=np.int64),
            first=np.zeros(2 * size + 1, dtype=np.int64),
        )
        step, peer, complete, explored = compiled(cross)(
            self._tables(), steps, limits.fewest, limits.most, limits.required, self.best_s, SETTLED_STEPS
        )
        self.explored += int(explored)
        if peer >= 0:
            order, ends = [int(peer)], [pipeline.length]
            while step:
                order.insert(0, int(steps.last[step]))
                ends.insert(0, int(steps.end[step]))
                step = int(steps.before[step])
            found = PartialPipeline(0.0, 0, (), (0,))
            for peer, end in zip(order, ends, strict=True):
                start = found.cuts[-1]
                into_s = pipeline.hop_s(found.order[-1], peer, start) if found.order else pipeline.enter_s(peer)
                found = self._longer(found, found.mask | 1 << peer, peer, end, into_s)
            self._offer(found)
        return bool(complete)

    def _tables(self) -> LineTables:
        pipeline = self.line
        peers, length = range(pipeline.count), pipeline.length
        into = [self._cheapest_into(peer) for peer in peers]
        each_s = np.full((length + 1, pipeline.count), inf)
        most = np.zeros((length + 1, pipeline.count), dtype=np.int64)
        for peer in peers:
            least_s, furthest = inf, 0
            for start in range(length - 1, -1, -1):
                least_s = min(least_s, pipeline.compute_s(peer, start, start + 1))
                furthest = max(furthest, self._reach[peer][start] - start)
                most[start, peer] = furthest
                each_s[start, peer] = least_s + into[peer] / furthest if furthest else inf
        return LineTables(
            seconds=np.array([[pipeline.compute_s(peer, 0, end) for end in range(length + 1)] for peer in peers]),
            fits=np.array(self._fits, dtype=np.bool_),
            enter_s=np.array([pipeline.enter_s(peer) for peer in peers]),
            leave_s=np.array([pipeline.leave_s(peer) for peer in peers]),
            hop_s=np.array(
                [
                    [[pipeline.hop_s(i, j, cut) if i != j else inf for cut in range(length + 1)] for j in peers]
                    for i in peers
                ]
            ),
            twins=np.array(self._twins, dtype=np.int64),
            ranked=np.argsort(each_s, axis=1, kind="stable").astype(np.int64),
            each_s=np.where(most > 0, each_s, 0.0),
            most=most,
            back_s=min((pipeline.leave_s(peer) for peer in peers), default=inf),
        )

    def _glance(self) -> None:
        """Find a good pipeline quickly: keep the best beginnings per number of stages, try few stage lengths."""
        level = [PartialPipeline(0.0, 0, (), (0,))]
        for _ in range(self.limits.most):
            grown: dict[tuple[int, int, int], PartialPipeline] = {}
            for pipeline in level:
                for longer in self._extensions(pipeline, few=True):
                    if longer.cuts[-1] == self.line.length:
                        self._offer(longer)
                        continue
                    state = (longer.mask, longer.order[-1], longer.cuts[-1])
                    if state not in grown or longer.seconds < grown[state].seconds:
                        grown[state] = longer
            ranked = sorted(grown.values(), key=lambda one: (one.seconds + self._rest_s[one.cuts[-1]], one.order))
            # Also keep beginnings with many blocks placed: if memory is short, the fastest beginnings can't be
            # completed.
            far = sorted(grown.values(), key=lambda one: (-one.cuts[-1], one.seconds, one.order))
            level = list(dict.fromkeys([*ranked[:BEAM], *far[:BEAM]]))

    def _extensions(self, pipeline: PartialPipeline, *, few: bool = False) -> Iterator[PartialPipeline]:
        depth = len(pipeline.order) + 1
        start = pipeline.cuts[-1]
        whole = self.line.length
        for peer in range(self.line.count):
            bit = 1 << peer
            if pipeline.mask & bit or self._twins[peer] & ~pipeline.mask:
                continue
            mask = pipeline.mask | bit
            missing = (self.limits.required & ~mask).bit_count()
            if missing > self.limits.most - depth:
                continue
            furthest = self._reach[peer][start]
            into_s = self.line.hop_s(pipeline.order[-1], peer, start) if pipeline.order else self.line.enter_s(peer)
            # Each stage that is still required needs a block.
            still = max(missing, self.limits.fewest - depth, 0)
            if furthest == whole and not still and depth >= self.limits.fewest:
                yield self._longer(pipeline, mask, peer, whole, into_s)
            if depth == self.limits.most:
                continue
            longest = min(furthest, whole - max(still, 1))
            shortest = start + 1
            if few:
                even = start + max(1, -(-(whole - start) // (self.limits.most - depth + 1)))
                ends = sorted({longest, (start + longest) // 2, min(even, longest)}, reverse=True)
            else:
                ends = list(range(longest, shortest - 1, -1))
            for end in ends:
                if end >= shortest and self._fits[peer][start][end]:
                    yield self._longer(pipeline, mask, peer, end, into_s)

    def _longer(self, pipeline: PartialPipeline, mask: int, peer: int, end: int, into_s: float) -> PartialPipeline:
        self.explored += 1
        seconds = pipeline.seconds + into_s + self.line.compute_s(peer, pipeline.cuts[-1], end)
        return PartialPipeline(seconds, mask, (*pipeline.order, peer), (*pipeline.cuts, end))

    def _offer(self, pipeline: PartialPipeline) -> None:
        seconds = pipeline.seconds + self.line.leave_s(pipeline.order[-1])
        if seconds < self.best_s:
            self.best, self.best_s = pipeline, seconds

    def _rests(self) -> list[float]:
        """Return for each position the least seconds behind it, the way back included; inf if it fits nowhere."""
        pipeline = self.line
        back_s = min((pipeline.leave_s(peer) for peer in range(pipeline.count)), default=inf)
        rests = [back_s]
        into = [self._cheapest_into(peer) for peer in range(pipeline.count)]
        for start in range(pipeline.length - 1, -1, -1):
            offers: list[tuple[float, int]] = []
            for peer in range(pipeline.count):
                most = max((self._reach[peer][s] - s for s in range(start, pipeline.length)), default=0)
                if most > 0:
                    least_s = min(pipeline.compute_s(peer, b, b + 1) for b in range(start, pipeline.length))
                    offers.append((least_s + into[peer] / most, most))
            poured_s, left = 0.0, pipeline.length - start
            for seconds, most in sorted(offers):
                poured_s += seconds * min(most, left)
                left -= min(most, left)
            each_s = sum(
                min((pipeline.compute_s(peer, b, b + 1) for peer in range(pipeline.count)), default=inf)
                for b in range(start, pipeline.length)
            )
            # Slightly lower, so that rounding can't lift the bound above what is attained.
            rests.append(inf if left else max(poured_s, each_s) * (1 - 1e-12) + back_s)
        rests.reverse()
        return rests

    def _cheapest_into(self, peer: int) -> float:
        inner = [
            self.line.hop_s(other, peer, cut)
            for other in range(self.line.count)
            for cut in range(1, self.line.length)
            if other != peer
        ]
        return min(inner, default=0.0)


SLACK: Final = 0.05
"""Largest increase of one session's time per token, as a fraction, accepted for more speed of all sessions together."""


def evened(
    pipeline: ServingPipeline, best: PartialPipeline, token_s: float, cache_tokens: int, *, most_s: float = inf
) -> tuple[int, ...]:
    """Return the cuts for `best.order`. `token_s`: seconds of the whole trip with `best.cuts`. `most_s`: upper limit on
    the trip with the new cuts."""
    order, length = best.order, pipeline.length
    if len(order) == 1:
        return best.cuts
    needed = [[pipeline.bytes(a, b, cache_tokens) if a < b else 0 for b in range(length + 1)] for a in range(length)]
    lent = [pipeline.lent_bytes(peer, cache_tokens) for peer in order]
    thresholds = sorted(
        {
            pipeline.compute_s(peer, a, b)
            for peer in order
            for a in range(length)
            for b in range(a + 1, length - len(order) + 2 + a)
            if b <= length
        }
    )
    # Subtract the part of the trip that does not depend on the cuts.
    limit_s = min(token_s * (1 + SLACK), most_s) - (token_s - _trip_s(pipeline, order, best.cuts))
    low, high, chosen = 0, len(thresholds) - 1, best.cuts
    while low <= high:
        middle = (low + high) // 2
        seconds, cuts = _quickest(pipeline, order, needed, lent, thresholds[middle])
        if cuts is not None and seconds <= limit_s:
            chosen, high = cuts, middle - 1
        else:
            low = middle + 1
    return chosen


def _trip_s(pipeline: ServingPipeline, order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """Return the seconds of the stages' compute and the hops between them."""
    seconds = sum(pipeline.compute_s(peer, cuts[k], cuts[k + 1]) for k, peer in enumerate(order))
    return seconds + sum(pipeline.hop_s(order[k - 1], order[k], cuts[k]) for k in range(1, len(order)))


def _quickest(
    pipeline: ServingPipeline, order: tuple[int, ...], needed: list[list[int]], lent: list[int], most_s: float
) -> tuple[float, tuple[int, ...] | None]:
    """Return the shortest trip with no stage above `most_s`, and its cuts, by dynamic programming."""
    length, last = pipeline.length, len(order) - 1
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for k, peer in enumerate(order):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (seconds, cuts) in reached.items():
            ends = [length] if k == last else range(start + 1, length - (last - k) + 1)
            for end in ends:
                compute_s = pipeline.compute_s(peer, start, end)
                if end <= start or compute_s > most_s or needed[start][end] > lent[k]:
                    continue
                if not pipeline.allowed(peer, start, end):
                    continue
                into_s = pipeline.hop_s(order[k - 1], peer, start) if k else 0.0
                total_s = seconds + compute_s + into_s
                if total_s < following.get(end, (inf, ()))[0]:
                    following[end] = (total_s, (*cuts, end))
        reached = following
    found = reached.get(length)
    return (inf, None) if found is None else found
