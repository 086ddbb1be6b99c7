"""Exact search over stages, peers, order and cuts. Decides which pipeline has the shortest step, with proof.

Dynamic programming over (set of peers used, first peer, first block), from the last stage towards the first, one level
per stage. A state keeps every suffix that no other beats in period, transit and the two occupancies of its head's link;
a suffix that can't beat the best known step even if the rest were cut perfectly is dropped (branch and bound).
Worst case exponential in the number of peers, hence the budget of tried extensions: an argument, never a clock.

Neighbours: `chain_kernels` (the loops), `pipeline` (costs), `improvement` (the first best), `planner` (what to do when
the budget ends).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from fusionai.scheduling.chain_kernels import Floats, Integers, Labels, Tables, grow
from fusionai.scheduling.compiled import available, compiled
from fusionai.scheduling.pipeline import Pipeline, Suffix

GLANCE_BUDGET: Final = 30_000
"""Extensions that are tried before the compiled search is worth loading."""
SLOW_BUDGET: Final = 400_000
"""Where nothing can be compiled: a second or two."""
MOST_PEERS: Final = 40
"""A state's number (peers used, head, start) stays within 63 bits."""


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


def search(
    pipeline: Pipeline, limits: Limits, *, known: Suffix | None, budget: int, glance: int = GLANCE_BUDGET
) -> Found:
    """The fastest pipeline, no slower than `known` (a feasible one or None); tries at most about `budget` extensions,
    of them `glance` before it loads the compiled loops. At most `MOST_PEERS` peers."""
    tables = chain_tables(pipeline, limits.required)
    if not available():
        budget = glance = min(budget, max(glance, SLOW_BUDGET))
    if glance > 0:
        found = _searched(pipeline, tables, limits, known, min(budget, glance), fast=False)
        if found.complete or budget <= glance:
            return found
        known = found.best
    return _searched(pipeline, tables, limits, known, budget, fast=True)


def chain_tables(pipeline: Pipeline, required: int = 0) -> Tables:
    """The costs of `pipeline` as arrays; `required`: peers that aren't exchangeable with others."""
    chain, peers = pipeline.chain, pipeline.owner
    length = chain.length
    machines = len(pipeline.speed)
    hops = [[pipeline.hop(i, j) for j in range(machines)] for i in range(machines)]
    bandwidth = np.array([[hop.bandwidth_bytes_per_s for hop in row] for row in hops])
    latency_s = np.array([[hop.latency_s for hop in row] for row in hops])
    no_twins = [0] * peers
    memory_bytes = np.array(pipeline.memory_bytes[:peers])
    return Tables(
        flops=np.array([[chain.flops(a, b) if a < b else 0.0 for b in range(length + 1)] for a in range(length)]),
        held=_held(pipeline),
        speed=np.array(pipeline.speed),
        busy_s=np.array([pipeline.busy_s(peer) for peer in range(peers)]),
        commit_s=np.array(pipeline.commit_s[:peers]),
        bandwidth=bandwidth,
        latency_s=latency_s,
        shared=np.array([[hop.shared for hop in row] for row in hops]),
        up=np.array(pipeline.up),
        down=np.array(pipeline.down),
        forward_bytes=np.array(chain.forward_bytes),
        gradient_bytes=np.array(chain.gradient_bytes),
        resident_bytes=np.array([0.0, *pipeline.resident[0][1:]]),
        memory_bytes=memory_bytes,
        roomiest=np.argsort(-memory_bytes, kind="stable").astype(np.int64),
        twins=np.array(twins(pipeline, required) if peers <= MOST_PEERS else no_twins, dtype=np.int64),
        hop_s=_cheapest_hop_s(pipeline, bandwidth[:peers, :peers], latency_s[:peers, :peers]),
    )


def _held(pipeline: Pipeline) -> Integers:
    """[P, L, L + 1]: as `Pipeline.held`, all at once."""
    length = pipeline.chain.length
    rounds = pipeline.microbatches
    resident, flight = np.array(pipeline.resident), np.array(pipeline.flight)
    free = np.array(pipeline.memory_bytes[: pipeline.owner])[:, None, None] - resident
    few = np.floor(free / np.where(flight > 0, flight, 1.0))
    held = np.where(flight * rounds <= free, float(rounds), few)
    held = np.where((free < 0) | np.tri(length, length + 1, dtype=np.bool_), -1.0, held).astype(np.int64)
    if pipeline.pinned:
        for peer in range(pipeline.owner):
            for start in range(length):
                for end in range(start + 1, length + 1):
                    if not pipeline.allowed(peer, start, end):
                        held[peer, start, end] = -1
    return held


def _cheapest_hop_s(pipeline: Pipeline, bandwidth: Floats, latency_s: Floats) -> float:
    """Of all inner cuts between any two peers; 0.0 where there are none."""
    chain, peers = pipeline.chain, pipeline.owner
    if peers < 2 or chain.length < 2:
        return 0.0
    others = ~np.eye(peers, dtype=np.bool_)
    both_s = (latency_s + latency_s.T)[others]
    inner = (chain.forward_bytes[c] / bandwidth + chain.gradient_bytes[c] / bandwidth.T for c in range(1, chain.length))
    return min(float((transfer_s[others] + both_s).min()) for transfer_s in inner)


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


def _searched(
    pipeline: Pipeline, tables: Tables, limits: Limits, known: Suffix | None, budget: int, *, fast: bool
) -> Found:
    labels = _labels(pipeline, budget)
    known_s = inf if known is None else pipeline.step_s(known)
    run = compiled(grow) if fast else grow
    rest, peer, _, explored, complete = run(
        tables,
        labels,
        pipeline.microbatches,
        pipeline.tail.stages,
        limits.fewest,
        limits.most,
        limits.required,
        known_s,
        budget,
    )
    if peer >= 0:
        order, cuts = [int(peer)], [0, int(labels.start[rest])]
        while rest:
            order.append(int(labels.head[rest]))
            rest = labels.rest[rest]
            cuts.append(int(labels.start[rest]))
        known = pipeline.fold(order, cuts)
    return Found(known, complete=bool(complete), explored=int(explored))


def _labels(pipeline: Pipeline, budget: int) -> Labels:
    # A peer's extensions are counted together, so the last ones may go beyond the budget.
    size = budget + pipeline.chain.length + 2
    tail = pipeline.tail

    def integers() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.zeros(size, dtype=np.int64)

    def floats() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.zeros(size, dtype=np.float64)

    labels = Labels(
        mask=integers(),
        head=integers(),
        start=integers(),
        period_s=floats(),
        transit_s=floats(),
        up_s=floats(),
        down_s=floats(),
        rest=integers(),
        after=integers(),
        beaten=np.zeros(size, dtype=np.bool_),
        first=np.zeros(2 * size + 1, dtype=np.int64),
    )
    labels.head[0], labels.start[0] = tail.head, tail.start
    labels.period_s[0], labels.transit_s[0], labels.up_s[0], labels.down_s[0] = tail[3:7]
    return labels
