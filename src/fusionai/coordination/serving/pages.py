"""Page tables of the KV caches: which session has which pages, which are shared, which are kept as prefix cache.

One table serves all layers and stages: page 7 of every stage belongs to the same positions of the same session. Full
pages that all stages have computed (`confirm`) are found again by a hash chain over scope and tokens, so that only an
equal beginning in the same scope matches. Unreferenced pages are kept until their room is needed; the least recently
used page goes first, and of one chain the end before the beginning.

A page is either free, referenced by one or more sessions, or unreferenced and kept. Shared pages are full and never
written: a session writes behind what it matched, and at least one of its tokens is left to compute.

Neighbours: `coordination.serving.admission` hands out pages; stages follow the tables (`wire.serving.Segment`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fusionai.coordination.serving.together import Ranges, known_before, seen_until
from fusionai.primitives.errors import FusionError

Key = bytes


class UnknownSession(FusionError):
    """Pages were requested for a session that has none."""


@dataclass(frozen=True, slots=True)
class Match:
    """`pages` that hold the first `tokens` tokens, with the keys under which they are known."""

    pages: tuple[int, ...]
    tokens: int
    keys: tuple[Key, ...] = field(default=(), compare=False)

    def up_to(self, tokens: int, page_tokens: int) -> Match:
        """Return the beginning of the match that has this many tokens, whole pages."""
        count = tokens // page_tokens
        return self if tokens == self.tokens else Match(self.pages[:count], tokens, self.keys[:count])


@dataclass(slots=True)
class _Table:
    scope: str
    pages: list[int]
    keys: list[Key] = field(default_factory=list[Key])
    """Keys of its first pages, as far as they are known to be full and computed."""


class Pages:
    """`count` pages of `page_tokens` positions each. Without `prefix` no page is shared or kept."""

    def __init__(self, count: int, page_tokens: int, *, prefix: bool = True) -> None:
        if count < 1 or page_tokens < 1:
            raise ValueError(f"expected at least one page of at least one token, got {count} of {page_tokens}")
        self.count = count
        self.page_tokens = page_tokens
        self.prefix = prefix
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._tables: dict[int, _Table] = {}
        self._index: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        """Indexed page -> its key."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Indexed pages without a reference, the next to be reused first."""

    # ------------------------------------------------------------------------------------------------------ looking

    @property
    def room(self) -> int:
        """Number of pages that can be handed out: free ones, and kept ones without a reference."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._tables)

    def pages_for(self, tokens: int) -> int:
        """Number of pages that hold this many positions."""
        return -(-tokens // self.page_tokens)

    def match(self, scope: str, tokens: Sequence[int], together: Ranges = ()) -> Match:
        """Return the longest known prefix of `tokens` in this scope, in whole pages. Always shorter than `tokens`,
        because the last token's logits are needed. `together`: ranges of positions that see each other."""
        pages: list[int] = []
        keys: list[Key] = []
        if self.prefix:
            for key in self._keys(scope, tokens, together, len(tokens) - 1):
                page = self._index.get(key)
                if page is None:
                    break
                pages.append(page)
                keys.append(key)
        match = Match(tuple(pages), len(pages) * self.page_tokens, tuple(keys))
        return match.up_to(known_before(together, match.tokens, self.page_tokens), self.page_tokens)

    def key(self, scope: str, tokens: Sequence[int], together: Ranges = ()) -> Key:
        """Return the key under which the last page of these tokens, which fill whole pages, is known."""
        *_, last = self._keys(scope, tokens, together, len(tokens))
        return last

    def _keys(self, scope: str, tokens: Sequence[int], together: Ranges, end: int) -> Iterator[Key]:
        """Yield the key of each full page of the first `end` tokens of a text."""
        key = _root(scope)
        for start in range(0, end - self.page_tokens + 1, self.page_tokens):
            key = self._next_key(key, tokens, together, start)
            yield key

    def _next_key(self, parent: Key, tokens: Sequence[int], together: Ranges, start: int) -> Key:
        """Return the key of the page that begins at `start`. It stands for all that the page's positions see, which may
        be more than the page has."""
        return _chained(parent, tokens[start : seen_until(together, start + self.page_tokens)])

    def lacks(self, match: Match, tokens: int) -> int:
        """Return how many pages are missing for a session of `tokens` positions that begins with `match`; 0 if it
        fits."""
        taken = sum(self._references[page] == 0 for page in match.pages)
        return max(0, self.pages_for(tokens) - len(match.pages) - (self.room - taken))

    def table(self, session: int) -> tuple[int, ...]:
        """Raises `UnknownSession`."""
        return tuple(self._table(session).pages)

    # --------------------------------------------------------------------------------------------------- one session

    def admit(self, session: int, scope: str, match: Match) -> None:
        """Open a session that begins with `match`, which `match` has just returned."""
        if session in self._tables:
            raise ValueError(f"session {session} has pages already")
        keys: list[Key] = []
        for page in match.pages:
            if self._references[page] == 0:
                del self._kept[page]
            self._references[page] += 1
            keys.append(self._key_of[page])
        self._tables[session] = _Table(scope, list(match.pages), keys)

    def extend(self, session: int, tokens: int) -> bool:
        """Give the session pages for `tokens` positions. Returns False, with nothing changed, if there is no room."""
        table = self._table(session)
        missing = self.pages_for(tokens) - len(table.pages)
        if missing > self.room:
            return False
        for _ in range(missing):
            page = self._take()
            self._references[page] = 1
            table.pages.append(page)
        return True

    def confirm(self, session: int, tokens: Sequence[int], together: Ranges = ()) -> None:
        """Index the session's full pages: all stages have computed its first positions, which hold these tokens."""
        if not self.prefix:
            return
        table = self._table(session)
        keys = table.keys
        full = min(len(tokens) // self.page_tokens, len(table.pages))
        for entry in range(len(keys), full):
            parent = keys[-1] if keys else _root(table.scope)
            key = self._next_key(parent, tokens, together, entry * self.page_tokens)
            keys.append(key)
            page = table.pages[entry]
            if key not in self._index:
                self._index[key] = page
                self._key_of[page] = key

    def release(self, session: int) -> None:
        """Free the session's pages, or keep those that are indexed. Unknown sessions are ignored."""
        table = self._tables.pop(session, None)
        if table is None:
            return
        # From the end: the beginning of a chain is useful to more sessions and is kept longer.
        for page in reversed(table.pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    # ----------------------------------------------------------------------------------------------------- all of it

    def drop_index(self) -> None:
        """Drop all kept pages, because a stage lost its cache and only the pages of live sessions are computed
        again."""
        for page in self._kept:
            self._forget(page)
            self._free.append(page)
        self._kept.clear()

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._kept.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        del self._index[self._key_of.pop(page)]

    def _table(self, session: int) -> _Table:
        table = self._tables.get(session)
        if table is None:
            raise UnknownSession(f"expected a session with pages, got {session}.")
        return table


def _root(scope: str) -> Key:
    return hashlib.sha256(b"scope\x00" + scope.encode()).digest()


def _chained(parent: Key, tokens: Sequence[int]) -> Key:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
