"""Plans of training against an independent enumeration, over random pools of ten kinds: no claim is false."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.kernels.compiled import available
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.problem.embedding_and_head import with_front
from fusionai.scheduling.problem.types import Plan, Problem, RolePlacement
from fusionai.scheduling.training import bound as relaxation
from fusionai.scheduling.training.bound import Relaxation
from fusionai.scheduling.training.pipeline import Pipeline
from harness.judged_pools import KINDS, judged_pool, with_wishes
from harness.planning_judge import best_single, judged

ROUNDING = 1e-9

pytestmark = pytest.mark.skipif(not available(), reason="numba is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_of_a_small_pool_is_beaten_and_no_bound_is_false(kind: str) -> None:
    for seed in range(25):
        problem = judged_pool(kind, seed, peers=2 + seed % 4, layers=2 + seed % 3)
        judge(problem if seed % 5 else with_wishes(problem, seed), f"{kind} {seed}")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_of_six_machines_is_beaten_and_no_bound_is_false(kind: str) -> None:
    for seed in range(200):
        problem = judged_pool(kind, 1000 + seed, peers=3 + seed % 4, layers=3 + seed % 4)
        judge(problem if seed % 3 else with_wishes(problem, seed), f"{kind} {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_many_kinds_of_machines_holds_where_the_optimum_is_known(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pools, taken for large ones by the relaxation. It is given a longer step than the shortest: a bound above
    the shortest step is then seen."""
    judged_bounds = 0
    for seed in range(25):
        problem = judged_pool(kind, 500 + seed, peers=2 + seed % 5, layers=3 + seed % 4)
        problem = msgspec.structs.replace(problem if seed % 4 else with_wishes(problem, seed), stages=None)
        try:
            best = plan(problem)
        except PlanError:
            continue
        assert best.certificate.exact, f"{kind} {seed}"
        with monkeypatch.context() as patched:
            for name, value in (("PAIRED", 0), ("MANY", 1), ("LIKELY", 2)):
                patched.setattr(relaxation, name, value)
            bound_s = bound_of_all(problem, 1.3 * best.step_time_s)
        assert 0 < bound_s <= best.step_time_s * (1 + ROUNDING), f"{kind} {seed}"
        judged_bounds += 1
    assert judged_bounds >= 10


def bound_of_all(problem: Problem, known_s: float) -> float:
    posed = with_front(problem)
    pipeline = Pipeline(posed, posed.peers)
    kept = pipeline.front is not None
    required = 1 << pipeline.front if pipeline.front is not None else 0
    proving = Relaxation(pipeline, PipelineLimits(fewest=1 + kept, most=len(problem.peers) + kept, required=required))
    proving.narrow(known_s)
    return proving.bound_s


@pytest.mark.slow
def test_where_the_ends_stay_with_the_owner_its_line_counts_among_many_machines() -> None:
    """The owner's line holds the step up; counted for one end alone, the bound is twice as fast as any plan."""
    certificate = plan(judged_pool("split", 3, peers=300, layers=32)).certificate
    assert certificate.optimality_gap < 0.01


def judge(problem: Problem, case: str) -> None:
    best = judged(problem)
    try:
        found = plan(problem)
    except PlanError:
        assert best.step_s == inf, case
        return
    tokens = problem.microbatches * problem.microbatch_tokens
    assert found.certificate.exact, case
    assert found.step_time_s == pytest.approx(best.step_s, rel=ROUNDING), case
    assert found.certificate.bound_tokens_per_s >= tokens / best.step_s * (1 - ROUNDING), case
    assert problem.stages or found.step_time_s <= best_single(problem) * (1 + ROUNDING), case
    judge_alone(problem, found, case)


def judge_alone(problem: Problem, found: Plan, case: str) -> None:
    """A machine by itself is faster only where the model's ends stay with the job owner or stages were asked for, and
    the plan says so."""
    ends = tuple(RolePlacement(role=role, place="pool") for role in ("feed", "loss"))
    free = msgspec.structs.replace(problem, roles=ends, kept_first=0, kept_last=0, stages=None)
    alone_s = best_single(free)
    if problem.owner is not None:
        alone_s = min(alone_s, best_single(msgspec.structs.replace(free, peers=(problem.owner,), owner=None)))
    if found.step_time_s > alone_s * (1 + ROUNDING):
        assert problem.owner is not None or problem.stages, case
        said = ("alone would be faster", "costs speed")
        assert any(words in warning for warning in found.warnings for words in said), case


@pytest.mark.slow
def test_a_plan_that_keeps_everything_is_not_taken_for_the_best_where_making_again_is_faster() -> None:
    """The kinds in which plans without memory savings exist, and are several times slower."""
    for kind, seed in (("slow links", 1), ("unequal links", 4), ("latency", 0), ("unequal speeds", 2)):
        problem = judged_pool(kind, seed, peers=4, layers=3)
        problem = msgspec.structs.replace(problem, recompute="auto")
        judge(problem, f"{kind} {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twelve_machines_are_planned_exactly(kind: str) -> None:
    found = plan(judged_pool(kind, 2, peers=12, layers=10))
    assert found.certificate.exact
    assert found.certificate.optimality_gap == 0.0
