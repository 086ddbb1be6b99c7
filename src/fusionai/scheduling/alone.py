"""One machine on its own: the baseline every plan is held against. Decides its speed, or that the model does not fit.

No link, no pipeline: a step is M microbatches one after the other, with one in flight.
Neighbours: `planner` prints it and warns when it wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusionai.scheduling.chain import Chain
from fusionai.scheduling.levers import (
    Levers,
    choices_of_problem,
    flops_per_s,
    inability,
    offload_s,
    weights_s,
    weights_update_s,
)
from fusionai.scheduling.types import PeerProfile, Problem


@dataclass(frozen=True, slots=True)
class Alone:
    """The fastest single machine that fits the whole model, the loss included."""

    peer: PeerProfile
    tokens_per_s: float


def fastest_alone(problem: Problem, peers: Sequence[PeerProfile]) -> Alone | None:
    """Over `peers` (those that may be used, and the owner). None if the model fits none of them."""
    chain = Chain(problem, problem.blocks)
    ways = choices_of_problem(problem)
    ops = {op for block in problem.blocks for op in block.ops}
    best: Alone | None = None
    for peer in sorted(peers, key=lambda p: p.peer):
        if not peer.effective_flops_per_s > 0 or ops & set(peer.unsupported_ops):
            continue
        fitting = (one for one in ways if _needed_bytes(chain, one) <= peer.memory_bytes)
        levers = next((one for one in fitting if inability(one, peer) is None), None)
        if levers is None:
            continue
        microbatch_s, update_s = compute_alone_s(chain, peer, levers), 0.0
        if levers.offload:
            update_s += offload_s(peer, chain.slot_bytes(0, chain.length))
        if levers.offload_weights:
            microbatch_s += weights_s(peer, chain.weight_bytes(0, chain.length))
            update_s += weights_update_s(peer, chain.trained_bytes(0, chain.length))
        step_s = problem.microbatches * microbatch_s + update_s
        tokens_per_s = problem.microbatches * problem.microbatch_tokens / step_s
        if best is None or tokens_per_s > best.tokens_per_s:
            best = Alone(peer, tokens_per_s)
    return best


def compute_alone_s(chain: Chain, peer: PeerProfile, levers: Levers | None = None) -> float:
    return max(chain.flops(0, chain.length, levers) / flops_per_s(peer, levers or chain.levers), 1e-12)


def _needed_bytes(chain: Chain, levers: Levers) -> float:
    return chain.resident_bytes(0, chain.length, levers) + chain.in_flight_bytes(0, chain.length, levers)
