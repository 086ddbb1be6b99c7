"""Rounds of replicas that exchange between their machines: when they are decided, and how long they are kept."""

from __future__ import annotations

from fusionai.coordination.training.exchanges import Exchanges
from fusionai.coordination.training.joint_rounds import ExchangingReplica, JointRound, Newcomer, RoundBook

BOTH = (ExchangingReplica(job="a", weight=1.0), ExchangingReplica(job="b", weight=2.0))


def book() -> RoundBook:
    made = RoundBook(expected={"a": 0, "b": 0})
    made.place("a", [0, 1], 1.0)
    made.place("b", [0, 1], 2.0)
    return made


def all_wait(made: RoundBook, step: int) -> None:
    for job in ("a", "b"):
        for stage in (0, 1):
            made.waits(job, stage, step)


def test_a_round_is_decided_when_every_stage_of_every_replica_waits() -> None:
    made = book()
    for job, stage in (("a", 0), ("a", 1), ("b", 1)):
        made.waits(job, stage, 4)
        assert made.decide() is None
    made.waits("b", 0, 4)
    assert made.decide() == JointRound(number=1, step=4, members=BOTH)
    assert made.decide() is None, "once"
    assert made.waiting(1) == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_a_replica_that_ended_is_not_waited_for() -> None:
    made = book()
    made.waits("a", 0, 4)
    made.waits("a", 1, 4)
    assert made.waits_in_vain(["a"])
    made.leave("b")
    decided = made.decide()
    assert decided is not None
    assert decided.members == BOTH[:1]
    made.expected["b"] = 0
    made.place("b", [0], 1.0)
    assert not made.is_lost("b", 4), "it can catch up"
    assert made.is_lost("b", 3), "it can't take part any more"


def test_a_round_is_decided_again_without_a_replica_that_ends_in_it() -> None:
    made = book()
    all_wait(made, 4)
    made.decide()
    assert made.leave("b") == []
    assert made.decide() == JointRound(number=2, step=4, members=BOTH[:1])
    late = book()
    all_wait(late, 4)
    late.decide()
    agreeing = [(job, stage) for job in ("a", "b") for stage in (0, 1)]
    assert [late.agrees(job, stage, 1) for job, stage in agreeing] == [False, False, False, True]
    assert late.leave("b") == []
    assert late.decide() is None, "every stage has all means, and may have adopted them"
    assert late.stuck(frozenset()) == set(), "they have only to adopt it"
    late.place("a", [0, 1], 1.0)
    late.waits("a", 0, 4)
    late.waits("a", 1, 4)
    assert late.agrees("a", 0, 1), "again, after a fault"
    assert late.stuck(frozenset()) == {"a"}, "a stage of it that is not there can't get what b sent"
    late.applied("a", 0, 5)
    late.applied("a", 1, 5)
    assert late.stuck(frozenset()) == set()


def test_a_stage_that_begins_again_agrees_again() -> None:
    made = book()
    all_wait(made, 4)
    made.decide()
    agreeing = [(job, stage) for job in ("a", "b") for stage in (0, 1)]
    for job, stage in agreeing[:3]:
        assert not made.agrees(job, stage, 1)
    made.place("a", [0, 1], 1.0)
    assert not made.agrees("b", 1, 1), "a has lost what it had"
    assert made.stuck(frozenset({"a", "z"})) == {"a"}
    assert made.left_out(4, frozenset({"a", "z"})) == {"a"}
    assert made.left_out(9, frozenset()) == {"a", "b"}, "of the round after, both are missing"
    assert not made.agrees("a", 0, 1)
    assert made.agrees("a", 1, 1)
    assert made.whole == 1


def test_a_stage_that_runs_the_step_again_finds_the_same_round() -> None:
    made = book()
    all_wait(made, 4)
    made.decide()
    for job in ("a", "b"):
        for stage in (0, 1):
            made.applied(job, stage, 5)
    assert not made.is_awaited(1)
    assert made.is_settled("a")
    made.place("b", [0, 1], 2.0)
    assert made.waits("b", 0, 4) == [1]
    assert made.decide() is None
    assert not made.is_settled("a")
    assert made.applied("a", 0, 5) == [1], "a stage that returned must serve it"
    assert made.place("b", [0, 1], 2.0) == [1]


def test_rounds_are_kept_while_a_member_may_run_them_again() -> None:
    made = book()
    for step in (4, 9, 14):
        all_wait(made, step)
        made.decide()
        for job in ("a", "b"):
            for stage in (0, 1):
                made.applied(job, stage, step + 1)
    made.needed_from("a", 10)
    assert (sorted(made.rounds), made.kept_from) == ([1, 2, 3], 1)
    made.needed_from("b", 8)
    assert (sorted(made.rounds), made.kept_from) == ([2, 3], 2)
    made.needed_from("b", 20)
    made.needed_from("a", 20)
    assert sorted(made.rounds) == [3], "the last one stays"


def test_with_overlap_a_stage_waits_until_it_has_adopted_the_update() -> None:
    made = book()
    made.exchanges = Exchanges(every=5, lag=2, steps=15)
    all_wait(made, 4)
    made.decide()
    for job in ("a", "b"):
        for stage in (0, 1):
            made.applied(job, stage, 6)
    assert made.is_awaited(1), "they train on meanwhile"
    assert made.applied("a", 0, 7) == [1]
    for job in ("a", "b"):
        made.needed_from(job, 6)
        for stage in (0, 1):
            made.applied(job, stage, 7)
    assert not made.is_awaited(1)
    all_wait(made, 9)
    made.decide()
    assert made.rounds.keys() == {1, 2}
    made.needed_from("a", 6)
    assert made.kept_from == 1, "a stage that begins again with the state after six steps adopts it once more"
    for job in ("a", "b"):
        made.needed_from(job, 7)
    assert made.kept_from == 2


def test_what_all_replicas_have_saved() -> None:
    made = with_newcomer(begun=5)
    assert made.saved_by("a", 12) == 0, "nothing is known of b"
    assert made.saved_by("b", 14) == 5, "c began there"
    assert made.saved_by("c", 10) == 10
    made.leave("c")
    assert made.saved_by("b", 20) == 12


def late_book() -> RoundBook:
    """Replica b has missed the round after step 4."""
    made = with_newcomer(begun=0)
    for stage in (0, 1):
        for job in ("a", "c"):
            made.waits(job, stage, 4)
    made.waits("b", 0, 4)
    assert made.left_out(4, frozenset()) == {"b"}
    assert made.may_catch_up("b", 4)
    made.misses("b", 4)
    decided = made.decide()
    assert decided is not None
    assert [member.job for member in decided.members] == ["a", "c"]
    return made


def test_a_late_replica_gets_the_agreed_state_and_takes_part_in_the_next_round() -> None:
    made = late_book()
    assert made.newcomers() == [], "its last stage has not come"
    assert made.waits("b", 1, 4) == []
    (found,) = made.newcomers()
    assert (found.job, found.stages, found.begun) == ("b", {0, 1}, 5)
    assert [sender.job for sender in found.senders] == ["a", "c"]
    assert not made.may_catch_up("b", 9), "while it does"
    for job in ("a", "b", "c"):
        for stage in (0, 1):
            made.applied(job, stage, 5)
    assert made.newcomers() == []
    for stage in (0, 1):
        for job in ("a", "c"):
            made.waits(job, stage, 9)
    assert made.decide() is None
    assert made.missing(9) == {"b"}
    for stage in (0, 1):
        made.waits("b", stage, 9)
    decided = made.decide()
    assert decided is not None
    assert [member.job for member in decided.members] == ["a", "b", "c"]
    assert made.caught_up == {"b"}
    assert made.overtaken() == set()


def test_a_replica_that_misses_two_rounds_can_not_catch_up() -> None:
    made = late_book()
    assert made.overtaken() == set()
    for step in (5, 10):
        for stage in (0, 1):
            for job in ("a", "c"):
                made.applied(job, stage, step)
                made.waits(job, stage, step + 4)
        made.decide()
    assert made.overtaken() == {"b"}
    assert made.is_lost("b", 4)


def test_a_round_with_a_late_replica_is_taken_back_unless_it_is_whole() -> None:
    made = book()
    all_wait(made, 4)
    made.decide()
    made.misses("b", 4)
    again = made.decide()
    assert again is not None
    assert (again.step, [member.job for member in again.members]) == (4, ["a"])
    made = book()
    all_wait(made, 4)
    made.decide()
    for job, stage in ((job, stage) for job in ("a", "b") for stage in (0, 1)):
        made.agrees(job, stage, 1)
    assert not made.may_catch_up("b", 4), "others may have adopted it"


def with_newcomer(begun: int = 5) -> RoundBook:
    made = book()
    made.expected["c"] = begun
    made.place("c", [0, 1], 3.0)
    return made


def test_a_replica_that_begins_later_is_not_waited_for_before() -> None:
    made = with_newcomer()
    all_wait(made, 4)
    assert made.missing(4) == set()
    decided = made.decide()
    assert decided is not None
    assert decided.members == BOTH
    for stage in (0, 1):
        for job in ("a", "b"):
            made.applied(job, stage, 5)
    all_wait(made, 9)
    assert made.next_step() == 9
    assert made.missing(9) == {"c"}
    assert made.decide() is None
    for stage in (0, 1):
        made.waits("c", stage, 9)
    decided = made.decide()
    assert decided is not None
    assert [member.job for member in decided.members] == ["a", "b", "c"]


def test_a_replica_that_begins_later_gets_its_state_from_the_members_of_the_round_before() -> None:
    made = with_newcomer()
    made.joins("c", 1)
    made.joins("c", 7)
    assert made.is_joining("c")
    assert made.newcomers() == [], "its round is not decided"
    all_wait(made, 4)
    made.decide()
    (found,) = made.newcomers()
    assert found == Newcomer(job="c", stages=frozenset({1}), begun=5, round=1, senders=BOTH)
    for stage in (0, 1):
        for job in ("a", "b"):
            made.agrees(job, stage, 1)
    for stage in (0, 1):
        for job in ("a", "b"):
            made.applied(job, stage, 5)
    made.leave("a")
    (found,) = made.newcomers()
    assert found.senders == BOTH[1:], "it still runs"
    made.applied("c", 1, 5)
    assert made.newcomers() == []
    assert not made.is_joining("c")


def test_a_replica_that_comes_too_late_has_no_senders() -> None:
    made = with_newcomer()
    del made.expected["c"]
    for step in (4, 9):
        all_wait(made, step)
        made.decide()
        for stage in (0, 1):
            for job in ("a", "b"):
                made.applied(job, stage, step + 1)
    made.expected["c"] = 5
    made.joins("c", 0)
    (found,) = made.newcomers()
    assert found.senders == ()


def test_the_others_of_a_stopped_replica_wait_in_vain() -> None:
    made = with_newcomer()
    made.waits("a", 0, 4)
    made.waits("a", 1, 4)
    assert made.waits_in_vain(["a"]), "b is missing"
    assert not made.waits_in_vain(["a", "b"])
    all_wait(made, 4)
    assert not made.waits_in_vain(["a", "b"]), "c takes part later"
    assert not made.waits_in_vain([])
