"""Detects stages that have become so slow that another plan is worth its cost, and makes that plan; moves nothing.

If machines share cores, or the model's cost was underestimated, all stages are slower than planned together. So a
stage's *slow-down* is the ratio of its measured to its planned compute, divided by the median of that ratio over all
stages (the lower of two middle ones, so that of two stages the slower one is identified). A stage becomes a straggler
when its slow-down was above `SLOW` for `STEPS` steps in a row and the other stages waited for it. It has recovered when
its slow-down was below `RECOVERED` for as many steps. Between the two values nothing changes.

The new plan is made with the measured speeds and adopted only if its step is at least the fraction `GAIN` shorter.
After a new plan, and after a search without one, the next search waits for `COOL_DOWN` steps. `better_plan` may take
seconds; `training` runs it outside the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.training.prediction import predict
from fusionai.scheduling.training.replicated import plan as planned

SLOW: Final = 1.5
"""Slow-down above which a stage may become a straggler; chosen."""
RECOVERED: Final = 1.2
"""Slow-down below which a straggler recovers; chosen."""
STEPS: Final = 8
"""Consecutive steps that make a stage a straggler, or end that state."""
WAITED_FOR: Final = 0.8
"""Least compute of a straggler as a fraction of the longest of all stages: the others don't wait for a shorter one."""
GAIN: Final = 0.15
"""Least reduction of the step time, as a fraction, for which a plan is adopted; chosen."""
COOL_DOWN: Final = 50
"""Pause in steps; moving a stage costs about as much as a checkpoint."""
MOST: Final = 50.0
"""Upper limit on a slow-down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """Observations of one plan. `watching` starts them, `observed` adds a step; the next plan starts anew."""

    quiet_until: int
    """First step at which another plan may be searched for."""
    slowdowns: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """Last `STEPS` slow-downs by stage, oldest first."""
    turning: Mapping[int, int] = field(default_factory=dict[int, int])
    """Consecutive steps, by stage, that speak for a change of state: a straggler fast or another stage slow."""
    stragglers: frozenset[int] = frozenset()

    def due(self, step: int) -> bool:
        """Return whether `better_plan` should be called now."""
        return bool(self.stragglers) and self.rested(step)

    def rested(self, step: int) -> bool:
        """Return whether stages may move by way of a checkpoint again."""
        return step >= self.quiet_until

    def asked(self, step: int) -> Straggling:
        """Return the state after a search at `step` that found no better plan."""
        return replace(self, quiet_until=step + COOL_DOWN)


@dataclass(frozen=True, slots=True)
class Better:
    """A better plan and its reasons. `problem`: the problem with measured speeds, from which the job's next plans are
    made. `slow`: by peer, how many times slower it was measured than its profile in the previous problem says.
    `reason`: text for the user."""

    plan: Plan
    problem: Problem
    slow: Mapping[str, float]
    reason: str


def watching(step: int) -> Straggling:
    """Return the state of a plan that starts at `step`; it gets `COOL_DOWN` steps to settle."""
    return Straggling(quiet_until=step + COOL_DOWN)


def observed(watch: Straggling, plan: Plan, busy_s: Mapping[int, float]) -> Straggling:
    """Return the state after a committed step. `busy_s`: by stage, seconds of forward and backward, including the
    pauses of a limited share. Missing stages and the job owner's are not judged, and a single stage is never judged."""
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
    """Return a plan (version 0) that is worth the move, or None. `problem.peers`: the machines that the job may use
    now, active and idle. After None, continue with `watch.asked(step)`; after a plan, with `watching` from the step at
    which it starts."""
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
    """Return whether the stage's time is meaningful; the owner's loss is short and mostly overhead."""
    return "stage" in stage.roles and stage.compute_s > 0


def _factor(watch: Straggling, stage: StagePlacement) -> float:
    """Return the median slow-down over the window; values near 1 are treated as noise."""
    slowdown = median(watch.slowdowns.get(stage.stage, (1.0,)))
    return 1.0 if 1 / RECOVERED < slowdown < RECOVERED else slowdown


def slowed(peer: PeerProfile, factor: float) -> PeerProfile:
    """Return the profile of `peer` for planning, if it computes `factor` times slower than its profile says."""
    return msgspec.structs.replace(
        peer,
        flops_per_s=peer.flops_per_s / factor,
        pace=None if peer.pace is None else peer.pace.slowed(factor),
        serving=tuple(pace.slowed(factor) for pace in peer.serving),
        attention_flops_per_s=peer.attention_flops_per_s / factor,
        memory_bandwidth_bytes_per_s=peer.memory_bandwidth_bytes_per_s / factor,
    )
