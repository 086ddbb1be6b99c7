"""A job that shares what predictions take for separate stops believing in moves, and begins to again after a while."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem
from fusionai.scheduling.standby.promotion import (
    BENEFIT,
    ENOUGH,
    FORGOTTEN_S,
    SETTLING,
    GainHistory,
    with_prediction,
    with_step,
)

WHOLE = SETTLING + ENOUGH


def a_plan() -> Plan:
    block = BlockCost(
        block=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=1000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    there = PeerProfile(peer="a", name="A", flops_per_s=1e10, memory_bytes=10**8, fingerprint="cpu")
    owner = msgspec.structs.replace(there, peer="owner")
    return plan(
        Problem(
            graph_hash="g",
            blocks=(block, msgspec.structs.replace(block, block=1, parameter_bytes=0, trainable_bytes=0)),
            peers=(there,),
            owner=owner,
            stages=1,
            microbatches=1,
            microbatch_tokens=1,
        )
    )


HERE = a_plan()


def elsewhere(peer: str) -> Plan:
    first, *others = HERE.stages
    return msgspec.structs.replace(HERE, stages=(msgspec.structs.replace(first, peer=peer), *others))


def steps(history: GainHistory, where: Plan, count: int, step_s: float, at_s: float = 0.0) -> GainHistory:
    for _ in range(count):
        history = with_step(history, where, step_s, at_s)
    return history


def moved(history: GainHistory, gain: float, before_s: float, after_s: float, *, number: int = 1) -> GainHistory:
    here, there = elsewhere(f"p{number - 1}"), elsewhere(f"p{number}")
    history = with_prediction(steps(history, here, ENOUGH, before_s), there, gain)
    return steps(history, there, WHOLE, after_s)


def test_who_was_promised_nothing_trusts():
    assert GainHistory().trust(0.0) == 1.0
    assert steps(GainHistory(), HERE, 100, 1.0).trust(0.0) == 1.0


def test_a_promise_that_was_kept_leaves_trust_whole_and_one_that_was_not_takes_it():
    assert moved(GainHistory(), 0.3, 1.0, 0.7).trust(0.0) == pytest.approx(1.0)
    assert moved(GainHistory(), 0.3, 1.0, 1.0).trust(0.0) == pytest.approx(BENEFIT / (BENEFIT + 0.3))
    assert moved(GainHistory(), 0.3, 1.0, 0.85).trust(0.0) == pytest.approx((BENEFIT + 0.15) / (BENEFIT + 0.3))


def test_two_promises_in_vain_leave_less_than_a_twentieth_of_a_gain_like_theirs():
    found = moved(GainHistory(), 0.4, 1.0, 1.0)
    found = moved(found, 0.4, 1.0, 1.0, number=2)
    assert 0.4 * found.trust(0.0) < 0.03 <= 0.4 * moved(GainHistory(), 0.4, 1.0, 1.0).trust(0.0)


def test_first_steps_after_a_move_do_not_count_and_one_slow_step_is_no_median():
    found = with_prediction(steps(GainHistory(), HERE, ENOUGH, 1.0), elsewhere("b"), 0.5)
    found = steps(found, elsewhere("b"), SETTLING, 30.0)
    found = steps(found, elsewhere("b"), ENOUGH - 1, 0.5)
    assert not found.outcomes
    (outcome,) = steps(found, elsewhere("b"), 1, 9.0).outcomes
    assert outcome.measured == pytest.approx(0.5)


def test_a_fault_in_between_and_too_few_steps_before_judge_nobody():
    found = with_prediction(steps(GainHistory(), HERE, ENOUGH, 1.0), elsewhere("b"), 0.5)
    found = steps(found, elsewhere("b"), WHOLE - 1, 2.0)
    assert not steps(found, elsewhere("c"), 100, 2.0).outcomes
    few = with_prediction(steps(GainHistory(), HERE, ENOUGH - 1, 1.0), elsewhere("b"), 0.5)
    assert not steps(few, elsewhere("b"), 100, 2.0).outcomes


def test_an_offer_that_nobody_took_up_judges_nobody():
    found = with_prediction(steps(GainHistory(), HERE, ENOUGH, 1.0), elsewhere("b"), 0.5)
    assert not steps(found, HERE, 100, 2.0).outcomes
    assert not steps(steps(found, elsewhere("c"), 5, 2.0), elsewhere("b"), 100, 2.0).outcomes


def test_what_was_found_is_forgotten():
    found = moved(GainHistory(), 0.3, 1.0, 1.0)
    assert found.trust(FORGOTTEN_S - 1) < 0.2
    assert found.trust(FORGOTTEN_S) == 1.0


@given(st.lists(st.tuples(st.floats(0.001, 0.99), st.floats(0.01, 10.0), st.floats(0.01, 10.0)), max_size=4))
def test_trust_is_a_part_of_one(moves: list[tuple[float, float, float]]):
    found = GainHistory()
    for number, (gain, before_s, after_s) in enumerate(moves, 1):
        found = moved(found, gain, before_s, after_s, number=number)
    assert len(found.outcomes) == len(moves)
    assert 0 < found.trust(0.0) <= 1.0 + 1e-9
