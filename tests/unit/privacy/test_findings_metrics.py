"""What counts as recovered, held against definitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.privacy.findings import Budget, Truth, chance, longest_common, recovery, rouge_l, wilson

SHORT = st.lists(st.integers(0, 3), max_size=7)


def as_letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def plainly(one: list[int], other: list[int]) -> int:
    """The longest common subsequence, by trying every one."""

    def within(part: Sequence[int], whole: list[int]) -> bool:
        left = iter(whole)
        return all(token in left for token in part)

    sizes = range(len(one), 0, -1)
    return next((size for size in sizes if any(within(part, other) for part in combinations(one, size))), 0)


@given(SHORT, SHORT)
def test_the_longest_common_subsequence_is_that(one: list[int], other: list[int]):
    assert longest_common(one, other) == longest_common(other, one) == plainly(one, other)


@given(SHORT, SHORT)
def test_rouge_is_all_for_equals_and_nothing_for_strangers(one: list[int], other: list[int]):
    assert 0 <= rouge_l(one, other) <= 1
    assert (rouge_l(one, one) == 1) == bool(one)
    assert rouge_l(one, [token + 10 for token in other]) == 0


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_interval_holds_the_share(right: int, wrong: int):
    low, high = wilson(right, right + wrong)
    assert 0 <= low <= high <= 1
    if right + wrong:
        assert low <= right / (right + wrong) <= high
        assert high - low >= wilson(10 * right, 10 * (right + wrong))[1] - wilson(10 * right, 10 * (right + wrong))[0]


def test_the_interval_is_wilsons():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_recovery_counts_tokens_in_place_and_secrets_exactly():
    truth = Truth(((0, 1, 2, 3), (4, 5, 6, 7)), ("bc", "gh"), as_letters)
    found = recovery("white-box", [(0, 1, 2, 9), (5, 4, 6, 7)], truth, Budget(forward_tokens=1, seconds=0.0))
    assert (found.tokens, found.top1) == (8, 5 / 8)
    assert (found.secrets, found.secrets_found) == (2, 2)
    worse = recovery("white-box", [(0, 1, 9, 2), (4, 5, 6)], truth, Budget(forward_tokens=1, seconds=0.0))
    assert worse.secrets_found == 0
    assert worse.top1 == 5 / 8


def test_a_text_without_a_secret_counts_none():
    truth = Truth(((0, 1),), ("",), as_letters)
    assert recovery("nearest", [(0, 1)], truth, Budget(forward_tokens=1, seconds=0.0)).secrets == 0


def test_chance_is_the_commonest_token_of_what_the_attacker_has():
    truth = Truth(((0, 1, 1, 2), (1, 1, 0, 3)), ("", ""), as_letters)
    assert chance([1, 1, 0], truth) == 4 / 8
    assert chance([3, 3, 1], truth) == 1 / 8
