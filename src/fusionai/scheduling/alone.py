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
        steps_s = [
            _step_s(problem, chain, peer, one)
            for one in ways
            if _needed_bytes(chain, one) <= peer.memory_bytes and inability(one, peer) is None
        ]
        if not steps_s:
            continue
        step_s = min(steps_s)
        tokens_per_s = problem.microbatches * problem.microbatch_tokens / step_s
        if best is None or tokens_per_s > best.tokens_per_s:
            best = Alone(peer, tokens_per_s)
    return best


def _step_s(problem: Problem, chain: Chain, peer: PeerProfile, levers: Levers) -> float:
    microbatch_s, update_s = max(chain.flops(0, chain.length, levers) / flops_per_s(peer, levers), 1e-12), 0.0
    if levers.offload:
        update_s += offload_s(peer, chain.slot_bytes(0, chain.length))
    if levers.offload_weights:
        microbatch_s += weights_s(peer, chain.weight_bytes(0, chain.length))
        update_s += weights_update_s(peer, chain.trained_bytes(0, chain.length))
    return problem.microbatches * microbatch_s + update_s


def _needed_bytes(chain: Chain, levers: Levers) -> float:
    return chain.resident_bytes(0, chain.length, levers) + chain.in_flight_bytes(0, chain.length, levers)
