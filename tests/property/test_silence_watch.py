"""However the watcher sleeps: who speaks is never suspected, who is dead always is, in bounded waking time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.silence import Silence

# Exact in binary, so that sums can be compared.
gaps = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.5, 1.0, 1.5, 8.0, 3600.0]), min_size=1, max_size=80)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(gaps, st.data())
def test_silence_is_the_waking_time_since_the_last_word(pauses: list[float], data: st.DataObject) -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s = silent_s = 0.0
    for pause_s in pauses:
        now_s += pause_s
        silent_s += pause_s if pause_s <= silence.stall_s else silence.ping_s
        if data.draw(st.booleans()):
            silence.heard("ada", now_s)
            silent_s = 0.0
        else:
            found = silence.tick(now_s)
            assert found == (("ada",) if silent_s >= silence.deadline_s else ())
            if found:
                return
            following_s = silence.next_tick_s()
            assert following_s is not None
            assert now_s <= following_s <= now_s + silence.ping_s


@settings(max_examples=100, deadline=None, derandomize=True)
@given(gaps)
def test_who_answers_every_ping_is_never_suspected(pauses: list[float]) -> None:
    """The answer lies unread while the watcher sleeps, and is read only after the tick."""
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s = 0.0
    for pause_s in pauses:
        now_s += pause_s
        assert silence.tick(now_s) == ()
        silence.heard("ada", now_s)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.5, 0.75, 1.0, 2.0, 3600.0]), min_size=8, max_size=20))
def test_who_is_dead_is_found_within_eight_ticks(pauses: list[float]) -> None:
    silence = Silence()
    silence.watch("ada", 0.0)
    now_s, found = 0.0, []
    for pause_s in pauses[:8]:
        now_s += pause_s
        found += silence.tick(now_s)
    assert found == ["ada"]
