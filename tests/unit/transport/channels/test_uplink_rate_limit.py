"""Limits of a machine's connections: no window of time carries more, small frames pass by, large ones are sliced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.transport.channels.uplink import BURST_S, SMALL_DEBT_S, RateLimit, TransferLimits

RATE = 2_500_000.0


@settings(deadline=None, derandomize=True)
@given(
    rate=st.floats(1e3, 1e9),
    steps=st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 2)), min_size=1, max_size=50),
)
def test_whoever_waits_as_told_keeps_the_limit_over_every_window(rate: float, steps: list[tuple[int, float]]) -> None:
    limit, now_s = RateLimit(rate), 0.0
    sent: list[tuple[float, int]] = []
    for nbytes, pause_s in steps:
        now_s += pause_s
        now_s += limit.take(nbytes, now_s)
        sent.append((now_s, nbytes))
    for first, (begin_s, _) in enumerate(sent):
        for last in range(first, len(sent)):
            # What waited was paid for before the window began: the first piece is no part of it.
            carried = sum(nbytes for _, nbytes in sent[first + 1 : last + 1])
            allowed = rate * (sent[last][0] - begin_s + BURST_S)
            assert carried <= allowed * (1 + 1e-6) + 1


def test_an_idle_line_saves_up_one_burst_and_no_more() -> None:
    limit = RateLimit(RATE)
    assert limit.take(int(RATE * BURST_S), 100.0) == 0.0
    assert limit.take(int(RATE), 100.0) == pytest.approx(1.0)
    assert limit.take(0, 1000.0) == 0.0
    assert limit.take(int(RATE * (BURST_S + 0.5)), 1000.0) == pytest.approx(0.5)


def test_a_clock_that_steps_back_pays_nothing_and_costs_nothing() -> None:
    limit = RateLimit(RATE)
    waited_s = limit.take(int(RATE), 50.0)
    assert limit.take(0, 10.0) == pytest.approx(waited_s)
    assert limit.take(0, 10.0 + waited_s) == pytest.approx(0.0)


def test_small_frames_pass_by_a_small_debt_only() -> None:
    limit = RateLimit(RATE)
    limit.take(int(RATE * (BURST_S + SMALL_DEBT_S)), 0.0)
    assert limit.admits_small(0.0)
    limit.take(1000, 0.0)
    assert not limit.admits_small(0.0)
    assert limit.admits_small(0.1)


@pytest.mark.parametrize(("rate", "expected"), [(1e9, 262_144), (RATE, 50_000), (1_000.0, 1024)])
def test_slices_take_a_moment_each(rate: float, expected: int) -> None:
    assert RateLimit(rate).slice_bytes(262_144) == expected


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_no_limit_is_said_by_none(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RateLimit(rate)
    assert TransferLimits().upload is None
    assert TransferLimits().download is None
