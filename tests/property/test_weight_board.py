"""Whatever sources do (answer, answer half, decline, end, return, dawdle), no piece is lost or counted twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.execution.weights.board import Board, Share, ring, start
from harness.examples import examples

A, B, C = (bytes([letter]) * 32 for letter in b"abc")
PEER, OWNER = 0, 1


def board(
    missing: dict[bytes, tuple[int, ...]], sources: int = 2, having: dict[int, set[bytes]] | None = None
) -> Board:
    known = [(having or {}).get(number, set[bytes]()) for number in range(sources)]
    starts = [(0, 0)] * sources
    return Board(missing, known, starts=starts, ask_pieces=4, retry_s=3.0, slow_s=5.0, grace_s=1.0, now_s=0.0)


def test_the_owner_gives_what_no_peer_has() -> None:
    work = board({A: tuple(range(6)), B: (0,)}, having={PEER: {A}})
    work.reached(PEER)
    assert [(share.digest, share.first, share.count) for share in everything(work, OWNER, 9.0)] == [(B, 0, 1)]
    first = work.take(PEER, 9.0)
    assert first is not None
    assert (first.digest, first.first, first.count) == (A, 0, 4)
    work.declined(PEER, first, 9.0)
    assert work.take(PEER, 9.0) is None, "it rests"
    assert work.take(OWNER, 9.0) is first
    # Part of an answer: the rest is open for those who may have it, the peer first of all once it has rested.
    assert work.arrived(OWNER, first, 1, 9.1)
    assert work.take(OWNER, 9.1) is None
    rest = work.take(PEER, 9.1)
    assert rest is not None
    assert (rest.digest, rest.first, rest.count) == (A, 1, 3)


def everything(work: Board, source: int, now_s: float) -> list[Share]:
    shares: list[Share] = []
    while (share := work.take(source, now_s)) is not None:
        shares.append(share)
    return shares


def test_the_owner_waits_for_peers_that_are_being_reached_but_not_for_long() -> None:
    work = board({A: (0,)})
    assert work.take(OWNER, 0.9) is None
    assert work.take(OWNER, 1.0) is not None
    work = board({A: (0,)})
    work.lost(PEER)
    assert work.take(OWNER, 0.1) is not None
    work = board({A: (0,)})
    work.reached(PEER)
    assert work.take(OWNER, 99.0) is None
    work.drop(PEER)
    assert work.take(PEER, 99.0) is None
    assert work.take(OWNER, 99.0) is not None


def test_who_declined_is_asked_again_later() -> None:
    work = board({A: (0,)}, sources=3)
    share = work.take(0, 0.0)
    assert share is not None
    now_s = 0.0
    for rest_s in (3 / 32, 3 / 16, 3 / 8, 3 / 4, 1.5, 3.0, 3.0):  # longer each time it has nothing
        work.declined(0, share, now_s)
        assert work.take(0, now_s + 0.99 * rest_s) is None
        now_s += rest_s
        assert work.take(0, now_s) is share


def test_a_source_that_gives_is_asked_at_once_after_a_gap() -> None:
    work = board({A: tuple(range(12))})
    work.reached(PEER)
    gap, has = work.take(PEER, 0.0), work.take(PEER, 0.0)
    assert gap is not None
    assert has is not None
    work.declined(PEER, gap, 0.0)
    work.arrived(PEER, has, 4, 0.1)
    assert work.take(PEER, 0.1) is gap
    work.declined(PEER, gap, 0.1)
    assert work.take(PEER, 0.1 + 3 / 32) is not None, "its declines are counted from the last answer on"


def test_a_source_is_asked_from_its_own_place_on() -> None:
    digests = (A, B, C)
    work = Board(
        {digest: tuple(range(8)) for digest in digests},
        [(), ()],
        starts=[(1, 4), (0, 4)],
        ask_pieces=4,
        retry_s=3.0,
        slow_s=5.0,
        grace_s=0.0,
        now_s=0.0,
    )
    work.reached(PEER)
    assert [share.place for share in everything(work, PEER, 0.0)] == [(1, 4), (2, 0), (2, 4), (0, 0), (0, 4), (1, 0)]
    work.drop(PEER)
    assert [share.place for share in everything(work, OWNER, 0.0)] == [(0, 4), (1, 0), (1, 4), (2, 0), (2, 4), (0, 0)]


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), members=st.integers(1, 9))
def test_members_begin_as_far_from_each_other_as_can_be(sizes: list[int], members: int) -> None:
    pieces = {bytes([number]) * 32: size for number, size in enumerate(sizes)}
    names = [f"member {number}" for number in range(members)]
    order, total = ring(pieces), sum(sizes)
    before = {digest: sum(pieces[other] for other in order[:place]) for place, digest in enumerate(order)}
    begun = sorted(before[order[tensor]] + first for tensor, first in (start(pieces, name, names) for name in names))
    gaps = [after - one for one, after in zip(begun, [*begun[1:], begun[0] + total], strict=True)]
    assert sum(gaps) == total
    assert max(gaps) - min(gaps) <= 1


def test_the_owner_helps_where_peers_are_slow() -> None:
    work = board({A: tuple(range(12))})
    work.reached(PEER)
    first = work.take(PEER, 0.0)
    assert first is not None
    assert work.take(OWNER, 5.0) is None
    helped = work.take(OWNER, 5.1)
    assert helped is not None
    assert helped is not first
    assert work.arrived(PEER, first, 4, 6.0)
    assert work.take(OWNER, 6.0) is not None, "its last answer took 6 s"
    assert work.take(OWNER, 6.0) is None, "nothing is left that nobody was asked for"


def test_the_first_answer_to_what_two_were_asked_for_counts() -> None:
    work = board({A: (0, 1)})
    work.reached(PEER)
    share = work.take(PEER, 0.0)
    assert share is not None
    assert work.take(OWNER, 5.1) is share
    assert work.arrived(OWNER, share, 2, 5.2)
    assert work.done
    assert not work.arrived(PEER, share, 2, 5.3)
    assert work.done


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_no_piece_is_lost_or_counted_twice(data: st.DataObject) -> None:
    missing = {digest: tuple(sorted(data.draw(st.sets(st.integers(0, 20), max_size=12)))) for digest in (A, B, C)}
    sources = data.draw(st.integers(1, 3))
    work = board(missing, sources)
    came: Counter[tuple[bytes, int]] = Counter()
    flying: dict[int, list[Share]] = {number: [] for number in range(sources)}
    now_s = 0.0
    for _ in range(data.draw(st.integers(0, 60))):
        now_s += data.draw(st.sampled_from((0.0, 0.5, 4.0, 20.0)))
        source = data.draw(st.integers(0, sources - 1))
        if flying[source] and data.draw(st.booleans()):
            share = flying[source].pop(0)
            match data.draw(st.sampled_from(("answer", "decline", "end", "reach"))):
                case "answer":
                    good = data.draw(st.integers(0, share.count))
                    if work.arrived(source, share, good, now_s):
                        came.update((share.digest, piece) for piece in range(share.first, share.first + good))
                case "decline":
                    work.declined(source, share, now_s)
                case "end":
                    work.lost(source)
                    flying[source].clear()
                case _:
                    work.reached(source)
                    flying[source].insert(0, share)
        elif (share := work.take(source, now_s)) is not None:
            assert source in share.askers
            flying[source].append(share)
    # Now the last source answers everything.
    for source in range(sources):
        work.lost(source) if source == sources - 1 else work.drop(source)
    now_s += 1000.0
    while (share := work.take(sources - 1, now_s)) is not None:
        assert work.arrived(sources - 1, share, share.count, now_s)
        came.update((share.digest, piece) for piece in range(share.first, share.first + share.count))
    assert work.done
    assert came == Counter({(digest, piece): 1 for digest, pieces in missing.items() for piece in pieces})
