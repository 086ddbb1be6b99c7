"""A certificate: no pipeline on these peers makes a step shorter than this. Proves; places nothing.

With a period of at most T, peer i works through at most W_i(T) FLOPs per microbatch: the largest range of blocks whose
compute and link times are within T and whose memory fits. Whoever is chosen, the W_i of the stages must add up to the
model (likewise in blocks), and transit is at least the model's FLOPs poured over the fastest peers first. The same
argument as the access-link certificate R <= (1/L) sum min(1/t_i, cap_i/net_i), for whole blocks and one pipeline.

T takes finitely many values; they are grouped into intervals, bounded by the interval's small end for the period and
its large end for W_i, so the bound holds for every T. Neighbours: `planner` prints the gap to it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import inf
from typing import Final

from fusionai.scheduling.pipeline import Pipeline

_INTERVALS: Final = 256


def step_time_bound_s(pipeline: Pipeline, most_stages: int, fewest_stages: int = 1) -> float:
    """Seconds below which no feasible pipeline of `fewest_stages`..`most_stages` pool stages can be; inf if none is."""
    chain = pipeline.chain
    capacities = [_Capacity(pipeline, peer) for peer in range(pipeline.owner)]
    tail = pipeline.tail
    total = chain.flops(0, chain.length)
    hop_s, last_hop_s = _cheapest_hops(pipeline)
    best = inf
    hop_shares = [_hop_share_s(pipeline, peer) for peer in range(pipeline.owner)]
    no_shares = [0.0] * pipeline.owner
    floor_s = max(tail.period_s, _hardest_block_s(capacities, chain.length))
    if floor_s == inf:
        return inf
    for low_s, high_s in _intervals(capacities, floor_s):
        reach = [capacity.within(high_s) for capacity in capacities]
        stages = _stages_needed(reach, total, chain.length)
        if stages is None or stages > most_stages:
            continue
        stages = max(stages, fewest_stages)
        poured_s = _pour_s(pipeline, reach, total, no_shares) + (stages - 1) * hop_s
        poured_s = max(poured_s, _pour_s(pipeline, reach, total, hop_shares))
        transit_s = tail.transit_s + last_hop_s + poured_s
        best = min(best, (pipeline.microbatches - 1) * low_s + max(transit_s, low_s))
    return best


class _Capacity:
    """W_i and the block count within a period, as step functions."""

    def __init__(self, pipeline: Pipeline, peer: int) -> None:
        chain, length = pipeline.chain, pipeline.chain.length
        links = pipeline.access_only(peer)
        points: list[tuple[float, float, int]] = []
        self.block_periods = [inf] * length
        """For each block the least period of any range that contains it."""
        for start in range(length):
            for end in range(start + 1, length + 1):
                if pipeline.held(peer, start, end) < 1:
                    continue
                period_s = pipeline.compute_s(peer, start, end)
                if links:
                    period_s = max(period_s, pipeline.access_s(peer, start, end))
                points.append((period_s, chain.flops(start, end), end - start))
                for block in range(start, end):
                    if period_s < self.block_periods[block]:
                        self.block_periods[block] = period_s
        points.sort()
        self.periods = [p for p, _, _ in points]
        self._flops = list(accumulate((f for _, f, _ in points), max))
        self._blocks = list(accumulate((n for _, _, n in points), max))

    def within(self, period_s: float) -> tuple[float, int]:
        index = bisect_right(self.periods, period_s) - 1
        return (0.0, 0) if index < 0 else (self._flops[index], self._blocks[index])


def _hardest_block_s(capacities: list[_Capacity], length: int) -> float:
    """Somebody must hold each block: the last one, for instance, may have much to send."""
    return max(min(capacity.block_periods[block] for capacity in capacities) for block in range(length))


def _intervals(capacities: list[_Capacity], floor_s: float) -> list[tuple[float, float]]:
    values = sorted({max(p, floor_s) for capacity in capacities for p in capacity.periods})
    width = max(1, -(-len(values) // _INTERVALS))
    return [(values[i], values[min(i + width, len(values)) - 1]) for i in range(0, len(values), width)]


def _stages_needed(reach: list[tuple[float, int]], total: float, length: int) -> int | None:
    """Fewest peers whose reach adds up to the model, None if all of them don't."""
    by_flops = accumulate(sorted((f for f, _ in reach), reverse=True))
    by_blocks = accumulate(sorted((n for _, n in reach), reverse=True))
    # Sums in another order may differ in the last bits; the bound must not rise because of that.
    slack = total * (1 - 1e-12)
    for count, (flops, blocks) in enumerate(zip(by_flops, by_blocks, strict=True), start=1):
        if flops >= slack and blocks >= length:
            return count
    return None


def _pour_s(pipeline: Pipeline, reach: list[tuple[float, int]], total: float, hop_shares: list[float]) -> float:
    """Least transit of the model's FLOPs, each peer taking at most its reach: compute, and hops in proportion to use.

    A used peer pays its share of two hops; using a fraction of its reach pays that fraction here, so this is a
    fractional knapsack, filled best first. The chain's two ends have one hop less, so as much as two shares is not
    owed. Peers with poor links would make that discount large: shares are capped, and the best cap counts.
    """
    best_s = 0.0
    ranked = sorted(hop_shares)
    for cap_s in {0.0, *(ranked[len(ranked) * part // 4] for part in range(4)), ranked[-1]}:
        rates = sorted(
            (1 / pipeline.speed[peer] + min(share_s, cap_s) / flops, flops)
            for peer, ((flops, _), share_s) in enumerate(zip(reach, hop_shares, strict=True))
            if flops > 0
        )
        seconds, left = -2 * cap_s, total * (1 - 1e-12)
        for rate, flops in rates:
            seconds += min(flops, left) * rate
            left -= min(flops, left)
        best_s = max(best_s, seconds)
    return best_s


def _hop_share_s(pipeline: Pipeline, peer: int) -> float:
    """What a stage between two others adds to transit by its own uplink and latency, 0.0 if it has special links."""
    chain = pipeline.chain
    if chain.length < 2 or not pipeline.access_only(peer):
        return 0.0
    profile = pipeline.peers[peer]
    inner = range(1, chain.length)
    sent = min(chain.forward_bytes[cut] for cut in inner) + min(chain.gradient_bytes[cut] for cut in inner)
    latency_s = profile.uplink.latency_s + profile.downlink.latency_s
    return sent / profile.uplink.bandwidth_bytes_per_s + 2 * latency_s


def _cheapest_hops(pipeline: Pipeline) -> tuple[float, float]:
    """Least time of a hop between two pool stages, and of the hop to the owner's loss stage (0.0 without one)."""
    chain, peers = pipeline.chain, range(pipeline.owner)
    inner = min(
        (pipeline.hop_s(i, j, c) for c in range(1, chain.length) for i in peers for j in peers if i != j), default=0.0
    )
    if pipeline.loss is None:
        return inner, 0.0
    return inner, min(pipeline.hop_s(i, pipeline.owner, chain.length) for i in peers)
