"""Lists the bytes and seconds of the transfers between a plan's stages.

`stage_costs` has the prices; `cli.plan_view` and the picture of a plan show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Transfer between one stage and the next, per microbatch; in serving per position of a pass, forward only."""

    from_stage: int
    to_stage: int
    forward_bytes: float
    forward_s: float
    gradient_bytes: float
    gradient_s: float
    latency_s: float
    """Sum of both directions; in serving of the forward direction."""

    @property
    def transfer_s(self) -> float:
        return self.forward_s + self.gradient_s


def crossings(plan: Plan, costs: StageCosts) -> tuple[Crossing, ...]:
    """Crossings in pipeline order; replicas have none between them. Seconds of transfers exclude latency."""
    found: list[Crossing] = []
    for one, other in pairwise(plan.stages):
        if one.replica != other.replica:
            continue
        forward = costs.hop(one.peer, other.peer)
        forward_bytes = costs.forward_bytes(one)
        gradient_bytes = gradient_s = 0.0
        latency_s = forward.latency_s
        if plan.task == "train":
            back = costs.hop(other.peer, one.peer)
            gradient_bytes = costs.gradient_bytes(other)
            gradient_s = gradient_bytes / back.bandwidth_bytes_per_s
            latency_s += back.latency_s
        found.append(
            Crossing(
                from_stage=one.stage,
                to_stage=other.stage,
                forward_bytes=forward_bytes,
                forward_s=forward_bytes / forward.bandwidth_bytes_per_s,
                gradient_bytes=gradient_bytes,
                gradient_s=gradient_s,
                latency_s=latency_s,
            )
        )
    return tuple(found)
