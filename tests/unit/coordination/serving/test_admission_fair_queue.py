"""The queue: who is next among scopes, what is charged to whom, where places end."""

from __future__ import annotations

import pytest

from fusionai.coordination.serving.admission import FairQueue


def order(queue: FairQueue, charged: dict[int, tuple[str, int]]) -> list[int]:
    """Everybody in the order of admission; each pays what it is charged."""
    admitted: list[int] = []
    while (first := queue.first) is not None:
        assert queue.pop() == first
        queue.charge(*charged[first])
        admitted.append(first)
    return admitted


def test_the_scope_that_was_given_least_is_next_and_the_older_request_of_two_that_are_even() -> None:
    queue = FairQueue(8)
    charged = {1: ("a", 10), 2: ("a", 10), 3: ("b", 4), 4: ("b", 4), 5: ("b", 4)}
    for number, (scope, _) in charged.items():
        queue.push(number, scope)
    assert order(queue, charged) == [1, 3, 4, 5, 2]


def test_nobody_saves_up_by_being_away() -> None:
    """Who comes anew starts level with the least served of those present, or where the last that left had come to."""
    queue = FairQueue(8)
    queue.push(1, "a")
    queue.pop()
    queue.charge("a", 100)
    queue.push(2, "a")
    queue.push(3, "b")
    assert order(queue, {2: ("a", 1), 3: ("b", 1)}) == [2, 3]
    for number, scope in ((1, "a"), (2, "a"), (3, "b")):
        queue.leave(number, scope)
    queue.push(4, "c")
    queue.charge("c", 1)
    queue.push(5, "d")
    queue.push(6, "c")
    queue.leave(4, "c")
    assert order(queue, {5: ("d", 2), 6: ("c", 0)}) == [5, 6]


def test_a_scope_keeps_what_it_was_given_while_one_of_its_sessions_lives() -> None:
    queue = FairQueue(8)
    for number in (1, 2):
        queue.push(number, "a")
    queue.push(3, "b")
    queue.pop()
    queue.charge("a", 50)
    queue.leave(1, "a")
    queue.push(4, "b")
    assert order(queue, {2: ("a", 1), 3: ("b", 1), 4: ("b", 1)}) == [3, 4, 2]


def test_a_scope_keeps_what_it_was_given_when_it_sends_more() -> None:
    queue = FairQueue(8)
    queue.push(1, "a")
    queue.push(2, "b")
    queue.pop()
    queue.charge("a", 50)
    queue.push(3, "a")
    queue.push(4, "b")
    assert order(queue, {2: ("b", 1), 3: ("a", 1), 4: ("b", 1)}) == [2, 4, 3]


def test_a_scope_whose_sessions_are_all_over_comes_anew() -> None:
    queue = FairQueue(8)
    queue.push(1, "a")
    queue.push(2, "b")
    queue.pop()
    queue.charge("a", 50)
    queue.leave(1, "a")
    queue.pop()
    queue.charge("b", 5)
    for number, scope in ((3, "b"), (4, "a"), (5, "b")):
        queue.push(number, scope)
    assert order(queue, {3: ("b", 1), 4: ("a", 1), 5: ("b", 1)}) == [3, 4, 5]


def test_who_had_to_make_room_comes_before_all_others_the_oldest_first() -> None:
    queue = FairQueue(8)
    for number in (1, 2, 3):
        queue.push(number, "a")
    assert (queue.pop(), queue.pop()) == (1, 2)
    queue.push_back(2)
    queue.push_back(1)
    assert list(queue) == [1, 2, 3]
    assert len(queue) == 3
    assert [queue.pop() for _ in range(3)] == [1, 2, 3]
    assert queue.first is None
    with pytest.raises(IndexError, match="no session waits"):
        queue.pop()


def test_whoever_is_over_waits_no_more_wherever_it_was() -> None:
    queue = FairQueue(8)
    for number in (1, 2, 3):
        queue.push(number, "a")
    queue.pop()
    queue.push_back(1)
    queue.leave(1, "a")
    queue.leave(3, "a")
    assert list(queue) == [2]
    queue.leave(2, "a")
    assert (len(queue), queue.first) == (0, None)


def test_one_scope_gets_three_quarters_of_the_places_and_those_about_to_be_admitted_take_none() -> None:
    queue = FairQueue(4)
    for number in (1, 2, 3):
        assert queue.has_room("a", 0)
        queue.push(number, "a")
    assert not queue.has_room("a", 0)
    assert queue.has_room("a", 1)
    assert queue.has_room("b", 0)
    queue.push(4, "b")
    assert not queue.has_room("b", 0)
    assert queue.has_room("b", 1)
    queue.pop()
    queue.push_back(1)
    assert queue.has_room("b", 0)
    assert FairQueue(1).has_room("a", 0)
    with pytest.raises(ValueError, match="got 0"):
        FairQueue(0)


def test_scopes_take_turns_in_a_pass() -> None:
    queue = FairQueue(4)
    assert queue.rank(((4, "a"), (2, "a"), (9, "b"), (1, "a"), (3, "b"))) == [4, 9, 2, 3, 1]
