"""Pools of machines that are alike, planned by looking at one order of each kind only: against brute force."""

from __future__ import annotations

from itertools import combinations, permutations
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan, without_surplus
from fusionai.scheduling.problem.constraints import PipelineLimits, limits_among
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.scheduling.training import solving
from fusionai.scheduling.training.pipeline import Pipeline
from harness.examples import examples
from harness.problems import POOL_ROLES, problems

pytestmark = pytest.mark.slow


@st.composite
def alike_problems(draw: st.DrawFn, *, spread: float = 0.0) -> Problem:
    """Of one or two kinds; machines of a kind differ by at most `spread` of speed, memory and uplink."""
    base = draw(problems(most_peers=5, most_blocks=6))
    kinds = draw(st.integers(1, 2))
    only_memory = draw(st.booleans())
    peers: list[PeerProfile] = []
    for number, peer in enumerate(base.peers):
        first = base.peers[number % kinds]
        if only_memory:
            first = msgspec.structs.replace(base.peers[0], memory_bytes=first.memory_bytes)
        less = 1 - draw(st.integers(0, 10)) / 10 * spread
        peers.append(
            msgspec.structs.replace(
                first,
                peer=peer.peer,
                flops_per_s=first.flops_per_s * less,
                memory_bytes=int(first.memory_bytes * (1 - draw(st.integers(0, 10)) / 10 * spread)),
                uplink=Link(
                    bandwidth_bytes_per_s=first.uplink.bandwidth_bytes_per_s * less,
                    latency_s=first.uplink.latency_s,
                ),
            )
        )
    owner = base.owner
    if owner is not None and owner.peer == peers[0].peer:
        owner = msgspec.structs.replace(owner, peer="owner")
    return msgspec.structs.replace(base, peers=tuple(peers), owner=owner)


def brute_force_step_s(problem: Problem) -> float:
    """Every choice and order of peers, every cut; `Pipeline.fold` itself is held against formulas written out again in
    the planner's own tests."""
    pipeline = Pipeline(problem, problem.peers)
    limits = limits_of(problem, pipeline)
    best = inf
    for count in range(limits.fewest, limits.most + 1):
        for order in permutations(range(pipeline.owner), count):
            if limits.required & ~sum(1 << peer for peer in order):
                continue
            for inner in combinations(range(1, pipeline.chain.length), count - 1):
                whole = pipeline.fold(order, (0, *inner, pipeline.chain.length))
                best = best if whole is None else min(best, pipeline.step_s(whole))
    return best


def at_owner(problem: Problem) -> bool:
    return problem.roles[1].place == "owner"


def limits_of(problem: Problem, pipeline: Pipeline) -> PipelineLimits:
    most = min(len(problem.peers), pipeline.chain.length)
    whole = PipelineLimits(fewest=problem.stages or max(1, len(problem.required)), most=problem.stages or most)
    return limits_among(problem, pipeline.peers, whole)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(alike_problems())
def test_nothing_is_lost_without_surplus_machines(problem: Problem) -> None:
    pipeline = Pipeline(problem, problem.peers)
    most = limits_of(problem, pipeline).most
    kept = without_surplus(problem, problem.peers, most)
    fewer = msgspec.structs.replace(problem, peers=tuple(kept))
    assert brute_force_step_s(fewer) == pytest.approx(brute_force_step_s(problem), rel=1e-12)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(alike_problems())
def test_plans_of_equal_machines_are_the_best_there_are(problem: Problem) -> None:
    """As in large pools: what small ones are searched with for certain is out of the way."""
    with pytest.MonkeyPatch.context() as large:
        large.setattr(solving, "EXACT_PEERS", 0)
        try:
            found = plan(problem)
        except PlanError:
            assert brute_force_step_s(problem) == inf
            return
    assert found.step_time_s == pytest.approx(brute_force_step_s(problem), rel=1e-9)
    assert found.certificate.exact


def test_a_large_pool_of_equal_machines_is_proven() -> None:
    for count, kinds in ((25, 1), (60, 1), (24, 3)):
        posed = _pool(count, kinds, 0.0)
        found = plan(posed)
        assert found.certificate.exact, (count, kinds)
        assert len(found.spares) + len(found.stages) == count
        again = plan(msgspec.structs.replace(posed, peers=tuple(reversed(posed.peers))))
        assert again == found


def test_machines_as_measured_are_planned_close_to_the_bound() -> None:
    for spread, most in ((0.001, 0.005), (0.01, 0.02)):
        assert plan(_pool(30, 1, spread)).certificate.optimality_gap <= most


def test_the_running_plan_and_named_machines_stay() -> None:
    posed = _pool(30, 1, 0.0)
    running = plan(msgspec.structs.replace(posed, excluded=tuple(f"peer{n:02}" for n in range(15))))
    again = plan(msgspec.structs.replace(posed, incumbent=running))
    assert [stage.peer for stage in again.stages] == [stage.peer for stage in running.stages]
    wished = plan(msgspec.structs.replace(posed, required=("peer29",)))
    assert "peer29" in {stage.peer for stage in wished.stages}


def test_whoever_differs_in_one_figure_is_no_surplus() -> None:
    posed = _pool(4, 1, 0.0)
    last = posed.peers[3]
    for other in (
        msgspec.structs.replace(last, memory_bytes=last.memory_bytes + 1),
        msgspec.structs.replace(last, share=0.9),
        msgspec.structs.replace(last, uplink=Link(bandwidth_bytes_per_s=2e7, latency_s=0.001)),
        msgspec.structs.replace(last, downlink=Link(bandwidth_bytes_per_s=2e8)),
    ):
        assert other in without_surplus(posed, (*posed.peers[:3], other), 1)
    assert without_surplus(posed, posed.peers, 3) == list(posed.peers[:3])


def _pool(count: int, kinds: int, spread: float) -> Problem:
    draw = Random(f"{count} {kinds} {spread}")
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**5,
            output_bytes=10**4,
            gradient_bytes=10**4,
        )
        for number in range(12)
    )
    peers = tuple(
        PeerProfile(
            peer=f"peer{number:02}",
            flops_per_s=1e10 * (1 + number % kinds / 7) * (1 + spread * draw.uniform(-1, 1)),
            memory_bytes=2 * 10**7,
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=0.001),
            downlink=Link(bandwidth_bytes_per_s=1e8),
        )
        for number in range(count)
    )
    return Problem(graph_hash="g", blocks=blocks, peers=peers, roles=POOL_ROLES, microbatches=8, microbatch_tokens=64)
