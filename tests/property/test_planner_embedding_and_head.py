"""Plans that keep the model's ends with the job owner, against brute force over every placement of the middle."""

from __future__ import annotations

from itertools import combinations, permutations
from math import floor, inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.problem.embedding_and_head import with_front
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.training.bound import Relaxation
from fusionai.scheduling.training.pipeline import Pipeline
from fusionai.scheduling.training.prediction import predict
from fusionai.scheduling.training.search import annealed
from harness.examples import examples
from harness.problems import OWNER_ROLES, problems, profiles

pytestmark = pytest.mark.slow

TAILS_SHARE = 3
"""Microbatches that the owner's last stage may have in flight beside its first."""


@st.composite
def split_problems(draw: st.DrawFn) -> Problem:
    base = draw(problems(most_blocks=6))
    owner = msgspec.structs.replace(draw(profiles("owner")), memory_bytes=draw(st.sampled_from([300, 10**4])) * 1000)
    return msgspec.structs.replace(
        base,
        owner=owner,
        roles=OWNER_ROLES,
        links={},
        kept_first=draw(st.integers(1, 2)),
        kept_last=draw(st.integers(0, 2)),
        stages=None if base.stages is None else min(base.stages, 2),
    )


def brute_force_step_s(problem: Problem) -> float:
    first, last = problem.kept_first, max(1, problem.kept_last)
    end = len(problem.blocks) - last
    counts = range(1, len(problem.peers) + 1) if problem.stages is None else [problem.stages]
    best = inf
    for count in counts:
        for order in permutations(problem.peers, count):
            if not set(problem.required) <= {peer.peer for peer in order}:
                continue
            for inner in combinations(range(first + 1, end), count - 1):
                cuts = [0, first, *inner, end, len(problem.blocks)]
                if len(set(cuts)) == len(cuts):
                    best = min(best, step_s(problem, order, cuts))
    return best


def step_s(problem: Problem, order: tuple[PeerProfile, ...], cuts: list[int]) -> float:
    assert problem.owner is not None
    chain, rounds = Chain(problem, problem.blocks), problem.microbatches
    machines = [problem.owner, *order, problem.owner]
    stages: list[StagePlacement] = []
    taken = 0.0
    for number in range(len(machines) - 1, -1, -1):
        start, stop = cuts[number], cuts[number + 1]
        resident, flight = chain.resident_bytes(start, stop), chain.in_flight_bytes(start, stop)
        room = machines[number].memory_bytes - resident - (taken if number == 0 else 0.0)
        held = rounds if flight * rounds <= room else floor(room / flight)
        if number == len(machines) - 1:
            held = min(held, TAILS_SHARE)
            taken = resident + min(held, rounds) * flight
        elif held < min(rounds, len(machines) - number):
            return inf
        tail = number == len(machines) - 1
        placed = StagePlacement(
            stage=number, peer=machines[number].peer, blocks=(start, stop), in_flight=rounds if tail else held
        )
        stages.insert(0, placed)
    return predict(stages, StageCosts(problem)).step_s


def planned(problem: Problem) -> Plan | None:
    try:
        return plan(problem)
    except PlanError:
        return None


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(split_problems())
def test_a_split_plan_is_optimal_or_rightly_refused(problem: Problem) -> None:
    found, best_s = planned(problem), brute_force_step_s(problem)
    if found is None:
        assert best_s == inf
        return
    assert found.step_time_s == pytest.approx(best_s, rel=1e-9)
    assert found.certificate.exact
    first, *pool, last = found.stages
    assert first.peer == last.peer == found.feed == "owner"
    assert (first.blocks, first.roles) == ((0, problem.kept_first), ("feed",))
    assert (last.blocks[0], last.roles) == (len(problem.blocks) - max(1, problem.kept_last), ("loss",))
    assert all(stage.peer != "owner" and stage.roles == ("stage",) for stage in pool)
    assert "owner" not in found.spares
    assert first.memory_bytes + last.memory_bytes <= first.memory_limit_bytes


def test_the_owners_line_carries_both_ends() -> None:
    """Where lines hold a step up, not machines."""
    held_up = 0
    for seed in range(25):
        problem = slow_lines(seed)
        found = plan(problem)
        assert found.step_time_s == pytest.approx(brute_force_step_s(problem), rel=1e-9), seed
        assert predict(found.stages, StageCosts(problem)).step_s <= found.step_time_s * (1 + 1e-9)
        held_up += found.bottleneck.startswith("access links")
    assert held_up >= 5


def slow_lines(seed: int) -> Problem:
    draw = Random(seed)

    def line(low: float, high: float) -> Link:
        return Link(bandwidth_bytes_per_s=10 ** draw.uniform(low, high), latency_s=draw.choice([0.0, 0.01]))

    crossing = [draw.choice([1, 2, 5]) * 10**5 for _ in range(6)]
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e8,
            backward_flops=2e8,
            parameter_bytes=10**5,
            trainable_bytes=10**5,
            activation_bytes=10**5,
            output_bytes=size,
            gradient_bytes=draw.choice([size, size // 2]),
        )
        for number, size in enumerate(crossing)
    )
    peers = tuple(
        PeerProfile(peer=f"peer{i}", flops_per_s=1e10, memory_bytes=10**8, uplink=line(5.5, 7), downlink=line(6, 8))
        for i in range(3)
    )
    owner = PeerProfile(peer="owner", flops_per_s=1e12, memory_bytes=10**8, uplink=line(5.5, 7), downlink=line(5.5, 7))
    return Problem(
        graph_hash="g",
        blocks=blocks,
        peers=peers,
        owner=owner,
        kept_first=1,
        kept_last=2,
        microbatches=8,
        microbatch_tokens=64,
    )


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(split_problems())
def test_bound_and_annealing_enclose_the_optimum(problem: Problem) -> None:
    found = planned(problem)
    if found is None:
        return
    pipeline = Pipeline(with_front(problem), with_front(problem).peers)
    assert pipeline.front is not None
    limits = PipelineLimits(fewest=2, most=len(problem.peers) + 1, required=1 << pipeline.front)
    if problem.required or problem.stages is not None:
        return
    relaxation = Relaxation(pipeline, limits)
    relaxation.narrow(found.step_time_s, effort=100_000)
    assert 0 < relaxation.bound_s <= found.step_time_s * (1 + 1e-9)
    good, _ = annealed(pipeline, limits, rounds=400)
    if good is not None:
        assert pipeline.step_s(good) >= found.step_time_s * (1 - 1e-9)
