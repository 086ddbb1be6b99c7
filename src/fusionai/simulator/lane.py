"""A peer's compute lane: does pieces of work one after another, in the order of submission.

`step` and `generation` submit the pieces with their durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fusionai.simulator.agenda import Agenda


@dataclass(slots=True)
class Lane:
    """A peer's compute thread. It does one piece of work at a time, in the order of submission."""

    agenda: Agenda
    _waiting: deque[tuple[float, Callable[[float], None]]] = field(
        default_factory=deque[tuple[float, Callable[[float], None]]]
    )
    _busy: bool = False

    def work(self, seconds: float, done: Callable[[float], None]) -> None:
        """Queue a piece of work. `done` is called at its end, with its start time."""
        self._waiting.append((seconds, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            seconds, done = self._waiting.popleft()
            began_s = self.agenda.now_s
            self.agenda.after(seconds, partial(self._finish, began_s, done))

    def _finish(self, began_s: float, done: Callable[[float], None]) -> None:
        done(began_s)
        self._next()
