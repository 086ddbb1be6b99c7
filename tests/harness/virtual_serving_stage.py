"""A serving stage without a tensor: pages hold numbers, attention is a hash of all that a session's pages hold.

What comes out at a position depends on every value before it, as read from the pages: a page that is another's, that
was not rebuilt or not truncated gives another token at the end. Neighbour: `harness.virtual_serving_member` runs these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment

VOCABULARY = 1_000
HEAD = 2_000_003
EMBEDDING = 1_000_003


def embedded(token: int) -> int:
    return hash((EMBEDDING, token))


def attended(stage: int, values: Sequence[int]) -> int:
    return hash((stage, tuple(values)))


def token_of(value: int) -> int:
    return hash((HEAD, value)) % VOCABULARY


def reference(prompt: Sequence[int], count: int, caching: Iterable[int]) -> list[int]:
    """The first `count` tokens that follow, computed without pages, passes or machines."""
    stages = sorted(caching)
    inputs: dict[int, list[int]] = {stage: [] for stage in stages}
    answer: list[int] = []
    pending = list(prompt)
    while len(answer) < count:
        value = 0
        for token in pending:
            value = embedded(token)
            for stage in stages:
                inputs[stage].append(value)
                value = attended(stage, inputs[stage])
        pending = [token_of(value)]
        answer += pending
    return answer


def sent_on(tokens: Sequence[int], stage: int, caching: Iterable[int]) -> list[int]:
    """What `stage` gives of a text's positions."""
    values = [embedded(token) for token in tokens]
    for one in sorted(number for number in caching if number <= stage):
        values = [attended(one, values[: place + 1]) for place in range(len(values))]
    return values


class Missing(Exception):
    """Something is not there that should be."""


@dataclass(slots=True)
class PagedStage:
    """`caching`: it attends; otherwise it passes on what it gets. `most`: sessions that may have a table."""

    number: int
    caching: bool
    page_tokens: int
    most: int
    cache: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """(page, place in it) -> the input value of that position."""
    retained: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """The same of the outputs."""
    tables: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    cached: dict[int, int] = field(default_factory=dict[int, int])

    fresh_in: Fence | None = None
    """The round in which everything was dropped: once is enough."""

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self.tables.pop(session, None)
            self.cached.pop(session, None)

    def forget_all(self) -> None:
        self.tables.clear()
        self.cached.clear()
        self.cache.clear()
        self.retained.clear()

    def run(self, segments: Sequence[Segment], values: Sequence[int]) -> list[int]:
        """Raises `AssertionError` where the driver asks for what can't be."""
        given = iter(values)
        outputs: list[int] = []
        for segment in segments:
            table = self._told(segment)
            known = [self._read(table, position) for position in range(segment.start)] if self.caching else []
            for position in range(segment.start, segment.start + segment.length):
                known.append(next(given))
                place = self._place(table, position)
                if self.caching:
                    self.cache[place] = known[-1]
                self.retained[place] = attended(self.number, known) if self.caching else known[-1]
                outputs.append(self.retained[place])
            self.cached[segment.session] = segment.start + segment.length
        assert next(given, None) is None, "more values than positions"
        assert len(self.tables) <= self.most, f"{len(self.tables)} sessions at once: {sorted(self.tables)}"
        return outputs

    def recalled(self, segment: Segment) -> list[int]:
        """What this stage sent on of a segment. Raises `Missing`."""
        places = (
            self._place(segment.pages, position) for position in range(segment.start, segment.start + segment.length)
        )
        try:
            return [self.retained[place] for place in places]
        except KeyError as error:
            raise Missing(f"nothing retained at {error}") from error

    def lacks(self, segments: Iterable[Segment]) -> bool:
        """Whether one is a piece behind another that could not be computed."""
        return any(one.first_page > 0 and one.start > self.cached.get(one.session, 0) for one in segments)

    def _told(self, segment: Segment) -> list[int]:
        table = self.tables.setdefault(segment.session, [])
        assert segment.first_page <= len(table), f"{segment}: there are {len(table)} pages"
        table[segment.first_page :] = segment.pages
        assert len(table) * self.page_tokens >= segment.start + segment.length, f"{segment}: too few pages {table}"
        return table

    def _read(self, table: Sequence[int], position: int) -> int:
        place = self._place(table, position)
        assert place in self.cache, f"stage {self.number}: position {position} on page {place[0]} was never computed"
        return self.cache[place]

    def _place(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self.page_tokens], position % self.page_tokens
