"""Copies of sessions: where they are taken, who begins with them, what makes them go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusionai.coordination.serving.admission import BatchLimits
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.beginnings import FIRST_NUMBER, Beginnings
from fusionai.coordination.serving.pages import Match
from fusionai.coordination.serving.sessions import PassPlan, SessionSpec

LIMITS = BatchLimits(
    pages=120, page_tokens=4, sessions=3, pass_tokens=64, in_flight=4, chunk_tokens=64, queue=8, tile_tokens=8,
    copies=True, reserve_tokens=0,
)  # fmt: skip


def session(number: int, prompt: list[int], scope: str = "", max_tokens: int = 1) -> SessionSpec:
    return SessionSpec(number=number, scope=scope, prompt=tuple(prompt), max_tokens=max_tokens)


def sent(batcher: Batcher) -> PassPlan:
    plan = batcher.next_pass(0.0)
    assert plan is not None
    return plan


def back(batcher: Batcher, plan: PassPlan) -> None:
    batcher.returned(plan.number, dict.fromkeys(plan.wanted_sessions, (7,)), (), 0.0)


def ended(batcher: Batcher, spec: SessionSpec) -> list[PassPlan]:
    """The passes of a session that is alone."""
    batcher.submit(spec, 0.0)
    plans: list[PassPlan] = []
    while (plan := batcher.next_pass(0.0)) is not None:
        plans.append(plan)
        back(batcher, plan)
    return plans


def pieces(plans: list[PassPlan]) -> list[tuple[int, int, bool, bool]]:
    """(start, end, begins as a copy, is kept as one)."""
    return [
        (one.start, one.start + one.length, one.source > 0, one.kept_as > 0) for plan in plans for one in plan.segments
    ]


@pytest.mark.parametrize(
    ("known", "begun", "total", "marks"),
    [
        (0, 0, 80, ()),  # 56 tokens would be saved
        (0, 0, 81, (64,)),
        (0, 0, 300, (280,)),
        (100, 0, 300, (96, 280)),
        (100, 96, 300, (280,)),
        (60, 0, 300, (280,)),
        (280, 0, 300, (280,)),
        (296, 0, 300, (280,)),  # behind a copy there must be some tokens
        (256, 0, 300, (256,)),  # two places that close are one
        (300, 280, 310, ()),
        (0, 0, 1, ()),
    ],
)
def test_copies_are_taken_where_texts_branch_off_and_where_prompts_end(
    known: int, begun: int, total: int, marks: tuple[int, ...]
) -> None:
    assert Beginnings(8).marks(known, begun, total) == marks


def test_a_text_begins_with_the_longest_copy_of_its_beginning() -> None:
    batcher = Batcher(LIMITS)
    first = list(range(1000, 1150))
    assert pieces(ended(batcher, session(1, first))) == [
        (0, 64, False, False), (64, 128, False, True), (128, 150, False, False),
    ]  # fmt: skip
    assert batcher.matched(1) == 0
    (copy,) = batcher.beginnings._kept.values()
    assert copy >= FIRST_NUMBER
    plans = ended(batcher, session(2, [*first, 7, *range(60)]))
    assert pieces(plans) == [(128, 192, True, True), (192, 211, False, False)]
    assert plans[0].segments[0].source == copy
    assert batcher.prefix_tokens == 128
    # Another scope, or other tokens at the beginning.
    assert pieces(ended(batcher, session(3, first, scope="b")))[0][:3] == (0, 64, False)
    assert pieces(ended(batcher, session(4, [0, *first])))[0][:3] == (0, 64, False)


def test_where_two_texts_branch_off_the_second_is_copied_and_the_third_begins() -> None:
    batcher = Batcher(LIMITS)
    common = list(range(100))
    ended(batcher, session(1, [*common, *range(1000, 1100)]))
    second = pieces(ended(batcher, session(2, [*common, *range(2000, 2100)])))
    assert (96, True) in [(end, kept) for _, end, _, kept in second]
    assert pieces(ended(batcher, session(3, [*common, *range(3000, 3100)])))[0][:3] == (96, 160, True)


def test_copies_make_room_for_sessions_the_one_used_longest_ago_first() -> None:
    batcher = Batcher(LIMITS)
    texts = [list(range(1000 * number, 1000 * number + 100)) for number in range(3)]
    for number, text in enumerate(texts, 1):
        ended(batcher, session(number, text))
    assert len(batcher.beginnings) == 2, "the session itself takes a place"
    assert pieces(ended(batcher, session(4, [*texts[1], *range(40)])))[0][0] == 80
    kept = list(batcher.beginnings._kept.values())
    for number in (5, 6, 7):
        batcher.submit(session(number, [number] * 30), 0.0)
    plan = sent(batcher)
    assert batcher.running == 3
    assert set(kept) <= set(plan.forget)
    assert len(batcher.beginnings) == 0


def test_a_copy_that_a_session_begins_with_stays_until_its_first_pass_is_back() -> None:
    batcher = Batcher(LIMITS)
    text = list(range(100))
    ended(batcher, session(1, text))
    batcher.submit(session(2, [*text, *range(40)], max_tokens=9), 0.0)
    plan = sent(batcher)
    assert plan.segments[0].source
    for number in (3, 4):
        batcher.submit(session(number, [number] * 30), 0.0)
    sent(batcher)
    assert batcher.running == 2, "the copy has the third place"
    back(batcher, plan)
    assert plan.segments[0].source in sent(batcher).forget
    assert batcher.running == 3


def test_of_two_copies_of_one_beginning_the_older_stays() -> None:
    """A session may be about to begin with it."""
    batcher = Batcher(replace(LIMITS, sessions=5))
    text = list(range(100))
    for number in (1, 2):
        batcher.submit(session(number, text), 0.0)
    plans = [sent(batcher) for _ in range(4)]
    older, newer = [segment.kept_as for plan in plans for segment in plan.segments if segment.kept_as]
    for plan in plans:
        back(batcher, plan)
    assert list(batcher.beginnings._kept.values()) == [older]
    assert newer in batcher.forgotten
    # A text that has to be read as a whole passes by where one is kept already.
    batcher.submit(replace(session(3, text, max_tokens=0), all_rows=True), 0.0)
    again = [sent(batcher) for _ in range(3)]
    for plan in again:
        batcher.returned(plan.number, {}, (), 0.0)
    read = pieces(again)
    assert [end for _, end, _, _ in read] == [64, 80, 100]
    assert not any(kept for *_, kept in read)


@pytest.mark.parametrize("way", ["fault", "failed", "cancelled"])
def test_a_copy_counts_only_when_all_stages_have_taken_it(way: str) -> None:
    batcher = Batcher(LIMITS)
    text = list(range(100))
    batcher.submit(session(1, text), 0.0)
    plans = [sent(batcher), sent(batcher)]
    kept = [segment.kept_as for plan in plans for segment in plan.segments if segment.kept_as]
    assert len(kept) == 1
    match way:
        case "fault":
            batcher.rewind()
        case "failed":
            for plan in plans:
                batcher.failed(plan.number, 0.0)
        case _:
            batcher.cancel(1)
            for plan in plans:
                back(batcher, plan)
    assert len(batcher.beginnings) == 0
    assert set(kept) <= set(batcher.forgotten)


def test_after_lost_caches_what_began_as_a_copy_is_computed_from_its_beginning() -> None:
    batcher = Batcher(LIMITS)
    text = list(range(100))
    ended(batcher, session(1, text))
    for number in (2, 3):
        batcher.submit(session(number, [*text, *range(100 * number, 100 * number + 40)], max_tokens=9), 0.0)
    for _ in range(2):
        back(batcher, sent(batcher))
    assert len(batcher.live) == 2
    batcher.rewind()
    (segment,) = batcher.segments_for_rebuild()
    assert (segment.session, segment.start) == (2, 0)
    batcher.caches_lost()
    assert list(batcher.live) == [2], "the other shares its pages and is read again"
    assert batcher.beginnings.longest(Match((), 0), 4) == (Match((), 0), 0)
    plans: list[PassPlan] = []
    while (plan := batcher.next_pass(0.0)) is not None:
        plans.append(plan)
        back(batcher, plan)
    again = [segment for plan in plans for segment in plan.segments if segment.session == 3]
    assert (again[0].start, again[0].source) == (0, 0)
