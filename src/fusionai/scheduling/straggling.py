"""Whether a stage has become so slow that another plan pays. Decides when to ask and whether to adopt; moves nothing.

What is compared is never a prediction with a clock: machines that share cores, or a model priced too low, are slower
than planned all together. A stage's *slow-down* is its measured over its planned compute, divided by the median of that
ratio over all stages (of two middle ones the lower, so that of two stages the slower one is the slow one). A stage
straggles when for `STEPS` steps in a row its slow-down was above `SLOW` and the others waited for it; it has recovered
when for as many steps it was below `RECOVERED`. Between the two nothing changes.

Another plan is made with the speeds as measured, and adopted only if it takes at least `GAIN` less time; then, and
after every plan that was asked for in vain, nobody asks for `COOL_DOWN` steps. So a machine that is slow now and then
moves nothing, and no rhythm of slowness moves stages more often than that.

Neighbours: `planner` plans, `prediction` compares, `training` feeds the spans' seconds and runs `better_plan`, which
may take seconds, beside the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.prediction import predict
from fusionai.scheduling.replicated import plan as planned
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import PeerProfile, Plan, Problem, StagePlacement

SLOW: Final = 1.5
RECOVERED: Final = 1.2
STEPS: Final = 8
"""So many in a row make a straggler, or make it an ordinary stage again."""
WAITED_FOR: Final = 0.8
"""A straggler's compute is at least this part of the longest of all stages: else nobody waits for it."""
GAIN: Final = 0.15
COOL_DOWN: Final = 50
"""Steps; moving a stage costs about as much as a checkpoint."""
MOST: Final = 50.0
"""Slow-downs beyond are as good as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """The watch over one plan. `watching` begins it, `observed` takes a step, the plan's successor begins anew."""

    quiet_until: int
    """First step at which another plan may be asked for."""
    slowdowns: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """Stage -> its last `STEPS` slow-downs, oldest first."""
    turning: Mapping[int, int] = field(default_factory=dict[int, int])
    """Stage -> for how many steps in a row it has looked like the opposite of what it counts as."""
    stragglers: frozenset[int] = frozenset()

    def due(self, step: int) -> bool:
        """Whether `better_plan` is worth its time now."""
        return bool(self.stragglers) and self.rested(step)

    def rested(self, step: int) -> bool:
        """Whether stages may move by way of a checkpoint again."""
        return step >= self.quiet_until

    def asked(self, step: int) -> Straggling:
        """Another plan was asked for at `step`, in vain."""
        return replace(self, quiet_until=step + COOL_DOWN)


@dataclass(frozen=True, slots=True)
class Better:
    """`problem`: speeds as measured; what the next plans of this job are made from. `slow`: peer -> how many times
    slower it was found than its profile in the problem before says. `reason`: for people."""

    plan: Plan
    problem: Problem
    slow: Mapping[str, float]
    reason: str


def watching(step: int) -> Straggling:
    """A plan came into force before `step`: time for it to settle."""
    return Straggling(quiet_until=step + COOL_DOWN)


def observed(watch: Straggling, plan: Plan, busy_s: Mapping[int, float]) -> Straggling:
    """`busy_s`: stage -> seconds of forward and backward of one committed step, the rest of a limited share included.
    Stages that are missing, and the job owner's, are not judged; neither is anybody alone."""
    counted = [stage for stage in plan.stages if _counts(stage) and busy_s.get(stage.stage, 0.0) > 0]
    if len(counted) < 2:
        return watch
    ratios = {stage.stage: busy_s[stage.stage] / (plan.microbatches_of(stage) * stage.compute_s) for stage in counted}
    common = median_low(ratios.values())
    longest_s = max(busy_s[stage] for stage in ratios)
    slowdowns = dict(watch.slowdowns)
    turning = dict(watch.turning)
    stragglers = set(watch.stragglers)
    for stage, ratio in ratios.items():
        slowdown = min(ratio / common, MOST)
        slowdowns[stage] = (*slowdowns.get(stage, ()), slowdown)[-STEPS:]
        if stage in stragglers:
            turned = slowdown < RECOVERED
        else:
            turned = slowdown > SLOW and busy_s[stage] >= WAITED_FOR * longest_s
        turning[stage] = turning.get(stage, 0) + 1 if turned else 0
        if turning[stage] >= STEPS:
            stragglers ^= {stage}
            turning[stage] = 0
    return replace(watch, slowdowns=slowdowns, turning=turning, stragglers=frozenset(stragglers))


def better_plan(watch: Straggling, plan: Plan, problem: Problem, step: int) -> Better | None:
    """A plan (version 0) that is worth the move, or None. `problem.peers`: whom the job may use now, active ones and
    idle ones. After None, go on with `watch.asked(step)`; after a plan, with `watching` from where it comes into force.
    """
    if not watch.due(step):
        return None
    slow = {
        stage.peer: max(_factor(watch, other) for other in plan.stages if other.peer == stage.peer)
        for stage in plan.stages
        if stage.stage in watch.slowdowns
    }
    measured = msgspec.structs.replace(
        problem, peers=tuple(slowed(peer, slow.get(peer.peer, 1.0)) for peer in problem.peers)
    )
    try:
        found = planned(msgspec.structs.replace(measured, incumbent=plan))
    except PlanError:
        return None
    costs = StageCosts(measured, plan)
    now_s = predict(plan.stages, costs).step_s
    then_s = predict(found.stages, StageCosts(measured, found)).step_s
    if then_s > (1 - GAIN) * now_s:
        return None
    late = "; ".join(
        f"stage {stage.stage} on {costs.name(stage.peer)} computes {slow[stage.peer]:.2g} times slower than planned"
        for stage in plan.stages
        if stage.stage in watch.stragglers
    )
    reason = (
        f"{late}, measured against the other stages; "
        f"another plan takes {format_seconds(then_s)} a step instead of {format_seconds(now_s)}."
    )
    return Better(found, measured, {peer: factor for peer, factor in slow.items() if factor != 1.0}, reason)


def _counts(stage: StagePlacement) -> bool:
    """The owner's loss is small and mostly overhead: it says little about anybody's speed."""
    return "stage" in stage.roles and stage.compute_s > 0


def _factor(watch: Straggling, stage: StagePlacement) -> float:
    """Median over the window; what is near one is taken for noise."""
    slowdown = median(watch.slowdowns.get(stage.stage, (1.0,)))
    return 1.0 if 1 / RECOVERED < slowdown < RECOVERED else slowdown


def slowed(peer: PeerProfile, factor: float) -> PeerProfile:
    """`peer` as it would be planned with when it computes `factor` times slower than its profile says."""
    return msgspec.structs.replace(
        peer,
        flops_per_s=peer.flops_per_s / factor,
        pace=None if peer.pace is None else peer.pace.slowed(factor),
        serving=tuple(pace.slowed(factor) for pace in peer.serving),
        attention_flops_per_s=peer.attention_flops_per_s / factor,
        memory_bandwidth_bytes_per_s=peer.memory_bandwidth_bytes_per_s / factor,
    )
