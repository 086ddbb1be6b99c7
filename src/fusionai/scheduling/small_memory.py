"""Which stages make activations again in backward, where that is left to the plan. Decides that, and no placement.

First everybody keeps activations. Only where no such plan exists, or where memory keeps a stage from having as many
microbatches in flight as would hide its links, all stages are planned without; then each that has room after all
keeps them. A plan with recomputation must be faster to be taken without need. The method of T. Chen et al., 2016
(arXiv 1604.06174), whole blocks as segments; which stages do it follows from the peers' memory.

The bound of a mixed plan: its blocks take at least the time they take without recomputation, so no mixed plan beats
the bound of the plans that recompute everywhere by more than the largest such ratio of a block.

Neighbours: `planner` asks; `levers` and `stage_costs` price.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.levers import NO_LEVERS, levers_of_stage
from fusionai.scheduling.prediction import predict
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import BlockCost, Certificate, Plan, Problem, StagePlacement

WORTH_IT: Final = 1.01
"""By so much a plan with recomputation must be faster to replace one without."""


def fitted(problem: Problem, solved: Callable[[Problem], Plan]) -> Plan:
    """The plan of a problem that leaves recomputation to it. `solved` plans with it everywhere or nowhere. Raises the
    `PlanError` of stages that take as little memory as they can."""
    everywhere = msgspec.structs.replace(problem, recompute="always")
    try:
        kept = solved(msgspec.structs.replace(problem, recompute="never"))
    except PlanError:
        return _kept_where_there_is_room(problem, solved(everywhere))
    if not any(_starved(stage, kept) for stage in kept.stages):
        return kept
    try:
        mixed = _kept_where_there_is_room(problem, solved(everywhere))
    except PlanError:
        return kept
    return mixed if mixed.tokens_per_s > kept.tokens_per_s * WORTH_IT else kept


def _starved(stage: StagePlacement, plan: Plan) -> bool:
    """Whether memory has no room for one more microbatch in flight."""
    more_bytes = stage.memory_bytes + stage.in_flight_bytes
    return stage.in_flight < plan.microbatches and more_bytes > stage.memory_limit_bytes


def _kept_where_there_is_room(problem: Problem, plan: Plan) -> Plan:
    costs = StageCosts(problem, plan)
    taken = {
        stage.peer: sum(other.memory_bytes for other in plan.stages if other.peer == stage.peer) - stage.memory_bytes
        for stage in plan.stages
    }
    stages = tuple(_lightest(stage, costs, stage.memory_limit_bytes - taken[stage.peer]) for stage in plan.stages)
    prediction = predict(stages, costs)
    speed = plan.microbatches * problem.microbatch_tokens / prediction.step_s
    bound = max(plan.certificate.bound_tokens_per_s * max(map(_times_faster, problem.blocks)), speed)
    return msgspec.structs.replace(
        plan,
        stages=stages,
        step_time_s=prediction.step_s,
        tokens_per_s=speed,
        bottleneck=prediction.bottleneck if stages != plan.stages else plan.bottleneck,
        certificate=Certificate(
            method=f"{plan.certificate.method}; activations kept where there is room",
            exact=False,
            bound_tokens_per_s=bound,
            optimality_gap=bound / speed - 1,
            explored=plan.certificate.explored,
        ),
    )


def _lightest(stage: StagePlacement, costs: StageCosts, room_bytes: int) -> StagePlacement:
    """As it is, or with activations kept if they fit into `room_bytes`."""
    if levers_of_stage(stage) == NO_LEVERS:
        return stage
    needed_bytes, flight_bytes = costs.held_bytes(stage, NO_LEVERS, stage.in_flight)
    if needed_bytes > room_bytes:
        return stage
    return msgspec.structs.replace(
        stage,
        compute_s=stage.compute_s - stage.recompute_s,
        memory_bytes=needed_bytes,
        in_flight_bytes=flight_bytes,
        recompute=False,
        recompute_s=0.0,
        recompute_saves_bytes=0,
    )


def _times_faster(block: BlockCost) -> float:
    """A block that keeps its activations against one that does not."""
    kept_flops = block.forward_flops + block.backward_flops
    return 1.0 if kept_flops <= 0 else (kept_flops + block.forward_flops) / kept_flops
