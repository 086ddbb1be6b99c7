"""Who is admitted next: a queue for each scope (an API key), the scope that was served least goes first.

Start-time fair queueing over tokens: each scope has a counter of what it was given; one that comes anew starts at the
least of those present, so nobody saves up by being away. Within a scope, first come first served. Whoever was admitted
once and had to make room (preempted) comes before all others, the oldest first: it has been paid for.

Bounded: at most `most` wait, and one scope alone gets no more than three quarters of the places, so that another always
finds one. Neighbour: `coordination.serving.batching`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator


class FairQueue:
    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"expected at least one place in the queue, got {most}")
        self.most = most
        self._share = max(1, most - most // 4)
        self._waiting: dict[str, deque[int]] = {}
        self._returned: list[int] = []
        """Preempted, ascending. They take no place: they had one before."""
        self._served: dict[str, float] = {}
        """Scope -> tokens it was given, for those with a session waiting or admitted."""
        self._members: dict[str, int] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return sum(len(one) for one in self._waiting.values()) + len(self._returned)

    def __iter__(self) -> Iterator[int]:
        yield from self._returned
        for waiting in self._waiting.values():
            yield from waiting

    def has_room(self, scope: str, admissible: int) -> bool:
        """`admissible`: so many that wait now do so only until the next pass is made."""
        waiting = sum(len(one) for one in self._waiting.values()) - admissible
        return waiting < self.most and len(self._waiting.get(scope, ())) - admissible < self._share

    def push(self, session: int, scope: str) -> None:
        """A new session at the end of its scope's queue."""
        if not self._members.get(scope):
            self._clock = max(self._clock, min(self._served.values(), default=self._clock))
            self._served[scope] = self._clock
        self._members[scope] = self._members.get(scope, 0) + 1
        self._waiting.setdefault(scope, deque()).append(session)

    def push_back(self, session: int) -> None:
        """An admitted session waits again, before everybody who was not admitted yet."""
        insort(self._returned, session)

    @property
    def first(self) -> int | None:
        """Who is admitted next; it is not passed over by others that would fit."""
        if self._returned:
            return self._returned[0]
        scope = self._next_scope()
        return None if scope is None else self._waiting[scope][0]

    def pop(self) -> int:
        if self._returned:
            return self._returned.pop(0)
        scope = self._next_scope()
        if scope is None:
            raise IndexError("nobody waits")
        session = self._waiting[scope].popleft()
        if not self._waiting[scope]:
            del self._waiting[scope]
        return session

    def charge(self, scope: str, tokens: int) -> None:
        self._served[scope] += tokens

    def leave(self, session: int, scope: str) -> None:
        """The session is over, waiting or not."""
        if session in self._returned:
            self._returned.remove(session)
        elif session in self._waiting.get(scope, ()):
            self._waiting[scope].remove(session)
            if not self._waiting[scope]:
                del self._waiting[scope]
        self._members[scope] -= 1
        if not self._members[scope]:
            self._clock = max(self._clock, min(self._served.values()))
            del self._members[scope], self._served[scope]

    def rank(self, sessions: Iterable[tuple[int, str]]) -> list[int]:
        """The sessions in turn of their scopes: the first of each, then the second of each, order kept otherwise."""
        seen: Counter[str] = Counter()
        ranked: list[tuple[int, int, int]] = []
        for order, (session, scope) in enumerate(sessions):
            ranked.append((seen[scope], order, session))
            seen[scope] += 1
        return [session for _, _, session in sorted(ranked)]

    def _next_scope(self) -> str | None:
        return min(self._waiting, key=lambda scope: (self._served[scope], self._waiting[scope][0]), default=None)
