"""Finds a standby machine that would compute a stage faster than its current peer, and the plans for moving it there.

When a faster machine returns or joins, it first becomes the stage's standby, which costs the job only a snapshot. Then
the two machines swap roles, which costs the replay of a few of that stage's steps and no checkpoint. If a swap is
impossible (the current peer has other stages, or one of the two lacks memory for snapshots), the stage moves by way of
a checkpoint, if the gain is larger. Both placements are predicted from the current profiles, so stages don't move back
and forth.

Predictions don't know what machines share, such as cores, a network link or cooling. A job therefore compares each
predicted gain with its own step times: the median before the move with the median after it. The trust is the ratio of
measured to predicted gains. An additional gain of `BENEFIT` counts as predicted and measured, so that a small
prediction has little weight and the trust without any prediction is 1. Outcomes are dropped after `FORGOTTEN_S`,
because machines change.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.standby.straggling import COOL_DOWN
from fusionai.scheduling.standby.straggling import GAIN as CHECKPOINT_GAIN
from fusionai.scheduling.standby.takeover import moved, with_profiles, with_standby
from fusionai.scheduling.training.prediction import predict

GAIN: Final = 0.03
"""Least gain of a swap as a fraction of a step's time; measured speeds are no more exact than that."""
COST_STEPS: Final = 2
"""Cost of a swap, in steps."""
WORTH_STEPS: Final = COOL_DOWN
"""Remaining steps below which no stage moves."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The next plan to switch to. `plan` has version 0; `reason` is text for the user. `gain` is the predicted fraction
    of a step's time that is saved, 0 if the plan only prepares the swap."""

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
    warm_stages: Set[int],
    steps_left: int,
    rested: bool,
    trust: float,
) -> Promotion | None:
    """Return the next move, or None. `candidates`: usable machines, those of the plan included. `warm_stages`: stages
    whose standby has a snapshot newer than the checkpoint. `rested`: whether the last plan change is long enough ago
    for a move by way of a checkpoint. `trust`: fraction of a predicted gain to count on, in (0, 1]."""
    if plan.task != "train" or steps_left < WORTH_STEPS:
        return None
    costs = StageCosts(with_profiles(problem, candidates), plan)
    working = {stage.peer for stage in plan.stages} | {plan.feed}
    idle = sorted({peer.peer for peer in candidates} - working)
    now_s = predict(plan.stages, costs).step_s
    standbys = {standby.stage: standby.peer for standby in plan.standbys}
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
        if (stage.stage, stage.peer) in {(standby.stage, standby.peer) for standby in found.standbys}:
            if standbys.get(stage.stage) == peer:
                return Promotion(found, f"{who}, and they change places", gain) if stage.stage in warm_stages else None
            first = with_standby(plan, problem, stage.stage, peer, candidates)
            if first is not None:
                return Promotion(first, f"{who}, and stands by for it first", 0.0)
        if gain * trust >= CHECKPOINT_GAIN:
            return Promotion(found, f"{who}, and takes it over", gain) if rested else None
    return None


def _ranked(plan: Plan, costs: StageCosts, idle: Sequence[str], most_s: float) -> list[_Choice]:
    """Return moves of stages with state that give a step of at most `most_s`, the shortest step first."""
    choices: list[_Choice] = []
    for index, stage in enumerate(plan.stages):
        if not costs.needs_standby(plan, stage):
            continue
        for peer in idle:
            there = msgspec.structs.replace(stage, peer=peer)
            stages = (*plan.stages[:index], there, *plan.stages[index + 1 :])
            choices.append(_Choice(stage, peer, predict(stages, costs).step_s))
    better = [choice for choice in choices if choice.step_s <= most_s]
    return sorted(better, key=lambda choice: (choice.step_s, choice.stage.stage, choice.peer))


ENOUGH: Final = 16
"""Number of steps over which a median is taken; chosen."""
SETTLING: Final = 4
"""Steps after a move that are left out, because they contain replays and snapshots; chosen."""
BENEFIT: Final = 0.05
"""Gain that counts as predicted and measured before the first outcome, as a fraction of a step's time; chosen."""
FORGOTTEN_S: Final = 600.0
"""Seconds for which an outcome counts; chosen."""

Placement = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class MoveResult:
    """Result of one move, measured at `at_s`. `predicted` and `measured` are gains as fractions of a step's time,
    with 0 <= measured <= predicted."""

    at_s: float
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class _PendingGain:
    placement: Placement
    gain: float
    before_s: float


@dataclass(frozen=True, slots=True)
class GainHistory:
    """State of one job. `steps_s`: the last step times under `placement`, oldest first."""

    placement: Placement = ()
    steps_s: tuple[float, ...] = ()
    outcomes: tuple[MoveResult, ...] = ()
    pending: _PendingGain | None = None

    def trust(self, now_s: float) -> float:
        """Return the fraction of a predicted gain to count on, in (0, 1]."""
        known = [one for one in self.outcomes if now_s - one.at_s < FORGOTTEN_S]
        predicted = BENEFIT + sum(one.predicted for one in known)
        return (BENEFIT + sum(one.measured for one in known)) / predicted


def with_prediction(history: GainHistory, plan: Plan, gain: float) -> GainHistory:
    """Record that a step of `plan` is predicted to be shorter by `gain`, a fraction of the current step's time. If
    fewer than `ENOUGH` steps were measured before, the prediction is not compared."""
    if len(history.steps_s) < ENOUGH or gain <= 0:
        return replace(history, pending=None)
    return replace(history, pending=_PendingGain(placement(plan), gain, median(history.steps_s)))


def with_step(history: GainHistory, plan: Plan, step_s: float, now_s: float) -> GainHistory:
    """Record a step of `step_s` committed under `plan`; a placement other than the predicted one ends a pending
    comparison."""
    here, pending = placement(plan), history.pending
    if here != history.placement:
        pending = pending if pending is not None and pending.placement == here else None
        history = replace(history, placement=here, steps_s=(), pending=pending)
    history = replace(history, steps_s=(*history.steps_s, step_s)[-(SETTLING + ENOUGH) :])
    if pending is None or pending.placement != here or len(history.steps_s) < SETTLING + ENOUGH:
        return history
    measured = 1 - median(history.steps_s[SETTLING:]) / pending.before_s
    outcome = MoveResult(now_s, pending.gain, min(max(measured, 0.0), pending.gain))
    kept = tuple(one for one in history.outcomes if now_s - one.at_s < FORGOTTEN_S)
    return replace(history, outcomes=(*kept, outcome), pending=None)


def placement(plan: Plan) -> Placement:
    return tuple((stage.stage, stage.peer) for stage in plan.stages)
