"""Calls and bytes counted as operations: every machine takes for the model what its own figures say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.primitives.pace import TrainingSpeed
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem
from fusionai.scheduling.standby.straggling import slowed
from fusionai.scheduling.training.replicated import plan as replicated


def block(number: int, flops: float = 3e6, calls: int = 40, moved: float = 1e6, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=flops / 3,
        backward_flops=2 * flops / 3,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=1000,
        output_bytes=1000,
        gradient_bytes=1000,
        calls=calls,
        moved_bytes=moved,
    )
    return msgspec.structs.replace(base, **changes)


def peer(
    name: str, block_flops_per_s: float = 1e9, call_s: float = 1e-4, byte_s: float = 1e-9, **changes: object
) -> PeerProfile:
    base = PeerProfile(
        peer=name,
        name=name,
        flops_per_s=2e9,
        pace=TrainingSpeed(flops_per_s=block_flops_per_s, call_s=call_s, byte_s=byte_s),
        memory_bytes=10**9,
        fingerprint="cpu",
    )
    return msgspec.structs.replace(base, **changes)


def unmeasured(name: str, **changes: object) -> PeerProfile:
    return peer(name, pace=None, **changes)


def problem(*peers: PeerProfile, blocks: tuple[BlockCost, ...] | None = None, **changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=blocks or tuple(block(number) for number in range(4)),
        peers=peers,
        owner=peer("owner"),
        microbatches=4,
        microbatch_tokens=10,
    )
    return msgspec.structs.replace(base, **changes)


def seconds(found: Problem, machine: PeerProfile) -> list[float]:
    """Of every block on `machine`."""
    return [(one.forward_flops + one.backward_flops) / machine.effective_flops_per_s for one in found.blocks]


def test_machines_that_are_alike_take_for_every_block_what_was_measured():
    blocks = (block(0, 1e3, 5, 7e6), block(1), block(2, 9e6, 41, 0.0), block(3, 2e6, 3))
    found = paced(problem(peer("a"), peer("b", share=0.5), blocks=blocks))
    whole, half = found.peers
    for one, took_s, twice_s in zip(blocks, seconds(found, whole), seconds(found, half), strict=True):
        computed_s = (one.forward_flops + one.backward_flops) / 1e9
        assert took_s == pytest.approx(computed_s + one.calls * 1e-4 + one.moved_bytes * 1e-9)
        assert twice_s == pytest.approx(2 * took_s)


def test_in_bf16_the_speed_measured_in_bf16_counts():
    card = peer("card", 1e9)
    assert card.pace is not None
    card = msgspec.structs.replace(card, pace=msgspec.structs.replace(card.pace, half_flops_per_s=4e9))
    plain = paced(problem(card, peer("old", 1e9)))
    in_half = paced(problem(card, peer("old", 1e9), precision="bf16"))
    one = block(0)
    others_s = one.calls * 1e-4 + one.moved_bytes * 1e-9
    for found, machine, speed in ((plain, 0, 1e9), (plain, 1, 1e9), (in_half, 0, 4e9), (in_half, 1, 1e9)):
        computed_s = (one.forward_flops + one.backward_flops) / speed
        assert seconds(found, found.peers[machine])[0] == pytest.approx(computed_s + others_s)


@given(st.lists(st.tuples(st.floats(1e8, 1e14), st.floats(0.0, 1e-2), st.floats(0.0, 1e-7)), min_size=1, max_size=5))
def test_whatever_machines_are_like_each_takes_for_layers_that_are_alike_what_it_takes(
    measured: list[tuple[float, float, float]],
):
    found = paced(problem(*(peer(f"p{i}", *figures) for i, figures in enumerate(measured))))
    for machine, (speed, call_s, byte_s) in zip(found.peers, measured, strict=True):
        for took_s in seconds(found, machine):
            assert took_s == pytest.approx(3e6 / speed + 40 * call_s + 1e6 * byte_s)


def test_said_twice_it_changes_nothing():
    once = paced(problem(peer("a"), peer("b", 5e9, 3e-5)))
    assert paced(once) is once
    assert all((one.calls, one.moved_bytes) == (0, 0.0) for one in once.blocks)


def test_where_nobody_was_measured_and_in_serving_nothing_changes():
    plain = problem(unmeasured("a"), owner=unmeasured("owner"))
    assert paced(plain) is plain
    serving = problem(peer("a"), task="serve")
    assert paced(serving) is serving


def test_who_was_not_measured_is_taken_for_typical():
    """Its speed counts as it is, its calls take what as many operations take as in a typical machine's call."""
    found = paced(problem(peer("a"), peer("b"), unmeasured("plain")))
    plain = found.peers[2]
    assert plain.flops_per_s == pytest.approx(2e9)


def test_a_block_without_backward_keeps_none():
    frozen = block(0, backward_flops=0.0, forward_flops=1e6)
    found = paced(problem(peer("a"), blocks=(frozen, block(1), block(2))))
    assert found.blocks[0].backward_flops == 0.0
    assert found.blocks[0].forward_flops == pytest.approx(1e6 + 40 * 1e-4 * 1e9 + 1e6)


def test_plans_and_prices_count_calls():
    told = problem(peer("a"), peer("b"), stages=2)
    bare = problem(*(unmeasured(name, flops_per_s=1e9) for name in "ab"), owner=unmeasured("owner"), stages=2)
    found, without = plan(told), plan(bare)
    assert found == replicated(told)
    assert found.stages[0].compute_s > 2 * without.stages[0].compute_s
    costs = StageCosts(told, found)
    for stage in found.stages:
        assert costs.compute_s(stage, stage.peer) == pytest.approx(stage.compute_s)
    total_s = sum(stage.compute_s for stage in found.stages)
    assert total_s == pytest.approx(4 * (3e6 / 1e9 + 40 * 1e-4 + 1e6 * 1e-9))


def test_a_slowed_machine_calls_as_much_slower():
    found = paced(problem(slowed(peer("a"), 3.0)))
    once = paced(problem(peer("a")))
    assert sum(seconds(found, found.peers[0])) == pytest.approx(3 * sum(seconds(once, once.peers[0])))
