"""Session table of a serving stage: page tables, rings, and cached positions. Checks whether a pass fits; holds no
tensors.

All segments of a pass are checked before anything changes. The positions of a pass count as cached only after the pass
was computed. Page ids come from the caller and are never trusted. Neighbours: `parted` and `torch.paged_attention` hold
the memory that these numbers refer to, `base` calls this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.ir.schema import Graph, Node, Ref
from fusionai.ir.serving_cost import vector_bytes
from fusionai.ir.states import STATES_PER_SESSION
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.wire.serving import CacheFormat, Segment, ServeOptions

FEW_POSITIONS: Final = 16
"""Up to this many positions of a session, after earlier ones, give the same bits together as one by one. Chosen."""
TILE_POSITIONS: Final = 32
"""Positions of a prompt whose attention is computed together, in tiles that end at multiples of this. Prompt pieces
that also end at such multiples give the same bits whatever their lengths."""


@dataclass(slots=True)
class CachedSession:
    """`length`: positions cached. `written`: end of the farthest position ever written to the session's ring. `states`:
    after how many positions each of its states was taken, -1 for none."""

    pages: list[int] = field(default_factory=list[int])
    length: int = 0
    ring: int = -1
    written: int = 0
    states: list[int] = field(default_factory=lambda: [-1] * STATES_PER_SESSION)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One segment's part of a pass: rows [first, first + length) of the pack are positions [start, end) of a session.
    `pages`: the page table up to `end`. `state`, `next_state`: the slots of the states before and after these
    positions; `state` is -1 at the beginning of a text. `source`: the place (ring and states) that is copied to `ring`
    before, -1 for none. `kept_as`: the session under which it is also kept after, 0 for none. `together`: ranges
    (start, end) of its positions that see each other."""

    session: int
    first: int
    start: int
    length: int
    pages: tuple[int, ...]
    ring: int
    state: int = -1
    next_state: int = -1
    source: int = -1
    kept_as: int = 0
    together: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length


class SessionTable:
    """`paged`: True if some layer keeps all positions. `windows`: window -> positions in a ring for that window.
    `states`: True if some node carries a state; a session then continues only where one of its states was taken."""

    def __init__(self, options: ServeOptions, *, paged: bool, windows: dict[int, int], states: bool = False) -> None:
        self._options = options
        self._paged = paged
        self._windows = windows
        self._states = states
        self._sessions: dict[int, CachedSession] = {}
        self._free_rings = list(range(options.sessions - 1, -1, -1))
        self._filled: dict[int, int] = {}
        """Page -> how many of its positions, from the first on, are filled."""

    def place(self, segments: Sequence[Segment]) -> tuple[RowSpan, ...]:
        """Check a pass and write its pages into the tables. Positions cached from each segment's start on are
        dropped."""
        changed = self._checked(segments)
        spans: list[RowSpan] = []
        first = 0
        for segment in segments:
            session = self._place_of(segment.session)
            source = -1
            if segment.source:
                other = self._sessions[segment.source]
                session.written, session.states, source = other.written, list(other.states), other.ring
            session.pages = changed[segment.session]
            session.length = segment.start
            if segment.start == 0:
                session.written = 0
            state, following = self._states_of(session, segment.start)
            span = RowSpan(
                segment.session,
                first,
                segment.start,
                segment.length,
                tuple(session.pages[: self._pages_of(segment.start + segment.length)]),
                session.ring,
                state,
                following,
                source,
                segment.kept_as,
                segment.together,
            )
            if segment.kept_as:
                self._place_of(segment.kept_as)
            if self._paged:
                for page, begin, _ in self._written_pages(span):
                    self._filled[page] = min(self._filled.get(page, 0), begin)
            session.written = max(session.written, span.end)
            spans.append(span)
            first += segment.length
        return tuple(spans)

    def _place_of(self, number: int) -> CachedSession:
        session = self._sessions.setdefault(number, CachedSession())
        if (self._windows or self._states) and session.ring < 0:
            session.ring = self._free_rings.pop()
        return session

    def computed(self, spans: Iterable[RowSpan]) -> list[tuple[int, int]]:
        """Mark the positions of these spans as cached. Return the places to copy, (from, to), of sessions that are also
        kept under another number."""
        copies: list[tuple[int, int]] = []
        for span in spans:
            session = self._sessions[span.session]
            session.length = span.end
            if span.next_state >= 0:
                session.states[span.next_state % STATES_PER_SESSION] = span.end
            if self._paged:
                for page, _, end in self._written_pages(span):
                    self._filled[page] = end
            if span.kept_as:
                kept = self._sessions[span.kept_as]
                kept.pages, kept.length, kept.written = list(session.pages), session.length, session.written
                kept.states = list(session.states)
                copies.append((session.ring, kept.ring))
        return [pair for pair in copies if min(pair) >= 0]

    def _states_of(self, session: CachedSession, start: int) -> tuple[int, int]:
        """Return the slots of the state at `start` and of the one after the pass. The latter holds nothing until the
        pass is computed."""
        if not self._states:
            return -1, -1
        held = session.states.index(start) if start else -1
        after = 1 - held if start else 0
        session.states[after] = -1
        if not start:
            session.states = [-1] * STATES_PER_SESSION
        first = session.ring * STATES_PER_SESSION
        return first + held if start else -1, first + after

    def forget(self, sessions: Iterable[int]) -> None:
        for number in sessions:
            session = self._sessions.pop(number, None)
            if session is not None and session.ring >= 0:
                self._free_rings.append(session.ring)

    def forget_all(self) -> None:
        self.forget(list(self._sessions))
        self._filled.clear()

    @property
    def cached(self) -> dict[int, int]:
        return {number: session.length for number, session in self._sessions.items()}

    def _checked(self, segments: Sequence[Segment]) -> dict[int, list[int]]:
        """Return session -> its page table including the pages of this pass. Raises `ExecutionError`; changes
        nothing."""
        tables: dict[int, list[int]] = {}
        writers: dict[int, int] = {}
        named = [segment.session for segment in segments] + [one.kept_as for one in segments if one.kept_as]
        if len(set(named)) < len(named):
            twice = next(number for number in named if named.count(number) > 1)
            raise ExecutionError(f"session {twice} has two segments in one pass.")
        for segment in segments:
            _check_together(segment)
            number = segment.session
            session = self._sessions.get(number, CachedSession())
            if segment.source:
                if segment.source not in self._sessions:
                    raise ExecutionError(f"session {number} begins as a copy of {segment.source}, which is not here.")
                if segment.source in named:
                    raise ExecutionError(f"session {segment.source} is copied and changed in one pass.")
                session = self._sessions[segment.source]
            table = self._table(session, segment)
            self._check_start(session, segment, table)
            if self._paged:
                span = RowSpan(number, 0, segment.start, segment.length, tuple(table), -1)
                for page, _, _ in self._written_pages(span):
                    if writers.setdefault(page, number) != number:
                        raise ExecutionError(f"sessions {writers[page]} and {number} both write page {page}.")
            tables[number] = table
        new = sum(number not in self._sessions for number in named)
        if len(self._sessions) + new > self._options.sessions:
            raise ExecutionError(
                f"{len(self._sessions)} sessions exist and the pass adds {new}; the limit is {self._options.sessions}.",
                hint="Forget finished sessions.",
            )
        return tables

    def _table(self, session: CachedSession, segment: Segment) -> list[int]:
        if not segment.pages:
            table = session.pages
        elif segment.first_page > len(session.pages):
            raise ExecutionError(
                f"session {segment.session} has {len(session.pages)} pages, its pass writes from entry "
                f"{segment.first_page} on."
            )
        else:
            table = [*session.pages[: segment.first_page], *segment.pages]
        for page in segment.pages:
            if not 0 <= page < self._options.pages:
                raise ExecutionError(
                    f"session {segment.session} names page {page}; there are {self._options.pages} pages."
                )
        needed = self._pages_of(segment.start + segment.length)
        if self._paged and len(table) < needed:
            raise ExecutionError(
                f"session {segment.session} has {len(table)} pages, {segment.start + segment.length} positions take "
                f"{needed}."
            )
        return list(table)

    def _check_start(self, session: CachedSession, segment: Segment, table: Sequence[int]) -> None:
        start = segment.start
        known = session.length
        if segment.source and self._paged:
            known = min(known, self._filled_positions(table))
        if self._states and start and start not in session.states:
            raise ExecutionError(
                f"session {segment.session} starts at position {start}, but its states are those after "
                f"{' and '.join(str(end) for end in session.states if end >= 0) or 'no'} positions.",
                hint="Send its tokens from position 0 on.",
            )
        if start > known and self._paged and not self._windows and not self._states and not segment.source:
            # The first positions may be in pages that another session filled.
            known = self._filled_positions(table)
        if start > known:
            raise ExecutionError(
                f"session {segment.session} starts at position {start}, but {known} are cached.",
                hint="Send its tokens from position 0 on.",
            )
        for window, capacity in self._windows.items():
            if start and max(0, start - window + 1) < session.written - capacity:
                raise ExecutionError(
                    f"session {segment.session} goes back to position {start}, but its window of {window} then needs "
                    f"positions that its ring has overwritten: {session.written} were written.",
                    hint="Send its tokens from position 0 on.",
                )

    def _filled_positions(self, table: Sequence[int]) -> int:
        total = 0
        for page in table:
            filled = self._filled.get(page, 0)
            total += filled
            if filled < self._options.page_tokens:
                break
        return total

    def _pages_of(self, positions: int) -> int:
        return -(-positions // self._options.page_tokens)

    def _written_pages(self, span: RowSpan) -> Iterable[tuple[int, int, int]]:
        """Yield (page, first position in it, end) for every page that a span writes."""
        size = self._options.page_tokens
        for entry in range(span.start // size, self._pages_of(span.end)):
            yield span.pages[entry], max(0, span.start - entry * size), min(size, span.end - entry * size)


def _check_together(segment: Segment) -> None:
    """Raise `ExecutionError` unless the ranges that see each other are in the segment, ascending and apart."""
    done = segment.start
    for start, end in segment.together:
        if not done <= start < end <= segment.start + segment.length:
            raise ExecutionError(
                f"positions {start} to {end} of session {segment.session} can't see each other: its segment has "
                f"{segment.start} to {segment.start + segment.length}, and ranges ascend and are apart."
            )
        done = end


CACHE_NAMES: Final[Mapping[CacheFormat, str]] = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "uint8"
}  # fmt: skip
"""Cache format -> dtype name of `primitives.tensors`. With `int8`, a head's vector is its levels, one byte each, and
the bytes of its scale in float32 behind them."""
LEVELS: Final = 127.0
"""Largest level of a vector kept as `int8`: that of its largest number."""


def stored_width(width: int, cache: CacheFormat) -> int:
    """Return the elements, of the dtype in `CACHE_NAMES`, of one head's vector in a cache."""
    return vector_bytes(width, cache) // ITEMSIZE_BYTES[CACHE_NAMES[cache]]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Cache shape of one attention node. `window` is None if all positions are kept, in pages. `heads` counts key and
    value heads, `query_heads` the query heads."""

    node: int
    query_heads: int
    heads: int
    key_width: int
    value_width: int
    window: int | None

    def blocks(self, options: ServeOptions) -> tuple[int, int]:
        """Return the number of pages or rings, and the positions of each."""
        if self.window is None:
            return options.pages, options.page_tokens
        return options.sessions, ring_tokens(self.window, options)

    def nbytes(self, options: ServeOptions) -> int:
        """Return the bytes of the whole cache."""
        vectors_bytes = sum(vector_bytes(width, options.cache) for width in (self.key_width, self.value_width))
        return prod(self.blocks(options)) * self.heads * vectors_bytes


def layer_shapes(graph: Graph, options: ServeOptions) -> tuple[LayerShape, ...]:
    """Return the cache shape of every attention node, in graph order. A window that no session can outgrow counts as
    none. Raises `ExecutionError` on an attention that can't use a cache."""
    found: list[LayerShape] = []
    for node in graph.nodes:
        if node.op != "fusion.attention":
            continue
        query, key, value = (_sizes(graph, node, number) for number in range(3))
        if node.kwargs.get("causal") is not True or node.kwargs.get("key_mask") is not None:
            raise ExecutionError(f"node {node.id}: attention with a cache must be causal and without a padding mask.")
        if value[0] != key[0] or query[1] != key[1] or not key[0] or query[0] % key[0]:
            raise ExecutionError(
                f"node {node.id}: expected as many value heads as key heads, keys as wide as queries, and query heads "
                f"that are a multiple; got [heads, width] {list(query)}, {list(key)} and {list(value)}."
            )
        window = node.kwargs.get("window")
        longest = options.pages * options.page_tokens
        ringed = window if isinstance(window, int) and window < longest else None
        found.append(LayerShape(node.id, query[0], key[0], key[1], value[1], ringed))
    return tuple(found)


def ring_tokens(window: int, options: ServeOptions) -> int:
    """Return the positions of a ring: one window and one pass, rounded up to whole pages."""
    return -(-(window + options.pass_tokens) // options.page_tokens) * options.page_tokens


def first_key(position: int, window: int | None) -> int:
    """Return the earliest position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def keys_until(span: RowSpan) -> npt.NDArray[np.int64]:
    """Return, for each position of a span, the position before which it sees keys."""
    until = np.arange(span.start + 1, span.end + 1)
    for start, end in span.together:
        until[start - span.start : end - span.start] = end
    return until


def one_by_one(span: RowSpan) -> bool:
    """Return whether a span's positions are computed as if each came alone, which those that see later ones can't."""
    return span.start > 0 and span.length <= FEW_POSITIONS and not span.together


def _sizes(graph: Graph, node: Node, position: int) -> tuple[int, int]:
    """Return (heads, width) of the node's queries (`position` 0), keys (1) or values (2)."""
    arg = node.args[position] if position < len(node.args) else None
    shape = graph.values[arg.name].shape if isinstance(arg, Ref) else ()
    match shape:
        case (_, int(heads), _, int(width)) if prod((heads, width)) > 0:
            return heads, width
        case _:
            raise ExecutionError(
                f"node {node.id}: its queries, keys and values must have fixed heads and widths, got {shape!r}."
            )
