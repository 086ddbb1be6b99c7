"""Virtual time: a queue of future events, and lanes that do one piece of work at a time. Nothing waits in real time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf


class Agenda:
    """An event queue. `now_s` is the time of the current event. Events at equal times happen in the order in which they
    were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened = 0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `time_s`; a time in the past counts as now."""
        self._noted += 1
        heapq.heappush(self._entries, (max(time_s, self.now_s), self._noted, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float = inf) -> None:
        """Run all events up to and including `until_s`, which is then the current time, or until none are left."""
        while self._entries and self._entries[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._entries)
            self.happened += 1
            action()
        if until_s < inf:
            self.now_s = max(self.now_s, until_s)


class Lane:
    """A peer's compute thread. It does one piece of work at a time, in the order of submission."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: deque[tuple[float, Callable[[float], None]]] = deque()
        self._busy = False

    def work(self, seconds: float, done: Callable[[float], None]) -> None:
        """Queue a piece of work. `done` is called at its end, with its start time."""
        self._waiting.append((seconds, done))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            seconds, done = self._waiting.popleft()
            self._agenda.after(seconds, partial(self._finish, self._agenda.now_s, done))

    def _finish(self, began_s: float, done: Callable[[float], None]) -> None:
        done(began_s)
        self._next()
