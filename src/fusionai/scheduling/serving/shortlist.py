"""Selects the peers of a large pool that the search for a serving pipeline examines, and bounds what all peers could
reach.

A pipeline has few stages. Of thousands of peers, the search gets those with the least seconds per block, their share of
a hop included, and some fast or large ones. The bound assigns the blocks to the best of all peers, so the certificate
also covers the peers that were left out.

`serving` calls this module for large pools; `serving.pipeline` has the formulas that are written here for arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import Floats, Integers
from fusionai.scheduling.problem.constraints import must_use
from fusionai.scheduling.problem.embedding_and_head import middle
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem, ServingNeeds
from fusionai.scheduling.serving.pipeline import block_s, least_tokens, ring_bytes, stage_bytes

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
    into = _cheapest_into(problem, usable, crossing)
    out = np.array([crossing / p.uplink.bandwidth_bytes_per_s + p.uplink.latency_s for p in usable])
    held = np.maximum(most, 1)
    fits = most > 0
    mean = seconds.mean(axis=1)
    # The first stage receives nothing from a peer and the last sends nothing to one: rank those by the other direction.
    inner, first, last = (mean + seconds_each / held for seconds_each in (into + out, out, into))
    ranked = [*(np.where(fits, key, np.inf) for key in (inner, first, last, mean)), -most - 1e-9 / mean]
    counts = [wanted, wanted // 2, wanted // 2, wanted // 4, wanted // 4]
    chosen = {int(i) for key, count in zip(ranked, counts, strict=True) for i in np.argsort(key, kind="stable")[:count]}
    owner = problem.owner.peer if problem.owner is not None else ""
    needed = must_use(problem)
    chosen |= {i for i, peer in enumerate(usable) if peer.peer in needed or peer.peer == owner}
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
    """Return `listed` plus the machine that passes a token fastest among those that hold all pool blocks and one
    context."""
    if len(listed) == len(usable):
        return listed
    blocks = middle(problem)
    needed = stage_bytes(blocks, needs, blocks[-1].output_bytes if needs.retain else 0, least_tokens(needs))

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
    """Return [N]: consecutive blocks that memory could hold with one context, without workspace and retained
    boundary."""
    tokens = needs.context_tokens
    sizes = [float(b.parameter_bytes + tokens * b.cache_token_bytes + ring_bytes([b], needs)) for b in blocks]
    sums = np.concatenate([[0.0], np.cumsum(np.array(sizes))])
    least = np.array([float((sums[count:] - sums[:-count]).min()) for count in range(1, len(blocks) + 1)])
    lent = np.array([float(peer.memory_bytes) for peer in peers])
    return np.searchsorted(np.maximum.accumulate(least), lent, side="right").astype(np.int64)


def _cheapest_into(problem: Problem, peers: Sequence[PeerProfile], crossing: float) -> Floats:
    """Return [N]: least seconds of a hop from any other peer; 0 for peers with an exceptional link into them."""
    up = max(peer.uplink.bandwidth_bytes_per_s for peer in peers)
    latency_s = min(peer.uplink.latency_s for peer in peers)
    owner = "" if problem.owner is None else problem.owner.peer
    free = {owner, *(key.split(">")[1] for key in problem.links)}
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
