"""One machine on its own: the baseline every plan is held against. Decides its speed, or that the model does not fit.

No link, no pipeline: a step is M microbatches one after the other, with one in flight.
Neighbours: `planner` prints it and warns when it wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusionai.scheduling.chain import Chain
from fusionai.scheduling.levers import Levers
from fusionai.scheduling.types import PeerProfile, Problem


@dataclass(frozen=True, slots=True)
class Alone:
    """The fastest single machine that fits the whole model, the loss included."""

    peer: PeerProfile
    tokens_per_s: float


def fastest_alone(problem: Problem, peers: Sequence[PeerProfile]) -> Alone | None:
    """Over `peers` (those that may be used, and the owner). None if the model fits none of them."""
    chain = Chain(problem, problem.blocks)
    ways = [
        Levers(recompute=again)
        for again in {"never": (False,), "always": (True,)}.get(problem.recompute, (False, True))
    ]
    ops = {op for block in problem.blocks for op in block.ops}
    best: Alone | None = None
    for peer in sorted(peers, key=lambda p: p.peer):
        if not peer.effective_flops_per_s > 0 or ops & set(peer.unsupported_ops):
            continue
        levers = next((one for one in ways if _needed_bytes(chain, one) <= peer.memory_bytes), None)
        if levers is None:
            continue
        tokens_per_s = problem.microbatch_tokens / compute_alone_s(chain, peer, levers)
        if best is None or tokens_per_s > best.tokens_per_s:
            best = Alone(peer, tokens_per_s)
    return best


def compute_alone_s(chain: Chain, peer: PeerProfile, levers: Levers | None = None) -> float:
    return max(chain.flops(0, chain.length, levers) / peer.effective_flops_per_s, 1e-12)


def _needed_bytes(chain: Chain, levers: Levers) -> float:
    return chain.resident_bytes(0, chain.length, levers) + chain.in_flight_bytes(0, chain.length, levers)
