"""Proves a lower bound on the step time of any pipeline on given machines, whatever its stages do to fit their memory.

All pipelines are divided into boxes by their period and by the time that files add to an update. In one box no step is
shorter than the box's least period and update plus the least transit of a chain whose stages fit the box's largest
period and update. That transit is a shortest path over cuts and machines with exact costs of stages, hops, memory and
savings, but a machine may appear more than once. Equal machines form one kind, with as many uses as machines.

Each use of a machine has a price, and the price of one use per machine is subtracted from the result (Lagrangian
relaxation, M. Held and R. Karp, 1970; relaxed states as N. Christofides, A. Mingozzi and P. Toth, 1981). Prices rise
until no machine is used more often than it exists. Machines without a path shorter than the best known step are dropped
from the box. The box with the least bound is divided next. `kernels.training_pipeline` has the loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, sqrt
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import Floats, Integers, available, compiled
from fusionai.scheduling.kernels.training_pipeline import Before, CostTables, KindTables, arcs, before, priced, through
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.training.pipeline import Pipeline, cost_tables

PAIRED: Final = 72
"""Largest number of kinds with exact hops for every pair; above it, hops cost what access links allow."""
HALVINGS: Final = 8
"""How often the largest period is halved to form the initial boxes."""
ROUNDS: Final = 40
"""Price updates per box."""
FEW_ROUNDS: Final = 100
"""Price updates per box with more than `PAIRED` kinds."""
MANY: Final = 512
"""Number of kinds from which a price update is so slow that boxes get only `LEAST_ROUNDS` updates."""
LIKELY: Final = 400
"""In a box with `MANY` kinds or more, number of kinds whose prices are raised first, without the others."""
LEAST_ROUNDS: Final = 2
"""Price updates over all kinds of a box with `MANY` kinds or more."""
NARROW: Final = 5e-4
"""A box whose periods and updates differ by less than this fraction of a step is not divided further."""
EFFORT: Final = 500_000_000
"""Approximate limit on stages and hops examined: half a second of compiled loops."""
SLOW_EFFORT: Final = 2_000_000
"""The same limit if loops can't be compiled."""
REFINED: Final = 1e-4
"""Least relative rise of a narrow box's bound for which price updates continue."""
SLACK: Final = 1 - 1e-9
"""Factor on the bound: sums in another order may differ in the last bits, which must not raise the bound."""
INTERVALS: Final = 12
"""Largest number of period intervals in the tables for a search."""
_BY_KIND: Final = (
    *("up", "down", "hop_up", "hop_down", "latency_s", "plain", "paired", "machines"),
    *("last_there_s", "last_back_s", "last_latency_s"),
)
_COSTS_BY_KIND: Final = (
    *("able", "speed", "away_bytes_per_s", "file_bytes_per_s", "memory_bytes", "busy_s", "commit_s"),
)
"""Fields of `KindTables` and of its costs that have one entry for each kind."""


@dataclass(frozen=True, slots=True)
class Box:
    """Pipelines with a period in (low_s, high_s] and files that take more than `low_update_s`, up to `high_update_s`.
    `kinds`: the kinds of machines that a shorter step may use. No step of these pipelines is shorter than `bound_s`."""

    low_s: float
    high_s: float
    low_update_s: float
    high_update_s: float
    kinds: Integers
    prices_s: Floats
    bound_s: float
    path: tuple[tuple[int, int], ...] = ()
    """Kind and first block of each stage of the cheapest chain at these prices."""

    def __lt__(self, other: Box) -> bool:
        return self.bound_s < other.bound_s


class Relaxation:
    """Lower bound for the pipelines within `limits`. `narrow` improves it."""

    def __init__(self, pipeline: Pipeline, limits: PipelineLimits) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self._rounds = pipeline.microbatches - 1
        self._kinds = _kinds(pipeline, limits)
        self._kind_of = np.zeros(pipeline.owner, dtype=np.int64)
        for number, members in enumerate(self._kinds):
            self._kind_of[members] = number
        self._first = np.array([members[0] for members in self._kinds], dtype=np.int64)
        self._required = np.array([bool(limits.required >> int(peer) & 1) for peer in self._first], dtype=np.bool_)
        self._tables = _tables(pipeline, self._kinds, self._first)
        self._known_s = inf
        self._boxes: list[Box] = []
        self._done: list[Box] = []
        """Boxes that are too narrow to be divided further."""
        self._begun = False
        self.effort = 0.0

    def narrow(self, known_s: float, *, goal: float = 0.0, effort: float = EFFORT) -> None:
        """Divide boxes until the bound is within the fraction `goal` of `known_s`, or until `effort` is spent. A later
        call with a smaller `known_s` continues where the last one ended."""
        if not available():
            effort = min(effort, SLOW_EFFORT)
        self._known_s = min(known_s, self._known_s)
        if not self._begun:
            self._begun = True
            self._begin()
        end = self.effort + effort
        done_s = min((box.bound_s for box in self._done), default=inf)
        while (self._boxes or self._done) and self.effort < end:
            least_s = self._boxes[0].bound_s if self._boxes else inf
            if min(least_s, done_s) * (1 + goal) >= self._known_s:
                break
            if least_s >= done_s:
                if not self._refine():
                    break
                done_s = min((box.bound_s for box in self._done), default=inf)
                continue
            box = heappop(self._boxes)
            for part in self._divided(box):
                self._offer(part)
            done_s = min((box.bound_s for box in self._done), default=inf)

    def _refine(self) -> bool:
        """Continue the price updates of the narrow box with the least bound; return whether it still rises."""
        box = min(self._done)
        refined = self._bounded(box)
        self._done.remove(box)
        if refined.bound_s < self._known_s:
            self._done.append(refined)
        return refined.bound_s > box.bound_s * (1 + REFINED)

    @property
    def bound_s(self) -> float:
        """Lower bound on the step time in seconds, at most the known step."""
        least_s = min((box.bound_s for box in self._open()), default=inf)
        return min(least_s * SLACK, self._known_s)

    def matter(self) -> list[int]:
        """Return the peers that a step shorter than the known one may use, those of the most promising boxes first."""
        found: dict[int, None] = {}
        for box in sorted(self._open()):
            found |= dict.fromkeys(int(kind) for kind in box.kinds)
        return [int(peer) for kind in found for peer in self._kinds[kind]]

    def chains(self, most: int) -> list[list[tuple[int, int]]]:
        """Return the stages (peer, start) of the cheapest chains of the `most` most promising boxes. If a chain uses a
        kind more often than it has machines, its last machine appears again."""
        found: list[list[tuple[int, int]]] = []
        for box in sorted(self._open())[:most]:
            used: dict[int, int] = {}
            chain: list[tuple[int, int]] = []
            for kind, start in box.path:
                members = self._kinds[kind]
                place = used.get(kind, 0)
                used[kind] = place + 1
                chain.append((members[min(place, len(members) - 1)], start))
            found.append(chain)
        return found

    def before(self, peers: list[int]) -> Before:
        """Return the costs before a stage, for a search among `peers` for a step shorter than the known one. `peers`
        must include all peers that `matter` returns."""
        boxes = self._open()
        edges = sorted({edge for box in boxes for edge in (box.low_s, box.high_s)})
        if len(edges) > INTERVALS + 1:
            edges = [edges[round(place * (len(edges) - 1) / INTERVALS)] for place in range(INTERVALS + 1)]
        kinds = np.array(sorted({int(self._kind_of[peer]) for peer in peers}), dtype=np.int64)
        place_of = {int(kind): place for place, kind in enumerate(kinds)}
        tables = self._among(kinds)
        rows = np.array([place_of[int(self._kind_of[peer])] for peer in peers], dtype=np.int64)
        length = self._pipeline.chain.length
        count = max(len(edges) - 1, 0)
        found = Before(
            periods=np.array(edges if edges else [0.0]),
            before_s=np.full((count, len(peers), length + 1), inf),
            prices_s=np.zeros((count, len(peers))),
            all_s=np.zeros(count),
        )
        for place in range(count):
            low_s, high_s = edges[place], edges[place + 1]
            near = [box for box in boxes if box.low_s < high_s and box.high_s > low_s]
            if not near:
                continue
            prices_s = self._prices_among(min(near), kinds)
            prices_s[-1] = 0.0
            cost = compiled(arcs)(tables, high_s, inf)
            target_s = self._known_s - self._rounds * low_s
            required = self._required[kinds]
            compiled(priced)(tables, cost, high_s, 1, length + 1, required, prices_s, target_s, ROUNDS // 2)
            before_s = compiled(before)(tables, cost, high_s, prices_s[:-1])
            found.before_s[place] = before_s[rows]
            found.prices_s[place] = prices_s[rows]
            found.all_s[place] = float((prices_s[:-1] * tables.machines).sum())
            self._spend(len(kinds), ROUNDS // 2)
        return found

    def _open(self) -> list[Box]:
        return [box for box in (*self._boxes, *self._done) if box.bound_s < self._known_s]

    def _begin(self) -> None:
        top_s = self._known_s / self._rounds if self._rounds > 0 else self._known_s
        if top_s == inf:
            top_s = self._longest_s()
        edges = [0.0, *(top_s * 2.0**-k for k in range(HALVINGS, -1, -1))] if self._rounds > 0 else [0.0, top_s]
        everyone = np.arange(len(self._kinds), dtype=np.int64)
        prices_s = np.zeros(len(self._kinds) + 1)
        updates = [(0.0, 0.0)]
        if any(variant.offload or variant.offload_weights for variant in self._pipeline.variants):
            whole_s = self._known_s if self._known_s < inf else self._longest_update_s()
            updates.append((0.0, whole_s))
        for low_update_s, high_update_s in updates:
            for low_s, high_s in pairwise(edges):
                least_s = self._rounds * low_s
                self._offer(self._bounded(Box(low_s, high_s, low_update_s, high_update_s, everyone, prices_s, least_s)))

    def _offer(self, box: Box) -> None:
        if box.bound_s >= self._known_s or box.bound_s == inf:
            return
        width_s = self._rounds * (box.high_s - box.low_s) + box.high_update_s - box.low_update_s
        if width_s <= NARROW * box.bound_s:
            self._done.append(box)
        else:
            heappush(self._boxes, box)

    def _divided(self, box: Box) -> list[Box]:
        in_files = box.high_update_s - box.low_update_s
        in_rounds = self._rounds * (box.high_s - box.low_s)
        if in_files > in_rounds:
            half_s = sqrt(box.low_update_s * box.high_update_s) if box.low_update_s > 0 else box.high_update_s / 8
            parts = [replace(box, high_update_s=half_s), replace(box, low_update_s=half_s)]
        else:
            half_s = sqrt(box.low_s * box.high_s) if box.low_s > 0 else box.high_s / 8
            parts = [replace(box, high_s=half_s), replace(box, low_s=half_s)]
        return [self._bounded(part) for part in parts]

    def _bounded(self, box: Box) -> Box:
        """Return the box with its least transit, and without the kinds that no shorter step can use there."""
        floor_s = self._rounds * box.low_s + box.low_update_s
        if floor_s >= self._known_s:
            return replace(box, bound_s=inf)
        tables = self._among(box.kinds)
        prices_s = self._prices_among(box, box.kinds)
        target_s = self._known_s - floor_s
        cost = compiled(arcs)(tables, box.high_s, box.high_update_s)
        rounds = ROUNDS if len(box.kinds) <= PAIRED else FEW_ROUNDS if len(box.kinds) < MANY else LEAST_ROUNDS
        if target_s == inf:
            rounds = 0  # no target to raise prices towards
        required = self._required[box.kinds]
        if len(box.kinds) >= MANY and rounds > 0:
            self._price_likely(box, cost, prices_s, target_s)
        transit_s, count, path, starts = compiled(priced)(
            tables, cost, box.high_s, self._limits.fewest, self._limits.most, required, prices_s, target_s, rounds
        )
        self._spend(len(box.kinds), rounds)
        if transit_s >= target_s:
            return replace(box, bound_s=inf)
        back_s = float((prices_s[:-1] * tables.machines).sum())
        back_s += prices_s[-1] * (self._limits.most if prices_s[-1] > 0 else self._limits.fewest)
        whole_s = compiled(through)(tables, cost, box.high_s, prices_s[:-1] + prices_s[-1]) - back_s
        stays = whole_s < target_s * (1 + 1e-9)
        everyone = np.zeros(len(self._kinds) + 1)
        everyone[box.kinds] = prices_s[:-1]
        everyone[-1] = prices_s[-1]
        bound_s = max(box.bound_s, floor_s + max(float(transit_s), box.low_s))
        chain = tuple((int(box.kinds[path[k]]), int(starts[k])) for k in range(count))
        likely_first = np.argsort(whole_s, kind="stable")
        kinds = box.kinds[likely_first[stays[likely_first]]]
        return replace(box, kinds=kinds, prices_s=everyone, bound_s=bound_s, path=chain)

    def _price_likely(self, box: Box, cost: Floats, prices_s: Floats, target_s: float) -> None:
        """Raise the prices of the kinds that short chains use, in place. Chains among these kinds alone take a small
        part of the time of a round over all kinds, and any set of prices proves a bound."""
        likely = self._required[box.kinds] | (prices_s[:-1] != 0)
        likely[:LIKELY] = True
        few = np.flatnonzero(likely)
        tables, limits = self._among(box.kinds[few]), self._limits
        few_s = np.append(prices_s[few], prices_s[-1])
        required = self._required[box.kinds[few]]
        compiled(priced)(tables, cost[few], box.high_s, limits.fewest, limits.most, required, few_s, target_s, ROUNDS)
        prices_s[few], prices_s[-1] = few_s[:-1], few_s[-1]
        self._spend(len(few), ROUNDS)

    def _prices_among(self, box: Box, kinds: Integers) -> Floats:
        return np.concatenate([box.prices_s[kinds], box.prices_s[-1:]])

    def _spend(self, kinds: int, rounds: int) -> None:
        length, variants = self._pipeline.chain.length, len(self._pipeline.variants)
        paired = kinds * kinds if kinds <= PAIRED else 4 * kinds
        stages = kinds * length * length / 2
        self.effort += stages * (2 + variants) + (rounds + 2) * (stages + length * paired)

    def _among(self, kinds: Integers) -> KindTables:
        return _chosen(self._pipeline, self._tables, self._first, kinds)

    def _longest_s(self) -> float:
        """Return a period in seconds that no stage exceeds."""
        tables, costs = self._tables, self._tables.costs
        slowest = float(costs.speed.min())
        seconds = float(costs.flops.max()) / slowest + float(costs.read_bytes.max() / costs.away_bytes_per_s.min())
        width = min(float(tables.up.min()), float(tables.down.min()))
        crossing = float((tables.forward_bytes + tables.gradient_bytes).max()) / width
        whole_s = seconds + crossing + float(tables.latency_s.max()) + float(tables.last_latency_s.max())
        return (whole_s + float(tables.tail_s)) * self._pipeline.chain.length * 2

    def _longest_update_s(self) -> float:
        costs = self._tables.costs
        return float(costs.slot_bytes.max() / costs.file_bytes_per_s.min()) + float(
            costs.trained_bytes.max() / costs.away_bytes_per_s.min()
        )


def _kinds(pipeline: Pipeline, limits: PipelineLimits) -> list[list[int]]:
    """Return groups of peers with equal costs; a required peer is a group of its own."""
    found: dict[object, list[int]] = {}
    for peer in range(pipeline.owner):
        own = limits.required >> peer & 1 or not pipeline.exchangeable(peer)
        found.setdefault(peer if own else pipeline.machines[peer].cost_key, []).append(peer)
    return list(found.values())


def _tables(pipeline: Pipeline, kinds: list[list[int]], first: Integers) -> KindTables:
    """Return the arrays of all kinds, without the pairwise arrays. `first`: the first peer of each kind."""
    chain, owner, peers = pipeline.chain, pipeline.owner, [int(peer) for peer in first]
    forward, gradient = np.array(chain.forward_bytes), np.array(chain.gradient_bytes)
    length = chain.length
    there_s, back_s, latency_s = (np.zeros(len(kinds)) for _ in range(3))
    if pipeline.loss is None:
        forward[length] = gradient[length] = 0.0
    else:
        for number, peer in enumerate(peers):
            there, back = pipeline.hop(peer, owner), pipeline.hop(owner, peer)
            there_s[number] = forward[length] / there.bandwidth_bytes_per_s
            back_s[number] = gradient[length] / back.bandwidth_bytes_per_s
            latency_s[number] = there.latency_s + back.latency_s
    profiles = [pipeline.peers[peer] for peer in peers]
    paired = [pipeline.peers[peer].peer in pipeline.linked for peer in peers]
    plain = [
        pipeline.access_only(peer) or (peer == pipeline.front and not own)
        for peer, own in zip(peers, paired, strict=True)
    ]
    costs = cost_tables(pipeline, peers)
    kind_of = {peer: number for number, members in enumerate(kinds) for peer in members}
    return KindTables(
        costs=_with_pins(costs, kind_of, -1),
        up=np.array([pipeline.machines[peer].up for peer in peers]),
        down=np.array([pipeline.machines[peer].down for peer in peers]),
        hop_up=np.array([one.uplink.bandwidth_bytes_per_s for one in profiles]),
        hop_down=np.array([one.downlink.bandwidth_bytes_per_s for one in profiles]),
        latency_s=np.array([one.uplink.latency_s + one.downlink.latency_s for one in profiles]),
        plain=np.array(plain, dtype=np.bool_),
        paired=np.array(paired, dtype=np.bool_),
        machines=np.array([len(members) for members in kinds], dtype=np.int64),
        bandwidth=np.zeros((0, 0)),
        hop_latency_s=np.zeros((0, 0)),
        last_there_s=there_s,
        last_back_s=back_s,
        last_latency_s=latency_s,
        forward_bytes=forward,
        gradient_bytes=gradient,
        tail_s=pipeline.tail.transit_s,
    )


def _with_pins(costs: CostTables, place_of: Mapping[int, int], absent: int) -> CostTables:
    """Return `costs` with renumbered machines in its pins; `absent` stands for a machine without a new number."""
    pinned = [-1 if one < 0 else place_of.get(int(one), absent) for one in costs.pinned]
    return costs._replace(pinned=np.array(pinned, dtype=np.int64), only=place_of.get(costs.only, -1))


def _chosen(pipeline: Pipeline, tables: KindTables, first: Integers, kinds: Integers) -> KindTables:
    """Return the arrays of some kinds, with pairwise arrays if there are at most `PAIRED` kinds."""
    chosen = tables._replace(**{name: getattr(tables, name)[kinds] for name in _BY_KIND})
    costs = tables.costs._replace(**{name: getattr(tables.costs, name)[kinds] for name in _COSTS_BY_KIND})
    chosen = chosen._replace(costs=_with_pins(costs, {int(kind): place for place, kind in enumerate(kinds)}, -2))
    if len(kinds) > PAIRED:
        chosen.hop_up[chosen.paired] = chosen.hop_down[chosen.paired] = inf
        chosen.latency_s[chosen.paired] = 0.0
        return chosen
    peers = [int(first[kind]) for kind in kinds]
    bandwidth = np.minimum(chosen.hop_up[:, None], chosen.hop_down[None, :])
    latency_s = chosen.latency_s[:, None] + chosen.latency_s[None, :]
    for one in np.flatnonzero(chosen.paired):
        for other in range(len(kinds)):
            if one != other:
                there, back = pipeline.hop(peers[one], peers[other]), pipeline.hop(peers[other], peers[one])
                bandwidth[one, other] = there.bandwidth_bytes_per_s
                bandwidth[other, one] = back.bandwidth_bytes_per_s
                latency_s[one, other] = latency_s[other, one] = there.latency_s + back.latency_s
    return chosen._replace(bandwidth=bandwidth, hop_latency_s=latency_s)
