"""The simulated step and the closed form of `scheduling.training.prediction` check each other.

Where no credit binds they agree: exactly for equal stages that wait for no link, within 5 % for any pipeline whose step
is long against one microbatch's trip. No simulated step is ever shorter than its busiest machine or link.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import (
    BlockCost,
    Certificate,
    Link,
    PeerProfile,
    Plan,
    Problem,
    RolePlacement,
    StagePlacement,
)
from fusionai.scheduling.training.pipeline import Pipeline
from fusionai.scheduling.training.prediction import predict
from fusionai.simulator.step import BARE, Rules, simulate_steps
from harness.examples import examples

pytestmark = pytest.mark.slow

POOL_ROLES = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))


def pipeline(blocks: tuple[BlockCost, ...], peers: tuple[PeerProfile, ...], microbatches: int) -> tuple[Plan, Problem]:
    """One block on each peer, and credit for all microbatches."""
    problem = Problem(
        graph_hash="g",
        blocks=blocks,
        peers=peers,
        roles=POOL_ROLES,
        microbatches=microbatches,
        microbatch_tokens=1,
    )
    stages = tuple(
        StagePlacement(stage=n, peer=peer.peer, blocks=(n, n + 1), in_flight=microbatches)
        for n, peer in enumerate(peers)
    )
    certificate = Certificate(method="given", exact=False, bound_tokens_per_s=1.0, optimality_gap=0.0)
    plan = Plan(
        graph_hash="g",
        stages=stages,
        feed=peers[0].peer,
        microbatches=microbatches,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=certificate,
    )
    return plan, problem


def block(number: int, forward: float, backward: float, output: int, gradient: int) -> BlockCost:
    return BlockCost(
        block=number,
        forward_flops=forward,
        backward_flops=backward,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=10,
        output_bytes=output,
        gradient_bytes=gradient,
    )


@given(
    stages=st.integers(1, 8),
    microbatches=st.integers(1, 20),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    latency_s=st.sampled_from([0.0, 0.01, 0.5]),
)
@settings(max_examples=examples(30), deadline=None, derandomize=True)
def test_equal_stages_take_exactly_what_the_closed_form_says(
    stages: int, microbatches: int, forward: int, backward: int, latency_s: float
) -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=latency_s)
    peers = tuple(
        PeerProfile(peer=f"p{n}", flops_per_s=10.0, memory_bytes=10**9, uplink=link, downlink=link)
        for n in range(stages)
    )
    plan, problem = pipeline(tuple(block(n, forward, backward, 0, 0) for n in range(stages)), peers, microbatches)
    closed_s = predict(plan.stages, StageCosts(problem)).step_s
    trips_s = 2 * 2 * latency_s * (stages - 1)
    assert closed_s == pytest.approx((microbatches + stages - 1) * (forward + backward) / 10 + trips_s)
    simulated_s = simulate_steps(plan, problem, BARE).step_s
    if latency_s == 0:
        assert simulated_s == pytest.approx(closed_s)
    else:
        # With few microbatches all forwards go before the first gradient is back: no later, and sometimes sooner.
        assert simulated_s <= closed_s * (1 + 1e-9)
        assert simulated_s >= microbatches * (forward + backward) / 10


@st.composite
def unequal(draw: st.DrawFn) -> tuple[Plan, Problem]:
    count = draw(st.integers(2, 5))
    sizes = st.sampled_from([0, 100_000, 1_000_000, 4_000_000])
    blocks = tuple(
        block(n, draw(st.integers(2, 10)) * 1e8, draw(st.integers(4, 20)) * 1e8, draw(sizes), draw(sizes))
        for n in range(count)
    )
    links = st.builds(
        Link,
        bandwidth_bytes_per_s=st.sampled_from([3e6, 1e7, 3e7, 1e8, 3e8]),
        latency_s=st.sampled_from([0.0, 0.001, 0.01]),
    )
    peers = tuple(
        PeerProfile(
            peer=f"p{n}",
            flops_per_s=draw(st.integers(3, 10)) * 1e9,
            memory_bytes=10**9,
            uplink=draw(links),
            downlink=draw(links),
        )
        for n in range(count)
    )
    return pipeline(blocks, peers, 48)


@given(unequal())
@settings(max_examples=examples(25), deadline=None, derandomize=True)
def test_unequal_stages_agree_within_five_per_cent_where_no_credit_binds(case: tuple[Plan, Problem]) -> None:
    plan, problem = case
    costs = StageCosts(problem)
    closed_s = predict(plan.stages, costs).step_s
    once = tuple(msgspec.structs.replace(stage, in_flight=1) for stage in plan.stages)
    # With one microbatch in flight a period is a whole trip: what it takes alone.
    trip_s = predict(once, costs).step_s / plan.microbatches
    simulated_s = simulate_steps(plan, problem, BARE).step_s
    assert simulated_s <= 1.05 * closed_s
    assert simulated_s >= busiest_s(plan, problem)
    assume(20 * trip_s <= closed_s)
    assert simulated_s >= 0.95 * closed_s


@given(unequal(), st.integers(1, 6), st.booleans())
@settings(max_examples=examples(15), deadline=None, derandomize=True)
def test_scarce_credit_never_deadlocks_and_never_helps_the_busiest(
    case: tuple[Plan, Problem], credit: int, lag: bool
) -> None:
    plan, problem = case
    scarce = msgspec.structs.replace(
        plan,
        stages=tuple(
            msgspec.structs.replace(stage, in_flight=credit, memory_limit_bytes=100, memory_bytes=0, in_flight_bytes=10)
            for stage in plan.stages
        ),
    )
    run = simulate_steps(scarce, problem, Rules(steps=2, weight_lag=lag))
    assert run.step_s >= busiest_s(plan, problem)
    assert max(run.in_flight) <= credit


def busiest_s(plan: Plan, problem: Problem) -> float:
    """All that the busiest machine or access link has to do in a step, less rounding."""
    costs = StageCosts(problem)
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stage in plan.stages:
        busy["compute", stage.peer] += costs.compute_s(stage, stage.peer)
    for one, other in zip(plan.stages, plan.stages[1:], strict=False):
        for sender, receiver, size in (
            (one.peer, other.peer, costs.forward_bytes(one)),
            (other.peer, one.peer, costs.gradient_bytes(other)),
        ):
            busy["up", sender] += size / costs.profiles[sender].uplink.bandwidth_bytes_per_s
            busy["down", receiver] += size / costs.profiles[receiver].downlink.bandwidth_bytes_per_s
    return plan.microbatches * max(busy.values()) * (1 - 1e-9)


@given(
    crossing=st.sampled_from([200_000, 500_000, 1_000_000, 1_500_000]),
    period_s=st.sampled_from([0.1, 0.3, 0.9]),
    latency_s=st.sampled_from([0.005, 0.05]),
)
@settings(max_examples=examples(12), deadline=None, derandomize=True)
def test_eight_stages_far_apart_reach_the_closed_form_with_the_planners_credit(
    crossing: int, period_s: float, latency_s: float
) -> None:
    """100 Mbit/s links, with whole backwards and with weight gradients put off as shipped stages with room do."""
    link = Link(bandwidth_bytes_per_s=12.5e6, latency_s=latency_s / 2)
    peers = tuple(
        PeerProfile(peer=f"p{n}", flops_per_s=1e10, memory_bytes=10**12, uplink=link, downlink=link) for n in range(8)
    )
    flops = period_s * 1e10 / 3
    plan, problem = pipeline(tuple(block(n, flops, 2 * flops, crossing, crossing) for n in range(8)), peers, 64)
    known = Pipeline(problem, peers)
    found = known.fold(range(8), range(9))
    assert found is not None
    credited = msgspec.structs.replace(
        plan,
        stages=tuple(
            msgspec.structs.replace(stage, in_flight=credit, memory_limit_bytes=10**9, in_flight_bytes=1)
            for stage, credit in zip(plan.stages, known.in_flight(found), strict=True)
        ),
    )
    closed_s = known.step_s(found)
    for lag in (False, True):
        run = simulate_steps(credited, problem, Rules(steps=1, bare=True, weight_lag=lag))
        assert run.step_s <= closed_s / 0.95
    # As many microbatches as stages are left, the ordinary 1F1B, would not do where trips are long against a period.
    scarce = msgspec.structs.replace(
        plan, stages=tuple(msgspec.structs.replace(stage, in_flight=8 - stage.stage) for stage in plan.stages)
    )
    if latency_s > 0.1 * period_s:
        assert simulate_steps(scarce, problem, BARE).step_s > 1.15 * closed_s
