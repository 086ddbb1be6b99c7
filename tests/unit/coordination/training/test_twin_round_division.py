"""Division of parameters among replicas: every number belongs to exactly one, in proportion to the weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.coordination.training.twin_round import ROW, spans

WEIGHTS = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=64)


@given(size=st.integers(0, 10**9), weights=WEIGHTS, key=st.text(max_size=20))
def test_each_number_belongs_to_one_member(size: int, weights: list[float], key: str) -> None:
    found = spans(key, size, weights)
    assert len(found) == len(weights)
    assert (found[0][0], found[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(first <= below for first, below in found)
    assert all(first % ROW == 0 or first == size for first, _ in found), "groups of a codec stay whole"


def test_shares_follow_the_weights() -> None:
    found = spans("w", 1000 * ROW, [1.0, 2.0, 1.0])
    assert [below - first for first, below in found] == pytest.approx([250 * ROW, 500 * ROW, 250 * ROW], abs=ROW)


def test_small_parameters_go_to_different_members() -> None:
    owners = [
        next(
            member
            for member, (first, below) in enumerate(spans(f"layer.{number}.norm", 64, [1.0] * 4))
            if below > first
        )
        for number in range(400)
    ]
    assert all(60 < owners.count(member) < 140 for member in range(4))
