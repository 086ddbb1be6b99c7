"""Credit per stage: figures worked out by hand, and what holds for all pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.scheduling.training.pipeline import SPARE, TARGET, credits_needed
from harness.examples import examples


def test_without_links_it_is_one_more_than_stages_from_there_on_and_one_at_the_last() -> None:
    assert credits_needed([1.0] * 4, [0.0] * 3, 1.0) == (5, 4, 3, 1)


def test_a_short_trip_costs_busy_stages_a_whole_period_each() -> None:
    # 0.2 of a period late is more than the 0.03 it may lose: each backward waits for the next turn.
    assert credits_needed([1.0] * 4, [0.2] * 3, 1.0) == (8, 6, 4, 1)
    # Trips within that may pile up until one stage has to wait.
    assert credits_needed([1.0] * 4, [0.045] * 3, 1.0) == (6, 4, 3, 1)


def test_idle_stages_take_a_gradient_when_it_comes() -> None:
    # The period is another stage's: 0.3 of work leaves room for a backward almost any time.
    assert credits_needed([0.3, 0.3, 0.3, 1.0], [0.2] * 3, 1.0) == (4, 3, 3, 1)


def test_a_long_trip_is_hidden() -> None:
    # 1 + 5.0 / 1 of work and trip, in turns of 1 / TARGET: 5.82 turns, so 6, and the two at both ends.
    assert credits_needed([1.0, 1.0], [5.0], 1.0) == (6 + 1 + SPARE, 1)


def test_a_single_stage_has_one() -> None:
    assert credits_needed([0.5], [], 0.5) == (1,)


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[float], list[float], float]:
    count = draw(st.integers(1, 9))
    compute_s = draw(st.lists(st.floats(0.01, 1.0), min_size=count, max_size=count))
    trip_s = draw(st.lists(st.floats(0.0, 5.0), min_size=count - 1, max_size=count - 1))
    return compute_s, trip_s, max(compute_s) * draw(st.floats(1.0, 2.0))


@pytest.mark.slow
@given(lines(), st.data())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_enough_for_1f1b_and_little_and_never_fewer_for_longer_trips(
    line: tuple[list[float], list[float], float], data: st.DataObject
) -> None:
    compute_s, trip_s, period_s = line
    found = credits_needed(compute_s, trip_s, period_s)
    count = len(compute_s)
    for stage, credit in enumerate(found):
        assert credit >= count - stage
        whole_s = sum(compute_s[stage:]) + sum(trip_s[stage:])
        assert whole_s / credit <= period_s * (1 + 1e-6), "the closed form would say that credit holds it up"
        # A wait is at most a turn per stage.
        assert credit <= max(count - stage, whole_s / period_s + 2 * (count - stage) + SPARE)
    assert sorted(found, reverse=True) == list(found)
    if trip_s:
        at = data.draw(st.integers(0, len(trip_s) - 1))
        longer = [*trip_s[:at], trip_s[at] + data.draw(st.floats(0.0, 3.0)), *trip_s[at + 1 :]]
        more = credits_needed(compute_s, longer, period_s)
        assert all(one <= other for one, other in zip(found, more, strict=True))


@given(lines())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_a_timetable_with_these_credits_exists(line: tuple[list[float], list[float], float]) -> None:
    """Every stage's forward and backward have their own part of each turn, and no more are in flight than allowed."""
    compute_s, trip_s, period_s = line
    found = credits_needed(compute_s, trip_s, period_s)
    turn_s = period_s / TARGET
    ready_s = 0.0
    for stage in range(len(compute_s) - 1, -1, -1):
        below = 0.0 if stage == len(compute_s) - 1 else ready_s + compute_s[stage + 1] + trip_s[stage]
        late_s = below % turn_s
        ready_s = below
        if late_s > turn_s - compute_s[stage] + 1e-6 * turn_s:
            ready_s += turn_s - late_s
        # The forward of the microbatch that begins now and all whose backward has not ended.
        in_flight = 1 + int((ready_s + compute_s[stage]) / turn_s - 1e-6)
        assert in_flight <= found[stage] + 1e-9, stage
