"""Spot checks of a served model: which texts are read again, one after the other, and what holds them up. Pure.

What is checked, or not, as a whole is a *text* at one stage: all passes of one session since it was admitted. When it
is over its pages are held, so that the stages still have and retain what belongs to it; its turn comes when nothing
else is being checked, and then a secret decides for each stage that somebody stands by for, as in training, whether
that one reads it again. Texts that end while many wait go unchecked, and so does what needs its pages: tokens come
first.

A *task* is one pass of one text through one stage; they are numbered through, which names a text to `verification`.

Neighbours: `coordination.serving.driver` owns one where work is checked; `verification` says what an answer means;
`batching` holds the pages.
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
"""Texts. Newcomers' are all checked; most of the others' leave the queue at once."""


@dataclass(slots=True)
class TextChecks:
    inspector: Inspector
    texts: int = 0
    """That were over at some stage with a standby."""
    _waiting: deque[Text] = field(default_factory=deque[Text])
    _reading: Text | None = None
    """The one that is being read again."""
    _tasks: int = 0
    """Of all texts so far."""

    @property
    def reading(self) -> Text | None:
        return self._reading

    def due(self, batcher: Batcher, places: Mapping[int, str], standbys: Mapping[int, str]) -> tuple[Check, ...]:
        """What is to be checked now, all of the same text: `reading`. `standbys`: those that could read it."""
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
                batcher.let_go(text.number)  # so long ago that sketches of it may have gone
                continue
            first, self._tasks = self._tasks, self._tasks + text.passes
            self.texts += 1
            if checks := self.inspector.due(places, standbys, first, self._tasks):
                self._reading = text
                return checks
            batcher.let_go(text.number)
        return ()

    def answered(self, batcher: Batcher, check: Check, opinion: Opinion) -> CheckVerdict | None:
        """None for a check that is not open. What was said of a text whose pages went to others meanwhile says
        nothing."""
        text = self._reading
        if text is not None and not batcher.is_held(text.number):
            opinion = Opinion(void="its pages were needed")
        found = self.inspector.answered(check, opinion)
        if text is not None and not self.inspector.open:
            self._reading = None
            batcher.let_go(text.number)
        return found

    def drop(self) -> None:
        """A round begins: nothing that was computed before it is checked any more."""
        self.inspector.drop()
        self._waiting.clear()
        self._reading = None
