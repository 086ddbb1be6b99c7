"""What a training stage may do to fit a small memory, at the price of time. Decides which of it a problem fixes.

None of it changes a bit of any result, so the planner may choose. Neighbours: `chain` prices ranges of blocks with it,
`small_memory` chooses stage by stage, `wire.messages.StageOptions` tells the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.scheduling.types import Problem, StagePlacement


@dataclass(frozen=True, slots=True)
class Levers:
    """`recompute`: what enters a block is kept, the rest is made again in backward, for one more forward pass."""

    recompute: bool = False


NO_LEVERS: Final = Levers()


def levers_of_problem(problem: Problem) -> Levers:
    """What all stages do. What is left to the plan counts as not done."""
    return Levers(recompute=problem.task == "train" and problem.recompute == "always")


def levers_of_stage(stage: StagePlacement) -> Levers:
    return Levers(recompute=stage.recompute)
