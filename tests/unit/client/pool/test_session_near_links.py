"""What machines of one home found of each other, as plans take it."""

from __future__ import annotations

import msgspec

from fusionai.client.pool.session import BETTER, MOST_MEMBERS, PoolMember, near_links
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import Link
from fusionai.wire.messages import LinkView, RouteKind
from harness.told_pool import member, problem

LINE = Link(bandwidth_bytes_per_s=2.5e6, latency_s=0.02)
LAN_BYTES_PER_S = 1e8


def lan(peer: str, bytes_per_s: float = LAN_BYTES_PER_S, route: RouteKind = "lan") -> LinkView:
    return LinkView(peer, route, 0, 0.001, probed_bytes_per_s=bytes_per_s)


def at_home(name: str, *links: LinkView) -> PoolMember:
    made = member(name, links=links)
    return PoolMember(made.view, msgspec.structs.replace(made.profile, uplink=LINE, downlink=LINE))


def test_what_one_side_found_counts_both_ways() -> None:
    link = Link(bandwidth_bytes_per_s=LAN_BYTES_PER_S, latency_s=0.0005)
    assert near_links([at_home("a", lan("b")), at_home("b")]) == {"a>b": link, "b>a": link}


def test_of_two_findings_the_slower_counts() -> None:
    found = near_links([at_home("a", lan("b")), at_home("b", lan("a", 5e7))])
    assert {link.bandwidth_bytes_per_s for link in found.values()} == {5e7}


def test_what_is_hardly_better_or_no_neighbour_is_left_out() -> None:
    barely = LINE.bandwidth_bytes_per_s * BETTER * 0.99
    assert near_links([at_home("a", lan("b", barely)), at_home("b")]) == {}
    assert near_links([at_home("a", lan("b", route="direct")), at_home("b")]) == {}
    assert near_links([at_home("a", lan("b", 0.0)), at_home("b")]) == {}
    assert near_links([at_home("a", lan("gone"), lan("a")), at_home("b")]) == {}


def test_of_large_pools_nothing_is_said() -> None:
    crowd = [at_home(f"p{number}", lan("p0")) for number in range(MOST_MEMBERS + 1)]
    assert near_links(crowd) == {}
    assert near_links(crowd[:-1])


def test_a_plan_keeps_much_traffic_within_a_home() -> None:
    """Two homes of two machines: the pipeline crosses the slow line once, whatever the machines are called."""
    members = [at_home("a"), at_home("b"), at_home("c", lan("a")), at_home("d", lan("b"))]
    posed = problem(*(one.profile for one in members))
    blocks = tuple(msgspec.structs.replace(one, output_bytes=100_000, gradient_bytes=100_000) for one in posed.blocks)
    posed = msgspec.structs.replace(posed, blocks=blocks[:4] + posed.blocks[4:], stages=4, links=near_links(members))
    order = [stage.peer for stage in plan(posed).stages[:-1]]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset("ac"), frozenset("bd")}
