"""What the word that a step is complete takes, during which its first stage has nothing to do. Decides nothing.

A step is official when every stage has told the job owner that its gradients are summed, and a stage begins with the
next step when it has been told so. The first stage of a chain is the last to be done and the first to begin again: it
waits for one way to the owner and one way back. The others hear of it before their next microbatch comes.

Neighbours: `prediction` adds it to a step, as `pipeline` does; `coordination.driver` sends the word (docs/recovery.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import StagePlacement


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
