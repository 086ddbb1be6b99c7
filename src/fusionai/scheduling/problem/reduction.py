"""Cost of summing the replicas' gradients at the end of a step, in bytes and seconds.

Every stage of the first replica is the home of its parameters. The other replicas send it their gradients. The home
adds them in the order of replicas, which fixes the bits of the sum, and sends the sums back. Gradients are sent when a
stage has finished all its microbatches, sums when the last gradient has arrived. All homes work at once, so the slowest
line determines the time.

`prediction` adds this time to a step, `snapshots` counts the retained bytes, and `coordination.training.stage` runs the
summation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, StagePlacement


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
    """Return the additional memory for summing, in bytes per byte of trainable parameters.

    The value is that of the stage that holds most. A home holds its own gradients, those of all other replicas and the
    sums while they are sent; other stages hold their gradients and the sums.
    """
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
