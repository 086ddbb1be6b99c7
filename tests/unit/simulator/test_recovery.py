"""From where a lost stage starts again, and what that takes."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem
from fusionai.simulator.recovery import Holdings, Restoration, collecting_s, restoration, round_trip_s

STATE = 3_000_000


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=500_000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str) -> PeerProfile:
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=0.05)
    return PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=10**9, fingerprint="cpu", uplink=link, downlink=link)


@pytest.fixture(scope="module")
def posed() -> Problem:
    return Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(3)), block(3, parameter_bytes=0, trainable_bytes=0)),
        peers=tuple(peer(name) for name in "abcdefg"),
        owner=peer("owner"),
        stages=3,
        microbatches=4,
        microbatch_tokens=100,
    )


@pytest.fixture(scope="module")
def planned(posed: Problem) -> Plan:
    return plan(posed)


def restored(posed: Problem, plan: Plan, holdings: Holdings, *, official: int, retained_from: int = 0) -> Restoration:
    there = frozenset("abcdefg")
    return restoration(plan, StageCosts(posed), holdings, there, step=official, retained_from=retained_from)


def whole(plan: Plan, official: int, *, without: tuple[int, ...] = ()) -> Holdings:
    states = {(stage.stage, stage.peer): official for stage in plan.stages if stage.stage not in without}
    return Holdings(states=states)


def test_when_all_are_at_the_official_step_a_round_is_two_round_trips(posed: Problem, planned: Plan) -> None:
    found = restored(posed, planned, whole(planned, 7), official=7)
    assert (found.base, found.reached, found.lost, found.rollback) == (7, 7, (), False)
    assert round_trip_s(planned, StageCosts(posed)) == pytest.approx(0.2)
    assert found.seconds == pytest.approx(0.4)


def test_the_guard_loads_nothing_and_replays_its_stage_alone(posed: Problem, planned: Plan) -> None:
    holdings = whole(planned, 9, without=(1,))
    holdings.keep_snapshot(1, planned.stages[1].peer, 6)
    found = restored(posed, planned, holdings, official=9)
    assert (found.base, found.reached, found.lost, found.rollback) == (6, 9, (1,), False)
    assert found.loading_s == 0
    assert found.replay_s == pytest.approx(3 * 4 * 0.3)


def test_another_machine_gets_the_snapshot_passed_on(posed: Problem, planned: Plan) -> None:
    holdings = whole(planned, 9, without=(1,))
    holdings.keep_snapshot(1, planned.guards[0].peer, 6)
    assert restored(posed, planned, holdings, official=9).loading_s == pytest.approx(STATE / 1e6)


def test_two_lost_stages_start_at_the_newest_step_both_have(posed: Problem, planned: Plan) -> None:
    holdings = whole(planned, 9, without=(0, 1))
    for step in (4, 8):
        holdings.keep_snapshot(0, planned.stages[0].peer, step)
    holdings.keep_snapshot(1, planned.stages[1].peer, 4)
    found = restored(posed, planned, holdings, official=9)
    assert (found.base, found.lost, found.rollback) == (4, (0, 1), False)


def test_without_a_snapshot_everybody_goes_back_to_the_checkpoint(posed: Problem, planned: Plan) -> None:
    holdings = whole(planned, 9, without=(1,))
    holdings.checkpoint = 5
    found = restored(posed, planned, holdings, official=9, retained_from=7)
    assert (found.base, found.reached, found.rollback) == (5, 5, True)
    assert found.replay_s == 0  # all run the steps since then like new ones
    # All three states over the owner's one uplink.
    assert found.loading_s == pytest.approx(3 * STATE / 1e6)


def test_a_checkpoint_above_the_line_serves_as_a_snapshot(posed: Problem, planned: Plan) -> None:
    holdings = whole(planned, 9, without=(1,))
    holdings.checkpoint = 8
    found = restored(posed, planned, holdings, official=9, retained_from=7)
    assert (found.base, found.rollback) == (8, False)
    assert found.loading_s == pytest.approx(STATE / 1e6)


def test_whoever_lost_its_memory_holds_nothing() -> None:
    holdings = Holdings(states={(0, "a"): 3, (1, "b"): 3})
    for step in (1, 2, 3):
        holdings.keep_snapshot(1, "a", step)
    assert holdings.snapshot_steps(1, frozenset("ab")) == {2, 3}
    assert holdings.snapshot_steps(1, frozenset("b")) == frozenset()
    holdings.forget("a")
    assert holdings.states == {(1, "b"): 3}
    assert holdings.snapshot_steps(1, frozenset("ab")) == frozenset()


def test_collecting_shares_the_owners_link(posed: Problem, planned: Plan) -> None:
    costs = StageCosts(posed)
    assert collecting_s(planned.stages, "owner", costs, upwards=True) == pytest.approx(3 * STATE / 1e6)
    assert collecting_s(planned.stages[:1], "owner", costs, upwards=True) == pytest.approx(STATE / 1e6 + 0.1)
    assert collecting_s((), "owner", costs, upwards=True) == 0
