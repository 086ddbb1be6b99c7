"""Beginnings of texts that stages keep as copies of sessions, for texts that begin with the same tokens.

A layer with a window keeps only the last positions of a session, and a state stands for all positions before it. So
pages alone do not let another session continue behind a common beginning. Instead, while a prompt is read, stages copy
what they have of the session, and a later session begins as a copy of that. Two places of a prompt are worth a copy:
its end, because the next turn of a conversation begins with it; and the place up to which its pages were known already,
because several texts branch off there (instructions that many conversations share).

A copy takes the place of a session that is not running. The copy that was used longest ago makes room first.
Neighbours: `admission` gives sessions their beginnings, `batching` ends pieces of prompts where copies are taken.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.serving.pages import Key, Match
from fusionai.coordination.serving.together import Ranges, known_before

FIRST_NUMBER: Final = 2**61
"""Stages know copies by numbers from here on, and sessions by lower ones."""
LEAST_TOKENS: Final = 64
"""Fewest tokens that a copy must save to be worth taking; chosen."""
TOKENS_BEHIND: Final = 17
"""Fewest tokens of a prompt behind a copy. Fewer positions would be computed in another way (`FEW_POSITIONS` of
`backends.serving.page_table`), and the last words of a prompt, which ask for an answer, are often not those of the next
turn; chosen."""


@dataclass(slots=True)
class Beginnings:
    """`unit`: lengths are multiples of this. The other fields are explained at their defaults."""

    unit: int
    least_tokens: int = LEAST_TOKENS
    tokens_behind: int = TOKENS_BEHIND
    _kept: OrderedDict[Key, int] = field(default_factory=OrderedDict[Key, int])
    """Key of a copy's last page -> its number; the one that was used longest ago first."""
    _under_way: set[int] = field(default_factory=set[int])
    """Copies that are taken by passes under way."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_NUMBER))

    def __len__(self) -> int:
        """Number of places that copies take."""
        return len(self._kept) + len(self._under_way)

    def longest(self, match: Match, page_tokens: int) -> tuple[Match, int]:
        """Return the longest beginning of a match that is kept, and its number; 0 if there is none."""
        for count in range(len(match.keys), 0, -1):
            number = self._kept.get(match.keys[count - 1])
            if number is not None:
                self._kept.move_to_end(match.keys[count - 1])
                return match.up_to(count * page_tokens, page_tokens), number
        return Match((), 0), 0

    def marks(self, known: int, begun: int, total: int, together: Ranges = ()) -> tuple[int, ...]:
        """Return the positions at which copies of a text of `total` tokens are worth taking, ascending. `known`: tokens
        whose pages were found, `begun`: those with which it begins as a copy, `together`: ranges of positions that see
        each other."""
        end = known_before(together, max(0, total - self.tokens_behind), self.unit)
        branch = min(known_before(together, known, self.unit), end)
        found: list[int] = []
        for mark in (branch, end):
            if mark - (found[-1] if found else begun) >= self.least_tokens:
                found.append(mark)
        return tuple(found)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def begin(self) -> int:
        """Return the number of a copy that the next pass takes."""
        number = next(self._numbers)
        self._under_way.add(number)
        return number

    def add(self, number: int, key: Key) -> bool:
        """Keep a copy that all stages have taken. Return False if there is an older one with the same tokens, which
        stays, because sessions may be about to begin with it."""
        self._under_way.discard(number)
        return self._kept.setdefault(key, number) == number

    def drop(self, number: int) -> None:
        """Forget a copy that a pass under way did not take everywhere."""
        self._under_way.discard(number)

    def drop_oldest(self, needed: Collection[int]) -> int:
        """Drop the copy that was used longest ago and is not needed; return its number, or 0 if there is none."""
        key = next((key for key, number in self._kept.items() if number not in needed), None)
        return 0 if key is None else self._kept.pop(key)

    def clear(self) -> tuple[int, ...]:
        """Drop all copies, and return their numbers."""
        numbers = (*self._kept.values(), *self._under_way)
        self._kept.clear()
        self._under_way.clear()
        return numbers
