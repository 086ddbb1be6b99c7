"""Compares a layout with several holders per block to the single chain of a plan, and decides whether to report it.

The layout is that of `coverage`: every peer has its own interval. The report has its steady throughput, and the time of
a step with the job's microbatches, by the formula of a chain extended by the costs of many holders:

    step = (M - 1) / rate + trip + exchange
    trip      round trip of one microbatch: each block at the mean speed of its holders, a hop where holders end
    exchange  gradients among the holders of each block after the last microbatch, in float32, not overlapped with
              computing: the slowest peer's 2 (h - 1) / h of the bytes of each of its blocks that h > 1 peers hold

`planner` makes the plan of one chain, which is what a job runs; `cli.plan` shows both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Final

import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.coverage import CoveragePlan, cover
from fusionai.scheduling.crossings import crossings
from fusionai.scheduling.kernels.coverage import Floats
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.embedding_and_head import middle, owners_flops, place_of
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem

WORTH_A_WORD: Final = 1.05
"""Least ratio of steady throughputs, layout to chain, for the layout to be reported; chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyHolders:
    """A layout that no job can run yet, compared with the chain that a job would run."""

    layout: CoveragePlan
    holders: tuple[int, ...]
    """Number of holders of each block, in order."""
    first_block: int
    chain_steady_tokens_per_s: float
    """Steady throughput of the chain, as if a step had an unlimited number of microbatches."""
    over_one_chain: float
    """Steady throughput of the layout divided by that of the chain."""
    trip_s: float
    exchange_s: float
    step_time_s: float
    tokens_per_s: float
    """Throughput of a step with the job's microbatches."""
    pays_from_microbatches: int | None
    """Least microbatches per step with which the layout is faster than the chain; None: it never is."""


def many_holders(problem: Problem, chain_plan: Plan) -> ManyHolders | None:
    """Return the comparison for a training job. None for serving, if one chain is as good, or if the problem sets
    stages, spares, required or pinned peers, which only a chain can have."""
    wishes = problem.stages is not None or problem.spares_wanted or problem.required or problem.pinned
    if problem.task != "train" or wishes:
        return None
    rounds = problem.microbatches - 1
    costs = StageCosts(problem)
    chain_trip_s = sum(stage.compute_s for stage in chain_plan.stages)
    chain_trip_s += sum(link.transfer_s + link.latency_s for link in crossings(chain_plan, costs))
    chain_period_s = max(stage.compute_s for stage in chain_plan.stages)
    if rounds:
        chain_period_s = max((chain_plan.step_time_s - chain_plan.commit_s - chain_trip_s) / rounds, chain_period_s)
    steady = problem.microbatch_tokens / chain_period_s
    loss_elsewhere = place_of(problem, "loss") == "owner"
    chain = Chain(problem, middle(problem))
    # Even with all machines busy all the time the gain would be too small, so the search can be skipped.
    together = sum(peer.effective_flops_per_s for peer in problem.peers if peer.peer not in problem.excluded)
    if problem.microbatch_tokens * together < WORTH_A_WORD * steady * chain.flops(0, chain.length):
        return None
    try:
        layout = cover(problem)
    except PlanError:
        # A chain can fit although no layout does: its last stages have little in flight and need less memory.
        return None
    if layout.tokens_per_s < WORTH_A_WORD * steady:
        return None
    spread = _Spread(problem, chain, layout)
    period_s = 1 / layout.microbatches_per_s
    trip_s = spread.trip_s() + (_owners_s(problem) if loss_elsewhere else 0.0)
    exchange_s = spread.exchange_s()
    step_s = rounds * period_s + trip_s + exchange_s + chain_plan.commit_s
    behind_s = trip_s + exchange_s - chain_trip_s
    caught_up = None if period_s >= chain_period_s else max(1, floor(behind_s / (chain_period_s - period_s)) + 2)
    return ManyHolders(
        layout=layout,
        holders=tuple(int(count) for count in spread.holders),
        first_block=chain.blocks[0].block,
        chain_steady_tokens_per_s=steady,
        over_one_chain=layout.tokens_per_s / steady,
        trip_s=trip_s,
        exchange_s=exchange_s,
        step_time_s=step_s,
        tokens_per_s=problem.microbatches * problem.microbatch_tokens / step_s,
        pays_from_microbatches=caught_up,
    )


class _Spread:
    """Sums over the holders of each block and cut of a layout."""

    def __init__(self, problem: Problem, chain: Chain, layout: CoveragePlan) -> None:
        self._chain = chain
        first, length = chain.blocks[0].block, chain.length
        known = {peer.peer: peer for peer in problem.peers}
        peers = [known[held.peer] for held in layout.holdings]
        self._start = np.array([held.blocks[0] - first for held in layout.holdings], dtype=np.int64)
        self._end = np.array([held.blocks[1] - first for held in layout.holdings], dtype=np.int64)
        self._rate = np.array([held.rate_per_s for held in layout.holdings])
        self._speed = np.array([peer.effective_flops_per_s for peer in peers])
        self._up = np.array([peer.uplink.bandwidth_bytes_per_s for peer in peers])
        self._down = np.array([peer.downlink.bandwidth_bytes_per_s for peer in peers])
        self._latency_s = np.array([peer.uplink.latency_s + peer.downlink.latency_s for peer in peers])
        self._length = length
        self.holders = self._over_blocks(np.ones(len(peers)))
        self._cover = self._over_blocks(self._rate)

    def trip_s(self) -> float:
        """Seconds of one microbatch's round trip, averaged over holders in proportion to their rates."""
        chain, length = self._chain, self._length
        flops = np.diff([chain.flops(0, end) for end in range(length + 1)])
        seconds = float((flops * self._over_blocks(self._rate / self._speed) / self._cover).sum())
        for cut in range(1, length):
            leaving, entering = self._end == cut, self._start == cut
            if not leaving.any():
                continue
            # Only some of the holders end here; the others compute the next block themselves.
            share = min(1.0, float(self._rate[leaving].sum()) / float(self._cover[cut - 1]))
            entering = entering if entering.any() else (self._start <= cut) & (cut < self._end)
            hop_s = chain.forward_bytes[cut] * _mean(1 / self._up, self._rate, leaving)
            hop_s += chain.gradient_bytes[cut] * _mean(1 / self._up, self._rate, entering)
            hop_s += _mean(self._latency_s, self._rate, leaving) + _mean(self._latency_s, self._rate, entering)
            seconds += share * hop_s
        return seconds

    def exchange_s(self) -> float:
        trained = np.array([float(block.trainable_bytes) for block in self._chain.blocks])
        sent = np.concatenate([[0.0], np.cumsum(trained * 2 * (self.holders - 1) / np.maximum(self.holders, 1))])
        return float(((sent[self._end] - sent[self._start]) / np.minimum(self._up, self._down)).max())

    def _over_blocks(self, values: Floats) -> Floats:
        steps = np.zeros(self._length + 1)
        np.add.at(steps, self._start, values)
        np.add.at(steps, self._end, -values)
        return np.cumsum(steps)[:-1]


def _mean(values: Floats, weights: Floats, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    return float((values[chosen] * weights[chosen]).sum() / weights[chosen].sum())


def _owners_s(problem: Problem) -> float:
    """Seconds of the job owner's blocks per microbatch; 0.0 without an owner."""
    owner = problem.owner
    return 0.0 if owner is None else owners_flops(problem) / owner.effective_flops_per_s
