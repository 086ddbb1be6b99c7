"""Silence becomes suspicion after the deadline, counted in the watcher's waking time."""

from __future__ import annotations

import pytest

from fusionai.coordination.silence import Silence


def ticks(silence: Silence, start_s: float, end_s: float) -> list[tuple[float, str]]:
    """Ticks every half second in (start, end]; when was who suspected?"""
    found: list[tuple[float, str]] = []
    now_s = start_s
    while now_s < end_s:
        now_s += 0.5
        found += [(now_s, who) for who in silence.tick(now_s)]
    return found


def test_the_silent_one_is_named_once_after_the_deadline() -> None:
    silence = Silence()
    silence.watch("ada", 10.0)
    silence.watch("bob", 10.0)
    found = []
    for half_seconds in range(1, 30):
        now_s = 10.0 + half_seconds / 2
        silence.heard("bob", now_s)
        found += [(now_s, who) for who in silence.tick(now_s)]
    assert found == [(14.0, "ada")]
    assert silence.watched == {"bob"}


def test_several_are_named_together_in_order() -> None:
    silence = Silence()
    for who in ("cyd", "ada", "bob"):
        silence.watch(who, 0.0)
    assert ticks(silence, 0.0, 6.0) == [(4.0, "ada"), (4.0, "bob"), (4.0, "cyd")]
    assert silence.next_tick_s() is None


def test_the_watchers_own_sleep_is_nobodys_silence() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    assert ticks(silence, 0.0, 3.0) == []
    # The lid is closed for an hour; on waking the tick may come before the frames that lie unread.
    assert silence.tick(3603.0) == ()
    assert silence.silent_s("ada") == 3.5
    silence.heard("ada", 3603.1)
    assert silence.tick(3603.5) == ()
    # The sleep is forgotten, not granted again.
    assert ticks(silence, 3603.5, 3610.0) == [(3607.5, "ada")]


def test_a_frame_read_first_after_the_sleep_grants_nothing_beyond_the_deadline() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    silence.heard("ada", 3600.0)
    assert ticks(silence, 3600.0, 3610.0) == [(3604.0, "ada")]


def test_a_watcher_that_always_stalls_still_finds_the_dead() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    when = [now_s for now_s in range(2, 40, 2) if silence.tick(float(now_s))]
    assert when == [16]


def test_late_words_of_the_suspected_and_the_forgotten_start_nothing() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    silence.watch("bob", 0.0)
    silence.forget("bob")
    silence.forget("nobody")
    silence.heard("bob", 1.0)
    assert ticks(silence, 1.0, 5.0) == [(4.0, "ada")]
    silence.heard("ada", 5.0)
    assert ticks(silence, 5.0, 20.0) == []
    silence.watch("ada", 20.0)
    assert ticks(silence, 20.0, 30.0) == [(24.0, "ada")]


def test_the_next_tick_is_a_ping_away_or_at_the_first_deadline() -> None:
    silence = Silence(ping_s=0.5, deadline_s=4.2)
    assert silence.next_tick_s() is None
    silence.watch("ada", 0.0)
    assert silence.next_tick_s() == 0.5
    assert ticks(silence, 0.0, 4.0) == []
    assert silence.next_tick_s() == pytest.approx(4.2)
    assert silence.tick(4.2) == ("ada",)


def test_time_that_runs_backwards_changes_nothing() -> None:
    silence = Silence()
    silence.watch("ada", 10.0)
    silence.tick(11.0)
    silence.heard("ada", 9.0)
    assert silence.tick(8.0) == ()
    assert silence.silent_s("ada") == 0.0
    assert silence.next_tick_s() == 11.5


@pytest.mark.parametrize(("ping_s", "deadline_s", "stall_s"), [(0.0, 4.0, 1.0), (2.0, 4.0, 1.0), (1.0, 1.0, 1.0)])
def test_settings_that_would_suspect_the_healthy_are_refused(ping_s: float, deadline_s: float, stall_s: float) -> None:
    with pytest.raises(ValueError, match="ping"):
        Silence(ping_s=ping_s, deadline_s=deadline_s, stall_s=stall_s)
