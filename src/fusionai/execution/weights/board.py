"""Schedules which pieces of weights to request from which source. Pure: time is an argument.

Sources before the last share one queue, so a faster one delivers more. The last source, the job owner, is asked only
for pieces that no reachable and fast enough peer has. A piece that a slow source was asked for may also be requested
from another; the first answer counts. A source without a piece may have it soon, because it is fetching as well.

All members go round one ring of pieces, each from its own starting point. When a member reaches the next one's starting
point, that member has the pieces from there on, so the owner sends each piece about once. Random orders would not
achieve this: two members that reach a piece at about the same time would both request it from the owner. A peer is
asked from its starting point on, since it fetches those pieces first. If it does not have a piece yet, it is left alone
for a moment instead of being asked for the whole ring; meanwhile the owner serves from this member's own starting
point.

`execution.weights.fetching` sends the requests and reports answers to this board.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

Place = tuple[int, int]
"""Position on the ring: (index of the tensor, index of its piece)."""

LEAST_REST: Final = 1 / 32
"""Rest after the first decline, as a fraction of the longest rest. It doubles with each further consecutive decline."""


@dataclass(slots=True, eq=False)
class Share:
    """Consecutive pieces of one tensor, requested together."""

    digest: bytes
    first: int
    count: int
    tensor: int
    """Index of its tensor on the ring."""
    askers: set[int] = field(default_factory=set[int])
    rests_s: dict[int, float] = field(default_factory=dict[int, float])
    """Source -> time until which it is not asked for this share, after declining it."""
    done: bool = False

    @property
    def place(self) -> Place:
        return self.tensor, self.first


class Board:
    """State of one fetch.

    `missing`: digest -> missing pieces, ascending; the tensors are in ring order, which numbers them. `having`: for
    each source the digests it has, empty means all. `starts`: for each source the ring position it is asked from; for
    the last source it is this member's own starting point. Sources are numbered in order of preference.
    """

    def __init__(
        self,
        missing: Mapping[bytes, Sequence[int]],
        having: Sequence[Collection[bytes]],
        *,
        starts: Sequence[Place],
        ask_pieces: int,
        retry_s: float,
        slow_s: float,
        grace_s: float,
        now_s: float,
    ) -> None:
        """`retry_s`: longest rest of a source that declines repeatedly. `slow_s`: a source that takes longer to
        answer is slow. `grace_s`: time for the other sources to be reached before the last source is asked for their
        pieces."""
        self._having = [frozenset(digests) for digests in having]
        self._starts = tuple(starts)
        self._live = set(range(len(having)))
        self._retry_s = retry_s
        self._slow_s = slow_s
        self._heard_s = dict.fromkeys(self._live, now_s)
        self._pace_s = dict.fromkeys(self._live, 0.0)
        """Source -> seconds its last answer took."""
        self._expected_s = dict.fromkeys(self._live, now_s + grace_s)
        """Source -> time until which the last source leaves pieces to it; infinite once it is reached."""
        self._declines = dict.fromkeys(self._live, 0)
        """Source -> number of consecutive declines."""
        self._rests_s = dict.fromkeys(self._live, -math.inf)
        """Source -> time until which it is asked for nothing."""
        self._open = [
            share
            for tensor, (digest, pieces) in enumerate(missing.items())
            for share in _shares(digest, pieces, ask_pieces, tensor)
        ]
        """Shares not requested yet, in ring order."""
        self._asked: dict[Share, None] = {}  # in order of request
        self._left = {digest: len(pieces) for digest, pieces in missing.items() if pieces}

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self._live)

    @property
    def missing(self) -> frozenset[bytes]:
        """Tensors that are not complete."""
        return frozenset(self._left)

    def take(self, source: int, now_s: float) -> Share | None:
        """Return the share to request from `source` now, None if there is none."""
        if source not in self._live or now_s < self._rests_s[source]:
            return None
        for share in self._from(self._starts[source]):
            if self._may(source, share, now_s) and not self._preferred_may(source, share, now_s):
                self._open.remove(share)
                self._asked[share] = None
                return self._given(share, source, now_s)
        for share in self._asked:
            if source not in share.askers and self._may(source, share, now_s) and self._all_slow(share, now_s):
                return self._given(share, source, now_s)
        return None

    def _from(self, start: Place) -> Iterator[Share]:
        at = bisect_left(self._open, start, key=_place)
        return chain(islice(self._open, at, None), islice(self._open, at))

    def reached(self, source: int) -> None:
        """Note that the connection to `source` is open."""
        self._expected_s[source] = math.inf

    def _given(self, share: Share, source: int, now_s: float) -> Share:
        if not any(source in asked.askers for asked in self._asked):
            self._heard_s[source] = now_s  # until now it had nothing to answer
        share.askers.add(source)
        return share

    def _may(self, source: int, share: Share, now_s: float) -> bool:
        having = self._having[source]
        if having and share.digest not in having:
            return False
        return now_s >= share.rests_s.get(source, -math.inf)

    def _preferred_may(self, source: int, share: Share, now_s: float) -> bool:
        """Return whether `source` is the last one and leaves this share to another."""
        if source != len(self._having) - 1:
            return False
        return any(
            self._rests_s[other] <= now_s < self._expected_s[other]
            and self._may(other, share, now_s)
            and not self._is_slow(other, now_s)
            for other in self._live - {source}
        )

    def _is_slow(self, source: int, now_s: float) -> bool:
        asked = any(source in share.askers for share in self._asked)
        return max(self._pace_s[source], now_s - self._heard_s[source] if asked else 0.0) > self._slow_s

    def _all_slow(self, share: Share, now_s: float) -> bool:
        return all(now_s - self._heard_s[asker] > self._slow_s for asker in share.askers)

    def _hear(self, source: int, now_s: float) -> None:
        self._pace_s[source] = now_s - self._heard_s[source]
        self._heard_s[source] = now_s

    def arrived(self, source: int, share: Share, good: int, now_s: float) -> bool:
        """Note that `good` pieces from the share's first on arrived; the rest is open again. Return False if the share
        was done already."""
        self._hear(source, now_s)
        self._declines[source] = 0
        if share.done:
            return False
        share.done = True
        self._asked.pop(share, None)
        if good < share.count:
            self._put_back(Share(share.digest, share.first + good, share.count - good, share.tensor))
        self._left[share.digest] -= good
        if self._left[share.digest] == 0:
            del self._left[share.digest]
        return True

    def declined(self, source: int, share: Share, now_s: float) -> None:
        """Note that `source` does not have the pieces (any more, or yet)."""
        self._hear(source, now_s)
        rest_s = self._retry_s * min(1.0, LEAST_REST * 2 ** self._declines[source])
        self._declines[source] += 1
        self._rests_s[source] = share.rests_s[source] = now_s + rest_s
        self._release(source, share)

    def lost(self, source: int) -> None:
        """Note that the connection ended. What was requested from it is open again, and its return is not waited
        for."""
        self._expected_s[source] = -math.inf
        for share in [share for share in self._asked if source in share.askers]:
            self._release(source, share)

    def drop(self, source: int) -> None:
        """Request nothing more from `source`."""
        self.lost(source)
        self._live.discard(source)

    def _release(self, source: int, share: Share) -> None:
        share.askers.discard(source)
        if share in self._asked and not share.askers:
            self._asked.pop(share, None)
            self._put_back(share)

    def _put_back(self, share: Share) -> None:
        insort(self._open, share, key=_place)


def _place(share: Share) -> Place:
    return share.place


def _shares(digest: bytes, pieces: Sequence[int], most: int, tensor: int) -> list[Share]:
    shares: list[Share] = []
    for piece in pieces:
        last = shares[-1] if shares else None
        if last is not None and last.first + last.count == piece and last.count < most:
            last.count += 1
        else:
            shares.append(Share(digest, piece, 1, tensor))
    return shares


def ring(pieces: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """Return the digests in ring order. `pieces`: digest -> number of pieces. The order is the same for all members and
    independent of layers, so that not all of them begin with the embedding."""
    return tuple(sorted(pieces, key=lambda digest: hashlib.sha256(digest).digest()))


def start(pieces: Mapping[bytes, int], member: str, members: Collection[str]) -> Place:
    """Return the ring position where `member`, one of `members`, begins. Starting points are evenly spaced."""
    order = sorted(members)
    begin = sum(pieces.values()) * order.index(member) // len(order)
    for tensor, digest in enumerate(ring(pieces)):
        if begin < pieces[digest]:
            return tensor, begin
        begin -= pieces[digest]
    return 0, 0
