"""Peers divided among replicas: as many as fit, equally strong, nobody twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.backends.state import state_bytes_ratio
from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Link, PeerProfile, Problem
from fusionai.scheduling.training.replicated import (
    MOST_TRIES,
    Exchanging,
    among,
    anchored,
    divide,
    exchange_s,
    fastest,
    steps_per_s,
)
from fusionai.wire.messages import OptimizerSpec
from harness.examples import examples
from harness.problems import problems
from harness.told_pool import problem, profile


def pool(*speeds: float, memory_bytes: int = 2**30) -> Problem:
    peers = [
        msgspec.structs.replace(profile(f"p{number}"), flops_per_s=speed * 1e9, memory_bytes=memory_bytes)
        for number, speed in enumerate(speeds)
    ]
    return msgspec.structs.replace(problem(*peers), stages=None)


def speeds(made: Problem, peers: tuple[str, ...]) -> float:
    known = {one.peer: one.flops_per_s / 1e9 for one in made.peers}
    return sum(known[peer] for peer in peers)


def test_groups_are_equally_fast() -> None:
    made = pool(4, 1, 3, 2)
    groups = divide(made, 2)
    assert [speeds(made, group.peers) for group in groups] == [5, 5]


def test_as_many_as_there_are_machines() -> None:
    assert len(divide(pool(1, 1, 1), 5)) == 3


def test_as_many_as_fit() -> None:
    """A machine holds half a model: four machines are two replicas, whatever was asked for."""
    whole = 5 * 1000 * 4
    made = pool(1, 1, 1, 1, memory_bytes=int(whole * 0.7))
    groups = divide(made, 4)
    assert [len(group.peers) for group in groups] == [2, 2]


def test_a_group_that_lacks_memory_comes_first() -> None:
    """The two strong machines would be a group each by speed alone; only together with a large one does it hold."""
    small, large = 12_000, 40_000
    peers = [
        msgspec.structs.replace(profile(name), flops_per_s=speed, memory_bytes=memory_bytes)
        for name, speed, memory_bytes in (("a", 9e9, small), ("b", 8e9, small), ("c", 1e9, large), ("d", 1e9, large))
    ]
    groups = divide(msgspec.structs.replace(problem(*peers), stages=None), 2)
    assert len(groups) == 2
    assert all({"c", "d"} & set(group.peers) for group in groups)


def test_not_even_one_fits() -> None:
    with pytest.raises(PlanError):
        divide(pool(1, 1, memory_bytes=1000), 2)


def test_who_is_kept_out_is_in_no_group() -> None:
    made = msgspec.structs.replace(pool(1, 1, 1), excluded=("p0",))
    assert {peer for group in divide(made, 2) for peer in group.peers} == {"p1", "p2"}


def test_near_machines_are_together() -> None:
    """By speed alone p0 goes with p3, but p0 and p1 share a fast line, and so do p2 and p3."""
    made = pool(4, 3, 3, 4)
    near = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    far = Link(bandwidth_bytes_per_s=1e3, latency_s=0.5)
    sides = ({"p0", "p1"}, {"p2", "p3"})
    links = {
        f"{a.peer}>{b.peer}": near if any({a.peer, b.peer} <= side for side in sides) else far
        for a in made.peers
        for b in made.peers
        if a != b
    }
    heavy = tuple(msgspec.structs.replace(block, forward_flops=1e9, backward_flops=2e9) for block in made.blocks)
    made = msgspec.structs.replace(made, links=links, blocks=heavy)
    groups = divide(made, 2)
    assert {frozenset(group.peers) for group in groups} == {frozenset(side) for side in sides}


def test_as_many_as_pay() -> None:
    """Machines that hold the model alone need no pipelines; a slow one beside fast ones would set the steps_per_s of
    all."""
    assert len(fastest(pool(1, 1, 1), 8)) == 3
    assert len(fastest(pool(9, 9, 1), 8)) == 2


def test_slow_lines_make_replicas_fewer_unless_they_exchange_seldom() -> None:
    made = pool(1, 1, 1, 1)
    slow = Link(bandwidth_bytes_per_s=1e5, latency_s=0.0)
    peers = tuple(msgspec.structs.replace(peer, uplink=slow, downlink=slow) for peer in made.peers)
    often, seldom = Exchanging(every=1, codec="none"), Exchanging(every=1000, codec="int4")
    assert len(fastest(made, 4, often)) == 4
    narrow = msgspec.structs.replace(made, peers=peers)
    assert len(fastest(narrow, 4, often)) == 1
    assert len(fastest(narrow, 4, seldom)) == 4
    assert made.owner is not None
    narrow = msgspec.structs.replace(made, owner=msgspec.structs.replace(made.owner, uplink=slow, downlink=slow))
    assert len(fastest(narrow, 4, often)) == 4, "the owner's line carries decisions only"


def test_an_exchange_between_machines_takes_as_long_as_the_slowest_line_needs() -> None:
    """By hand: 4000 bytes at each of three machines, the rest at the owner; shares 1/2, 1/4 and 1/4 by uplinks."""
    made = pool(1, 1, 1)
    links = [Link(bandwidth_bytes_per_s=speed, latency_s=0.001) for speed in (2e5, 1e5, 1e5)]
    peers = tuple(
        msgspec.structs.replace(peer, uplink=link, downlink=link) for peer, link in zip(made.peers, links, strict=True)
    )
    made = msgspec.structs.replace(made, peers=peers)
    groups = divide(made, 3)
    exchange = Exchanging(every=1, codec="none")
    assert exchange_s(made, groups, exchange) == pytest.approx((3 / 4 + 2 / 4) * 4000 / 1e5 + 0.004)
    assert exchange_s(made, groups[:1], exchange) == 0.0


def test_what_travels_beside_steps_costs_what_they_do_not_hide() -> None:
    made = pool(1, 1)
    groups = divide(made, 2)
    step_s = max(group.plan.step_time_s for group in groups)
    exchanging = [Exchanging(every=10, codec="none", lag=lag) for lag in (0, 2, 5, 9)]
    peer = made.peers[0]
    once_s = exchange_s(made, groups, exchanging[0]) - 2 * (peer.uplink.latency_s + peer.downlink.latency_s)
    nbytes = once_s * min(peer.uplink.bandwidth_bytes_per_s, peer.downlink.bandwidth_bytes_per_s)
    line = Link(bandwidth_bytes_per_s=nbytes / (5 * step_s), latency_s=0.0)
    made = msgspec.structs.replace(
        made, peers=tuple(msgspec.structs.replace(one, uplink=line, downlink=line) for one in made.peers)
    )
    assert exchange_s(made, groups, exchanging[0]) == pytest.approx(5 * step_s)
    found = [steps_per_s(made, groups, one) for one in exchanging]
    assert found == pytest.approx([2 / (1.5 * step_s), 2 / (1.3 * step_s), 2 / step_s, 2 / step_s])
    assert steps_per_s(made, groups) == pytest.approx(2 / step_s)


def test_exchanging_takes_the_memory_that_the_state_has() -> None:
    plain, apart = (state_bytes_ratio(OptimizerSpec(anchored=anchors)) for anchors in (False, True))
    assert pool(1).optimizer_bytes_per_trainable_byte == plain
    assert anchored(pool(1)).optimizer_bytes_per_trainable_byte == apart


@pytest.mark.slow
@given(made=problems(most_peers=4))
@settings(max_examples=examples(10), deadline=None)
def test_no_number_of_groups_is_faster(made: Problem) -> None:
    free = msgspec.structs.replace(made, stages=None, required=())
    try:
        best = fastest(free, 3)
    except PlanError:
        return
    assert all(steps_per_s(free, best) >= steps_per_s(free, divide(free, count)) for count in (1, 2, 3))


@pytest.mark.slow
@given(made=problems(most_peers=6), most=st.integers(1, 4))
@settings(max_examples=examples(30), deadline=None)
def test_nobody_is_in_two_groups_and_every_group_has_the_planners_plan(made: Problem, most: int) -> None:
    free = msgspec.structs.replace(made, stages=None, required=())
    try:
        groups = divide(free, most)
    except PlanError:
        with pytest.raises(PlanError):
            planned(free)
        return
    assert 1 <= len(groups) <= most
    named = [peer for group in groups for peer in group.peers]
    assert sorted(named) == sorted({one.peer for one in free.peers} - set(free.excluded))
    known: dict[str, PeerProfile] = {one.peer: one for one in free.peers}
    for group in groups:
        assert planned(among(free, [known[peer] for peer in group.peers])) == group.plan
    assert divide(free, most) == groups


@pytest.mark.slow
def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large pools not every exchange is tried."""
    from fusionai.scheduling.training import replicated as replica_groups

    made = 0

    def counted(one: Problem) -> object:
        nonlocal made
        made += 1
        return planned(one)

    monkeypatch.setattr(replica_groups, "planned", counted)
    divide(pool(*(1 + number % 7 for number in range(24))), 4)
    assert made <= MOST_TRIES + 2 + 4
