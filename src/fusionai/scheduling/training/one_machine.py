"""Predicts the training speed of one machine without a pipeline: the baseline that every plan is compared with.

A step is M microbatches one after the other, with one in flight. A machine of the pool also pays one round trip to the
job owner per step, as in any plan that uses it; the job owner's own machine does not.
`planner` and `serving` compare their plans with this baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_speed
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.links import hop
from fusionai.scheduling.problem.memory_savings import (
    MemorySavings,
    flops_per_s,
    inability,
    offload_s,
    savings_choices,
    weights_s,
    weights_update_s,
)
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, RolePlacement

EXPLAINED: Final = 0.9
"""Fraction of one machine's speed, chosen. If a plan with embedding and head in the pool reaches it, their place with
the job owner is what makes the plan slow."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The fastest single machine that fits the whole model, the loss included."""

    peer: PeerProfile
    tokens_per_s: float


def fastest_alone(problem: Problem, peers: Sequence[PeerProfile]) -> Alone | None:
    """The fastest of `peers` on its own (the eligible peers and the job owner); None if the model fits none of them."""
    chain = Chain(problem, problem.blocks)
    variants = savings_choices(problem)
    ops = {op for block in problem.blocks for op in block.ops}
    best: Alone | None = None
    for peer in sorted(peers, key=lambda p: p.peer):
        if not peer.effective_flops_per_s > 0 or ops & set(peer.unsupported_ops):
            continue
        steps_s = [
            _step_s(problem, chain, peer, one)
            for one in variants
            if _needed_bytes(chain, one) <= peer.memory_bytes and inability(one, peer) is None
        ]
        if not steps_s:
            continue
        step_s = min(steps_s) + _report_s(problem, peer)
        tokens_per_s = problem.microbatches * problem.microbatch_tokens / step_s
        if best is None or tokens_per_s > best.tokens_per_s:
            best = Alone(peer, tokens_per_s)
    return best


def against_one(
    problem: Problem, found: Plan, peer: str, tokens_per_s: float, planned: Callable[[Problem], Plan]
) -> str | None:
    """The warning that `peer` alone is faster than the plan, with the cause: the machine belongs to the job owner and
    needs no pool, or the model's ends stay with the job owner, or neither. None if `peer` alone is not faster, or if
    the plan uses only this machine. `planned` solves a problem; it is called to price ends in the pool."""
    if tokens_per_s <= found.tokens_per_s:
        return None
    pool = {stage.peer for stage in found.stages if "stage" in stage.roles}
    ends = any(stage.peer == found.feed and "stage" not in stage.roles for stage in found.stages)
    if pool == {peer} and not ends:
        return None  # The plan is this machine; it is slower only by the round trip.
    speed = format_speed(found.tokens_per_s)
    name = next((p.name for p in _everyone(problem) if p.peer == peer and p.name), peer)
    if all(peer != one.peer for one in problem.peers):
        return (
            f"The job owner's machine alone would be faster: {name} reaches {format_speed(tokens_per_s)} tokens/s "
            f"without the pool, this plan {speed}. A plan can use it where it is lent to the pool as well (`fusion "
            "join`)."
        )
    if ends:
        placed = tuple(RolePlacement(role=role, place="pool") for role in ("feed", "loss"))
        free = msgspec.structs.replace(problem, roles=placed, kept_first=0, kept_last=0, incumbent=None)
        try:
            open_per_s = planned(free).tokens_per_s
        except PlanError:
            open_per_s = 0.0
        if open_per_s >= EXPLAINED * tokens_per_s:
            return (
                f"That the model's ends stay with the job owner costs speed: {speed} tokens/s, and "
                f"{format_speed(open_per_s)} with privacy level `open` and the ends in the pool."
            )
    return (
        f"One machine alone would be faster: {name} reaches {format_speed(tokens_per_s)} tokens/s by itself, this plan "
        f"{speed}."
    )


def _report_s(problem: Problem, peer: PeerProfile) -> float:
    """Seconds a step spends on reporting to the job owner and waiting for the answer: one round trip."""
    if problem.owner is None:
        return 0.0
    there, back = hop(peer, problem.owner, problem.links), hop(problem.owner, peer, problem.links)
    return there.latency_s + back.latency_s


def _everyone(problem: Problem) -> list[PeerProfile]:
    return [*problem.peers, *([] if problem.owner is None else [problem.owner])]


def _step_s(problem: Problem, chain: Chain, peer: PeerProfile, savings: MemorySavings) -> float:
    microbatch_s, update_s = max(chain.flops(0, chain.length, savings) / flops_per_s(peer, savings), 1e-12), 0.0
    if savings.offload:
        update_s += offload_s(peer, chain.slot_bytes(0, chain.length))
    if savings.offload_weights:
        microbatch_s += weights_s(peer, chain.weight_bytes(0, chain.length))
        update_s += weights_update_s(peer, chain.trained_bytes(0, chain.length))
    return problem.microbatches * microbatch_s + update_s


def _needed_bytes(chain: Chain, savings: MemorySavings) -> float:
    return chain.resident_bytes(0, chain.length, savings) + chain.in_flight_bytes(0, chain.length, savings)
