"""Finds a standby machine that would compute a stage faster than its current peer, and the plans for moving it there.

After a failure a stage lies on the machine that guarded it. When a faster machine returns or joins, the stage moves to
it. The machine first becomes the stage's guard, which costs the job only a snapshot. Then the two machines swap roles,
which costs the replay of a few of that stage's steps and no checkpoint. If a swap is impossible (the current peer has
other stages, or one of the two lacks memory for snapshots), the stage moves by way of a checkpoint, if the gain is
larger.

Both placements are predicted from the current profiles, so stages don't move back and forth. A measured slowdown of a
machine is already part of its profile. Only the fraction of a predicted gain counts that earlier moves of this job
achieved.

`takeover` makes the plans, `prediction` compares them, `straggling` has the measured speeds, and `promises` computes
how far predictions are trusted.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.standby.straggling import COOL_DOWN
from fusionai.scheduling.standby.straggling import GAIN as CHECKPOINT_GAIN
from fusionai.scheduling.standby.takeover import guarded_by, moved, told
from fusionai.scheduling.training.prediction import predict

GAIN: Final = 0.03
"""Least gain of a swap as a fraction of a step's time; measured speeds are no more exact than that."""
COST_STEPS: Final = 2
"""Cost of a swap, in steps."""
WORTH_STEPS: Final = COOL_DOWN
"""Remaining steps below which no stage moves."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The next plan to switch to.

    `plan` has version 0; `reason` is text for the user. `gain` is the predicted fraction of a step's time that is
    saved, 0 if the plan only prepares the swap.
    """

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
    """Return the next move, or None.

    `candidates`: usable machines, those of the plan included. `sheltered`: stages whose guard has a snapshot newer than
    the checkpoint. `rested`: whether the last plan change is long enough ago for a move by way of a checkpoint.
    `trust`: fraction of a predicted gain to count on, in (0, 1].
    """
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
    """Return moves of stages with state that give a step of at most `most_s`, the shortest step first."""
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
