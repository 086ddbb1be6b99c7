"""Coverage against a solver of integer programs, with the rates written out again, and against what it must respect."""

from __future__ import annotations

from random import Random

import highspy
import msgspec
import numpy as np
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.constructions import CONSTRUCTIONS
from fusionai.scheduling.coverage import CoveragePlan, cover, solve
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement
from fusionai.scheduling.swarm import swarm_of

POOL = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
QUICK = 20_000_000


def pool(seed: int, peers: int, layers: int, *, even: bool = False) -> Problem:
    draw = Random(f"{seed} {peers} {layers}")
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9 * (1 if even else draw.choice([0.5, 1, 3])),
            backward_flops=2e9,
            parameter_bytes=1000 * (1 if even else draw.choice([1, 1, 2])),
            trainable_bytes=1000,
            activation_bytes=100,
            output_bytes=1000 * (1 if even else draw.choice([1, 4])),
            gradient_bytes=1000,
        )
        for number in range(layers)
    )
    profiles = tuple(
        PeerProfile(
            peer=f"peer{number}",
            flops_per_s=draw.choice([1e10, 3e10, 1e11]),
            memory_bytes=draw.choice([6, 14, 30, 60]) * 1000,
            uplink=Link(bandwidth_bytes_per_s=draw.choice([2e3, 1e4, 1e5])),
            downlink=Link(bandwidth_bytes_per_s=1e5),
        )
        for number in range(peers)
    )
    return Problem(graph_hash="g", blocks=blocks, peers=profiles, roles=POOL, microbatches=8, microbatch_tokens=16)


def intervals(problem: Problem, peer: PeerProfile) -> dict[tuple[int, int], float]:
    """Rates of every interval that fits, for two microbatches in flight and nobody behind the last block."""
    blocks, found = problem.blocks, {}
    for start in range(len(blocks)):
        for end in range(start + 1, len(blocks) + 1):
            inside = blocks[start:end]
            before = blocks[start - 1] if start else None
            after = inside[-1] if end < len(blocks) else None
            crossing = sum(b.output_bytes + b.gradient_bytes for b in (before, inside[-1]) if b is not None)
            state = sum(b.parameter_bytes + 3 * b.trainable_bytes for b in inside)
            if state + 2 * (sum(b.activation_bytes for b in inside) + crossing) > peer.memory_bytes:
                break
            up = (before.gradient_bytes if before else 0) + (after.output_bytes if after else 0)
            down = (before.output_bytes if before else 0) + (after.gradient_bytes if after else 0)
            seconds = max(
                sum(b.forward_flops + b.backward_flops for b in inside) / peer.flops_per_s,
                up / peer.uplink.bandwidth_bytes_per_s,
                down / peer.downlink.bandwidth_bytes_per_s,
            )
            found[start, end] = 1 / seconds
    return found


def optimum_per_s(problem: Problem) -> float:
    """The most microbatches a second, by HiGHS."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 1e-6)
    least = model.addVariable(lb=0.0, obj=-1.0)
    covers = [[] for _ in problem.blocks]
    for peer in problem.peers:
        chosen = []
        for (start, end), rate in intervals(problem, peer).items():
            taken = model.addVariable(lb=0.0, ub=1.0, type=highspy.HighsVarType.kInteger)
            chosen.append(taken)
            for block in range(start, end):
                covers[block].append(rate * taken)
        if chosen:
            model.addConstr(sum(chosen) <= 1)
    for terms in covers:
        model.addConstr(sum(terms) - least >= 0)
    model.run()
    assert model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return -float(model.getObjectiveValue())


def check(problem: Problem, plan: CoveragePlan) -> None:
    """Every promise the plan makes, with the rates of this file."""
    profiles = {peer.peer: peer for peer in problem.peers}
    covers = [0.0] * len(problem.blocks)
    for held in plan.holdings:
        rate = intervals(problem, profiles[held.peer])[held.blocks]
        assert held.rate_per_s == pytest.approx(rate)
        assert held.memory_bytes <= held.memory_limit_bytes
        for block in range(*held.blocks):
            covers[block] += rate
    assert len({held.peer for held in plan.holdings}) == len(plan.holdings)
    assert plan.microbatches_per_s == pytest.approx(min(covers))
    assert min(covers) == pytest.approx(covers[plan.scarcest_block])
    assert plan.tokens_per_s <= plan.certificate.bound_tokens_per_s * (1 + 1e-9)


@pytest.mark.slow
def test_close_to_the_optimum_and_below_the_bound() -> None:
    losses = []
    for seed in range(8):
        problem = pool(seed, peers=6, layers=6)
        best = optimum_per_s(problem)
        try:
            plan = cover(problem, effort=QUICK)
        except PlanError:
            assert best == pytest.approx(0.0, abs=1e-6)
            continue
        check(problem, plan)
        assert plan.microbatches_per_s <= best * (1 + 1e-5)
        bound = plan.certificate.bound_tokens_per_s / problem.microbatch_tokens
        assert bound >= best * (1 - 1e-5)
        losses.append(1 - plan.microbatches_per_s / best)
    assert len(losses) >= 5
    assert max(losses) <= 0.01


@pytest.mark.slow
def test_never_worse_than_a_simple_construction() -> None:
    for seed in range(6):
        problem = pool(seed, peers=30, layers=12)
        swarm = swarm_of(Chain(problem, problem.blocks), problem.peers, 2, loss_elsewhere=False)
        found = solve(swarm, effort=QUICK)
        for name, construct in CONSTRUCTIONS.items():
            layout = construct(swarm)
            assert found.cover >= layout.cover.min() * (1 - 1e-9), name
            assert (layout.end <= np.take_along_axis(swarm.reach, layout.start[:, None], axis=1)[:, 0]).all(), name


@pytest.mark.slow
def test_the_certificate_is_tight_for_many_peers() -> None:
    plan = cover(pool(1, peers=300, layers=12, even=True), effort=20_000_000)
    assert 0 <= plan.certificate.optimality_gap <= 0.01
    assert plan.least_holders >= 2


@pytest.mark.slow
def test_the_same_problem_gives_the_same_plan() -> None:
    problem = pool(3, peers=10, layers=6)
    shuffled = list(problem.peers)
    Random(4).shuffle(shuffled)
    again = msgspec.structs.replace(problem, peers=tuple(shuffled))
    assert cover(problem, effort=QUICK) == cover(again, effort=QUICK)


@pytest.mark.slow
def test_the_owners_loss_can_be_the_bottleneck() -> None:
    problem = pool(5, peers=20, layers=6)
    owner = PeerProfile(peer="owner", flops_per_s=1e8, memory_bytes=10**9, downlink=Link(bandwidth_bytes_per_s=1e2))
    problem = msgspec.structs.replace(problem, owner=owner, roles=(POOL[0], RolePlacement(role="loss")))
    plan = cover(problem, effort=QUICK)
    loss_s = sum((problem.blocks[-1].forward_flops, problem.blocks[-1].backward_flops)) / 1e8
    assert plan.microbatches_per_s == pytest.approx(1 / max(problem.blocks[-2].output_bytes / 1e2, loss_s))
    assert plan.certificate.optimality_gap == pytest.approx(0.0, abs=1e-9)


def test_a_block_that_fits_nobody_is_named() -> None:
    problem = pool(1, peers=3, layers=4)
    huge = msgspec.structs.replace(problem.blocks[2], parameter_bytes=10**9)
    problem = msgspec.structs.replace(problem, blocks=(*problem.blocks[:2], huge, problem.blocks[3]))
    with pytest.raises(PlanError, match=r"block 2 alone needs 1.* are missing"):
        cover(problem, effort=1000)
