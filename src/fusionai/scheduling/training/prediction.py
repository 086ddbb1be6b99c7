"""Predicts how long a training step takes for a given placement.

Applies the formulas of `pipeline` to a placement that already exists: stages keep their microbatches in flight, and a
peer may hold several stages, which then share its compute and its lines. Replicas run side by side, so a period takes
one microbatch through each of them. The job owner's process and line are shared by all replicas.

A step is committed when every stage has reported to the job owner that its gradients are summed. A stage begins the
next step when the owner has confirmed that. The first stage of a chain finishes last and begins first: it waits for one
message to the owner and one back (docs/recovery.md). The other stages receive the confirmation before their next
microbatch arrives.

`takeover` and `straggling` compare placements with these predictions; `pipeline` explains the terms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.reduction import reduction_s
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import StagePlacement


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step time and its bottleneck.

    `bottleneck` describes what limits the speed. `reduction_s` is the part of `step_s` that summing the replicas'
    gradients takes, `commit_s` the part that waiting for the step's commit takes.
    """

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
    """Return the commit's round trip in seconds, of the replica that waits longest.

    0 if the problem has no job owner or the owner has the first stage itself.
    """
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
