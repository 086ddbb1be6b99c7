"""Batching: what a pass carries, who is admitted, who makes room, what counts when a pass comes back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fusionai.coordination.serving.admission import BatchLimits, QueueFull, TooLong
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.sessions import PassPlan, SessionSpec
from fusionai.wire.serving import MAX_SESSIONS, Segment

LIMITS = BatchLimits(
    pages=34, page_tokens=4, sessions=8, pass_tokens=16, in_flight=2, chunk_tokens=8, queue=8, reserve_tokens=0
)


def limited(**changes: int | bool) -> Batcher:
    return Batcher(_changed(**changes))


def _changed(**changes: int | bool) -> BatchLimits:
    return BatchLimits(**{name: changes.get(name, getattr(LIMITS, name)) for name in BatchLimits.__slots__})


def session(
    number: int, prompt: int | Iterable[int], max_tokens: int = 4, scope: str = "", **more: object
) -> SessionSpec:
    tokens = tuple(range(100 * number, 100 * number + prompt)) if isinstance(prompt, int) else tuple(prompt)
    return SessionSpec(number=number, scope=scope, prompt=tokens, max_tokens=max_tokens, **more)  # pyright: ignore[reportArgumentType]


def back(batcher: Batcher, plan: PassPlan, token: int = 7, now_s: float = 0.0) -> frozenset[int]:
    """Every session whose next token was in the pass gets the same."""
    ends = set(plan.wanted_sessions) & set(batcher.sessions_of(plan.number))
    return batcher.returned(plan.number, dict.fromkeys(ends, (token,)), (), now_s)


def sent(batcher: Batcher) -> PassPlan:
    plan = batcher.next_pass(0.0)
    assert plan is not None
    return plan


def read(batcher: Batcher, *sessions: SessionSpec) -> None:
    """These have read their prompts and emitted one token."""
    for one in sessions:
        batcher.submit(one, 0.0)
    while any(batcher._sessions[one.number].emitted == 0 for one in sessions):
        back(batcher, sent(batcher))


def test_a_prompt_is_read_in_fixed_chunks_and_then_decoded() -> None:
    batcher = limited(in_flight=1)
    batcher.submit(session(1, 18, 2), 0.0)
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    while (plan := batcher.next_pass(0.0)) is not None:
        (segment,) = plan.segments
        seen.append((segment.start, segment.length, plan.wanted))
        back(batcher, plan)
    assert seen == [(0, 8, ()), (8, 8, ()), (16, 2, (1,)), (18, 1, (0,))]
    assert (batcher.running, batcher.queued, batcher.pages.room) == (0, 0, 32)


def test_chunks_end_at_the_same_positions_whatever_the_load() -> None:
    for others in range(6):
        batcher = limited(pages=80, sessions=16)
        read(batcher, *(session(number, 3, 30) for number in range(2, 2 + others)))
        batcher.submit(session(1, 21, 1), 0.0)
        ends: list[int] = []
        for _ in range(60):
            plan = batcher.next_pass(0.0)
            if plan is None:
                break
            ends += [one.start + one.length for one in plan.segments if one.session == 1]
            back(batcher, plan)
        assert ends == [8, 16, 21]


def test_pieces_of_one_prompt_follow_each_other_without_waiting() -> None:
    batcher = limited(in_flight=3)
    batcher.submit(session(1, 22, 2), 0.0)
    plans = [sent(batcher) for _ in range(3)]
    assert [(one.start, one.length) for plan in plans for one in plan.segments] == [(0, 8), (8, 8), (16, 6)]
    assert [plan.wanted for plan in plans] == [(), (), (5,)]
    assert plans[0].segments[0].pages
    assert all(not plan.segments[0].pages for plan in plans[1:]), "pages are told once"
    for plan in plans[:2]:
        assert back(batcher, plan) == {1}
        assert batcher.next_pass(0.0) is None, "all of the prompt is under way"
    assert batcher.live == {1: 16}
    back(batcher, plans[2])
    assert [one.start for one in sent(batcher).segments] == [22]


def test_a_piece_that_is_back_before_earlier_ones_counts_from_when_they_are() -> None:
    batcher = limited(in_flight=3)
    batcher.submit(session(1, 20, 2), 0.0)
    first, second, last = (sent(batcher) for _ in range(3))
    assert back(batcher, last) == {1}
    assert batcher._sessions[1].emitted == 1
    assert batcher.live == {}
    assert batcher.next_pass(0.0) is None, "what comes before its answer is not known to be computed"
    assert back(batcher, second) == {1}
    assert batcher.live == {}
    assert back(batcher, first) == {1}
    assert batcher.live == {1: 20}
    assert [one.start for one in sent(batcher).segments] == [20]


def test_a_prompt_with_pieces_under_way_goes_on_from_what_is_back_after_a_fault() -> None:
    batcher = limited(in_flight=3)
    batcher.submit(session(1, 24, 2), 0.0)
    first, second, third = (sent(batcher) for _ in range(3))
    back(batcher, first)
    back(batcher, third)
    batcher.rewind()
    assert back(batcher, second) == frozenset()
    again = [sent(batcher) for _ in range(2)]
    assert [(one.start, one.length, one.first_page) for plan in again for one in plan.segments] == [
        (8, 8, 0),
        (16, 8, 6),
    ]


def test_a_failed_piece_voids_those_behind_it_and_is_tried_alone() -> None:
    batcher = limited(in_flight=3)
    batcher.submit(session(1, 24, 2), 0.0)
    first, second, _ = (sent(batcher) for _ in range(3))
    assert batcher.failed(first.number, 0.0) == ()
    assert batcher.failed(second.number, 0.0) == (), "it could not be computed without the one before"
    alone = sent(batcher)
    assert [(one.start, one.length) for one in alone.segments] == [(0, 8)]
    assert batcher.next_pass(0.0) is None, "until it is back, nothing follows it"
    back(batcher, alone)
    assert [one.start for one in sent(batcher).segments] == [8]


def test_prompts_take_turns_though_their_pieces_do_not_wait() -> None:
    batcher = limited(in_flight=4, pass_tokens=8)
    batcher.submit(session(1, 32, 1), 0.0)
    batcher.submit(session(2, 32, 1), 0.0)
    assert [plan.segments[0].session for plan in (sent(batcher) for _ in range(4))] == [1, 2, 1, 2]


def test_no_more_of_a_text_is_under_way_than_stages_can_go_back() -> None:
    batcher = limited(in_flight=4, ahead_tokens=16)
    batcher.submit(session(1, 32, 1), 0.0)
    first = sent(batcher)
    assert sent(batcher).segments[0].start == 8
    assert batcher.next_pass(0.0) is None
    back(batcher, first)
    assert sent(batcher).segments[0].start == 16


def test_decoding_sessions_are_spread_over_the_passes_in_flight() -> None:
    batcher = limited(in_flight=3, pages=80)
    read(batcher, *(session(number, 2, 30) for number in range(1, 8)))
    plans = [sent(batcher) for _ in range(3)]
    assert [len(plan.segments) for plan in plans] == [3, 3, 1]
    assert batcher.next_pass(0.0) is None
    taken = [one.session for plan in plans for one in plan.segments]
    assert sorted(taken) == list(range(1, 8))


def test_no_more_passes_decode_at_a_time_than_can_be_computed_and_others_read_meanwhile() -> None:
    batcher = limited(in_flight=4, decoding_passes=2, pages=80)
    read(batcher, *(session(number, 2, 30) for number in range(1, 8)))
    plans = [sent(batcher) for _ in range(2)]
    assert [len(plan.segments) for plan in plans] == [4, 3]
    back(batcher, plans[1])
    batcher.submit(session(8, 8), 0.0)
    mixed = sent(batcher)
    assert [one.length for one in mixed.segments] == [1, 1, 1, 8], "who is ready goes together"
    back(batcher, mixed)
    assert len(sent(batcher).segments) == 4
    assert batcher.next_pass(0.0) is None, "two decode"
    batcher.cancel(1)
    batcher.submit(session(9, 8), 0.0)
    assert [one.session for one in sent(batcher).segments] == [9], "a prompt waits for nobody"


def test_who_is_ready_waits_while_as_many_passes_decode_as_can_be_computed() -> None:
    batcher = limited(in_flight=4, decoding_passes=2, pages=80)
    read(batcher, *(session(number, 2, 30) for number in range(1, 5)))
    plans = [sent(batcher) for _ in range(2)]
    batcher.submit(session(5, 4), 0.0)
    reading = sent(batcher)
    assert [one.session for one in reading.segments] == [5]
    back(batcher, reading)
    assert batcher.next_pass(0.0) is None, "two decode, though four may be under way"
    back(batcher, plans[0])
    assert 5 in [one.session for one in sent(batcher).segments]


def test_spread_over_more_passes_than_are_in_flight_is_over_those() -> None:
    assert _changed(in_flight=3, decoding_passes=8).spread == 3
    assert _changed(in_flight=3).spread == 3
    with pytest.raises(ValueError, match="at least 1"):
        _changed(decoding_passes=0)


def test_a_pass_with_decoding_sessions_reads_at_most_a_chunk_s_worth() -> None:
    batcher = limited(in_flight=1, pages=80, pass_tokens=32)
    read(batcher, session(1, 2, 30))
    for number in (2, 3, 4):
        batcher.submit(session(number, 8), 0.0)
    plan = sent(batcher)
    assert [(one.session, one.length) for one in plan.segments] == [(1, 1), (2, 8)]


def test_with_a_pass_as_long_as_a_chunk_reading_and_decoding_take_turns() -> None:
    batcher = limited(in_flight=1, pages=80, pass_tokens=8)
    read(batcher, session(1, 2, 30))
    batcher.submit(session(2, 24), 0.0)
    order: list[int] = []
    for _ in range(6):
        plan = sent(batcher)
        order += [one.session for one in plan.segments]
        back(batcher, plan)
    assert order == [1, 2, 1, 2, 1, 2]


def test_page_tables_are_told_once_and_in_whole_after_a_fault() -> None:
    batcher = limited(in_flight=1)
    batcher.submit(session(1, 10, 9), 0.0)
    first = sent(batcher)
    table = first.segments[0].pages
    assert (first.segments[0].first_page, len(table)) == (0, 3)
    back(batcher, first)
    assert sent(batcher).segments[0] == Segment(1, 8, 2, 3, ())
    batcher.rewind()
    again = sent(batcher)
    assert again.segments[0] == Segment(1, 8, 2, 0, table)
    assert again.number > first.number


def test_what_comes_back_of_a_void_pass_counts_for_nobody() -> None:
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    plan = sent(batcher)
    batcher.rewind()
    assert batcher.sessions_of(plan.number) == ()
    assert back(batcher, plan) == frozenset()
    assert sent(batcher).segments[0].start == 0


def test_a_cancelled_session_in_flight_counts_no_more_and_is_forgotten_once() -> None:
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    batcher.submit(session(2, 4), 0.0)
    plan = sent(batcher)
    assert batcher.cancel(1)
    assert not batcher.cancel(1)
    assert batcher.sessions_of(plan.number) == (2,)
    assert back(batcher, plan) == {2}
    assert sent(batcher).forget == (1,)
    assert sent_forgets(batcher) == ()


def sent_forgets(batcher: Batcher) -> tuple[int, ...]:
    batcher.rewind()  # the pass that told it is void: it is told again
    told = sent(batcher).forget
    assert told == (1,)
    batcher.returned(batcher._passes.copy().popitem()[0], {2: (1,)}, (), 0.0)
    return sent(batcher).forget


def test_proposals_are_checked_in_one_pass_and_rejected_ones_dropped() -> None:
    batcher = limited(pages=80)
    read(batcher, session(1, 6, 20))
    batcher.propose(1, (11, 12, 13))
    plan = sent(batcher)
    assert plan.tokens == (7, 11, 12, 13)
    assert plan.wanted == (0, 1, 2, 3)
    assert batcher.returned(plan.number, {1: (11, 12, 99)}, (), 0.0) == {1}
    following = sent(batcher)
    assert (following.segments[0].start, following.tokens) == (9, (99,))


def test_proposals_never_exceed_what_may_be_emitted_and_must_fit_what_comes_back() -> None:
    batcher = limited(pages=80)
    read(batcher, session(1, 6, 3))
    batcher.propose(1, (11, 12, 13))
    plan = sent(batcher)
    assert plan.tokens == (7, 11)
    with pytest.raises(ValueError, match="proposed were"):
        batcher.returned(plan.number, {1: (44, 45)}, (), 0.0)


def test_a_session_waits_for_guesses_and_others_do_not() -> None:
    batcher = limited(pages=80, in_flight=1)
    read(batcher, session(1, 6, 20), session(2, 6, 20))
    batcher.hold(1)
    for _ in range(3):
        plan = sent(batcher)
        assert [one.session for one in plan.segments] == [2]
        back(batcher, plan)
    batcher.propose(1, (11,))
    assert sent(batcher).tokens[:2] == (7, 11)
    batcher.rewind()
    batcher.hold(1)
    batcher.hold(2)
    assert batcher.next_pass(0.0) is None
    batcher.hold(9)
    batcher.propose(9, (1,))
    batcher.propose(2, ())
    assert [one.session for one in sent(batcher).segments] == [2]


def test_the_youngest_makes_room_and_goes_on_where_it_was() -> None:
    batcher = limited(pages=8, in_flight=1, prefix=False)
    read(batcher, session(1, 7, 12), session(2, 7, 12))
    order: list[tuple[int, int, int]] = []
    while batcher.running or batcher.queued:
        plan = sent(batcher)
        order += [(one.session, one.start, one.length) for one in plan.segments]
        back(batcher, plan)
    assert [start for number, start, _ in order if number == 1] == list(range(7, 18))
    again = next(entry for entry in order if entry[0] == 2 and entry[1] == 0)
    assert again[2] == 8
    assert order.index(again) > order.index((1, 15, 1))
    assert batcher.pages.room == 6


@pytest.mark.parametrize("pass_tokens", [8, 16])
def test_who_lacks_a_page_holds_nobody_up(pass_tokens: int) -> None:
    batcher = limited(pages=9, in_flight=1, prefix=False, pass_tokens=pass_tokens)
    batcher.submit(session(1, 16, 0, all_rows=True, output="hidden"), 0.0)
    for number, length, most in ((2, 8, 1), (3, 3, 12)):
        batcher.submit(session(number, length, most), 0.0)
    ended: list[int] = []
    while batcher.running or batcher.queued:
        plan = sent(batcher)
        tokens = {one: (7,) for one in plan.wanted_sessions if one > 1}
        before = batcher.sessions_of(plan.number)
        batcher.returned(plan.number, tokens, (), 0.0)
        ended += [one for one in before if one not in batcher._sessions]
    assert sorted(ended) == [1, 2, 3]
    assert batcher.pages.room == 7


def test_who_made_room_in_vain_takes_nobody_s_turn() -> None:
    """The third gives up pages that the fourth has too: the second still lacks one, and the first goes on."""
    batcher = limited(pages=8, pass_tokens=8)
    first, second = session(1, 2, 12, output="hidden"), session(2, 8, 12)
    third, fourth = session(3, 8, 12, output="hidden"), session(4, range(300, 309), 12)
    for one in (first, second, third):
        read(batcher, one)
        batcher.hold(one.number)
    batcher.propose(1, ())
    back(batcher, sent(batcher))  # the first's turn is now the last
    batcher.hold(1)
    batcher.submit(fourth, 0.0)
    assert parts(sent(batcher)) == [(4, 1)], "it begins on the third's pages"
    assert batcher.pages.room == 0
    for one in (first, second, third):
        batcher.propose(one.number, ())
    assert parts(sent(batcher)) == [(1, 1)]
    assert (batcher.running, batcher.queued) == (3, 1), "the third waits again"


def test_rows_of_the_whole_prompt_are_wanted_once_even_if_it_is_read_twice() -> None:
    batcher = limited(in_flight=1, prefix=False)
    batcher.submit(session(1, 12, 4, all_rows=True), 0.0)
    assert sent(batcher).wanted == tuple(range(8))
    plan = batcher._passes.copy().popitem()[0]
    batcher.returned(plan, {}, (), 0.0)
    batcher.compute_again()
    assert sent(batcher).wanted == ()
    batcher.returned(plan + 1, {}, (), 0.0)
    assert sent(batcher).wanted == (0, 1, 2, 3)


def test_an_embedding_has_passes_of_its_own_and_ends_with_its_prompt() -> None:
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    batcher.submit(session(2, 6, 0, all_rows=True, output="hidden"), 0.0)
    plans = [sent(batcher), sent(batcher)]
    assert [(plan.output, len(plan.wanted)) for plan in plans] == [("logits", 1), ("hidden", 6)]
    assert batcher.returned(plans[1].number, {}, (), 0.0) == {2}
    assert batcher.running == 1


def test_scopes_take_turns_however_many_sessions_one_sends() -> None:
    batcher = limited(sessions=2, queue=16, in_flight=1)
    for number in range(1, 9):
        batcher.submit(session(number, 4, 1, "greedy"), 0.0)
    first = sent(batcher)
    batcher.submit(session(9, 4, 1, "modest"), 0.0)
    back(batcher, first)
    assert 9 in {one.session for one in sent(batcher).segments}


def test_the_queue_is_bounded_and_one_scope_leaves_places_to_others() -> None:
    batcher = limited(queue=4, sessions=1)
    for number in (1, 2, 3, 7):
        batcher.submit(session(number, 4, 1, "a"), 0.0)
    with pytest.raises(QueueFull) as full:
        batcher.submit(session(4, 4, 1, "a"), 0.0)
    assert full.value.retry_after_s > 0
    batcher.submit(session(5, 4, 1, "b"), 0.0)
    with pytest.raises(QueueFull):
        batcher.submit(session(6, 4, 1, "c"), 0.0)


def test_retry_after_follows_how_fast_sessions_end() -> None:
    batcher = limited(queue=4, sessions=1, in_flight=1)
    for number in range(1, 5):
        batcher.submit(session(number, 4, 1), 0.0)
    for second in (2.0, 4.0):
        back(batcher, sent(batcher), now_s=second)
    for number in (11, 12):
        batcher.submit(session(number, 4, 1), 4.0)
    with pytest.raises(QueueFull) as full:
        batcher.submit(session(13, 4, 1), 6.0)
    assert full.value.retry_after_s == pytest.approx(4 / (2 / 4.0))


def test_what_can_never_fit_is_refused_at_once() -> None:
    batcher = limited(pages=6)
    with pytest.raises(TooLong, match="take 17 positions, all caches together have 16"):
        batcher.submit(session(1, 10, 7), 0.0)
    batcher.submit(session(2, 10, 6), 0.0)


def test_deadlines_end_sessions_that_wait_and_that_run() -> None:
    batcher = limited(sessions=1)
    batcher.submit(session(1, 4, deadline_s=5.0), 0.0)
    batcher.submit(session(2, 4, deadline_s=3.0), 0.0)
    plan = sent(batcher)
    assert batcher.expire(2.9) == ()
    assert batcher.expire(5.0) == (1, 2)
    assert back(batcher, plan) == frozenset()
    assert (batcher.running, batcher.queued, batcher.pages.room) == (0, 0, 32)


def test_after_a_failed_pass_each_tries_alone_and_only_the_culprit_is_over() -> None:
    batcher = limited(in_flight=1)
    for number in (1, 2):
        batcher.submit(session(number, 4), 0.0)
    assert batcher.failed(sent(batcher).number, 0.0) == ()
    plan = sent(batcher)
    assert [one.session for one in plan.segments] == [1]
    assert batcher.failed(plan.number, 0.0) == (1,)
    plan = sent(batcher)
    assert ([one.session for one in plan.segments], plan.forget) == ([2], (1,))
    assert back(batcher, plan) == {2}


def test_a_rebuild_tells_shared_pages_once() -> None:
    batcher = limited(pages=80)
    alike = tuple(range(12))
    read(batcher, session(1, alike, 9))
    read(batcher, session(2, (*alike, 50, 51), 9))
    assert batcher.matched(2) == 12
    batcher.rewind()
    one, two = batcher.segments_for_rebuild()
    assert (one.session, one.start, one.length) == (1, 0, 13)
    assert (two.session, two.start, two.length) == (2, 12, 2)
    assert two.pages[:3] == one.pages[:3]
    assert batcher.tokens_of(two) == (50, 51)
    assert batcher.live == {1: 13, 2: 14}


def test_who_has_computed_nothing_yet_waits_again_after_a_fault() -> None:
    batcher = limited(pages=80)
    alike = tuple(range(12))
    read(batcher, session(1, alike, 9))
    batcher.submit(session(2, (*alike, 50, 51), 9), 0.0)
    sent(batcher)
    batcher.rewind()
    assert batcher.live == {1: 12}
    assert batcher.queued == 1


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks no longer than a pass"):
        limited(chunk_tokens=17)
    with pytest.raises(ValueError, match="more pages than a probe"):
        limited(pages=1)


# ------------------------------------------------------------------------------------------------ what counts for whom


def test_a_pass_made_before_a_session_gave_its_pages_up_counts_for_it_no_more() -> None:
    """It was admitted again, and reads its tokens anew: what comes of the older pass is of pages it has no more."""
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    older = sent(batcher)
    batcher.compute_again()
    newer = sent(batcher)
    assert batcher.sessions_of(older.number) == ()
    assert back(batcher, older) == frozenset()
    assert batcher.sessions_of(newer.number) == (1,)
    assert back(batcher, newer) == {1}


def test_a_pass_counts_once() -> None:
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    plan = sent(batcher)
    assert back(batcher, plan) == {1}
    assert back(batcher, plan) == frozenset()
    assert batcher.failed(plan.number, 0.0) == ()


def test_what_fails_for_a_session_that_is_in_it_no_more_is_not_held_against_it() -> None:
    batcher = limited()
    for number in (1, 2):
        batcher.submit(session(number, 4), 0.0)
    older = sent(batcher)
    batcher.compute_again()
    newer = sent(batcher)
    assert batcher.failed(older.number, 0.0) == ()
    assert batcher.sessions_of(newer.number) == (1, 2)
    assert batcher.failed(newer.number, 0.0) == (), "the first failure that counts"


def test_what_came_back_forgives_a_failure() -> None:
    batcher = limited(in_flight=1)
    batcher.submit(session(1, 4, 9), 0.0)
    for _ in range(3):
        assert batcher.failed(sent(batcher).number, 0.0) == ()
        assert back(batcher, sent(batcher)) == {1}


# ------------------------------------------------------------------------------------------------- what stages forget


def test_stages_are_told_again_what_a_pass_told_them_that_failed_or_is_void() -> None:
    for end in ("failed", "void"):
        batcher = limited(in_flight=1)
        read(batcher, session(1, 4, 9), session(2, 4, 9))
        batcher.cancel(1)
        plan = sent(batcher)
        assert plan.forget == (1,)
        if end == "failed":
            batcher.failed(plan.number, 0.0)
        else:
            batcher.rewind()
        plan = sent(batcher)
        assert plan.forget == (1,)
        back(batcher, plan)
        assert sent(batcher).forget == ()


def test_every_pass_tells_what_to_forget_until_one_that_told_it_came_back() -> None:
    """The first may fail at a stage, then those behind that stage hear of it from the next."""
    batcher = limited(in_flight=3, sessions=3)
    read(batcher, *(session(number, 4, 9) for number in (1, 2, 3)))
    batcher.cancel(1)
    first = sent(batcher)
    batcher.submit(session(4, 4), 0.0)
    second = sent(batcher)
    assert 4 in [one.session for one in second.segments]
    assert first.forget == second.forget == (1,)
    batcher.failed(first.number, 0.0)
    back(batcher, second)
    assert sent(batcher).forget == ()


def test_a_late_pass_does_not_answer_for_a_session_that_was_admitted_and_dropped_since() -> None:
    batcher = limited(in_flight=3)
    read(batcher, session(1, 4, 9), session(2, 4, 9))
    batcher.compute_again()
    batcher.hold(2)
    assert batcher.forgotten == (1, 2)
    early = batcher.take_number()
    assert [one.session for one in sent(batcher).segments] == [1]
    batcher.cancel(1)
    batcher.dropped(early, (1, 2))
    assert batcher.forgotten == (1,)


def test_stages_that_hold_a_waiting_session_again_are_told_again() -> None:
    batcher = limited()
    read(batcher, session(1, 4, 9))
    batcher.compute_again()
    batcher.dropped(batcher.take_number(), (1,))
    assert batcher.forgotten == ()
    batcher.forget((1,))
    assert batcher.forgotten == (1,)


def test_what_one_pass_can_not_name_keeps_its_place_at_the_stages() -> None:
    batcher = limited(in_flight=1)
    batcher.forget(range(1000, 1000 + MAX_SESSIONS // 2 + 6))
    for number in range(1, 9):
        batcher.submit(session(number, 1), 0.0)
    plan = sent(batcher)
    assert (len(plan.forget), len(plan.segments)) == (MAX_SESSIONS // 2, 2)
    back(batcher, plan)
    assert (len(sent(batcher).forget), batcher.running) == (6, 8)


def test_stages_forget_strangers_and_never_who_is_admitted() -> None:
    batcher = limited(in_flight=1)
    read(batcher, session(1, 4, 9))
    batcher.forget((1, 8, 9))
    assert sent(batcher).forget == (8, 9)


def test_who_gave_its_pages_up_is_forgotten_unless_it_is_admitted_again_meanwhile() -> None:
    batcher = limited(in_flight=1)
    read(batcher, session(1, 4, 9), session(2, 4, 9))
    batcher.compute_again()
    assert batcher.forgotten == (1, 2)
    batcher.compute_again()
    batcher.forget((1, 2))
    assert sent(batcher).forget == ()


def test_one_pass_tells_of_half_as_many_as_there_can_be_and_the_next_of_the_others() -> None:
    batcher = limited(in_flight=1)
    read(batcher, session(1, 4, 9))
    batcher.forget(range(1000, 1000 + MAX_SESSIONS))
    first = sent(batcher)
    back(batcher, first)
    assert first.forget + sent(batcher).forget == tuple(range(1000, 1000 + MAX_SESSIONS))


# ---------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"page_tokens": 0}, "at least 1"),
        ({"sessions": 0}, "at least 1"),
        ({"in_flight": 0}, "at least 1"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"queue": 0}, "at least 1"),
        ({"probe_tokens": 0}, "at least 1"),
        ({"reserve_tokens": -1}, "at least 1"),
        ({"sessions": MAX_SESSIONS}, "fewer than"),
        ({"probe_tokens": 17}, "a probe of one pass"),
    ],
)
def test_limits_out_of_bounds_are_refused(changes: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        limited(**changes)


def test_limits_at_their_bounds_are_fine() -> None:
    assert limited(sessions=MAX_SESSIONS - 1, pages=5, page_tokens=1, probe_tokens=1, queue=1, in_flight=1)
    assert limited(pages=4, probe_tokens=16, chunk_tokens=16)


@pytest.mark.parametrize("spec", [session(0, 4), session(-1, 4), session(1, 0), session(1, 4, -1), session(7, 4)])
def test_what_is_no_session_is_refused(spec: SessionSpec) -> None:
    batcher = limited()
    batcher.submit(session(7, 4), 0.0)
    with pytest.raises(ValueError, match="new session number"):
        batcher.submit(spec, 0.0)


def test_guesses_before_the_first_token_are_dropped() -> None:
    batcher = limited(in_flight=1)
    batcher.submit(session(1, 4, 9), 0.0)
    batcher.propose(1, (11, 12))
    assert back(batcher, sent(batcher)) == {1}
    assert sent(batcher).tokens == (7,)


def test_a_session_without_a_deadline_never_expires() -> None:
    batcher = limited()
    batcher.submit(session(1, 4), 0.0)
    batcher.submit(session(2, 4, deadline_s=1.0), 0.0)
    assert batcher.expire(1e9) == (2,)


def test_no_more_passes_are_under_way_than_may_be() -> None:
    batcher = limited(in_flight=2)
    for number in range(1, 7):
        batcher.submit(session(number, 8), 0.0)
    assert batcher.oldest_s is None
    assert batcher.next_pass(3.0) is not None
    assert batcher.next_pass(4.0) is not None
    assert batcher.next_pass(5.0) is None
    assert (batcher.under_way, batcher.oldest_s) == (2, 3.0)


def test_what_was_known_of_a_prompt_is_told_for_sessions_that_are() -> None:
    batcher = limited()
    assert batcher.matched(5) == 0
    batcher.submit(session(5, 4), 0.0)
    assert batcher.matched(5) == 0


# --------------------------------------------------------------------------------------------------------- who is next


def test_what_is_computed_of_a_session_counts_from_its_first_position_on() -> None:
    batcher = limited()
    batcher.submit(session(1, 1, 9), 0.0)
    plan = sent(batcher)
    assert batcher.live == {}
    back(batcher, plan)
    assert batcher.live == {1: 1}


def test_a_session_all_of_whose_pages_another_has_needs_no_segment_of_its_own() -> None:
    """The older one was admitted again and found what the younger had computed."""
    batcher = limited(in_flight=1)
    alike = tuple(range(8))
    read(batcher, session(2, alike, 9))
    batcher.hold(2)
    read(batcher, session(1, (*alike, 50, 51), 9))
    (only,) = batcher.segments_for_rebuild()
    assert (only.session, only.start, only.length) == (1, 0, 10)
    assert batcher.live == {1: 10, 2: 8}


def test_nobody_is_admitted_while_a_session_lacks_a_page() -> None:
    batcher = limited(pages=8, prefix=False)
    read(batcher, session(1, 8, 9))
    batcher.hold(1)
    batcher.submit(session(2, 16, 4), 0.0)
    back(batcher, sent(batcher))
    older = sent(batcher)
    assert [one.session for one in older.segments] == [2]
    batcher.propose(1, ())
    batcher.submit(session(3, 4, 4), 0.0)
    assert batcher.next_pass(0.0) is None, "1 lacks a page, 2 is under way"
    batcher.cancel(2)
    back(batcher, older)
    assert [one.session for one in sent(batcher).segments] == [1]
    assert [one.session for one in sent(batcher).segments] == [3]


def test_whose_rows_have_all_come_may_go_on_from_the_prefix_cache() -> None:
    batcher = limited(pages=8, in_flight=1)
    read(batcher, session(1, 8, 13), session(2, 8, 4, all_rows=True))
    batcher.hold(2)
    while batcher.queued == 0:
        back(batcher, sent(batcher))
    batcher.propose(2, ())
    batcher.cancel(1)
    plan = sent(batcher)
    assert [(one.session, one.start, one.length) for one in plan.segments] == [(2, 4, 4)]
    assert plan.wanted == ()
    back(batcher, plan)
    plan = sent(batcher)
    assert plan.segments[0].start == 8
    assert plan.wanted_sessions == (2,)


def test_who_waits_takes_no_room_in_a_pass() -> None:
    batcher = limited(sessions=1)
    read(batcher, session(1, 4, 30))
    batcher.submit(session(2, 8), 0.0)
    batcher.propose(1, range(12))
    assert sent(batcher).tokens == (7, *range(12))


def test_the_last_token_of_a_prompt_is_read_not_decoded() -> None:
    """So it is no reason to read less of others."""
    batcher = limited(pass_tokens=32, in_flight=1, prefix=False)
    batcher.submit(session(1, 9), 0.0)
    back(batcher, sent(batcher))
    for number in (2, 3):
        batcher.submit(session(number, 8), 0.0)
    assert [(one.session, one.length) for one in sent(batcher).segments] == [(1, 1), (2, 8), (3, 8)]


def test_whose_pass_failed_is_in_nobody_else_s_pass_until_it_has_tried_alone() -> None:
    batcher = limited(in_flight=1)
    read(batcher, session(1, 4, 9))
    batcher.hold(1)
    batcher.submit(session(2, 4, 9), 0.0)
    assert batcher.failed(sent(batcher).number, 0.0) == ()
    batcher.propose(1, ())
    for expected in (1, 2):
        plan = sent(batcher)
        assert [one.session for one in plan.segments] == [expected]
        back(batcher, plan)
    assert [one.session for one in sent(batcher).segments] == [1, 2]


# ------------------------------------------------------------------------------------------------------ how much fits


def parts(plan: PassPlan) -> list[tuple[int, int]]:
    return [(one.session, one.length) for one in plan.segments]


def test_guesses_take_what_room_a_prompt_leaves_and_prompts_what_guesses_leave() -> None:
    batcher = limited(in_flight=1, pages=80)
    read(batcher, session(1, 4, 30))
    for number, length in ((2, 3), (3, 1)):
        batcher.submit(session(number, length), 0.0)
    batcher.propose(1, range(30))
    assert parts(sent(batcher)) == [(1, 13), (2, 3)]


def test_a_pass_is_filled_with_those_that_decode_and_no_further() -> None:
    batcher = limited(in_flight=1, pages=80, pass_tokens=8, sessions=16, queue=16)
    read(batcher, *(session(number, 2, 30) for number in range(1, 11)))
    seen: list[int] = []
    for count in (8, 8, 4):
        plan = sent(batcher)
        seen += [one for one, _ in parts(plan)][:count]
        assert len(plan.tokens) == 8
        back(batcher, plan)
    assert sorted(seen) == sorted([*range(1, 11), *range(1, 11)]), "each twice before anyone's third turn"


def test_guesses_of_several_share_a_pass() -> None:
    batcher = limited(in_flight=1, pages=80, pass_tokens=8)
    read(batcher, session(1, 2, 30), session(2, 2, 30), session(3, 2, 30))
    batcher.propose(1, range(3))
    batcher.propose(2, range(30))
    batcher.propose(3, range(30))
    assert parts(sent(batcher)) == [(1, 4), (2, 4)]


def test_who_only_reads_does_not_make_passes_of_those_that_decode_larger() -> None:
    batcher = limited(in_flight=2, pages=80)
    read(batcher, session(1, 2, 30), session(2, 2, 30))
    for number in (3, 4, 5):
        batcher.submit(session(number, 8), 0.0)
    assert len([one for one, length in parts(sent(batcher)) if length == 1]) == 1


# ------------------------------------------------------------------------------------------------ what may come back


def test_what_comes_back_must_fit_what_was_asked() -> None:
    reading = limited()
    reading.submit(session(1, 12), 0.0)
    with pytest.raises(ValueError, match="only there"):
        reading.returned(sent(reading).number, {1: (7,)}, (), 0.0)
    read_all = limited()
    read_all.submit(session(1, 4), 0.0)
    with pytest.raises(ValueError, match="only there"):
        read_all.returned(sent(read_all).number, {}, (), 0.0)
    prompt_only = limited()
    prompt_only.submit(session(1, 4, 0), 0.0)
    with pytest.raises(ValueError, match="was given"):
        prompt_only.returned(sent(prompt_only).number, {1: (7,)}, (), 0.0)


@pytest.mark.parametrize("tokens", [(), (7,)])
def test_who_has_finished_is_over_with_its_last_token_or_without_another(tokens: tuple[int, ...]) -> None:
    batcher = limited()
    batcher.submit(session(1, 4, 9), 0.0)
    assert batcher.returned(sent(batcher).number, {1: tokens}, {1}, 0.0) == {1}
    assert (batcher.running, batcher.live) == (0, {})


def test_a_prompt_without_an_answer_ends_with_its_last_chunk() -> None:
    batcher = limited(in_flight=1)
    batcher.submit(session(1, 12, 0), 0.0)
    for running in (1, 0):
        batcher.returned(sent(batcher).number, {}, (), 0.0)
        assert batcher.running == running


def test_how_fast_sessions_end_is_not_known_in_the_moment_of_the_first() -> None:
    batcher = limited(queue=1, sessions=1, in_flight=1)
    batcher.submit(session(1, 4, 1), 0.0)
    back(batcher, sent(batcher), now_s=4.0)
    for number in (2, 3):
        batcher.submit(session(number, 4, 1), 4.0)
    for now_s in (3.9, 4.0):
        with pytest.raises(QueueFull) as full:
            batcher.submit(session(4, 4, 1), now_s)
        assert full.value.retry_after_s == 1.0


def test_sessions_of_several_adapters_share_a_pass_and_no_prefix() -> None:
    batcher = limited(in_flight=1)
    prompt = range(9)
    read(batcher, *(session(number, prompt, adapter=number % 2) for number in (1, 2)))
    assert [(one.session, one.adapter) for one in sent(batcher).segments] == [(1, 1), (2, 0)]
    batcher = limited()
    for number, adapter, known in ((1, 0, 0), (2, 1, 0), (3, 1, 8), (4, 0, 8), (5, 2, 0)):
        read(batcher, session(number, prompt, adapter=adapter))
        assert batcher.matched(number) == known, number


def test_what_is_rebuilt_goes_through_the_sessions_own_adapter() -> None:
    batcher = limited()
    read(batcher, session(1, 6, adapter=2), session(2, 6))
    assert [(one.session, one.adapter) for one in batcher.segments_for_rebuild()] == [(1, 2), (2, 0)]


# ------------------------------------------------------------------------------------------------ texts that are over


def holding(**changes: int | bool) -> Batcher:
    return Batcher(_changed(**changes), holds=True)


def ended(batcher: Batcher, *sessions: SessionSpec) -> None:
    for one in sessions:
        batcher.submit(one, 0.0)
    while (plan := batcher.next_pass(0.0)) is not None:
        back(batcher, plan)


def test_a_text_that_is_over_keeps_its_pages_until_it_is_let_go() -> None:
    batcher = holding(in_flight=1)
    room = batcher.pages.room
    ended(batcher, session(1, 9, 3))
    (text,) = batcher.take_over()
    assert (text.number, text.origin, text.passes) == (1, 0, 4)
    assert text.tokens == (*range(100, 109), 7, 7)  # the last one was given out and never computed
    assert len(text.pages) == 3
    assert batcher.take_over() == ()
    assert batcher.pages.room == room - 3
    assert sent_forget(batcher) == (1,)
    batcher.let_go(1)
    batcher.let_go(1)
    assert (batcher.is_held(1), batcher.pages.room) == (False, room)


def test_a_text_without_a_computed_position_is_not_held() -> None:
    batcher = holding(in_flight=1)
    room = batcher.pages.room
    batcher.submit(session(1, 9, 3), 0.0)
    sent(batcher)
    batcher.cancel(1)
    assert not batcher.is_held(1)
    assert (batcher.take_over(), batcher.pages.room) == ((), room)


def sent_forget(batcher: Batcher) -> tuple[int, ...]:
    """What the next pass tells stages to forget: at once, their rings are needed."""
    return batcher.forgotten


def test_of_what_another_text_began_with_only_the_rest_is_its_own() -> None:
    batcher = holding(in_flight=1)
    ended(batcher, session(1, range(10)))
    ended(batcher, session(2, (*range(8), 50, 51, 52)))
    texts = {text.number: text for text in batcher.take_over()}
    assert (texts[1].origin, texts[2].origin) == (0, 8)
    assert texts[2].pages[:2] == texts[1].pages[:2]


def test_whoever_computes_needs_pages_more_than_a_check() -> None:
    batcher = holding(pages=10, in_flight=1, prefix=False)
    ended(batcher, session(1, 8, 2), session(2, 8, 2))
    assert len(batcher.take_over()) == 2
    batcher.submit(session(3, 28, 4), 0.0)
    assert batcher.next_pass(0.0) is not None
    assert not batcher.is_held(1)
    assert not batcher.is_held(2)


def test_an_answer_that_grows_takes_the_pages_of_what_is_over() -> None:
    batcher = holding(pages=10, in_flight=1, prefix=False, sessions=2)
    read(batcher, session(2, 8, 20))
    ended(batcher, session(1, 8, 2))
    assert [text.number for text in batcher.take_over()] == [2]
    assert not batcher.is_held(1)
    assert batcher.queued == batcher.running == 0


def test_what_was_computed_in_two_rounds_is_nobodys_and_what_was_never_computed_neither() -> None:
    batcher = holding(in_flight=1)
    read(batcher, session(1, 6, 4))
    batcher.submit(session(2, 6, 4), 0.0)
    batcher.cancel(2)
    batcher.rewind()
    while (plan := batcher.next_pass(0.0)) is not None:
        back(batcher, plan)
    assert batcher.take_over() == ()


def test_what_is_computed_again_from_its_tokens_is_one_rounds() -> None:
    batcher = holding(in_flight=1)
    read(batcher, session(1, 6, 4))
    batcher.compute_again()
    batcher.rewind()
    while (plan := batcher.next_pass(0.0)) is not None:
        back(batcher, plan)
    (text,) = batcher.take_over()
    assert (text.number, text.origin) == (1, 0)


@pytest.mark.parametrize("fault", ["rewind", "compute_again", "caches_lost"])
def test_a_round_or_a_lost_cache_lets_everything_go_and_nothing_is_found_again(fault: str) -> None:
    batcher = holding(in_flight=1)
    ended(batcher, session(1, range(10)))
    assert len(batcher.take_over()) == 1
    getattr(batcher, fault)()
    assert not batcher.is_held(1)
    known = batcher.pages.match(session(2, range(10)).prefix_scope, list(range(10))).tokens
    assert known == (8 if fault == "rewind" else 0)


def test_a_prompt_that_is_read_again_with_its_answer_has_pages_for_both() -> None:
    """Its last piece came back with a token, and then an earlier one failed."""
    batcher = limited(in_flight=2, page_tokens=4, prefix=False)
    batcher.submit(session(1, 16, 3), 0.0)
    first, last = sent(batcher), sent(batcher)
    assert back(batcher, last) == {1}
    assert batcher.failed(first.number, 0.0) == ()
    pages = 0
    for start in (0, 8, 16):
        (segment,) = (plan := sent(batcher)).segments
        pages = max(pages, segment.first_page + len(segment.pages))
        assert segment.start == start
        assert 4 * pages >= start + segment.length
        back(batcher, plan)
