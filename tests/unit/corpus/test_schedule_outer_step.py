"""What local updates take where nothing is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusionai.corpus.schedule import outer_step


def test_short_jobs_forget_sooner() -> None:
    assert outer_step(1) == outer_step(40) == (1.0, 0.5)
    assert outer_step(200) == outer_step(10**6) == (0.7, 0.9)
    assert outer_step(80) == (0.812, 0.75)


@given(st.integers(1, 10**4))
def test_more_rounds_never_forget_sooner_nor_step_farther_at_once(rounds: int) -> None:
    rate, momentum = outer_step(rounds)
    more_rate, more_momentum = outer_step(rounds + 1)
    assert 0.5 <= momentum <= more_momentum <= 0.9
    assert 0.7 <= more_rate <= rate <= 1.0
