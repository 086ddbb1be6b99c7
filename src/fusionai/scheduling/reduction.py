"""What summing the replicas' gradients at a step's end costs: bytes, seconds. Decides nothing.

Every stage of the first replica is the home of its parameters: the others send it theirs, it adds them in the order of
replicas, which makes the sum's bits, and sends the sums back. Parts travel when a stage has all its microbatches, sums
when the last part is there; what the homes have in common is the slowest line.

Neighbours: `prediction` adds it to a step, `snapshots` counts what is retained of it, `coordination.stage` runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import Plan, StagePlacement


def reduction_s(stages: Sequence[StagePlacement], costs: StageCosts) -> float:
    """Of a step: the parts to the homes, then the sums back. 0 for one replica."""
    homes = [stage for stage in stages if stage.replica == 0]
    others = [stage for stage in stages if stage.replica > 0]
    pairs = [(one, home, size) for home in homes for one in others if (size := costs.shared_bytes(one, home)) > 0]
    there = [(one.peer, home.peer, size) for one, home, size in pairs]
    back = [(home.peer, one.peer, size) for one, home, size in pairs]
    return _longest_s(there, costs) + _longest_s(back, costs)


def reduced_bytes(plan: Plan, costs: StageCosts, stage: StagePlacement) -> float:
    """What `stage` sends of gradients in a step, kept once however many get it."""
    return costs.shared_bytes(stage, stage) if plan.replicas > 1 else 0.0


def held_per_byte(replicas: int) -> float:
    """Beside its own gradients a home holds what all others sent, and the sums while they are sent; others hold what
    they sent, and the sums. In bytes per byte of what is trained, of the stage that holds most."""
    return 0.0 if replicas == 1 else float(replicas)


def _longest_s(transfers: Sequence[tuple[str, str, float]], costs: StageCosts) -> float:
    """All at once: (sender, receiver, bytes)."""
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
