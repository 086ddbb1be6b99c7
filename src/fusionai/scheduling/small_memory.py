"""What stages do to fit a small memory, where that is left to the plan. Decides that, and no placement.

First nobody does anything. Only where no such plan exists are all stages planned with what costs least and suffices:
activations made again in backward, then optimizer state in a file, then both; then these with weights that lie
elsewhere between uses. Then each stage does as little of it as its own memory asks for. Machines whose backend can't
do what is left for them are not used in such a plan. Where memory keeps a stage from having as many microbatches in
flight as would hide its links, making activations again may also give the faster plan, and is then taken.

The bound of such a plan: no block takes less than what it takes with all kept, so no plan beats the bound of those that
make everything again by more than the largest such ratio of a block. Making activations again is T. Chen et al., 2016
(arXiv 1604.06174), whole blocks as segments; which stages do it follows from the peers' memory.

Neighbours: `planner` asks; `levers` and `stage_costs` price; `cli` shows `savings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.levers import (
    NO_LEVERS,
    SPARING,
    Levers,
    choices_of_problem,
    inability,
    levers_of_problem,
    levers_of_stage,
)
from fusionai.scheduling.prediction import predict
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import BlockCost, Certificate, Plan, Problem, StagePlacement

WORTH_IT: Final = 1.01
"""By so much a plan that saves memory must be faster to replace one that need not."""


def fitted(problem: Problem, solved: Callable[[Problem], Plan]) -> Plan:
    """The plan of a training problem. `solved` plans with the same levers everywhere. Raises the `PlanError` of stages
    that take as little memory as they may."""
    choices = _possible(problem)
    solved = _able(problem, solved, choices)
    found = _first(problem, solved, choices)
    least = levers_of_stage(found.stages[0])
    if least != choices[0]:
        # Cut for more levers, stages can end with fewer of them: where state in files is in play, all that is left is
        # tried, but for weights, which every microbatch would read.
        more = choices[choices.index(least) + 1 :] if least.offload else ()
        more = [levers for levers in more if levers.offload_weights == least.offload_weights]
        others = [solved(_everywhere(problem, levers)) for levers in more]
        mixed = [_lightened(problem, one, choices) for one in (found, *others)]
        return max(mixed, key=lambda one: one.tokens_per_s)
    away = len(choices) > 1 and (choices[1].offload or choices[1].offload_weights)
    more = choices[1] if len(choices) > 1 and not away else None
    if more is None or not any(_starved(stage, found) for stage in found.stages):
        return found
    try:
        other = _lightened(problem, solved(_everywhere(problem, more)), choices)
    except PlanError:
        return found
    return other if other.tokens_per_s > found.tokens_per_s * WORTH_IT else found


def _possible(problem: Problem) -> tuple[Levers, ...]:
    """What the problem leaves to the plan, as far as the backend of any machine can do it; all where none can."""
    choices = choices_of_problem(problem)
    possible = tuple(one for one in choices if any(inability(one, peer) is None for peer in problem.peers))
    return possible or choices


def _able(problem: Problem, solved: Callable[[Problem], Plan], choices: Sequence[Levers]) -> Callable[[Problem], Plan]:
    """`solved`, without the machines whose backend can't do what their memory asks of them in what it finds. A machine
    with more room than its stage needs is used, whatever it can."""
    if all(inability(levers, peer) is None for levers in choices for peer in problem.peers):
        return solved
    profiles = {peer.peer: peer for peer in problem.peers}

    def without(posed: Problem) -> Plan:
        found = solved(posed)
        least = _lightened(problem, found, choices) if levers_of_problem(posed) != choices[0] else found
        unable = {
            stage.peer
            for stage in least.stages
            if stage.peer in profiles and inability(levers_of_stage(stage), profiles[stage.peer]) is not None
        }
        if not unable:
            return found
        return without(msgspec.structs.replace(posed, unable=tuple(sorted({*posed.unable, *unable}))))

    return without


def _first(problem: Problem, solved: Callable[[Problem], Plan], choices: Sequence[Levers]) -> Plan:
    """With the first of `choices` that there is a plan with."""
    try:
        return solved(_everywhere(problem, choices[0]))
    except PlanError:
        if len(choices) == 1:
            raise
        return _first(problem, solved, choices[1:])


def saving(problem: Problem, plan: Plan) -> Plan:
    """`plan` saying what its stages do everywhere, and what that saves and costs."""
    levers = levers_of_problem(problem)
    if levers == NO_LEVERS:
        return plan
    costs = StageCosts(problem, plan)
    stages = tuple(costs.with_levers(stage, levers) if _saves(stage) else stage for stage in plan.stages)
    if not (levers.offload or levers.offload_weights):
        return msgspec.structs.replace(plan, stages=stages)
    # The search counts neither updates nor what weights take to read: its bound stays one, its proof does not.
    predicted = predict(stages, costs)
    step_s = predicted.step_s if levers.offload_weights else plan.step_time_s + max(map(costs.update_s, stages))
    speed = problem.microbatches * problem.microbatch_tokens / step_s
    gap = plan.certificate.bound_tokens_per_s / speed - 1
    return msgspec.structs.replace(
        plan,
        stages=stages,
        step_time_s=step_s,
        tokens_per_s=speed,
        bottleneck=predicted.bottleneck if levers.offload_weights else plan.bottleneck,
        certificate=msgspec.structs.replace(plan.certificate, exact=False, optimality_gap=gap),
    )


def savings(plan: Plan) -> Iterator[str]:
    """For people: what stages do to fit their memory, what it saves and what it costs."""
    for stage in plan.stages:
        if stage.recompute:
            times = stage.compute_s / (stage.compute_s - stage.recompute_s) - 1 if stage.recompute_s else 0.0
            yield (
                f"Stage {stage.stage} makes activations again in backward: saves "
                f"{format_bytes(stage.recompute_saves_bytes)}, costs {times:.0%} more compute."
            )
        if stage.offload:
            yield (
                f"Stage {stage.stage} has its optimizer's state in a file: saves "
                f"{format_bytes(stage.offload_saves_bytes)}, costs {format_seconds(stage.offload_s)} a step."
            )
        if stage.offload_weights:
            yield (
                f"Stage {stage.stage} has its weights away until a block needs them: saves "
                f"{format_bytes(stage.offload_weights_saves_bytes)}, costs "
                f"{format_seconds(stage.offload_weights_s)} a step."
            )


def _saves(stage: StagePlacement) -> bool:
    """All but the owner's last stage, which keeps what it has."""
    return stage.roles != ("loss",)


def _everywhere(problem: Problem, levers: Levers) -> Problem:
    return msgspec.structs.replace(
        problem,
        recompute="always" if levers.recompute else "never",
        offload="always" if levers.offload else "never",
        offload_weights="always" if levers.offload_weights else "never",
    )


def _starved(stage: StagePlacement, plan: Plan) -> bool:
    """Whether memory has no room for one more microbatch in flight."""
    more_bytes = stage.memory_bytes + stage.in_flight_bytes
    return stage.in_flight < plan.microbatches and more_bytes > stage.memory_limit_bytes


def _lightened(problem: Problem, plan: Plan, choices: Sequence[Levers]) -> Plan:
    """Every stage with the first of `choices` that fits its peer."""
    costs = StageCosts(problem, plan)
    others = {
        stage.stage: sum(other.memory_bytes for other in plan.stages if other.peer == stage.peer) - stage.memory_bytes
        for stage in plan.stages
    }
    stages = tuple(
        _lightest(stage, costs, stage.memory_limit_bytes - others[stage.stage], choices) for stage in plan.stages
    )
    prediction = predict(stages, costs)
    speed = plan.microbatches * problem.microbatch_tokens / prediction.step_s
    bound = max(plan.certificate.bound_tokens_per_s * max(map(_times_faster, problem.blocks)), speed)
    return msgspec.structs.replace(
        plan,
        stages=stages,
        step_time_s=prediction.step_s,
        commit_s=prediction.commit_s,
        tokens_per_s=speed,
        bottleneck=prediction.bottleneck if stages != plan.stages else plan.bottleneck,
        certificate=Certificate(
            method=f"{plan.certificate.method}; memory saved where it must be",
            exact=False,
            bound_tokens_per_s=bound,
            optimality_gap=bound / speed - 1,
            explored=plan.certificate.explored,
        ),
    )


def _lightest(stage: StagePlacement, costs: StageCosts, room_bytes: int, choices: Sequence[Levers]) -> StagePlacement:
    own = levers_of_stage(stage)
    if own == NO_LEVERS:
        return stage
    cheaper = choices[: choices.index(own)]
    better = next((levers for levers in cheaper if costs.held_bytes(stage, levers) <= room_bytes), None)
    return stage if better is None else costs.with_levers(stage, better)


def _times_faster(block: BlockCost) -> float:
    """A block that keeps its activations against one that does not."""
    kept_flops = block.forward_flops + block.backward_flops
    return SPARING if kept_flops <= 0 else SPARING * (kept_flops + block.forward_flops) / kept_flops
