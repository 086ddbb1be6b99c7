"""Blocks pinned to peers: plans obey, are the best that obey, and say so when there is none."""

from __future__ import annotations

from itertools import combinations, permutations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.training.pipeline import Pipeline

BLOCKS = tuple(
    BlockCost(
        block=number,
        forward_flops=(number + 1) * 1e9,
        backward_flops=2e9,
        parameter_bytes=1_000,
        trainable_bytes=1_000,
        activation_bytes=100,
        output_bytes=4_000,
        gradient_bytes=4_000,
    )
    for number in range(6)
)
LINK = Link(bandwidth_bytes_per_s=1e5, latency_s=0.01)
PEERS = tuple(
    PeerProfile(peer=name, flops_per_s=speed, memory_bytes=10**6, uplink=LINK, downlink=LINK)
    for name, speed in (("a", 4e10), ("b", 2e10), ("c", 2e10), ("d", 1e9))
)
OWNER = PeerProfile(peer="me", flops_per_s=1e10, memory_bytes=10**6)
PROBLEM = Problem(graph_hash="g", blocks=BLOCKS, peers=PEERS, owner=OWNER, microbatches=4, microbatch_tokens=8)


def holder(found: Plan, block: int) -> str:
    return next(stage.peer for stage in found.stages if stage.blocks[0] <= block < stage.blocks[1])


def pinned(pins: dict[int, str], **fields: object) -> Problem:
    return msgspec.structs.replace(PROBLEM, pinned=pins, **fields)


PINS = [{0: "c"}, {2: "d"}, {0: "b", 4: "c"}, {1: "c", 3: "c"}, {0: "d", 1: "a", 4: "b"}]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_plan_obeys_and_is_the_best_that_does(pins: dict[int, str]):
    problem = pinned(pins)
    found = plan(problem)
    assert {block: holder(found, block) for block in pins} == pins
    assert found.certificate.exact
    assert found.step_time_s == pytest.approx(best_by_trying_all(problem))


def best_by_trying_all(problem: Problem) -> float:
    """Every order of every choice of peers with every cut, pins looked at only at the end."""
    free = msgspec.structs.replace(problem, pinned={})
    pipeline = Pipeline(free, PEERS)
    length, best = pipeline.chain.length, float("inf")
    for count in range(1, len(PEERS) + 1):
        for order in permutations(range(len(PEERS)), count):
            for inner in combinations(range(1, length), count - 1):
                cuts = [0, *inner, length]
                holders = {
                    block: pipeline.peers[peer].peer
                    for k, peer in enumerate(order)
                    for block in range(cuts[k], cuts[k + 1])
                }
                whole = pipeline.fold(order, cuts)
                if whole is not None and all(holders[block] == peer for block, peer in problem.pinned.items()):
                    best = min(best, pipeline.step_s(whole))
    return best


def test_equal_peers_are_not_exchanged_where_one_is_pinned():
    for name in ("b", "c"):
        assert holder(plan(pinned({4: name})), 4) == name


def test_pins_that_lie_crosswise_have_no_plan():
    with pytest.raises(PlanError, match=r"no cut fits .* with block 0 to 'a', block 1 to 'b', block 2 to 'a' pinned"):
        plan(pinned({0: "a", 1: "b", 2: "a"}))


def test_more_pinned_peers_than_stages():
    with pytest.raises(PlanError, match="2 peers are required, but only 1 stages"):
        plan(pinned({0: "a", 4: "b"}, stages=1))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (pinned({5: "a"}), "block 5 is pinned to peer 'a', but the pool is given blocks 0 to 4"),
        (pinned({0: "e"}), "`pinned` names peer 'e', which is not in the pool"),
        (pinned({0: "a"}, excluded=("a",)), "peer 'a' is pinned but can't be used"),
    ],
)
def test_pins_that_can_not_be_met(problem: Problem, said: str):
    with pytest.raises(PlanError, match=said):
        plan(problem)


@pytest.mark.slow
def test_in_a_pool_too_large_for_the_exact_search():
    more = tuple(
        PeerProfile(peer=f"m{number}", flops_per_s=5e9 + number, memory_bytes=10**6, uplink=LINK, downlink=LINK)
        for number in range(60)
    )
    found = plan(pinned({2: "d"}, peers=(*PEERS, *more)))
    assert holder(found, 2) == "d"


@pytest.mark.parametrize("pins", [{1: "d"}, {1: "c", 4: "b"}], ids=str)
def test_serving_obeys_too(pins: dict[int, str]):
    needs = ServingNeeds(context_tokens=16, sessions=2, cache_tokens=32)
    found = plan(pinned(pins, task="serve", serving=needs, microbatches=1, microbatch_tokens=1))
    assert {block: holder(found, block) for block in pins} == pins
    free = plan(pinned({}, task="serve", serving=needs, microbatches=1, microbatch_tokens=1))
    assert found.tokens_per_s <= free.tokens_per_s
