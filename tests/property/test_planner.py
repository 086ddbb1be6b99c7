"""The planner against brute force: every choice and order of peers, every cut, with the formulas written out again."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from math import inf
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.constraints import PipelineLimits
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem
from fusionai.scheduling.training.bound import Relaxation
from fusionai.scheduling.training.pipeline import Pipeline
from fusionai.scheduling.training.search import annealed, improve, search
from harness.examples import examples
from harness.problems import POOL_ROLES, problems

pytestmark = pytest.mark.slow


def brute_force_step_s(problem: Problem) -> float:
    """Least step time over everything; inf if nothing fits."""
    owner_takes_loss = problem.roles[1].place == "owner"
    length = len(problem.blocks) - owner_takes_loss
    best = inf
    counts = range(1, min(len(problem.peers), length) + 1) if problem.stages is None else [problem.stages]
    for count in counts:
        for order in permutations(problem.peers, count):
            if not set(problem.required) <= {p.peer for p in order}:
                continue
            for inner in combinations(range(1, length), count - 1):
                cuts = [0, *inner, length]
                ranges = [problem.blocks[a:b] for a, b in pairwise(cuts)]
                best = min(best, step_s(problem, list(order), ranges, owner_takes_loss))
    return best


def step_s(
    problem: Problem, order: list[PeerProfile], ranges: list[tuple[BlockCost, ...]], owner_takes_loss: bool
) -> float:
    rounds = problem.microbatches
    machines, stages = list(order), list(ranges)
    if owner_takes_loss:
        assert problem.owner is not None
        machines.append(problem.owner)
        stages.append(problem.blocks[-1:])
    last = len(stages) - 1
    compute = [
        sum(b.forward_flops + b.backward_flops for b in stage) / (machine.flops_per_s * machine.share)
        for machine, stage in zip(machines, stages, strict=True)
    ]
    loss_memory = 0.0
    if owner_takes_loss:
        loss_memory = resident(problem, stages[-1]) + min(rounds, 2) * flight(stages[-2], stages[-1], None)

    def direction(sender: PeerProfile, receiver: PeerProfile) -> tuple[float, float, bool]:
        if sender.peer == receiver.peer:
            return inf, 0.0, False
        own = problem.links.get(f"{sender.peer}>{receiver.peer}")
        if own is not None:
            return own.bandwidth_bytes_per_s, own.latency_s, False
        slower = min(sender.uplink.bandwidth_bytes_per_s, receiver.downlink.bandwidth_bytes_per_s)
        return slower, sender.uplink.latency_s + receiver.downlink.latency_s, True

    up, down = [0.0] * len(stages), [0.0] * len(stages)
    hop = [0.0] * len(stages)
    transfers = [0.0]
    for k in range(last):
        a, b = machines[k], machines[k + 1]
        block = stages[k][-1]
        bandwidth, latency, shared = direction(a, b)
        hop[k] += block.output_bytes / bandwidth + latency
        transfers.append(block.output_bytes / bandwidth)
        if shared:
            up[k] += block.output_bytes / a.uplink.bandwidth_bytes_per_s
            down[k + 1] += block.output_bytes / b.downlink.bandwidth_bytes_per_s
        bandwidth, latency, shared = direction(b, a)
        hop[k] += block.gradient_bytes / bandwidth + latency
        transfers.append(block.gradient_bytes / bandwidth)
        if shared:
            up[k + 1] += block.gradient_bytes / b.uplink.bandwidth_bytes_per_s
            down[k] += block.gradient_bytes / a.downlink.bandwidth_bytes_per_s
    period = max(*compute, *transfers, *up, *down)
    for k in range(len(order)):
        own_loss = owner_takes_loss and problem.owner is not None and order[k].peer == problem.owner.peer
        if own_loss:
            period = max(period, compute[k] + compute[-1])
        before = stages[k - 1] if k else None
        after = stages[k] if k < last else None
        fixed = resident(problem, stages[k]) + (loss_memory if own_loss else 0.0)
        each = flight(before, stages[k], after)
        downstream = len(stages) - k
        if fixed + min(rounds, downstream) * each > order[k].memory_bytes:
            return inf
        held = next((n for n in range(rounds, 0, -1) if fixed + n * each <= order[k].memory_bytes), 1)
        if held < rounds:
            period = max(period, (sum(compute[k:]) + sum(hop[k:])) / held)
    word = 0.0
    if problem.owner is not None:
        word = direction(order[0], problem.owner)[1] + direction(problem.owner, order[0])[1]
    return (rounds - 1) * period + sum(compute) + sum(hop) + word


def resident(problem: Problem, stage: tuple[BlockCost, ...]) -> float:
    slots = 1 + problem.optimizer_bytes_per_trainable_byte
    state = sum(b.parameter_bytes + slots * b.trainable_bytes for b in stage)
    return state + max(b.workspace_bytes for b in stage)


def flight(before: tuple[BlockCost, ...] | None, stage: tuple[BlockCost, ...], after: object) -> float:
    crossing = stage[-1].output_bytes + stage[-1].gradient_bytes
    if before is not None:
        crossing += before[-1].output_bytes + before[-1].gradient_bytes
    return sum(b.activation_bytes for b in stage) + crossing


def posed(problem: Problem) -> tuple[Pipeline, PipelineLimits]:
    pipeline = Pipeline(problem, problem.peers)
    most = min(len(problem.peers), pipeline.chain.length)
    required = sum(1 << i for i, peer in enumerate(pipeline.peers) if peer.peer in problem.required)
    return pipeline, PipelineLimits(fewest=problem.stages or 1, most=problem.stages or most, required=required)


def planned(problem: Problem) -> Plan | None:
    try:
        return plan(problem)
    except PlanError:
        return None


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(problems())
def test_plan_is_optimal_or_rightly_refused(problem: Problem) -> None:
    found, best_s = planned(problem), brute_force_step_s(problem)
    if found is None:
        assert best_s == inf
    else:
        assert found.step_time_s == pytest.approx(best_s, rel=1e-9)
        assert found.certificate.exact
        assert found.certificate.optimality_gap == 0.0
        assert found.certificate.bound_tokens_per_s == found.tokens_per_s


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(most_peers=5, most_blocks=6))
def test_search_needs_no_good_start(problem: Problem) -> None:
    """Local search usually finds the optimum of a small pool and would hide a branch cut wrongly."""
    pipeline, limits = posed(problem)
    found = search(pipeline, limits, known=None, budget=10**6)
    assert found.complete
    step_s = inf if found.best is None else pipeline.step_s(found.best)
    assert step_s == pytest.approx(brute_force_step_s(problem), rel=1e-9)


def test_search_weighs_period_against_transit() -> None:
    """Few microbatches and dear cuts: where a better period and a better transit are at odds."""
    for seed in range(80):
        draw = Random(seed)
        base = ordinary_problem(seed, peers=4, layers=7)
        crossing = [draw.choice([2, 5, 20]) * 10**5 for _ in base.blocks]
        blocks = tuple(
            msgspec.structs.replace(b, output_bytes=c, gradient_bytes=c, forward_flops=draw.uniform(2, 20) * 1e8)
            for b, c in zip(base.blocks, crossing, strict=True)
        )
        problem = msgspec.structs.replace(base, blocks=blocks, microbatches=draw.choice([2, 3, 5, 8]))
        pipeline, limits = posed(problem)
        found = search(pipeline, limits, known=None, budget=10**6)
        assert found.best is not None
        assert pipeline.step_s(found.best) == pytest.approx(brute_force_step_s(problem), rel=1e-9), seed


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(most_peers=5, most_blocks=8))
def test_larger_plan_is_optimal_or_rightly_refused(problem: Problem) -> None:
    found, best_s = planned(problem), brute_force_step_s(problem)
    assert (inf if found is None else found.step_time_s) == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(problems(most_peers=6, most_blocks=8))
def test_plan_keeps_its_promises(problem: Problem) -> None:
    found = planned(problem)
    if found is None:
        return
    covered = [number for stage in found.stages for number in range(*stage.blocks)]
    assert covered == [block.block for block in problem.blocks]
    assert [stage.stage for stage in found.stages] == list(range(len(found.stages)))
    pool = [stage for stage in found.stages if "stage" in stage.roles]
    assert len({stage.peer for stage in pool}) == len(pool)
    assert problem.stages in (None, len(pool))
    assert set(problem.required) <= {stage.peer for stage in pool}
    for stage in found.stages:
        assert stage.memory_bytes <= stage.memory_limit_bytes
        assert min(problem.microbatches, len(found.stages) - stage.stage) <= stage.in_flight <= problem.microbatches
    everyone = {p.peer for p in problem.peers}
    assert {s.peer for s in pool} | set(found.spares) | {e.peer for e in found.excluded} == everyone
    assert found.bottleneck
    assert (found.single_peer_tokens_per_s or 0.0) <= found.tokens_per_s or found.warnings


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(problems(most_peers=6, most_blocks=8))
def test_bound_and_heuristic_enclose_the_optimum(problem: Problem) -> None:
    """What large pools rely on, where the optimum is known."""
    found = planned(problem)
    if found is None:
        return
    pipeline, limits = posed(problem)
    for known_s in (inf, found.step_time_s):
        relaxation = Relaxation(pipeline, limits)
        relaxation.narrow(known_s, effort=100_000)
        assert 0 < relaxation.bound_s <= found.step_time_s * (1 + 1e-9)
    for good in (improve(pipeline, limits, budget=2000)[0], annealed(pipeline, limits, rounds=400)[0]):
        if good is None:
            continue
        assert pipeline.step_s(good) >= found.step_time_s * (1 - 1e-9)
        used = sum(1 << stage.head for stage in pipeline.pool_stages(good))
        assert limits.required & ~used == 0
        assert limits.fewest <= sum(1 for _ in pipeline.pool_stages(good)) <= limits.most


def test_heuristic_and_bound_are_close_on_ordinary_pools() -> None:
    """A regression alarm: how much worse than the optimum the parts for large pools are."""
    losses, gaps, annealed_losses = [], [], []
    for seed in range(8):
        problem = ordinary_problem(seed)
        best_s = plan(problem).step_time_s
        pipeline = Pipeline(problem, problem.peers)
        limits = PipelineLimits(fewest=1, most=len(problem.peers))
        good, _ = improve(pipeline, limits, budget=10_000)
        assert good is not None
        losses.append(pipeline.step_s(good) / best_s - 1)
        better, _ = annealed(pipeline, limits, rounds=40_000)
        assert better is not None
        annealed_losses.append(pipeline.step_s(better) / best_s - 1)
        relaxation = Relaxation(pipeline, limits)
        relaxation.narrow(best_s)
        gaps.append(best_s / relaxation.bound_s - 1)
    assert max(losses) <= 0.03
    assert max(annealed_losses) <= 0.005
    assert max(gaps) <= 0.06


def test_a_large_pool_has_a_certificate() -> None:
    problem = ordinary_problem(1, peers=24, layers=24)
    found = plan(problem)
    assert found.certificate.bound_tokens_per_s >= found.tokens_per_s
    expected = found.certificate.bound_tokens_per_s / found.tokens_per_s - 1
    assert found.certificate.optimality_gap == pytest.approx(expected)
    assert 0 <= found.certificate.optimality_gap < 0.05
    assert plan(problem) == found


def ordinary_problem(seed: int, peers: int = 6, layers: int = 14) -> Problem:
    draw = Random(seed)
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**6,
            output_bytes=10**5,
            gradient_bytes=10**5,
        )
        for number in range(layers)
    )
    pool = tuple(
        PeerProfile(
            peer=f"peer{number}",
            flops_per_s=draw.choice([5e9, 1e10, 2e10]) * draw.uniform(0.9, 1.1),
            memory_bytes=10**9,
            uplink=Link(bandwidth_bytes_per_s=10 ** draw.uniform(6, 8), latency_s=draw.uniform(0, 0.02)),
        )
        for number in range(peers)
    )
    return Problem(
        graph_hash="g", blocks=blocks, peers=pool, owner=None, roles=POOL_ROLES, microbatches=16, microbatch_tokens=64
    )


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_listing(problem: Problem, random: object) -> None:
    shuffled = list(problem.peers)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    assert planned(msgspec.structs.replace(problem, peers=tuple(shuffled))) == planned(problem)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(problems())
def test_more_resources_never_slow_a_plan(problem: Problem) -> None:
    before = planned(problem)
    if before is None:
        return
    free = msgspec.structs.replace(problem, owner=None, roles=POOL_ROLES)
    for base in (problem, free):
        base_plan = planned(base)
        if base_plan is None or any(problem.owner and p.peer == problem.owner.peer for p in base.peers):
            continue
        first = base.peers[0]
        faster = msgspec.structs.replace(first, flops_per_s=first.flops_per_s * 2)
        roomier = msgspec.structs.replace(first, memory_bytes=first.memory_bytes * 2)
        for better in (faster, roomier):
            richer = plan(msgspec.structs.replace(base, peers=(better, *base.peers[1:])))
            assert richer.step_time_s <= base_plan.step_time_s * (1 + 1e-9)
        if base.stages is None:
            newcomer = msgspec.structs.replace(first, peer="newcomer")
            richer = plan(msgspec.structs.replace(base, peers=(*base.peers, newcomer)))
            assert richer.step_time_s <= base_plan.step_time_s * (1 + 1e-9)
