"""Whose machine is whose among replicas."""

from __future__ import annotations

from typing import Any

from fusionai.client.pool.session import PoolMember
from fusionai.client.training.replica_crews import Crews
from fusionai.primitives.ids import JobId
from harness.told_pool import member


def crews() -> Crews:
    made = Crews()
    made.give(0, ["a", "b"])
    made.give(1, ["c"])
    made.know(0, JobId("job-0"))
    made.know(1, JobId("job-1"))
    return made


def works(name: str, job: str) -> PoolMember:
    return member(name, state="active", job=job)


def kept_out(made: Crews, number: int, *members: PoolMember, in_need: bool = False) -> set[str]:
    return set(made.kept_out(number, members, in_need=in_need))


def test_everybody_has_their_own() -> None:
    members = works("a", "job-0"), member("b"), works("c", "job-1")
    assert kept_out(crews(), 0, *members) == {"c"}
    assert kept_out(crews(), 1, *members) == {"a", "b"}


def test_a_new_machine_goes_to_the_weakest() -> None:
    members = works("a", "job-0"), member("b"), works("c", "job-1"), member("d")
    assert kept_out(crews(), 1, *members) == {"a", "b"}
    assert kept_out(crews(), 0, *members) == {"c", "d"}


def test_new_machines_are_kept_for_whoever_waits_until_they_are_not_enough() -> None:
    made = crews()
    made.someone_waits = True
    members = works("a", "job-0"), member("b"), works("c", "job-1"), member("d")
    assert "d" in kept_out(made, 0, *members)
    assert "d" in kept_out(made, 1, *members)
    made.see(members, share_out=True)
    assert "d" not in kept_out(made, 1, *members)


def test_whose_machines_are_lost_is_weak() -> None:
    members = member("a", state="lost"), member("b", state="lost"), works("c", "job-1"), member("d")
    assert "d" not in kept_out(crews(), 0, *members)


def test_new_machines_are_spread() -> None:
    made = crews()
    made.see([works("a", "job-0"), member("b"), works("c", "job-1"), member("d"), member("e"), member("f")])
    mine = {name for name in "abcdef" if name not in kept_out(made, 0, *map(member, "abcdef"))}
    assert len(mine) == 3


def test_in_need_anybody_who_stands_by_will_do() -> None:
    members = works("a", "job-0"), member("b"), member("c", state="lost")
    assert kept_out(crews(), 1, *members, in_need=True) == {"a"}


def test_in_need_its_own_come_first() -> None:
    members = works("a", "job-0"), member("b"), member("c")
    assert kept_out(crews(), 1, *members, in_need=True) == {"a", "b"}


def test_nobody_takes_who_rests_or_clears() -> None:
    changes: dict[str, Any] = {"rests_s": 5.0}
    members = member("a", **changes), member("b", clears="another"), works("c", "job-1")
    assert kept_out(crews(), 1, *members, in_need=True) == {"a", "b"}


def test_who_works_for_another_one_now_is_the_others() -> None:
    made = crews()
    made.see([works("b", "job-1")])
    assert kept_out(made, 0, member("a"), member("b"), member("c")) == {"b", "c"}


def test_who_has_ended_leaves_machines_to_the_others() -> None:
    made = crews()
    made.forget(0)
    members = member("a"), member("b"), works("c", "job-1")
    assert kept_out(made, 1, *members) == set()
    assert kept_out(made, 0, *members) == {"a", "b", "c"}
