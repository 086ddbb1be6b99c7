"""Whether a machine that stands by would do a stage's work faster than the one that has it. Decides which, and in how
many moves; moves nothing.

After a loss a stage lies on whatever guarded it; when a faster machine is back, or joins, that is no reason to stay. It
becomes the stage's guard first, which costs the job nothing but a snapshot, and then the two change places, which costs
the replay of a few of that stage's steps and no checkpoint. Where that can't be (the former peer has other stages, or
the memory of one of the two has no room for snapshots) the stage moves by way of a checkpoint, for a larger gain.

What is compared are predictions, both made from the profiles of now: a difference that machines keep, so nothing goes
to and fro. What a machine was found to be slower than its profile says is in that profile already. And of what is
predicted only the part counts that such moves have brought in this job so far.

Neighbours: `takeover` makes the plans, `prediction` compares, `straggling` has the speeds that were measured,
`promises` says how far predictions are to be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.prediction import predict
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.straggling import COOL_DOWN
from fusionai.scheduling.straggling import GAIN as CHECKPOINT_GAIN
from fusionai.scheduling.takeover import guarded_by, moved, told
from fusionai.scheduling.types import PeerProfile, Plan, Problem, StagePlacement

GAIN: Final = 0.03
"""Of a step's time: what changing places must gain at least. Measured speeds are not more exact than that."""
COST_STEPS: Final = 2
"""What changing places costs."""
WORTH_STEPS: Final = COOL_DOWN
"""With fewer steps to go nothing moves."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """`plan` (version 0) is the next to go over to; `reason` is for people. `gain`: the part of a step's time that is
    predicted to be saved, 0 where the plan only makes ready for that."""

    plan: Plan
    reason: str
    gain: float


@dataclass(frozen=True, slots=True)
class _Choice:
    stage: StagePlacement
    peer: str
    step_s: float


def promoted(
    plan: Plan,
    problem: Problem,
    candidates: Sequence[PeerProfile],
    *,
    sheltered: Set[int],
    steps_left: int,
    rested: bool,
    trust: float,
) -> Promotion | None:
    """The next move, or None. `candidates`: machines that may be used now, those of the plan among them. `sheltered`:
    stages whose guard has a snapshot newer than the checkpoint. `rested`: the last plan is long enough ago to move by
    way of a checkpoint. `trust`: the part of a predicted gain to count on, in (0, 1]."""
    if plan.task != "train" or steps_left < WORTH_STEPS:
        return None
    costs = StageCosts(told(problem, candidates), plan)
    working = {stage.peer for stage in plan.stages} | {plan.feed}
    idle = sorted({peer.peer for peer in candidates} - working)
    now_s = predict(plan.stages, costs).step_s
    guards = {guard.stage: guard.peer for guard in plan.guards}
    least = max(GAIN, COST_STEPS / steps_left) / trust
    for choice in _ranked(plan, costs, idle, (1 - least) * now_s):
        stage, peer = choice.stage, choice.peer
        gain = 1 - choice.step_s / now_s
        who = (
            f"{costs.name(peer)} computes stage {stage.stage} faster than {costs.name(stage.peer)}: "
            f"{format_seconds(choice.step_s)} a step instead of {format_seconds(now_s)}"
        )
        found = moved(plan, problem, stage.stage, peer, candidates)
        if found is None:
            continue
        if (stage.stage, stage.peer) in {(guard.stage, guard.peer) for guard in found.guards}:
            if guards.get(stage.stage) == peer:
                return Promotion(found, f"{who}, and they change places", gain) if stage.stage in sheltered else None
            first = guarded_by(plan, problem, stage.stage, peer, candidates)
            if first is not None:
                return Promotion(first, f"{who}, and guards it first", 0.0)
        if gain * trust >= CHECKPOINT_GAIN:
            return Promotion(found, f"{who}, and takes it over", gain) if rested else None
    return None


def _ranked(plan: Plan, costs: StageCosts, idle: Sequence[str], most_s: float) -> list[_Choice]:
    """Stages with state on machines with which a step takes at most `most_s`, the shortest first."""
    choices: list[_Choice] = []
    for index, stage in enumerate(plan.stages):
        if not costs.guardable(plan, stage):
            continue
        for peer in idle:
            there = msgspec.structs.replace(stage, peer=peer)
            stages = (*plan.stages[:index], there, *plan.stages[index + 1 :])
            choices.append(_Choice(stage, peer, predict(stages, costs).step_s))
    better = [choice for choice in choices if choice.step_s <= most_s]
    return sorted(better, key=lambda choice: (choice.step_s, choice.stage.stage, choice.peer))
