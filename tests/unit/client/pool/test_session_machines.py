"""Which members are of one machine is the broker's word, and a job takes one part of each device."""

from __future__ import annotations

import msgspec

from fusionai.client.pool.session import PoolMember, members_of, one_part_each
from fusionai.wire.messages import PoolView
from harness.told_pool import member


def part(name: str, machine: str = "", **changes: object) -> PoolMember:
    made = member(name)
    return PoolMember(made.view, msgspec.structs.replace(made.profile, machine=machine, **{"parts": 2, **changes}))


def names(members: tuple[PoolMember, ...]) -> list[str]:
    return [one.view.peer for one in members]


def test_a_device_can_not_say_that_it_is_of_another_machine() -> None:
    card = member("b")
    liar = msgspec.structs.replace(card.profile, machine="c")
    shown = msgspec.Raw(msgspec.msgpack.encode(liar))
    views = (
        msgspec.structs.replace(member("a").view, profile=shown),
        msgspec.structs.replace(card.view, profile=shown, machine="a"),
    )
    assert [one.profile.machine for one in members_of(PoolView(members=views))] == ["", "a"]


def test_a_job_takes_one_part_of_each_device() -> None:
    halves, others = (part("a"), part("a2", "a")), (part("b"), part("b2", "b"))
    assert names(one_part_each((*halves, *others, member("c")))) == ["a", "b", "c"]
    cards = (part("d", device="cuda:0"), part("d2", "d", device="cuda:1"))
    assert names(one_part_each(cards)) == ["d", "d2"], "they are two devices"
    assert names(one_part_each((*halves, *others), [halves[1]])) == ["a2", "b"]
    assert names(one_part_each(others, [part("b3", "b")])) == []
    both = one_part_each(halves, halves)
    assert names(both) == ["a", "a2"], "what a job has it keeps"
