"""Which pipeline a text goes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.coordination.serving.routing import (
    BLOCK_TOKENS,
    CROWDING,
    MOST_CROWDING,
    READING,
    SLOWEST,
    Answered,
    Pace,
    Routing,
    TextToRoute,
)

READY = frozenset({1, 2, 3})


def pace(token_s: float, sessions: int = 4, prompt_token_s: float = 0.001) -> Pace:
    """A pipeline in which sessions of one pass cost next to nothing."""
    return Pace(token_s=(token_s,) * sessions, prompt_token_s=prompt_token_s, sessions=sessions)


def text(*tokens: int, scope: str = "", most: int = 100) -> TextToRoute:
    return TextToRoute(tokens=tokens or (1, 2, 3), cache=(scope,), most_tokens=most)


def answer(tokens: int, planned_s: float, measured_s: float, others: float = 0.0) -> Answered:
    return Answered(tokens, planned_s, planned_s * others, measured_s)


def placed(routing: Routing, count: int) -> list[int]:
    """Where so many texts go, one after the other, all of which stay."""
    places: list[int] = []
    for number in range(count):
        asked = text(number)
        places.append(routing.ranked(asked, READY)[0])
        routing.began(places[-1], asked)
    return places


def test_equal_pipelines_get_equally_many_texts():
    routing = Routing()
    for number in (1, 2, 3):
        routing.open(number, pace(0.01))
    assert placed(routing, 9) == [1, 2, 3] * 3
    assert routing.texts == {1: 3, 2: 3, 3: 3}


def test_a_slow_pipeline_gets_texts_once_the_fast_one_is_as_slow_for_a_further_one():
    routing = Routing()
    routing.open(1, pace(0.03, sessions=8))
    routing.open(2, pace(0.01, sessions=8))
    places = placed(routing, 20)
    assert places[0] == 2
    # The fast one has all its places taken, and further texts would wait.
    first_on_the_slow_one = places.index(1)
    assert first_on_the_slow_one >= 8
    assert places.count(2) > places.count(1) > 0


def test_a_conversation_returns_to_its_pipeline_and_leaves_it_when_that_is_soonest():
    routing = Routing()
    routing.open(1, pace(0.001))
    routing.open(2, pace(0.001))
    history = tuple(range(10 * BLOCK_TOKENS))
    routing.began(2, text(*history))
    routing.ended(2, text(*history, 7, 8, 9))
    following = text(*history, *range(40), most=10)
    assert routing.ranked(following, READY)[0] == 2
    # Another scope shares no cache.
    assert routing.ranked(text(*history, *range(40), scope="other", most=10), READY)[0] == 1
    # A text with another beginning does not return.
    assert routing.ranked(text(5, *history, most=10), READY)[0] == 1
    for _ in range(120):
        routing.began(2, text(0, most=10))
    assert routing.ranked(following, READY)[0] == 1


def test_an_answer_is_part_of_what_its_pipeline_has():
    routing = Routing()
    routing.open(1, pace(0.001))
    routing.open(2, pace(0.001))
    prompt, answer = tuple(range(BLOCK_TOKENS)), tuple(range(500, 500 + 4 * BLOCK_TOKENS))
    routing.began(1, text(*prompt))
    routing.began(2, text(*prompt))
    routing.ended(1)
    routing.ended(2, text(*prompt, *answer))
    assert routing.ranked(text(*prompt, *answer, 1, most=1), READY)[0] == 2


def test_pipelines_that_are_not_ready_come_last_and_closed_ones_not_at_all():
    routing = Routing()
    routing.open(1, pace(0.001))
    routing.open(2, pace(0.01))
    routing.open(3, pace(0.02))
    assert routing.ranked(text(), frozenset({2, 3})) == (2, 3, 1)
    routing.close(2)
    assert routing.ranked(text(), frozenset({2, 3})) == (3, 1)
    routing.began(2, text())
    routing.ended(2)
    routing.answered(2, answer(5, 1.0, 1.0))
    assert routing.token_s(2) == (0.0, 0)
    assert routing.texts == {1: 0, 3: 0}


def test_measured_times_count():
    routing = Routing()
    routing.open(1, pace(0.01))
    routing.open(2, pace(0.012))
    for _ in range(30):
        routing.answered(1, answer(50, 0.5, 2.0))
        routing.answered(2, answer(50, 0.6, 0.6))
    assert routing.ranked(text(), READY)[0] == 2
    for _ in range(100):
        routing.answered(2, answer(50, 0.6, 2.4))
        routing.answered(1, answer(50, 0.5, 2.0))
    assert routing.ranked(text(), READY)[0] == 1
    # A stalled answer does not close a pipeline for ever.
    routing.answered(1, answer(50, 0.001, 1e6))
    assert routing.slower(1) <= 4.0 + SLOWEST


def test_short_answers_do_not_part_equal_pipelines():
    """The first answers of each pipeline wait for others' prompts, by chance more on the first pipeline."""
    routing = Routing()
    for number in (1, 2):
        routing.open(number, pace(0.02, sessions=16))
    for _ in range(8):
        routing.answered(1, answer(8, 7 * 0.02, 7 * 0.12, others=7))
        routing.answered(2, answer(8, 7 * 0.02, 7 * 0.08, others=7))
    places = placed(routing, 16)
    assert 7 <= places.count(1) <= places.count(2) <= 9


def test_crowding_is_learnt_from_answers_beside_others():
    """The plan says that sessions cost nothing, and each makes the others a third slower."""
    routing = Routing()
    routing.open(1, pace(0.01, sessions=8))
    routing.open(2, pace(0.02, sessions=8))
    assert placed(routing, 7) == [1] * 7
    for _ in range(7):
        routing.ended(1)
    routing.tried(1, 0.01)
    routing.tried(2, 0.0215)
    for others in (0, 3, 6):
        routing.answered(1, answer(100, 1.0, 1 + others / 3, others))
    assert abs(routing.crowding - 1 / 3) < 1e-9
    assert routing.slower(1) == pytest.approx(1.0, rel=0.1)
    assert placed(routing, 7) == [1, 1, 1, 1, 2, 1, 1]
    for _ in range(200):
        routing.answered(1, answer(100, 1.0, 100.0, 1))
    assert routing.crowding == MOST_CROWDING


def test_a_busy_pipeline_that_could_not_be_tried_is_expected_to_be_like_the_others():
    """Plans are seventeen times too fast. One pipeline got its texts before it could be tried."""
    routing = Routing()
    for number in (1, 2, 3):
        routing.open(number, pace(0.0003, sessions=8))
    routing.tried(1, 0.0035)
    routing.tried(2, 0.004)
    for number in range(8):
        routing.began(3, text(number))
    for _ in range(50):
        routing.answered(3, answer(150, 149 * 0.0003, 149 * 0.0051, others=7))
    places = placed(routing, 8)
    assert places.count(3) <= 1
    assert places.count(2) >= 2


def test_a_pipeline_that_was_slow_is_tried_again():
    routing = Routing()
    routing.open(1, pace(0.01))
    routing.open(2, pace(0.0099))
    for _ in range(40):
        routing.answered(2, answer(50, 0.5, 5.0))
        routing.answered(1, answer(50, 0.5, 0.5))
    assert routing.ranked(text(), READY)[0] == 1
    assert routing.slower(2) > 3
    answers = 0
    while routing.ranked(text(), READY)[0] == 1:
        routing.answered(1, answer(50, 0.5, 0.5))
        answers += 1
        assert answers < 2000
    assert answers > 100
    # If it is still slow, one answer is enough to know.
    routing.answered(2, answer(50, 0.5, 5.0))
    assert routing.ranked(text(), READY)[0] == 1


def test_a_trial_corrects_a_wrong_plan():
    """The profile of pipeline 2's machine was measured while the machine was busy."""
    routing = Routing()
    routing.open(1, pace(0.01))
    routing.open(2, pace(0.12))
    routing.answered(2, answer(50, 6.0, 6.0))
    assert routing.ranked(text(), READY)[0] == 1
    routing.tried(1, 0.02)
    routing.tried(2, 0.01)
    assert routing.slower(1) == 2.0
    assert routing.ranked(text(), READY)[0] == 2
    # Answers after it count relative to what was measured.
    for _ in range(20):
        routing.answered(2, answer(50, 50 * 0.12, 50 * 0.04))
        routing.answered(1, answer(50, 50 * 0.01, 50 * 0.02))
    assert routing.ranked(text(), READY)[0] == 1
    # Another plan is not measured yet, and a closed pipeline no more.
    routing.open(2, pace(0.015))
    assert routing.slower(2) == 2.0  # like the others
    routing.tried(3, 1.0)
    routing.tried(1, 0.0)
    assert routing.slower(1) == pytest.approx(2.0)


def test_a_changed_plan_changes_the_pace_and_nothing_else():
    routing = Routing()
    routing.open(1, pace(0.01))
    routing.open(2, pace(0.02))
    routing.began(1, text())
    assert routing.token_s(1) == (0.01, 0)
    routing.open(1, pace(0.05))
    assert routing.texts == {1: 1, 2: 0}
    assert routing.token_s(1) == (0.05, 0)
    assert routing.ranked(text(), READY)[0] == 2


def test_expected_answers_are_as_long_as_answers_are_but_no_longer_than_asked():
    """Pipeline 1 reads prompts fast, pipeline 2 answers fast."""
    routing = Routing()
    routing.open(1, pace(0.02, prompt_token_s=0.0))
    routing.open(2, pace(0.01, prompt_token_s=0.02 / READING))
    long = tuple(range(63))  # reading counts 1.26 s, which 126 tokens of an answer make up for
    assert routing.ranked(text(*long, most=1000), READY)[0] == 2
    assert routing.ranked(text(*long, most=20), READY)[0] == 1
    for _ in range(30):
        routing.answered(1, answer(10, 0.0, 0.0))
    assert routing.ranked(text(*long, most=1000), READY)[0] == 1


@given(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=5), st.integers(1, 60))
def test_no_text_goes_where_it_takes_longer_than_on_the_fastest_pipeline(times: list[float], count: int):
    """The floor: with places for all, the chosen pipeline's planned token is at most as slow as that of the fastest one
    with the texts that it has."""
    routing = Routing()
    for number, token_s in enumerate(times):
        routing.open(number, pace(token_s, sessions=count + 1, prompt_token_s=0.0))
    fastest = min(range(len(times)), key=lambda number: times[number])
    for number in range(count):
        asked = text(number)
        chosen = routing.ranked(asked, frozenset(range(len(times))))[0]
        texts = routing.texts
        assert times[chosen] <= times[fastest] * (1 + CROWDING * texts[fastest]) * (1 + 1e-6) + 1e-9
        routing.began(chosen, asked)
