"""Admission of sessions: who waits, who has pages in the stages' caches, and what stages may drop.

A session is admitted when there are pages for all its tokens and a reserve for its answer; then it gets pages as it
grows. When pages run out, the youngest session that is not under way gives its pages up, waits in front of the queue
and is computed again later from its tokens (most of its pages are usually still there and found again). The oldest
session never gives up its pages and fits alone, so something always goes on.

Pages of a session that ended may be handed out while a pass with it is under way: links keep their order, so whatever
that pass writes is overwritten. Where texts may be checked when they are over (`holds`), their pages are held until
`let_go`, or until other sessions need the room.

Each pass names the sessions that stages may drop, until a pass that named them came back from the last stage: a pass
that fails at one stage does not reach the stages after it, and passes behind it may already use the dropped sessions'
places.

Neighbours: `pages` and `fair_queue` are its parts, `batching` composes passes from admitted sessions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.serving.fair_queue import FairQueue
from fusionai.coordination.serving.limits import BatchLimits, QueueFull, TooLong
from fusionai.coordination.serving.pages import Match, Pages
from fusionai.coordination.serving.sessions import Session, SessionSpec, Text
from fusionai.wire.serving import MAX_SESSIONS

PROBE_SESSION: Final = 0
"""Session number of the probe. It owns its pages for the life of the job. Other sessions count from 1."""
LONGEST_RETRY_S: Final = 60.0
FORGET_AT_ONCE: Final = MAX_SESSIONS // 2
"""Largest number of sessions that one pass has stages drop; half of what its message has room for (chosen)."""


@dataclass(slots=True)
class Admission:
    """The base of the batcher."""

    limits: BatchLimits
    holds: bool = False
    """Whether pages of ended texts are held for checks. `take_over` returns these texts; each needs a call of
    `let_go`."""
    pages: Pages = field(init=False)
    prompt_tokens: int = 0
    """Prompt tokens read so far, including those from the prefix cache. The next field counts only the cached ones."""
    prefix_tokens: int = 0
    computed_positions: int = 0
    """Positions computed so far in all texts, including repeated computation."""
    _sessions: dict[int, Session] = field(default_factory=dict[int, Session])
    _queue: FairQueue = field(init=False)
    _next_number: int = 0
    """Number of the next pass, probe or rebuild."""
    _turns: itertools.count[int] = field(default_factory=itertools.count)
    _forget: dict[int, int] = field(default_factory=dict[int, int])
    """Sessions that some stage may still hold and that are not admitted -> number of the first pass that can have them
    dropped everywhere."""
    _held: dict[int, Text] = field(default_factory=dict[int, Text])
    """Ended sessions whose pages are still held, by session number."""
    _over: list[Text] = field(default_factory=list[Text])
    """Held texts that `take_over` has not returned yet."""
    _ends_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=16))
    """Times at which the last sessions ended."""

    def __post_init__(self) -> None:
        limits = self.limits
        self.pages = Pages(limits.pages, limits.page_tokens, prefix=limits.prefix)
        self._queue = FairQueue(limits.queue)
        self.pages.admit(PROBE_SESSION, "", Match((), 0))
        if not self.pages.extend(PROBE_SESSION, limits.probe_tokens):
            raise ValueError(f"expected more pages than a probe takes, got {limits.pages}")

    def submit(self, spec: SessionSpec, now_s: float) -> None:
        """Queue a session. Raises `QueueFull`, `TooLong`, and `ValueError` for an invalid session."""
        if spec.number <= PROBE_SESSION or spec.number in self._sessions or not spec.prompt or spec.max_tokens < 0:
            raise ValueError(f"expected a new session number and a prompt, got {spec.number}, {len(spec.prompt)}")
        positions = len(spec.prompt) + spec.max_tokens
        pages = self.pages.count - self.pages.pages_for(self.limits.probe_tokens)
        if self.pages.pages_for(positions) > pages:
            raise TooLong(
                f"prompt and answer take {positions} positions, all caches together have "
                f"{pages * self.limits.page_tokens}.",
                hint="Send a shorter prompt or ask for fewer tokens.",
            )
        if not self._queue.has_room(spec.scope, max(0, self.limits.sessions - self.running)):
            raise QueueFull(f"{self.queued} requests wait already.", self._retry_after_s(now_s))
        self._sessions[spec.number] = Session(spec, list(spec.prompt), next(self._turns))
        self._queue.push(spec.number, spec.scope)

    def cancel(self, number: int) -> bool:
        """End the session and free its pages. Returns False if it had ended already."""
        session = self._sessions.pop(number, None)
        if session is None:
            return False
        if session.admitted:
            self._forget[number] = self._next_number
            if self.holds and session.undisturbed and session.computed > session.origin:
                self._hold(session)
            else:
                self.pages.release(number)
        self._queue.leave(number, session.spec.scope)
        return True

    def expire(self, now_s: float) -> tuple[int, ...]:
        """End all sessions whose deadline has passed, waiting or admitted, and return them."""
        late = [
            number
            for number, session in self._sessions.items()
            if session.spec.deadline_s is not None and session.spec.deadline_s <= now_s
        ]
        for number in late:
            self._end(number, now_s)
        return tuple(late)

    def _end(self, number: int, now_s: float) -> None:
        self.cancel(number)
        self._ends_s.append(now_s)

    def _retry_after_s(self, now_s: float) -> float:
        """Estimate, from the rate at which sessions ended lately, the time until all waiting sessions have been
        admitted."""
        if not self._ends_s or now_s <= self._ends_s[0]:
            return 1.0
        ends_per_s = len(self._ends_s) / (now_s - self._ends_s[0])
        return min(LONGEST_RETRY_S, max(0.5, self.queued / ends_per_s))

    # ------------------------------------------------------------------------------------------------- what stages hold

    def take_over(self) -> tuple[Text, ...]:
        """Return the texts that ended since the last call and whose pages are still held."""
        over, self._over = self._over, []
        return tuple(text for text in over if text.number in self._held)

    def is_held(self, number: int) -> bool:
        """Return whether the stages' cached and retained data of this text is still held."""
        return number in self._held

    def let_go(self, number: int) -> None:
        """Free the held pages of a text. A second call has no effect."""
        if self._held.pop(number, None) is not None:
            self.pages.release(number)

    def _hold(self, session: Session) -> None:
        pages = self.pages.table(session.number)[: self.pages.pages_for(session.computed)]
        text = Text(
            number=session.number,
            tokens=tuple(session.tokens[: session.computed]),
            origin=session.origin,
            pages=pages,
            adapter=session.spec.adapter,
            passes=session.passes,
            over_at=self.computed_positions,
        )
        self._held[text.number] = text
        self._over.append(text)

    def _make_room(self) -> bool:
        """Free the pages of all held texts: computing sessions need them more. Return whether there were any."""
        held = list(self._held)
        for number in held:
            self.let_go(number)
        return bool(held)

    def forget(self, sessions: Iterable[int]) -> None:
        """Have sessions that a stage still holds dropped with the next pass, if they are not admitted."""
        for number in sessions:
            session = self._sessions.get(number)
            if session is None or not session.admitted:
                self._forget[number] = self._next_number

    @property
    def forgotten(self) -> tuple[int, ...]:
        """Sessions for the next pass or probe to have dropped, ascending."""
        return tuple(sorted(self._forget)[:FORGET_AT_ONCE])

    def dropped(self, number: int, sessions: Iterable[int]) -> None:
        """Pass or probe `number` crossed all stages: they have dropped these sessions, unless a session was admitted
        again since the pass was sent."""
        for session in sessions:
            if session in self._forget and self._forget[session] <= number:
                del self._forget[session]

    def take_number(self) -> int:
        """Return the next number of a pass, probe or rebuild. All share one numbering."""
        self._next_number += 1
        return self._next_number - 1

    # ------------------------------------------------------------------------------------------------------------ pages

    def _admit(self) -> None:
        """Admit sessions strictly in queue order, so that sessions that need much room are not starved. Admits none
        while an admitted session lacks a page. Sessions that the next pass can't have dropped keep their places."""
        places = max(1, self.limits.sessions - max(0, len(self._forget) - FORGET_AT_ONCE))
        while self.running < places and not any(one.lacking for one in self._sessions.values()):
            number = self._queue.first
            if number is None:
                return
            session = self._sessions[number]
            spec = session.spec
            unread = spec.all_rows and session.delivered < len(spec.prompt)
            match = Match((), 0) if unread else self.pages.match(spec.prefix_scope, session.tokens)
            left = spec.max_tokens - session.emitted
            if self.pages.lacks(match, len(session.tokens) + min(left, self.limits.reserve_tokens)):
                if self._make_room():
                    continue
                return
            self._queue.pop()
            self.pages.admit(number, spec.prefix_scope, match)
            self.pages.extend(number, len(session.tokens))
            session.admitted = True
            self._forget.pop(number, None)  # its next segment starts it anew
            session.computed = session.origin = match.tokens
            session.pages_sent = 0
            if session.matched is None:
                session.matched = match.tokens
                self._queue.charge(spec.scope, len(session.tokens))
                self.prompt_tokens += len(spec.prompt)
                self.prefix_tokens += match.tokens

    def _find_page(self, session: Session) -> bool:
        """Find a page for the session's next position. If none is free, the youngest idle session younger than it gives
        up its pages."""
        while not self.pages.extend(session.number, len(session.tokens)):
            if self._make_room():
                continue
            younger = [
                one
                for one in self._sessions.values()
                if one.admitted and not one.flights and one.number > session.number
            ]
            if not younger:
                session.lacking = True
                return False
            self._give_up(max(younger, key=lambda one: one.number))
        session.lacking = False
        return True

    def _give_up(self, session: Session) -> None:
        self.pages.release(session.number)
        self._forget[session.number] = self._next_number
        self._queue.push_back(session.number)
        session.leave_pages()

    # ---------------------------------------------------------------------------------------------------------- figures

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._sessions) - len(self._queue)

    def matched(self, number: int) -> int:
        """Return how many tokens of the session's prompt came from the prefix cache."""
        session = self._sessions.get(number)
        return 0 if session is None or session.matched is None else session.matched
