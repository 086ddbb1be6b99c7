"""No flip-flop: steady machines move nothing, one change of speed moves at most once, no rhythm beats the cool-down."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, RolePlacement
from fusionai.scheduling.standby.straggling import COOL_DOWN, STEPS, better_plan, observed, watching
from harness.examples import examples

POOL = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))


def pool(flops: list[float], blocks: int, stages: int | None) -> Problem:
    cost = BlockCost(
        block=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=1000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    return Problem(
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(cost, block=number) for number in range(blocks)),
        peers=tuple(
            PeerProfile(peer=f"p{number}", flops_per_s=speed, memory_bytes=10**9) for number, speed in enumerate(flops)
        ),
        roles=POOL,
        stages=stages,
        microbatches=8,
        microbatch_tokens=64,
    )


def true_busy_s(
    problem: Problem, found: Plan, slow: dict[str, float], noise: Random, spread: float
) -> dict[int, float]:
    """What the clock says: the first problem's speeds, each peer's slow-down, a common factor, noise."""
    speeds = {peer.peer: peer.flops_per_s for peer in problem.peers}
    return {
        stage.stage: 2.5
        * found.microbatches
        * (stage.blocks[1] - stage.blocks[0])
        * 3e9
        / speeds[stage.peer]
        * slow.get(stage.peer, 1.0)
        * noise.uniform(1 - spread, 1 + spread)
        for stage in found.stages
    }


def lived(problem: Problem, slowness: list[dict[str, float]], noise: Random, spread: float = 0.1) -> list[int]:
    """Steps at which the plan changed, for each peer's slow-down at each step."""
    known, found, watch, changes = problem, plan(problem), watching(0), []
    for step, slow in enumerate(slowness):
        watch = observed(watch, found, true_busy_s(problem, found, slow, noise, spread))
        if not watch.due(step):
            continue
        better = better_plan(watch, found, known, step)
        if better is None:
            watch = watch.asked(step)
        else:
            known, found, watch = better.problem, better.plan, watching(step)
            changes.append(step)
    return changes


speeds = st.lists(st.sampled_from([1e10, 1.5e10, 3e10]), min_size=3, max_size=4)
noises = st.integers(0, 10**6).map(Random)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(speeds, noises, st.sampled_from([0.0, 0.1, 0.19]))
def test_steady_machines_move_nothing(flops: list[float], noise: Random, spread: float) -> None:
    assert lived(pool(flops, 12, 3), [{}] * (4 * COOL_DOWN), noise, spread) == []


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(speeds, noises, st.integers(0, 3), st.sampled_from([1.3, 2.0, 4.0, 20.0]), st.sampled_from([None, 3]))
def test_one_change_of_speed_moves_at_most_once(
    flops: list[float], noise: Random, peer: int, factor: float, stages: int | None
) -> None:
    slowness = [{}] * COOL_DOWN + [{f"p{peer}": factor}] * (6 * COOL_DOWN)
    changes = lived(pool(flops, 12, stages), slowness, noise)
    assert len(changes) <= 1
    assert all(step >= COOL_DOWN + STEPS - 1 for step in changes)


def test_a_slow_machine_does_move_something() -> None:
    """The properties above also hold for a watch that never wakes."""
    slowness = [{}] * COOL_DOWN + [{"p1": 3.0}] * (3 * COOL_DOWN)
    changes = lived(pool([1e10, 1e10, 1e10], 12, 3), slowness, Random(1))
    assert changes == [COOL_DOWN + STEPS - 1]


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(speeds, noises, st.integers(1, STEPS - 1), st.integers(1, 20))
def test_slowness_that_passes_soon_moves_nothing(flops: list[float], noise: Random, slow: int, pause: int) -> None:
    rhythm = ([{"p0": 5.0}] * slow + [{}] * pause) * (6 * COOL_DOWN // (slow + pause))
    assert lived(pool(flops, 12, 3), rhythm, noise) == []


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(speeds, noises, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=4, max_size=12))
def test_no_rhythm_moves_stages_more_often_than_the_cool_down(
    flops: list[float], noise: Random, periods: list[tuple[int, int]]
) -> None:
    slowness = [{f"p{peer}": 6.0} for peer, length in periods for _ in range(length)]
    changes = [0, *lived(pool(flops, 12, 3), slowness, noise)]
    assert all(later - earlier >= COOL_DOWN for earlier, later in pairwise(changes))
