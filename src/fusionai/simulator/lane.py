"""A peer's one compute thread. Decides that work is done one piece after another, in the order it was asked for.

Neighbours: `step` and `generation` say what the pieces are and how long they take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fusionai.simulator.agenda import Agenda


@dataclass(slots=True)
class Lane:
    """A peer's one compute thread: one piece of work after another, in the order they were asked for."""

    agenda: Agenda
    _waiting: deque[tuple[float, Callable[[float], None]]] = field(
        default_factory=deque[tuple[float, Callable[[float], None]]]
    )
    _busy: bool = False

    def work(self, seconds: float, done: Callable[[float], None]) -> None:
        """`done` is told when the work began."""
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
