"""Whatever happens to the machines: nothing official is lost, steps follow each other no faster than they can, an
interruption ends before the next one begins, and heartbeats that are skipped change nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.simulator.course import simulate_course
from fusionai.simulator.scenario import Churn, Scenario, Timings
from harness.examples import examples

LINK = Link(bandwidth_bytes_per_s=12.5e6, latency_s=0.01)


def peer(name: str, memory_bytes: int) -> PeerProfile:
    return PeerProfile(
        peer=name,
        flops_per_s=1e12,
        memory_bytes=memory_bytes,
        fingerprint="gpu",
        uplink=LINK,
        downlink=LINK,
    )


def problem(machines: int, memory_bytes: int) -> Problem:
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e10,
            backward_flops=2e10,
            parameter_bytes=10**6 if number < 6 else 0,
            trainable_bytes=10**6 if number < 6 else 0,
            activation_bytes=10**6,
            output_bytes=100_000,
            gradient_bytes=100_000,
        )
        for number in range(7)
    )
    return Problem(
        graph_hash="g",
        blocks=blocks,
        peers=tuple(peer(f"p{n}", memory_bytes) for n in range(machines)),
        owner=peer("owner", 10**9),
        stages=3,
        microbatches=8,
        microbatch_tokens=64,
    )


@pytest.mark.slow
@given(
    churn=st.builds(
        Churn,
        stay_s=st.sampled_from([100.0, 400.0, 2000.0]),
        away_s=st.sampled_from([5.0, 60.0, 600.0]),
        crashes=st.sampled_from([0.0, 0.5, 1.0]),
        silent=st.sampled_from([0.0, 0.5, 1.0]),
        freeze_every_s=st.sampled_from([60.0, 300.0, 1e9]),
        freeze_s=st.sampled_from([1.0, 3.0, 30.0]),
        late=st.sampled_from([0.0, 0.4]),
    ),
    machines=st.sampled_from([3, 5, 9]),
    memory_bytes=st.sampled_from([60_000_000, 10**9]),
    checkpoint_every=st.sampled_from([0, 10, 100]),
    patience_s=st.sampled_from([20.0, 600.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(15), deadline=None, derandomize=True)
def test_whatever_happens_nothing_official_is_lost(
    churn: Churn, machines: int, memory_bytes: int, checkpoint_every: int, patience_s: float, seed: int
) -> None:
    scenario = Scenario(
        hours=0.25,
        seed=seed,
        checkpoint_every=checkpoint_every,
        churn=churn,
        timings=Timings(patience_s=patience_s),
    )
    posed = problem(machines, memory_bytes)
    try:
        course = simulate_course(posed, scenario)
    except PlanError:
        return  # the machines for a plan were never there
    assert course.lost_steps == 0
    assert course == simulate_course(posed, scenario, every_beat=True)
    busiest_s = 8 * 6 * 3e10 / 1e12 / 3  # a third of the blocks, were every stage as fast as can be
    assert all(after - before >= busiest_s - 1e-6 for before, after in pairwise(course.commits_s))
    for one, other in pairwise(course.incidents):
        assert one.recovered_s is not None
        assert one.recovered_s <= other.at_s + 1e-6
    assert all(0 <= part <= 1 + 1e-9 for part in (*course.present.values(), *course.working.values()))
    assert course.redone_s + course.waiting_s <= course.lasted_s
