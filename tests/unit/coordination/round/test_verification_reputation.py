"""How much of whose work is checked: BOINC's rule over stretches, its floor, and that nobody can know what is drawn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.round.verification import (
    CHEATED,
    LEAST,
    MISSED,
    MOST,
    NEEDED,
    PROMISED_TASKS,
    Reputation,
    drawn,
    floor,
)


def held(times: int) -> Reputation:
    reputation = Reputation()
    for _ in range(times):
        reputation = reputation.held()
    return reputation


def test_a_newcomer_is_checked_until_ten_stretches_held():
    assert [held(times).chance(1) for times in range(NEEDED)] == [1.0] * NEEDED
    assert held(NEEDED).chance(1) == 0.1


def test_trust_grows_and_never_ends_checks():
    chances = [held(times).chance(4) for times in range(NEEDED, 200)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] == floor(4) >= LEAST


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 500), st.sampled_from(["", "somebody"]))
def test_one_that_does_not_hold_begins_again(times: int, partner: str):
    doubted = held(times).doubted(partner)
    assert doubted.chance(1) == 1.0
    assert doubted.held().partners == doubted.partners == ({partner} if partner else set())


def found_within_tasks(tasks: int) -> float:
    """By how many tasks a trusted peer that falsifies `CHEATED` of them is found in all but `MISSED` of cases: checked
    at the floor, in stretches of `tasks`."""
    caught = floor(tasks) * (1 - (1 - CHEATED) ** tasks)
    stretches, left = 0, 1.0
    while left > MISSED:
        stretches, left = stretches + 1, left * (1 - caught)
    return float(stretches * tasks)


@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
def test_short_stretches_keep_the_promise(tasks: int):
    assert found_within_tasks(tasks) <= PROMISED_TASKS + tasks


def test_long_stretches_are_not_checked_for_more_than_it_is_worth():
    assert floor(64) == MOST
    assert found_within_tasks(64) > PROMISED_TASKS


def test_single_tasks_need_a_twentieth():
    assert floor(1) == pytest.approx(0.05, rel=0.01)


@settings(deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.floats(0, 1))
def test_what_is_drawn_follows_from_the_secret(secret: bytes, chance: float):
    assert drawn(secret, "p", 1, 2, chance) == drawn(secret, "p", 1, 2, chance)
    assert drawn(secret, "p", 1, 2, 1.0)
    assert not drawn(secret, "p", 1, 2, 0.0)


def test_as_many_are_drawn_as_the_chance_says_and_others_under_another_secret():
    one = [drawn(b"a" * 32, "p", 1, first, 0.3) for first in range(4000)]
    other = [drawn(b"b" * 32, "p", 1, first, 0.3) for first in range(4000)]
    assert sum(one) == pytest.approx(1200, abs=120)
    both = sum(x and y for x, y in zip(one, other, strict=True))
    assert both == pytest.approx(360, abs=80)  # as of independent coins
