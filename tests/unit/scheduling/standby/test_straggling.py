"""Slow stages are found by comparison, with hysteresis; a plan is changed only where that pays, and not soon again."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem
from fusionai.scheduling.standby.straggling import COOL_DOWN, MOST, STEPS, Straggling, better_plan, observed, watching

BLOCKS = 12


def problem(**changes: object) -> Problem:
    """Twelve equal blocks over up to four equal peers, three of them required; the loss with the owner."""
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=1000,
            trainable_bytes=1000,
            activation_bytes=1000,
            output_bytes=100,
            gradient_bytes=100,
        )
        for number in range(BLOCKS)
    )
    loss = msgspec.structs.replace(
        blocks[0], block=BLOCKS, forward_flops=1e6, backward_flops=0.0, parameter_bytes=0, trainable_bytes=0
    )

    def peer(name: str) -> PeerProfile:
        return PeerProfile(peer=name, name=name.upper(), flops_per_s=1e10, memory_bytes=10**9, fingerprint="cpu")

    base = Problem(
        graph_hash="g",
        blocks=(*blocks, loss),
        peers=tuple(peer(name) for name in "abc"),
        owner=peer("owner"),
        stages=3,
        microbatches=8,
        microbatch_tokens=64,
    )
    return msgspec.structs.replace(base, **changes)


def busy(found: Plan, *factors: float) -> dict[int, float]:
    """Measured seconds of one step: the prediction times a factor for each stage; the loss has overhead."""
    times = {
        stage.stage: factor * found.microbatches * stage.compute_s
        for stage, factor in zip(found.stages, factors, strict=False)
    }
    return {**times, found.stages[-1].stage: 0.5}


def after(watch: Straggling, found: Plan, *factors: float, steps: int) -> Straggling:
    for _ in range(steps):
        watch = observed(watch, found, busy(found, *factors))
    return watch


def test_a_stage_straggles_after_so_many_steps_in_a_row_and_recovers_likewise() -> None:
    found = plan(problem())
    watch = after(watching(0), found, 1, 2, 1, steps=STEPS - 1)
    assert watch.stragglers == frozenset()
    # One ordinary step and the count begins anew.
    watch = after(after(watch, found, 1, 1, 1, steps=1), found, 1, 2, 1, steps=STEPS - 1)
    assert watch.stragglers == frozenset()
    watch = after(watch, found, 1, 2, 1, steps=1)
    assert watch.stragglers == {1}
    # Between the two bounds it stays what it is.
    watch = after(watch, found, 1, 1.35, 1, steps=5 * STEPS)
    assert watch.stragglers == {1}
    watch = after(watch, found, 1, 1, 1, steps=STEPS - 1)
    assert watch.stragglers == {1}
    assert after(watch, found, 1, 1, 1, steps=1).stragglers == frozenset()
    assert after(watching(0), found, 1, 1.35, 1, steps=5 * STEPS).stragglers == frozenset()


def test_all_slower_than_planned_is_nobodys_fault() -> None:
    found = plan(problem())
    assert after(watching(0), found, 7, 7.5, 8, steps=5 * STEPS).stragglers == frozenset()
    assert after(watching(0), found, 7, 14, 7, steps=STEPS).stragglers == {1}


def test_the_slower_of_two_is_the_slow_one_and_a_fast_one_accuses_nobody_of_three() -> None:
    two = plan(problem(stages=2))
    watch = after(watching(0), two, 3, 1, steps=STEPS)
    assert (watch.stragglers, watch.slowdowns[0][-1], watch.slowdowns[1][-1]) == ({0}, 3, 1)
    three = plan(problem())
    watch = after(watching(0), three, 1, 0.3, 1, steps=STEPS)
    assert watch.stragglers == frozenset()


def test_the_owners_overhead_and_who_is_alone_are_not_judged() -> None:
    found = plan(problem())
    watch = after(watching(0), found, 1, 1, 1, steps=STEPS)
    assert set(watch.slowdowns) == {0, 1, 2}
    # Only one stage has reported.
    assert observed(watching(0), found, {1: 100.0}) == watching(0)
    alone = plan(problem(stages=1))
    assert after(watching(0), alone, 9, steps=STEPS).slowdowns == {}


def test_nobody_waits_for_a_slow_stage_with_little_to_do() -> None:
    small = problem(peers=(*problem().peers[:2], msgspec.structs.replace(problem().peers[2], flops_per_s=1e9)))
    found = plan(small)
    little = next(stage for stage in found.stages if stage.peer == "c")
    assert little.blocks[1] - little.blocks[0] == 1
    longest = max(stage.compute_s for stage in found.stages)
    factors = [3.0 if stage is little else 1.0 for stage in found.stages]
    assert 3 * little.compute_s > longest
    assert after(watching(0), found, *factors, steps=STEPS).stragglers == {little.stage}
    thin = msgspec.structs.replace(
        found,
        stages=tuple(
            msgspec.structs.replace(stage, compute_s=stage.compute_s / 10) if stage is little else stage
            for stage in found.stages
        ),
    )
    assert after(watching(0), thin, *factors, steps=STEPS).stragglers == frozenset()


def test_a_straggler_gets_less_to_do_and_the_measured_speeds_go_on() -> None:
    base = problem()
    found = plan(base)
    slow = found.stages[1].peer
    watch = after(watching(0), found, 1, 3, 1, steps=COOL_DOWN)
    assert better_plan(watch, found, base, COOL_DOWN - 1) is None
    better = better_plan(watch, found, base, COOL_DOWN)
    assert better is not None
    sizes = {stage.peer: stage.blocks[1] - stage.blocks[0] for stage in better.plan.stages}
    assert sizes[slow] == 1
    assert better.plan.version == 0
    name = slow.upper()
    assert better.reason.startswith(f"stage 1 on {name} computes 3 times slower than planned, measured against the oth")
    assert "another plan takes 16.8 s a step instead of 31.2 s" in better.reason
    speeds = {peer.peer: peer.flops_per_s for peer in better.problem.peers}
    assert speeds == {peer.peer: pytest.approx(1e10 / 3 if peer.peer == slow else 1e10) for peer in base.peers}
    # Under its own speeds the new plan runs as it says: nobody straggles any more.
    settled = after(watching(COOL_DOWN), better.plan, 1, 1, 1, steps=2 * COOL_DOWN)
    assert better_plan(settled, better.plan, better.problem, 1000) is None


def test_an_idle_machine_takes_the_stragglers_place() -> None:
    idle = msgspec.structs.replace(problem().peers[0], peer="d", name="D")
    base = problem(peers=(*problem().peers, idle))
    found = plan(base)
    assert found.spares == ("d",)
    watch = after(watching(0), found, 1, 1, 4, steps=STEPS)
    better = better_plan(watch, found, base, COOL_DOWN)
    assert better is not None
    assert {stage.peer for stage in better.plan.stages} == {"a", "b", "d", "owner"}


def test_a_plan_that_gains_too_little_is_not_worth_the_move() -> None:
    # One block each: nothing can be taken off the straggler.
    base = problem(blocks=(*problem().blocks[:3], msgspec.structs.replace(problem().blocks[-1], block=3)))
    found = plan(base)
    watch = after(watching(0), found, 1, 3, 1, steps=STEPS)
    assert watch.due(COOL_DOWN)
    assert better_plan(watch, found, base, COOL_DOWN) is None
    asked = watch.asked(COOL_DOWN)
    assert not asked.due(2 * COOL_DOWN - 1)
    assert asked.due(2 * COOL_DOWN)
    # Nor is one that can't be made.
    assert better_plan(watch, found, msgspec.structs.replace(base, peers=base.peers[:2]), COOL_DOWN) is None


def test_a_stage_that_stands_still_is_bounded() -> None:
    found = plan(problem())
    watch = after(watching(0), found, 1, 1e9, 1, steps=STEPS)
    assert watch.slowdowns[1] == (MOST,) * STEPS
    assert better_plan(watch, found, problem(), COOL_DOWN) is not None
