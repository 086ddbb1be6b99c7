"""Exact search for the pipeline with the shortest step, over stages, peers, order and cuts.

Dynamic programming over (set of peers used, first peer, first block), from the last stage towards the first, one level
per stage. A state keeps every suffix that no other one beats in period, transit, update and the two occupancies of its
head's link. A suffix is dropped if it can't beat the best known step, given a relaxation's bound on everything before
it (branch and bound).

The worst case is exponential in the number of peers. Therefore the search has a budget of tried extensions, an argument
and never a clock, so that results are reproducible.

`chain_kernels` has the loops, `pipeline` the costs, `improvement` finds the first pipeline, and `solving` decides what
happens when the budget is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.chain import Labels, Tables, grow
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.scheduling.problem.limits import Limits
from fusionai.scheduling.training.bound import Before
from fusionai.scheduling.training.pipeline import Pipeline, Suffix

GLANCE_BUDGET: Final = 6_000
"""Extensions tried in plain Python before the compiled search is loaded, which takes time."""
SLOW_BUDGET: Final = 400_000
"""Extensions tried if loops can't be compiled: a second or two."""
MOST_PEERS: Final = 40
"""Largest number of peers, so that a state's number (peers used, head, start) fits into 63 bits."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    `complete`: the whole space was searched, so `best` is proven optimal. `best` is None if no feasible pipeline was
    found or known.
    """

    best: Suffix | None
    complete: bool
    explored: int


def search(
    pipeline: Pipeline,
    limits: Limits,
    *,
    known: Suffix | None,
    budget: int,
    glance: int = GLANCE_BUDGET,
    before: Before | None = None,
    below_s: float = inf,
) -> Found:
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


def chain_tables(pipeline: Pipeline, required: int = 0, before: Before | None = None) -> Tables:
    """Return the costs of `pipeline` as arrays; `required`: mask of peers that can't be exchanged with others."""
    chain, peers, stages = pipeline.chain, pipeline.owner, pipeline.tables
    length = chain.length
    machines = len(pipeline.speed)
    hops = [[pipeline.hop(i, j) for j in range(machines)] for i in range(machines)]
    memory_bytes = np.array(pipeline.memory_bytes[:peers])
    pinned, only, only_blocks = pipeline.pins.table(length)
    before = _simply_before(pipeline) if before is None else before
    return Tables(
        flops=stages.flops,
        read_bytes=stages.read_bytes,
        slot_bytes=stages.slot_bytes,
        trained_bytes=stages.trained_bytes,
        stage_bytes=stages.resident_bytes,
        flight_bytes=stages.flight_bytes,
        needless=stages.needless,
        able=np.array(pipeline.able, dtype=np.bool_),
        pinned=np.array(pinned, dtype=np.int64),
        only=only,
        only_blocks=only_blocks,
        speed=np.array(pipeline.pace),
        away_bytes_per_s=np.array(pipeline.away_bytes_per_s),
        file_bytes_per_s=np.array(pipeline.file_bytes_per_s),
        busy_s=np.array([pipeline.busy_s(peer) for peer in range(peers)]),
        commit_s=np.array(pipeline.commit_s[:peers]),
        bandwidth=np.array([[hop.bandwidth_bytes_per_s for hop in row] for row in hops]),
        latency_s=np.array([[hop.latency_s for hop in row] for row in hops]),
        shared=np.array([[hop.shared for hop in row] for row in hops]),
        up=np.array(pipeline.up),
        down=np.array(pipeline.down),
        forward_bytes=np.array(chain.forward_bytes),
        gradient_bytes=np.array(chain.gradient_bytes),
        least_bytes=stages.resident_bytes[:, 0, :].min(axis=0),
        memory_bytes=memory_bytes,
        roomiest=np.argsort(-memory_bytes, kind="stable").astype(np.int64),
        twins=np.array(twins(pipeline, required) if peers <= MOST_PEERS else [0] * peers, dtype=np.int64),
        periods=before.periods,
        before_s=before.before_s,
        prices_s=before.prices_s,
        all_s=before.all_s,
    )


def _simply_before(pipeline: Pipeline) -> Before:
    """Return a simple bound: the fastest machine computes everything before a stage."""
    work = pipeline.tables.flops[0, 0] * (1 - 1e-12)
    least_s = work / max(pace[0] for pace in pipeline.pace)
    return Before(
        periods=np.array([0.0, np.inf]),
        before_s=np.broadcast_to(least_s, (1, pipeline.owner, len(least_s))).copy(),
        prices_s=np.zeros((1, pipeline.owner)),
        all_s=np.zeros(1),
    )


def twins(pipeline: Pipeline, required: int) -> list[int]:
    """Return for each peer the mask of earlier peers with equal costs; these must be used before it."""
    masks: list[int] = []
    for peer in range(pipeline.owner):
        mask = 0
        for earlier in range(peer):
            if pipeline.alike(earlier, peer) and (required >> peer & 1) == (required >> earlier & 1):
                mask |= 1 << earlier
        masks.append(mask)
    return masks


def _searched(
    pipeline: Pipeline, tables: Tables, limits: Limits, known: Suffix | None, below_s: float, budget: int, *, fast: bool
) -> Found:
    labels = _labels(pipeline, budget)
    known_s = below_s if known is None else min(below_s, pipeline.step_s(known))
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
    # A peer's extensions are counted at once, so the last ones may exceed the budget.
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
        update_s=floats(),
        rest=integers(),
        after=integers(),
        beaten=np.zeros(size, dtype=np.bool_),
        first=np.zeros(2 * size + 1, dtype=np.int64),
    )
    labels.head[0], labels.start[0] = tail.head, tail.start
    labels.period_s[0], labels.transit_s[0], labels.up_s[0], labels.down_s[0] = tail[3:7]
    labels.update_s[0] = tail.update_s
    return labels
