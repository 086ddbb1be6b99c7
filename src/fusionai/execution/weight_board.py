"""Which pieces of weights are still to be asked for, and of whom. Pure: time comes as an argument.

Decides the order and who may ask what. Peers before the last source all draw from one heap, so that the quicker one
gives more; the last source, the job owner, gives only what no peer has that is reached and quick enough. A piece that
somebody is slow with may be asked of another too; the first answer counts. Who has nothing now may have it soon (it
fetches as well).

All who fetch go round one ring of pieces, each from a place of its own (`weight_ring`): a peer is asked from its place
on, since that is what it has first; where it has nothing yet it rests for a moment instead of being asked for the whole
ring, and the owner gives meanwhile from this member's own place on.

Neighbours: `execution.weights` asks, receives and tells this board.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

Place = tuple[int, int]
"""On the ring: which tensor, which of its pieces."""

LEAST_REST: Final = 1 / 32
"""Of the longest rest: after the first decline; doubled with every further one in a row."""


@dataclass(slots=True, eq=False)
class Share:
    """Consecutive pieces of one tensor, asked for at once."""

    digest: bytes
    first: int
    count: int
    tensor: int
    """Its tensor's number on the ring."""
    askers: set[int] = field(default_factory=set[int])
    rests_s: dict[int, float] = field(default_factory=dict[int, float])
    """Until when each source that declined is not asked for it."""
    done: bool = False

    @property
    def place(self) -> Place:
        return self.tensor, self.first


class Board:
    """`missing`: digest -> pieces that are not here, ascending; the tensors in the ring's order, by which they are
    numbered. `having`: for each source the digests it has, empty means all. `starts`: where on the ring each source is
    asked from; for the last it is this member's own place. Sources are numbers in order of preference."""

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
        """Who declined again and again is asked once in `retry_s`; who takes longer than `slow_s` for an answer is
        slow; the last source waits `grace_s` for the others to be reached."""
        self._having = [frozenset(digests) for digests in having]
        self._starts = tuple(starts)
        self._live = set(range(len(having)))
        self._retry_s = retry_s
        self._slow_s = slow_s
        self._heard_s = dict.fromkeys(self._live, now_s)
        self._pace_s = dict.fromkeys(self._live, 0.0)
        """What the last answer took."""
        self._expected_s = dict.fromkeys(self._live, now_s + grace_s)
        """Until when the last source leaves a source's pieces to it; for ever once it is reached."""
        self._declines = dict.fromkeys(self._live, 0)
        """In a row, until now."""
        self._rests_s = dict.fromkeys(self._live, -math.inf)
        """Until when it is asked for nothing."""
        self._open = [
            share
            for tensor, (digest, pieces) in enumerate(missing.items())
            for share in _shares(digest, pieces, ask_pieces, tensor)
        ]
        """In the order of the ring."""
        self._asked: dict[Share, None] = {}  # in the order of asking
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
        """What to ask `source` for now, if anything."""
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
        """A connection is open."""
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
        """Whether the last source leaves this to others."""
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
        """`good` pieces from the share's first on are here. False if they were already. The rest is open again."""
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
        """It does not have them (any more, or yet)."""
        self._hear(source, now_s)
        rest_s = self._retry_s * min(1.0, LEAST_REST * 2 ** self._declines[source])
        self._declines[source] += 1
        self._rests_s[source] = share.rests_s[source] = now_s + rest_s
        self._release(source, share)

    def lost(self, source: int) -> None:
        """The connection ended; what was asked of it is open again. Nobody waits for it to be reached again."""
        self._expected_s[source] = -math.inf
        for share in [share for share in self._asked if source in share.askers]:
            self._release(source, share)

    def drop(self, source: int) -> None:
        """Nothing more is asked of it."""
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
