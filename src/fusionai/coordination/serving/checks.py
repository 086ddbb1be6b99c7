"""Spot checks of a served model: which texts are read again, one after the other.

A *text* at one stage, all passes of one session since it was admitted, is checked as a whole or not at all. When the
session ends its pages are held, so that the stages still hold and retain the text's data. When no other check is open,
a secret decides for each stage with a standby, as in training, whether that standby reads the text again. A text is not
checked if it ends while many wait, or if sessions need its pages, because tokens have priority.

A *task* is one pass of one text through one stage. Tasks are numbered over all texts, and `verification` knows a text
by these numbers.

Neighbours: `coordination.serving.driver` owns the checks; `round.verification` interprets an answer; `batching` holds
the pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.round.verification import Check, CheckVerdict, Inspector, Opinion
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.sessions import Text

MOST_WAITING: Final = 32
"""Limit on waiting texts. All texts of new peers are checked; most texts of others leave the queue at once."""


@dataclass(slots=True)
class TextChecks:
    inspector: Inspector
    texts: int = 0
    """Number of texts that ended while a stage had a standby."""
    _waiting: deque[Text] = field(default_factory=deque[Text])
    _reading: Text | None = None
    """The text that is being read again."""
    _tasks: int = 0
    """Number of tasks of all texts so far."""

    @property
    def reading(self) -> Text | None:
        return self._reading

    def due(self, batcher: Batcher, places: Mapping[int, str], standbys: Mapping[int, str]) -> tuple[Check, ...]:
        """Return the checks to begin now, all of the same text: `reading`. `standbys`: those that could read it."""
        for text in batcher.take_over():
            if standbys and len(self._waiting) < MOST_WAITING:
                self._waiting.append(text)
            else:
                batcher.let_go(text.number)
        while self._reading is None and self._waiting:
            text = self._waiting.popleft()
            if not batcher.is_held(text.number):
                continue
            if batcher.computed_positions - text.over_at > batcher.limits.pages * batcher.limits.page_tokens:
                batcher.let_go(text.number)  # too long ago: sketches of it may have been dropped
                continue
            first, self._tasks = self._tasks, self._tasks + text.passes
            self.texts += 1
            if checks := self.inspector.due(places, standbys, first, self._tasks):
                self._reading = text
                return checks
            batcher.let_go(text.number)
        return ()

    def answered(self, batcher: Batcher, check: Check, opinion: Opinion) -> CheckVerdict | None:
        """Return the verdict, None for a check that is not open. An answer about a text whose pages were given away
        meanwhile is void."""
        text = self._reading
        if text is not None and not batcher.is_held(text.number):
            opinion = Opinion(void="its pages were needed")
        found = self.inspector.answered(check, opinion)
        if text is not None and not self.inspector.open:
            self._reading = None
            batcher.let_go(text.number)
        return found

    def drop(self) -> None:
        """Drop all checks, because a round begins."""
        self.inspector.drop()
        self._waiting.clear()
        self._reading = None
