"""However the watcher sleeps: who speaks is never suspected, who is dead always is, in bounded waking time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.round.liveness import (
    DEADLINE_S,
    FACTOR,
    LEARNING_S,
    LONGEST_S,
    MEMORY_S,
    SHORTEST_S,
    Silence,
)
from harness.examples import examples

# Exact in binary, so that sums can be compared.
gaps = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.5, 1.0, 1.5, 8.0, 3600.0]), min_size=1, max_size=80)


def deadline_s(heard_s: list[float], watched_s: float) -> float:
    """By the definition, from all waking times at which the peer was heard."""
    if not heard_s or heard_s[-1] - watched_s < LEARNING_S:
        return DEADLINE_S
    ends = zip([watched_s, *heard_s], heard_s, strict=False)
    longest_s = max(end_s - start_s for start_s, end_s in ends if end_s >= heard_s[-1] - MEMORY_S)
    return min(LONGEST_S, max(SHORTEST_S, FACTOR * longest_s))


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(gaps, st.data())
def test_silence_is_the_waking_time_since_the_last_word(pauses: list[float], data: st.DataObject) -> None:
    """Suspected at the deadline that the definition gives, so never before the shortest nor after the longest."""
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s = awake_s = 0.0
    heard_s: list[float] = []
    prompt = data.draw(st.integers(0, 140), label="prompt answers before")
    for number, pause_s in enumerate([0.5] * prompt + pauses):
        now_s += pause_s
        awake_s += pause_s if pause_s <= silence.stall_s else silence.stall_s / 2
        if number < prompt or data.draw(st.integers(0, 3)) == 0:
            silence.heard("ada", now_s)
            heard_s.append(awake_s)
            continue
        silent_s = awake_s - (heard_s[-1] if heard_s else 0.0)
        allowed_s = deadline_s(heard_s, 0.0)
        found = silence.tick(now_s)
        assert found == ({"ada": allowed_s} if silent_s >= allowed_s else {})
        if found:
            assert SHORTEST_S <= allowed_s <= silent_s
            assert silent_s < LONGEST_S + silence.stall_s
            return


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.floats(0.5, 3.9), st.lists(st.floats(0.0, 1.0), max_size=100), st.floats(0.1, 0.9))
def test_who_stays_within_its_longest_gap_is_never_suspected(
    longest_s: float, shares: list[float], tick_s: float
) -> None:
    """As long as it shows that gap once within the memory; looked at however often."""
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s, shown_s = 0.0, 0.0
    for share in [1.0, *shares]:
        gap_s = longest_s if now_s - shown_s > MEMORY_S - 2 * longest_s else share * longest_s
        shown_s = now_s + gap_s if gap_s == longest_s else shown_s
        end_s = now_s + gap_s
        while now_s + tick_s < end_s:
            now_s += tick_s
            assert silence.tick(now_s) == {}
        now_s = end_s
        assert silence.tick(now_s) == {}
        silence.heard("ada", now_s)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(gaps)
def test_who_answers_every_ping_is_never_suspected(pauses: list[float]) -> None:
    """The answer lies unread while the watcher sleeps, and is read only after the tick."""
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s = 0.0
    for pause_s in pauses:
        now_s += pause_s
        assert silence.tick(now_s) == {}
        silence.heard("ada", now_s)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.5, 0.75, 1.0, 2.0, 3600.0]), min_size=16, max_size=20))
def test_who_is_dead_is_found_within_sixteen_ticks(pauses: list[float]) -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s, found = 0.0, []
    for pause_s in pauses[:16]:
        now_s += pause_s
        found += silence.tick(now_s)
    assert found == ["ada"]
