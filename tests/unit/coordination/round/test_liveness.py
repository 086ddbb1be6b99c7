"""Silence becomes suspicion after the deadline, counted in the watcher's waking time."""

from __future__ import annotations

import pytest

from fusionai.coordination.round.liveness import DEADLINE_S, LEARNING_S, LONGEST_S, MEMORY_S, SHORTEST_S, Silence


def lives(silence: Silence, start_s: float, *gaps_s: float) -> float:
    """Ada is heard after each gap, and never suspected meanwhile; returns when she was heard last."""
    now_s = start_s
    for gap_s in gaps_s:
        ends_s = now_s + gap_s
        while now_s < ends_s:
            now_s = min(ends_s, now_s + silence.ping_s)
            if now_s < ends_s:
                assert silence.tick(now_s) == {}
        silence.heard("ada", now_s)
        assert silence.tick(now_s) == {}
    return now_s


def prompt(seconds: float) -> list[float]:
    """Often heard of."""
    return [0.5] * round(seconds / 0.5)


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


def test_the_watchers_own_sleep_is_nobodys_silence() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    assert ticks(silence, 0.0, 3.0) == []
    # The lid is closed for an hour; on waking the tick may come before the frames that lie unread.
    assert silence.tick(3603.0) == {}
    assert silence.silent_s("ada") == 3.25
    silence.heard("ada", 3603.1)
    assert silence.tick(3603.5) == {}
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
    when = [now_s for now_s in range(2, 80, 2) if silence.tick(float(now_s))]
    assert when == [32]


def test_late_words_of_the_suspected_and_the_forgotten_start_nothing() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    silence.watch("bob", 0.0)
    silence.forget("bob")
    silence.forget("nobody")
    assert ticks(silence, 0.0, 1.0) == []
    silence.heard("bob", 1.0)
    assert ticks(silence, 1.0, 5.0) == [(4.0, "ada")]
    silence.heard("ada", 5.0)
    assert ticks(silence, 5.0, 20.0) == []
    silence.watch("ada", 20.0)
    assert ticks(silence, 20.0, 30.0) == [(24.0, "ada")]


def test_time_that_runs_backwards_changes_nothing() -> None:
    silence = Silence()
    silence.watch("ada", 10.0)
    silence.tick(10.5)
    silence.tick(11.0)
    assert silence.tick(10.5) == {}
    assert silence.silent_s("ada") == 1.0
    silence.heard("ada", 9.0)
    assert silence.tick(8.0) == {}
    assert silence.silent_s("ada") == 0.0


def test_a_prompt_peer_is_missed_soon() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    last_s = lives(silence, 0.0, *prompt(LEARNING_S))
    assert ticks(silence, last_s, last_s + 0.5) == []
    assert silence.tick(last_s + SHORTEST_S) == {"ada": SHORTEST_S}


def test_a_peer_watched_for_too_short_a_time_has_the_longest_deadline() -> None:
    silence = Silence()
    silence.watch("ada", 7.0)
    # Many signs of life are no long acquaintance.
    last_s = lives(silence, 7.0, *[0.0625] * 79)
    assert last_s == 7.0 + LEARNING_S - 0.0625
    assert ticks(silence, last_s, last_s + 3.5) == []
    assert silence.tick(last_s + DEADLINE_S) == {"ada": DEADLINE_S}


@pytest.mark.parametrize(
    ("longest_s", "deadline_s"),
    [(0.25, 1.0), (0.5, 1.0), (0.625, 1.25), (0.75, 1.5), (1.0, 2.0), (1.75, 3.5), (2.0, 4.0), (3.5, 7.0)],
)
def test_the_deadline_is_twice_the_longest_gap_within_bounds(longest_s: float, deadline_s: float) -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    # At the beginning, when even the longest is granted.
    last_s = now_s = lives(silence, 0.0, longest_s, *prompt(LEARNING_S))
    while now_s < last_s + deadline_s - 0.25:
        now_s += 0.25
        assert silence.tick(now_s) == {}
    assert silence.tick(last_s + deadline_s) == {"ada": deadline_s}


def test_a_gap_is_remembered_for_a_while_and_then_no_more() -> None:
    silence = Silence(shortest_s=1.25)
    silence.watch("ada", 0.0)
    known_s = lives(silence, 0.0, *prompt(LEARNING_S), 1.0)
    last_s = lives(silence, known_s, *prompt(MEMORY_S))
    assert ticks(silence, last_s, last_s + 1.5) == []
    silence.heard("ada", last_s + 1.75)
    # That gap is known now; the one before is a memory's length away and more.
    last_s = lives(silence, last_s + 1.75, *prompt(MEMORY_S + 0.5))
    assert ticks(silence, last_s, last_s + 1.0) == []
    assert silence.tick(last_s + 1.25) == {"ada": 1.25}


def test_shorter_gaps_count_when_the_longest_is_forgotten() -> None:
    silence = Silence(shortest_s=2.0)
    silence.watch("ada", 0.0)
    last_s = lives(silence, 0.0, *prompt(LEARNING_S), 1.75, 1.25, *prompt(MEMORY_S - 0.5))
    assert ticks(silence, last_s, last_s + 2.0) == []
    assert silence.tick(last_s + 2.5) == {"ada": 2.5}


def test_the_watchers_own_sleep_is_no_gap_of_a_peer() -> None:
    silence = Silence(shortest_s=2.0)
    silence.watch("ada", 0.0)
    last_s = lives(silence, 0.0, *prompt(LEARNING_S))
    silence.heard("ada", last_s + 3600.0)
    last_s = lives(silence, last_s + 3600.0, 0.5)
    assert ticks(silence, last_s, last_s + 3.0) == [(last_s + 2.0, "ada")]


def test_a_peer_whose_machine_acknowledges_is_starved_rather_than_gone() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    silence.watch("bob", 0.0)
    now_s = 0.0
    while now_s < LEARNING_S + 1.0:
        now_s += 0.25
        silence.heard("ada", now_s)
        silence.heard("bob", now_s)
    found = []
    for number in range(1, 40):
        silent = silence.tick(now_s + number / 4, acknowledging={"ada"})
        found += [(number / 4, who, deadline_s) for who, deadline_s in silent.items()]
    assert found == [(SHORTEST_S, "bob", SHORTEST_S), (DEADLINE_S, "ada", DEADLINE_S)]


def test_a_starved_peer_teaches_the_watcher_to_wait_for_longer_than_for_an_unknown_one() -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    last_s = lives(silence, 0.0, *prompt(LEARNING_S))
    for gap_s in (0.75, 1.25, 2.25, 3.75, 6.5, 10.0):
        # A load that grows: each gap is less than twice the one before.
        last_s = lives(silence, last_s, gap_s)
    silent = [(n / 4, silence.tick(last_s + n / 4)) for n in range(1, 80)]
    assert [(s, found) for s, found in silent if found] == [(LONGEST_S, {"ada": LONGEST_S})]


def test_everybody_has_a_deadline_of_their_own() -> None:
    silence = Silence(ping_s=0.5, shortest_s=2.0)
    silence.watch("ada", 0.0)
    now_s = lives(silence, 0.0, *prompt(LEARNING_S))
    silence.watch("bob", now_s)
    assert ticks(silence, now_s, now_s + 1.5) == []
    silence.tick(now_s + 1.75)
    assert silence.tick(now_s + 2.0) == {"ada": 2.0}
    assert ticks(silence, now_s + 2.0, now_s + 3.5) == []
    assert silence.tick(now_s + 4.0) == {"bob": 4.0}


@pytest.mark.parametrize("suspected", [True, False])
def test_who_is_watched_anew_is_unknown(suspected: bool) -> None:
    silence = Silence(shortest_s=2.0)
    silence.watch("ada", 0.0)
    now_s = lives(silence, 0.0, *prompt(LEARNING_S))
    if suspected:
        assert ticks(silence, now_s, now_s + 2.0) == [(now_s + 2.0, "ada")]
        now_s += 2.0
    silence.watch("ada", now_s)
    assert ticks(silence, now_s, now_s + 6.0) == [(now_s + 4.0, "ada")]


@pytest.mark.parametrize(
    ("ping_s", "shortest_s", "deadline_s", "stall_s"),
    [(0.0, 2.0, 4.0, 1.0), (2.0, 3.0, 4.0, 1.0), (1.0, 1.0, 4.0, 1.0), (0.5, 2.0, 1.9, 1.0)],
)
def test_settings_that_would_suspect_the_healthy_are_refused(
    ping_s: float, shortest_s: float, deadline_s: float, stall_s: float
) -> None:
    with pytest.raises(ValueError, match="ping"):
        Silence(ping_s=ping_s, shortest_s=shortest_s, deadline_s=deadline_s, stall_s=stall_s)


def test_settings_at_their_limits_are_taken() -> None:
    silence = Silence(ping_s=1.0, shortest_s=2.0, deadline_s=2.0, longest_s=2.0, stall_s=1.0)
    silence.watch("ada", 0.0)
    assert silence.tick(1.0) == {}
    assert silence.tick(2.0) == {"ada": 2.0}
