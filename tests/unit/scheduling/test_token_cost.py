"""Energy and money of a plan, and what passes between its stages: only what is known of everybody is said."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts, crossings
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem
from fusionai.scheduling.token_cost import Prices, token_cost

BLOCKS = tuple(
    BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000,
        trainable_bytes=1_000,
        activation_bytes=100,
        output_bytes=4_000,
        gradient_bytes=2_000,
    )
    for number in range(4)
)
LINK = Link(bandwidth_bytes_per_s=1e6, latency_s=0.001)
PEERS = tuple(
    PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=10**6, uplink=LINK, downlink=LINK, power_w=power)
    for name, power in (("a", 100.0), ("b", 50.0))
)
OWNER = PeerProfile(peer="me", flops_per_s=1e10, memory_bytes=10**6, uplink=LINK, downlink=LINK, power_w=10.0)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(
        graph_hash="g", blocks=BLOCKS, peers=PEERS, owner=OWNER, stages=2, microbatches=4, microbatch_tokens=64
    )


@pytest.fixture(scope="module")
def found(problem: Problem) -> Plan:
    return plan(problem)


def test_joules_are_watts_by_tokens_per_second(found: Plan):
    cost = token_cost(found, (*PEERS, OWNER), Prices())
    assert cost.power_w == 160
    assert cost.joules == pytest.approx(160 * 1e6 / found.tokens_per_s)
    assert (cost.money, cost.without_price) == (None, ()), "nobody has a price: there is nothing to miss"
    some = token_cost(found, (*PEERS, OWNER), Prices(per_hour={"a": 1.0}))
    assert (some.money, set(some.without_price)) == (None, {"b", "me"})


def test_an_hour_s_price_stands_for_everything_else_electricity(found: Plan):
    prices = Prices(currency="EUR", electricity_per_kwh=0.5, per_hour={"a": 0.4})
    cost = token_cost(found, (*PEERS, OWNER), prices)
    per_hour = 0.4 + (50 + 10) / 1000 * 0.5
    assert cost.money == pytest.approx(per_hour / 3600 * 1e6 / found.tokens_per_s)
    assert cost.currency == "EUR"


def test_one_machine_of_which_nothing_is_known_leaves_the_sum_unknown(found: Plan):
    silent = msgspec.structs.replace(PEERS[1], power_w=None)
    cost = token_cost(found, (PEERS[0], silent, OWNER), Prices(electricity_per_kwh=0.5))
    assert (cost.power_w, cost.joules, cost.money) == (None, None, None)
    assert cost.without_power == cost.without_price == ("b",)


def test_who_stands_by_costs_nothing(problem: Problem):
    alone = plan(msgspec.structs.replace(problem, stages=1))
    used = {stage.peer for stage in alone.stages}
    cost = token_cost(alone, (*PEERS, OWNER), Prices())
    assert cost.power_w == sum(peer.power_w or 0 for peer in (*PEERS, OWNER) if peer.peer in used) < 160


def test_what_passes_between_stages(problem: Problem, found: Plan):
    first, second = crossings(found, StageCosts(problem))
    assert (first.from_stage, first.to_stage) == (0, 1)
    assert (first.forward_bytes, first.gradient_bytes) == (4_000, 2_000)
    assert (first.forward_s, first.gradient_s) == (0.004, 0.002)
    assert first.latency_s == pytest.approx(0.004)
    assert first.transfer_s == pytest.approx(found.stages[0].send_s)
    assert second.transfer_s == pytest.approx(found.stages[1].send_s)
