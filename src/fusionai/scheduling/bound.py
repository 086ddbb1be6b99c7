"""A certificate: no pipeline on these peers makes a step shorter than this. Proves; places nothing.

With a period of at most T, peer i works through at most W_i(T) FLOPs per microbatch: the largest range of blocks whose
compute and link times are within T and whose memory fits. Whoever is chosen, the W_i of the stages must add up to the
model (likewise in blocks), and transit is at least the model's FLOPs poured over the fastest peers first. The same
argument as the access-link certificate R <= (1/L) sum min(1/t_i, cap_i/net_i), for whole blocks and one pipeline.

T is looked at in intervals, bounded by the interval's small end for the period and its large end for W_i, so the bound
holds for every T. Neighbours: `planner` prints the gap to it, `shortlist` takes whom it pours over, `bound_kernels` has
the loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from fusionai.scheduling.bound_kernels import Floats, Ground, Integers, extremes, reaches
from fusionai.scheduling.chain import Chain
from fusionai.scheduling.compiled import available, compiled
from fusionai.scheduling.ends import ends_of, front_of
from fusionai.scheduling.pipeline import Pipeline
from fusionai.scheduling.types import Link, PeerProfile, Problem

INTERVALS: Final = 400
LARGE_INTERVALS: Final = 100
"""From `LARGE` peers on."""
LARGE: Final = 1000
_SLACK: Final = 1 - 1e-12
"""Sums in another order may differ in the last bits; the bound must not rise because of that."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a pipeline has besides its pool stages: rounds, the owner's loss stage, the cheapest hops."""

    rounds: int
    """Microbatches less one."""
    period_s: float
    transit_s: float
    hop_s: float
    """Least between two stages of the pool."""
    last_hop_s: float
    """Least to the owner's loss stage; 0.0 without one."""


def step_time_bound_s(pipeline: Pipeline, most_stages: int, fewest_stages: int = 1) -> float:
    """Seconds below which no feasible pipeline of `fewest_stages`..`most_stages` pool stages can be; inf if none is."""
    problem, memory = pipeline.problem, pipeline.memory_bytes[: pipeline.owner]
    ground = ground_of(problem, pipeline.chain, pipeline.peers, memory, loss_elsewhere=pipeline.loss is not None)
    around = around_of(problem, pipeline.chain, pipeline.peers, pipeline.tail.period_s, pipeline.loss is not None)
    return Bound(ground, around).step_s(most_stages, fewest_stages)


def ground_of(
    problem: Problem, chain: Chain, peers: Sequence[PeerProfile], memory_bytes: Sequence[float], *, loss_elsewhere: bool
) -> Ground:
    length = chain.length
    forward, gradient = np.array(chain.forward_bytes), np.array(chain.gradient_bytes)
    if not loss_elsewhere:
        forward[length] = gradient[length] = 0.0
    index = {peer.peer: number for number, peer in enumerate(peers)}
    front = front_of(problem, list(peers))
    special = {end for key in problem.links for end in key.split(">")}
    # On the owner's own machine the loss stage is next door.
    special |= {problem.owner.peer} if problem.owner is not None else set()
    needed = [
        [chain.resident_bytes(a, b) + chain.in_flight_bytes(a, b) if a < b else 0.0 for b in range(length + 1)]
        for a in range(length)
    ]
    memory = np.array(memory_bytes, dtype=np.float64)
    if front is not None:
        # The owner's first blocks and no more: longer ranges take more.
        memory[front] = min(memory[front], needed[0][ends_of(problem).first])
    return Ground(
        work=np.array([chain.flops(0, end) for end in range(length + 1)]),
        forward_bytes=forward,
        gradient_bytes=gradient,
        # `Pipeline.held` divides where this adds up.
        needed_bytes=np.array(needed) * _SLACK,
        speed=np.array([peer.effective_flops_per_s for peer in peers]),
        memory_bytes=memory,
        up=np.array([peer.uplink.bandwidth_bytes_per_s for peer in peers]),
        down=np.array([peer.downlink.bandwidth_bytes_per_s for peer in peers]),
        latency_s=np.array([peer.uplink.latency_s + peer.downlink.latency_s for peer in peers]),
        plain=np.array([peer.peer not in special for peer in peers], dtype=np.bool_),
        pinned=np.array([index.get(problem.pinned.get(b.block, ""), -1) for b in chain.blocks], dtype=np.int64),
        pins=len(problem.pinned),
    )


def around_of(
    problem: Problem, chain: Chain, peers: Sequence[PeerProfile], tail_s: float, loss_elsewhere: bool
) -> Around:
    """`tail_s`: of the owner's loss stage, 0.0 without one."""
    inner = [chain.forward_bytes[c] + chain.gradient_bytes[c] for c in range(1, chain.length)]
    hop_s = 0.0
    if inner and len(peers) > 1:
        widest, latency_s = _best_hop(peers, peers, problem.links)
        hop_s = min(inner) / widest + 2 * latency_s
    last_hop_s = 0.0
    owner = problem.owner
    if front_of(problem, list(peers)) is not None and owner is not None:
        peers = [peer for peer in peers if peer.peer != owner.peer]
    if loss_elsewhere and owner is not None and peers and all(peer.peer != owner.peer for peer in peers):
        there, back = _best_hop(peers, [owner], problem.links), _best_hop([owner], peers, problem.links)
        last_hop_s = chain.forward_bytes[chain.length] / there[0] + there[1]
        last_hop_s += chain.gradient_bytes[chain.length] / back[0] + back[1]
    return Around(problem.microbatches - 1, tail_s, tail_s, hop_s, last_hop_s)


class Bound:
    """Computed once for a pool; asked for several limits on stages."""

    def __init__(self, ground: Ground, around: Around) -> None:
        self.ground = ground
        self.around = around
        least, longest = compiled(extremes)(ground) if _worth_it(ground) else extremes(ground)
        self.floor_s = max(float(least.max()), around.period_s)
        """Somebody must hold each block: the last one, for instance, may have much to send."""
        self._periods = np.zeros(0)
        if self.floor_s < inf:
            count = LARGE_INTERVALS if len(ground.speed) >= LARGE else INTERVALS
            top_s = max(longest, self.floor_s)
            if top_s > 0:
                grid = np.geomspace(max(self.floor_s, top_s * 1e-6), top_s, count)
                self._periods = np.concatenate([[self.floor_s], np.minimum(grid, top_s)[:-1], [top_s]])
            else:
                self._periods = np.zeros(1)
            run = compiled(reaches) if _worth_it(ground) else reaches
            self._flops, self._blocks = run(ground, self._periods)
            self._shares_s = self._hop_shares_s()

    def step_s(self, most_stages: int, fewest_stages: int = 1) -> float:
        """Seconds below which no pipeline is; inf if there is none."""
        return min((step_s for step_s, _, _ in self._floors(most_stages, fewest_stages)), default=inf)

    def suited(self, most_stages: int, count: int) -> list[int]:
        """Of the peers, those that hold most within the periods that look best: `count` for the best of them, or twice
        the stages it takes."""
        floors = sorted(self._floors(most_stages, 1))[:3]
        chosen: dict[int, None] = {}
        for _, place, stages in floors:
            reach = self._flops[:, place]
            ranked = np.lexsort((self._shares_s, -reach))
            chosen |= dict.fromkeys(int(peer) for peer in ranked[: max(count, 2 * stages)] if reach[peer] > 0)
        return list(chosen)

    def _floors(self, most_stages: int, fewest_stages: int) -> list[tuple[float, int, int]]:
        """For each interval of periods: seconds, its place, fewest stages."""
        around = self.around
        length = len(self.ground.pinned)
        total = float(self.ground.work[length])
        found: list[tuple[float, int, int]] = []
        best = inf
        caps_s = [float(cap_s) for cap_s in np.quantile(self._shares_s, (0.0, 0.25, 0.5, 0.75, 1.0))]
        for place in range(len(self._periods)):
            low_s = float(self._periods[max(place - 1, 0)])
            if around.rounds * low_s + max(around.transit_s, low_s) >= best:
                break
            stages = _stages_needed(self._flops[:, place], self._blocks[:, place], total, length)
            if stages is None or stages > most_stages:
                continue
            used = max(stages, fewest_stages)
            poured_s = self._pour_s(place, 0.0) + (used - 1) * around.hop_s
            for cap_s in caps_s:
                if cap_s > 0:
                    poured_s = max(poured_s, self._pour_s(place, cap_s))
            transit_s = around.transit_s + around.last_hop_s + poured_s
            step_s = around.rounds * low_s + max(transit_s, low_s)
            best = min(best, step_s)
            found.append((step_s, place, stages))
        return found

    def _pour_s(self, place: int, cap_s: float) -> float:
        """Least transit of the model's FLOPs, each peer taking at most its reach: compute, and hops in proportion to
        use.

        A used peer pays its share of two hops; using a fraction of its reach pays that fraction here, so this is a
        fractional knapsack, filled best first. The chain's two ends have one hop less, so as much as two shares is not
        owed. Peers with poor links would make that discount large: shares are capped, and the best cap counts.
        """
        flops = self._flops[:, place]
        useful = flops > 0
        flops = flops[useful]
        rates = 1 / self.ground.speed[useful] + np.minimum(self._shares_s[useful], cap_s) / flops
        order = np.argsort(rates, kind="stable")
        filled = np.minimum(np.cumsum(flops[order]), self.ground.work[-1] * _SLACK)
        return float((np.diff(filled, prepend=0.0) * rates[order]).sum()) * _SLACK - 2 * cap_s

    def _hop_shares_s(self) -> Floats:
        """[N]: what a stage between two others adds to transit by its own uplink and latency; 0.0 for special links."""
        ground = self.ground
        inner = slice(1, len(ground.pinned))
        if len(ground.pinned) < 2:
            return np.zeros(len(ground.speed))
        sent = float(ground.forward_bytes[inner].min() + ground.gradient_bytes[inner].min())
        return np.where(ground.plain, sent / ground.up + 2 * ground.latency_s, 0.0)


def _worth_it(ground: Ground) -> bool:
    """Small pools end sooner than compiled loops are loaded."""
    peers, length = len(ground.speed), len(ground.pinned)
    return available() and peers * length * length > 40_000


def _stages_needed(flops: Floats, blocks: Integers, total: float, length: int) -> int | None:
    """Fewest peers whose reach adds up to the model, None if all of them don't."""
    by_flops = np.cumsum(np.sort(flops)[::-1])
    by_blocks = np.cumsum(np.sort(blocks)[::-1])
    enough = (by_flops >= total * _SLACK) & (by_blocks >= length)
    return int(np.argmax(enough)) + 1 if enough[-1] else None


def _best_hop(
    senders: Sequence[PeerProfile], receivers: Sequence[PeerProfile], links: Mapping[str, Link]
) -> tuple[float, float]:
    """No hop between them is wider or shorter than this: bytes per second, seconds."""
    widest = min(
        max(peer.uplink.bandwidth_bytes_per_s for peer in senders),
        max(peer.downlink.bandwidth_bytes_per_s for peer in receivers),
    )
    latency_s = min(p.uplink.latency_s for p in senders) + min(p.downlink.latency_s for p in receivers)
    return (
        max([widest, *(link.bandwidth_bytes_per_s for link in links.values())]),
        min([latency_s, *(link.latency_s for link in links.values())]),
    )
