"""Pages: sharing by prefix and scope, what is kept and what goes, nothing handed out twice."""

from __future__ import annotations

import pytest

from fusionai.coordination.serving.pages import Match, Pages, UnknownSession

NOTHING = Match((), 0)


def opened(pages: Pages, session: int, tokens: tuple[int, ...], scope: str = "") -> tuple[int, ...]:
    """A session that computed all its tokens."""
    pages.admit(session, scope, pages.match(scope, tokens))
    assert pages.extend(session, len(tokens))
    pages.confirm(session, tokens)
    return pages.table(session)


def test_a_prefix_is_shared_in_whole_pages_and_never_entirely() -> None:
    pages = Pages(16, 4)
    first = opened(pages, 1, tuple(range(8)))
    assert pages.match("", tuple(range(8))) == Match(first[:1], 4)
    assert pages.match("", tuple(range(9))) == Match(first, 8)
    assert pages.match("", (0, 1, 2, 9, 4, 5)) == NOTHING
    second = opened(pages, 2, (*range(8), 77))
    assert second[:2] == first


def test_another_scope_or_an_unlike_beginning_shares_nothing() -> None:
    pages = Pages(16, 4)
    opened(pages, 1, tuple(range(12)), "key a")
    assert pages.match("key b", tuple(range(12))) == NOTHING
    assert pages.match("key a", (9, *range(4, 12))) == NOTHING


def test_switched_off_nothing_is_kept() -> None:
    pages = Pages(4, 4, prefix=False)
    opened(pages, 1, tuple(range(12)))
    assert pages.match("", tuple(range(12))) == NOTHING
    pages.release(1)
    assert (pages.room, pages.kept) == (4, 0)


def test_what_was_not_confirmed_is_not_found() -> None:
    pages = Pages(8, 4)
    pages.admit(1, "", NOTHING)
    pages.extend(1, 8)
    pages.confirm(1, tuple(range(7)))
    assert pages.match("", tuple(range(8))).tokens == 4
    assert pages.match("", tuple(range(12))).tokens == 4


def test_kept_pages_go_oldest_first_and_of_a_chain_its_end() -> None:
    pages = Pages(4, 2)
    old = opened(pages, 1, (1, 2, 3, 4))
    pages.release(1)
    new = opened(pages, 2, (5, 6, 7, 8))
    pages.release(2)
    assert (pages.room, pages.kept) == (4, 4)
    pages.admit(3, "", NOTHING)
    assert pages.extend(3, 2)
    assert pages.table(3) == (old[1],)
    assert pages.match("", (1, 2, 3, 4, 0)) == Match(old[:1], 2)
    assert pages.match("", (5, 6, 7, 8, 0)) == Match(new, 4)


def test_no_room_changes_nothing() -> None:
    pages = Pages(3, 2)
    pages.admit(1, "", NOTHING)
    assert pages.extend(1, 4)
    before = pages.table(1)
    assert not pages.extend(1, 9)
    assert (pages.table(1), pages.room) == (before, 1)


def test_the_last_page_is_handed_out_too() -> None:
    pages = Pages(3, 2)
    pages.admit(1, "", NOTHING)
    assert pages.extend(1, 6)
    assert (pages.room, len(pages.table(1))) == (0, 3)
    assert pages.extend(1, 6)


def test_a_match_takes_kept_pages_out_of_the_room() -> None:
    pages = Pages(4, 2)
    opened(pages, 1, (1, 2, 3, 4))
    pages.release(1)
    match = pages.match("", (1, 2, 3, 4, 5))
    assert pages.lacks(match, 8) == 0
    assert pages.lacks(match, 9) == 1
    assert pages.lacks(NOTHING, 8) == 0


def test_after_lost_caches_only_living_sessions_are_found() -> None:
    pages = Pages(8, 2)
    opened(pages, 1, (1, 2, 3, 4))
    opened(pages, 2, (9, 9, 9, 9))
    pages.release(2)
    pages.drop_index()
    assert (pages.kept, pages.room) == (0, 6)
    assert pages.match("", (9, 9, 9, 9, 9)) == NOTHING
    assert pages.match("", (1, 2, 3, 4, 5)).tokens == 4


def test_an_equal_page_of_a_second_session_is_freed_when_it_ends() -> None:
    pages = Pages(8, 2)
    for session in (1, 2):
        pages.admit(session, "", NOTHING)
        pages.extend(session, 4)
    for session in (1, 2):
        pages.confirm(session, (1, 2, 3, 4))
    pages.release(2)
    assert pages.kept == 0
    pages.release(1)
    assert (pages.kept, pages.room) == (2, 8)
    pages.release(1)


def test_misuse_is_said() -> None:
    pages = Pages(2, 2)
    with pytest.raises(UnknownSession, match="got 5"):
        pages.table(5)
    pages.admit(1, "", NOTHING)
    with pytest.raises(ValueError, match="session 1"):
        pages.admit(1, "", NOTHING)
    with pytest.raises(ValueError, match="got 0 of 4"):
        Pages(0, 4)
    with pytest.raises(ValueError, match="got 4 of 0"):
        Pages(4, 0)
    assert Pages(1, 1).room == 1


def test_a_page_is_that_of_a_text_whose_positions_saw_the_same() -> None:
    """Images 5, 6 and 7, 8 side by side see each other; a text with the first alone takes none of their pages."""
    pages, both, one = Pages(16, 2), (1, 2, 5, 6, 7, 8, 3, 3, 3), (1, 2, 5, 6, 3, 3, 3)
    pages.admit(1, "", NOTHING)
    assert pages.extend(1, len(both))
    pages.confirm(1, both, ((2, 6),))
    assert pages.match("", both, ((2, 6),)).tokens == 8
    assert pages.match("", one, ((2, 4),)).tokens == 2
    assert pages.match("", both[:6], ((2, 6),)).tokens == 2, "no text begins within what sees itself"
