"""How long a step takes with the stages exactly as they lie. Decides nothing; moves nothing.

The formulas of `pipeline`, for a placement that is given instead of grown: stages keep their microbatches in flight,
and a peer may hold several of them (then it works and sends for all). Replicas run beside each other, so a period takes
one microbatch through each; what they have in common (the job owner's process and line) works for all of them.

A step is official when every stage has told the job owner that its gradients are summed, and a stage begins with the
next step when it has been told so. The first stage of a chain is the last to be done and the first to begin again: it
waits for one way to the owner and one way back (docs/recovery.md). The others hear of it before their next microbatch
comes.

Neighbours: `takeover` and `straggling` compare placements with this; `pipeline` explains the terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.reduction import reduction_s
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import StagePlacement


@dataclass(frozen=True, slots=True)
class Prediction:
    """`bottleneck` says what a faster pipeline would have to change first. `reduction_s`: of `step_s`, what summing
    the replicas' gradients takes; `commit_s`: what the word that the step is complete takes."""

    step_s: float
    bottleneck: str
    reduction_s: float = 0.0
    commit_s: float = 0.0


def predict(stages: Sequence[StagePlacement], costs: StageCosts) -> Prediction:
    """Of one step over `stages` in pipeline order. Speeds and links are those of `costs.problem`."""
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
    """Of a step over `stages`, of the replica that waits longest. 0 where the job owner is not known, or has the first
    stage itself."""
    owner = costs.problem.owner
    if owner is None:
        return 0.0
    return max(
        costs.hop(first.peer, owner.peer).latency_s + costs.hop(owner.peer, first.peer).latency_s
        for first in first_stages(stages)
    )


def first_stages(stages: Sequence[StagePlacement]) -> list[StagePlacement]:
    """Of every replica the first."""
    return [stage for index, stage in enumerate(stages) if not index or stages[index - 1].replica != stage.replica]
