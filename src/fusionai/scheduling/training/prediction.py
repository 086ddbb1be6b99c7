"""Predicts how long a training step takes for a given placement, and how fast one machine is alone.

Applies the formulas of `pipeline` to a placement that already exists: stages keep their microbatches in flight, and a
peer may hold several stages, which then share its compute and its access link. Replicas run side by side, so a period
takes one microbatch through each of them.

A step is committed when every stage has reported to the job owner that its gradients are summed. The first stage of a
chain finishes last and begins first: it waits for one message to the owner and one back (docs/recovery.md). The other
stages receive the confirmation before their next microbatch arrives.

With several replicas, every stage of the first one is the home of its parameters. The other replicas send it their
gradients. The home adds them in the order of replicas, which fixes the bits of the sum, and sends the sums back. All
homes work at once, so the slowest link determines the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem import memory_savings as saving
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, RolePlacement, StagePlacement, hop


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step time and its bottleneck. `bottleneck` describes what limits the speed. `reduction_s` is the part
    of `step_s` that summing the replicas' gradients takes, `commit_s` the part that waiting for the step's commit
    takes."""

    step_s: float
    bottleneck: str
    reduction_s: float = 0.0
    commit_s: float = 0.0


def predict(stages: Sequence[StagePlacement], costs: StageCosts) -> Prediction:
    """Predict one step over `stages`, given in pipeline order, with the speeds and links of `costs.problem`."""
    compute = [costs.compute_s(stage, stage.peer) for stage in stages]
    hop_s = [0.0] * len(stages)
    busy: defaultdict[str, float] = defaultdict(float)
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    causes: list[tuple[float, str]] = []
    for stage, seconds in zip(stages, compute, strict=True):
        busy[stage.peer] += seconds
    for index, (one, other) in enumerate(pairwise(stages)):
        if one.replica != other.replica:
            continue
        for sender, receiver, size in (
            (one.peer, other.peer, costs.forward_bytes(one)),
            (other.peer, one.peer, costs.gradient_bytes(other)),
        ):
            link = costs.hop(sender, receiver)
            transfer_s = size / link.bandwidth_bytes_per_s
            hop_s[index] += transfer_s + link.latency_s
            if link.shared:
                up[sender] += size / costs.profiles[sender].uplink.bandwidth_bytes_per_s
                down[receiver] += size / costs.profiles[receiver].downlink.bandwidth_bytes_per_s
            causes.append((transfer_s, f"link between stage {one.stage} and stage {other.stage}"))
    causes += [(seconds, f"compute on {costs.name(peer)}") for peer, seconds in busy.items()]
    causes += [(seconds, f"uplink of {costs.name(peer)}") for peer, seconds in up.items()]
    causes += [(seconds, f"downlink of {costs.name(peer)}") for peer, seconds in down.items()]
    microbatches = -(-costs.problem.microbatches // (1 + max(stage.replica for stage in stages)))
    transit_s, longest_s = 0.0, 0.0
    for index in range(len(stages) - 1, -1, -1):
        stage = stages[index]
        if index + 1 < len(stages) and stages[index + 1].replica != stage.replica:
            transit_s = 0.0
        transit_s += compute[index] + hop_s[index]
        longest_s = max(longest_s, transit_s)
        if stage.in_flight < microbatches:
            held = f"round trip of stage {stage.stage} with {stage.in_flight} microbatches in flight"
            causes.append((transit_s / stage.in_flight, held))
    period_s, cause = max(causes, key=lambda entry: entry[0])
    summing_s, word_s = reduction_s(stages, costs), commit_s(stages, costs)
    update_s = max(costs.update_s(stage) for stage in stages)
    step_s = (microbatches - 1) * period_s + longest_s + summing_s + update_s + word_s
    if summing_s > step_s / 2:
        return Prediction(step_s, f"summing gradients ({format_seconds(summing_s)} per step)", summing_s, word_s)
    return Prediction(step_s, f"{cause} ({format_seconds(period_s)} per microbatch)", summing_s, word_s)


def commit_s(stages: Sequence[StagePlacement], costs: StageCosts) -> float:
    """Return the commit's round trip in seconds, of the replica that waits longest. 0 if the problem has no job owner
    or the owner has the first stage itself."""
    owner = costs.problem.owner
    if owner is None:
        return 0.0
    return max(
        costs.hop(first.peer, owner.peer).latency_s + costs.hop(owner.peer, first.peer).latency_s
        for first in first_stages(stages)
    )


def first_stages(stages: Sequence[StagePlacement]) -> list[StagePlacement]:
    """Return the first stage of every replica."""
    return [stage for index, stage in enumerate(stages) if not index or stages[index - 1].replica != stage.replica]


def reduction_s(stages: Sequence[StagePlacement], costs: StageCosts) -> float:
    """Return the seconds of sending gradients to the homes and sums back; 0 for one replica."""
    homes = [stage for stage in stages if stage.replica == 0]
    others = [stage for stage in stages if stage.replica > 0]
    pairs = [(one, home, size) for home in homes for one in others if (size := costs.shared_bytes(one, home)) > 0]
    there = [(one.peer, home.peer, size) for one, home, size in pairs]
    back = [(home.peer, one.peer, size) for one, home, size in pairs]
    return _longest_s(there, costs) + _longest_s(back, costs)


def reduced_bytes(plan: Plan, costs: StageCosts, stage: StagePlacement) -> float:
    """Return the gradient bytes that `stage` sends in a step; retained once, however many replicas receive them."""
    return costs.shared_bytes(stage, stage) if plan.replicas > 1 else 0.0


def held_per_byte(replicas: int) -> float:
    """Return the additional memory for summing, in bytes per byte of trainable parameters. The value is that of the
    stage that holds most. A home holds its own gradients, those of all other replicas and the sums while they are sent;
    other stages hold their gradients and the sums."""
    return 0.0 if replicas == 1 else float(replicas)


def _longest_s(transfers: Sequence[tuple[str, str, float]], costs: StageCosts) -> float:
    """Return the seconds of simultaneous transfers, each given as (sender, receiver, bytes)."""
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    longest_s = latency_s = 0.0
    for sender, receiver, size in transfers:
        link = costs.hop(sender, receiver)
        longest_s = max(longest_s, size / link.bandwidth_bytes_per_s)
        latency_s = max(latency_s, link.latency_s)
        if link.shared:
            up[sender] += size / costs.profiles[sender].uplink.bandwidth_bytes_per_s
            down[receiver] += size / costs.profiles[receiver].downlink.bandwidth_bytes_per_s
    return max([longest_s, *up.values(), *down.values()]) + latency_s


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
    variants = saving.savings_choices(problem)
    ops = {op for block in problem.blocks for op in block.ops}
    best: Alone | None = None
    for peer in sorted(peers, key=lambda p: p.peer):
        if not peer.effective_flops_per_s > 0 or ops & set(peer.unsupported_ops):
            continue
        steps_s = [
            _step_s(problem, chain, peer, one)
            for one in variants
            if _needed_bytes(chain, one) <= peer.memory_bytes and saving.inability(one, peer) is None
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
    speed, alone = format_speed(found.tokens_per_s), f"{format_speed(tokens_per_s)} {problem.unit}/s"
    name = problem.name_of(peer)
    if all(peer != one.peer for one in problem.peers):
        return (
            f"The job owner's machine alone would be faster: {name} reaches {alone} "
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
                f"That the model's ends stay with the job owner costs speed: {speed} {problem.unit}/s, and "
                f"{format_speed(open_per_s)} with privacy level `open` and the ends in the pool."
            )
    return f"One machine alone would be faster: {name} reaches {alone} by itself, this plan {speed}."


def _report_s(problem: Problem, peer: PeerProfile) -> float:
    """Seconds a step spends on reporting to the job owner and waiting for the answer: one round trip."""
    if problem.owner is None:
        return 0.0
    there, back = hop(peer, problem.owner, problem.links), hop(problem.owner, peer, problem.links)
    return there.latency_s + back.latency_s


def _step_s(problem: Problem, chain: Chain, peer: PeerProfile, savings: saving.MemorySavings) -> float:
    microbatch_s, update_s = max(chain.flops(0, chain.length, savings) / saving.flops_per_s(peer, savings), 1e-12), 0.0
    if savings.offload:
        update_s += saving.offload_s(peer, chain.slot_bytes(0, chain.length))
    if savings.offload_weights:
        microbatch_s += saving.weights_s(peer, chain.weight_bytes(0, chain.length))
        update_s += saving.weights_s(peer, chain.trained_bytes(0, chain.length))
    return problem.microbatches * microbatch_s + update_s


def _needed_bytes(chain: Chain, savings: saving.MemorySavings) -> float:
    return chain.resident_bytes(0, chain.length, savings) + chain.in_flight_bytes(0, chain.length, savings)
