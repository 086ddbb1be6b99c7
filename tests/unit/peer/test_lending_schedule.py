"""Windows of the week in which a machine is lent."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.peer.lending import DAYS, parse_schedule
from fusionai.primitives.errors import UsageError
from harness.examples import examples

MONDAY = datetime(2024, 1, 1)


def at(text: str) -> datetime:
    """`fri 22:30` of one week."""
    day, time = text.split()
    hours, minutes = time.split(":")
    return MONDAY + timedelta(days=DAYS.index(day), hours=int(hours), minutes=int(minutes))


@pytest.mark.parametrize(
    ("entries", "lent", "kept"),
    [
        (["22:00-07:00"], ["mon 22:00", "tue 06:59", "mon 00:00", "sun 23:00"], ["mon 07:00", "wed 21:59"]),
        (["09:00-17:30"], ["mon 09:00", "sun 17:29"], ["mon 08:59", "mon 17:30"]),
        (["fri 22:00-07:00"], ["fri 22:00", "sat 06:59"], ["fri 06:00", "sat 07:00", "sat 22:00"]),
        (["sun 22:00-07:00"], ["sun 22:00", "mon 06:00"], ["mon 22:00", "sun 06:00"]),
        (["mon-fri 18:00-24:00", "sat,sun"], ["fri 23:59", "sat 00:00", "sun 12:00"], ["mon 17:59", "mon 00:00"]),
        (["sat-mon"], ["sat 00:00", "sun 12:00", "mon 23:59"], ["tue 00:00", "fri 23:59"]),
        (["  Sat , SUN  00:00-24:00 "], ["sat 00:00", "sun 23:59"], ["mon 00:00"]),
        (["00:00-24:00"], ["wed 12:00"], []),
    ],
)
def test_windows(entries: list[str], lent: list[str], kept: list[str]) -> None:
    schedule = parse_schedule(entries)
    assert [time for time in lent if not schedule.lent(at(time))] == []
    assert [time for time in kept if schedule.lent(at(time))] == []


@pytest.mark.parametrize(
    ("entries", "now", "expected"),
    [
        (["22:00-07:00"], "mon 12:00", "mon 22:00"),
        (["22:00-07:00"], "mon 22:00", "tue 07:00"),
        (["sat,sun"], "fri 12:00", "sat 00:00"),
        (["sat 00:00-24:00", "sun 00:00-12:00"], "sat 01:00", "sun 12:00"),
        (["20:00-22:00", "21:00-23:00"], "mon 20:30", "mon 23:00"),
    ],
)
def test_when_that_changes(entries: list[str], now: str, expected: str) -> None:
    assert parse_schedule(entries).next_change(at(now)) == at(expected)


@pytest.mark.parametrize("entries", [["00:00-24:00"], ["mon-sun"], ["00:00-12:00", "12:00-24:00"]])
def test_always_never_changes(entries: list[str]) -> None:
    schedule = parse_schedule(entries)
    assert schedule.lent(at("thu 03:00"))
    assert schedule.next_change(at("thu 03:00")) is None


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            lambda days, begin, length: (
                f"{days}{begin // 60}:{begin % 60:02}-{(begin + length) % 1440 // 60}:{(begin + length) % 60:02}"
            ),
            st.sampled_from(["", "mon ", "sat-mon ", "tue,thu "]),
            st.integers(0, 1439),
            st.integers(1, 1439),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 7 * 1440 - 1),
    st.integers(0, 59),
)
def test_nothing_changes_before_the_next_change(entries: list[str], minute: int, second: int) -> None:
    schedule = parse_schedule(entries)
    now = MONDAY + timedelta(minutes=minute, seconds=second)
    change = schedule.next_change(now)
    later = [MONDAY + timedelta(minutes=minute + 1 + ahead) for ahead in range(7 * 1440)]
    first = next((time for time in later if schedule.lent(time) != schedule.lent(now)), None)
    assert change == first


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", "expected a time such as"),
        ("always", "days such as mon"),
        ("22-7", "expected a time such as"),
        ("25:00-26:00", "from 00:00 to 24:00"),
        ("10:75-11:00", "from 00:00 to 24:00"),
        ("mon-frx 10:00-11:00", "got 'frx'"),
        ("10:00-10:00", "ends when it begins"),
    ],
)
def test_what_is_no_schedule_gets_a_sentence(entry: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_schedule([entry])
