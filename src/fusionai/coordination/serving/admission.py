"""Admission of sessions: which wait, which have pages in the stages' caches, and which ones stages may drop.

Order: one queue for each scope (an API key); the scope that was served least goes first (start-time fair queueing over
tokens). A new scope starts at the lowest counter of those present, so that no scope gains by being away. Within a scope
sessions are first come, first served. Preempted sessions come before all others, the oldest first.

A session is admitted when there are pages for all its tokens and a reserve for its answer; then it gets pages as it
grows. When pages run out, the youngest session that is not under way gives its pages up, waits in front of the queue
and is computed again later from its tokens (most of its pages are usually still there and found again). The oldest
session never gives up its pages and fits alone, so at least one session always makes progress.

Pages of a session that ended may be handed out while a pass with it is under way: links keep their order, so the pages
are overwritten after that pass. Where texts may be checked when they are over (`holds`), their pages are held until
`let_go`, or until other sessions need the room.

Each pass names the sessions that stages may drop, until a pass that named them came back from the last stage: a pass
that fails at one stage does not reach the stages after it, and passes behind it may already use the dropped sessions'
places.

Neighbours: `pages` has the page tables, `batching` composes passes from admitted sessions."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import lcm
from typing import Final

from fusionai.coordination.serving.beginnings import Beginnings
from fusionai.coordination.serving.pages import Match, Pages
from fusionai.coordination.serving.sessions import Session, SessionSpec, Text
from fusionai.coordination.serving.together import FEW, between, fits
from fusionai.primitives.errors import FusionError
from fusionai.wire.serving import MAX_SESSIONS


class QueueFull(FusionError):
    """The queue is full. A new attempt may succeed after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLong(FusionError):
    """Prompt and answer would not fit even if the session were the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`sessions`: limit on admitted sessions; stages need room for one more, the probe's. `reserve_tokens`: tokens of
    its answer for which an admitted session must find pages. `queue`: limit on waiting sessions. `decoding_passes`:
    number of passes over which decoding sessions are spread; None: as many as are in flight. `chunk_tokens`: longest
    piece of a prompt; `tile_tokens`: pieces are multiples of this, None: of `chunk_tokens`. `ahead_tokens`: limit on
    one session's positions in passes under way, beyond which stages could not go back; None: no limit. `prefix`: texts
    begin with what is cached of earlier ones. `copies`: stages keep windows or states, which pages do not share, so a
    text can only begin as a copy of another (`beginnings`)."""

    pages: int
    page_tokens: int
    sessions: int
    pass_tokens: int
    in_flight: int
    chunk_tokens: int
    queue: int
    prefix: bool = True
    copies: bool = False
    reserve_tokens: int = 64
    probe_tokens: int = 8
    decoding_passes: int | None = None
    tile_tokens: int | None = None
    ahead_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = (self.page_tokens, self.sessions, self.in_flight, self.chunk_tokens, self.queue, self.probe_tokens)
        if min(*counts, self.spread, self.tile) < 1 or self.reserve_tokens < 0 or self.chunk_tokens > self.pass_tokens:
            raise ValueError(f"expected counts of at least 1 and chunks no longer than a pass, got {self}")
        if self.tile > self.chunk_tokens:
            raise ValueError(f"expected tiles no longer than a chunk, got {self}")
        if self.sessions >= MAX_SESSIONS or self.probe_tokens > self.pass_tokens:
            raise ValueError(f"expected fewer than {MAX_SESSIONS} sessions and a probe of one pass, got {self}")

    @property
    def tile(self) -> int:
        return self.chunk_tokens if self.tile_tokens is None else self.tile_tokens

    @property
    def unit(self) -> int:
        """Beginnings that are kept have a multiple of this many tokens: whole pages, and whole tiles, so that pieces of
        a prompt end at the same multiples with and without them."""
        return lcm(self.page_tokens, self.tile)

    @property
    def spread(self) -> int:
        """Number of passes among which decoding sessions are divided."""
        return self.in_flight if self.decoding_passes is None else min(self.in_flight, self.decoding_passes)


class FairQueue:
    """At most `most` sessions wait, of one scope at most three quarters of them, so that others find a place."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"expected at least one place in the queue, got {most}")
        self.most = most
        self._share = max(1, most - most // 4)
        self._waiting: dict[str, deque[int]] = {}
        self._returned: list[int] = []
        """Preempted sessions, ascending. They do not count towards `most`, because they were counted before."""
        self._served: dict[str, float] = {}
        """Scope -> tokens that it was charged, for scopes with a session waiting or admitted."""
        self._members: dict[str, int] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return sum(len(one) for one in self._waiting.values()) + len(self._returned)

    def __iter__(self) -> Iterator[int]:
        yield from self._returned
        for waiting in self._waiting.values():
            yield from waiting

    def has_room(self, scope: str, admissible: int) -> bool:
        """Return whether another session may wait. `admissible`: number of waiting sessions that the next pass
        admits."""
        waiting = sum(len(one) for one in self._waiting.values()) - admissible
        return waiting < self.most and len(self._waiting.get(scope, ())) - admissible < self._share

    def push(self, session: int, scope: str) -> None:
        """Add a new session at the end of its scope's queue."""
        if not self._members.get(scope):
            self._clock = max(self._clock, min(self._served.values(), default=self._clock))
            self._served[scope] = self._clock
        self._members[scope] = self._members.get(scope, 0) + 1
        self._waiting.setdefault(scope, deque()).append(session)

    def push_back(self, session: int) -> None:
        """Queue a preempted session before all sessions that were never admitted."""
        insort(self._returned, session)

    @property
    def first(self) -> int | None:
        """The session that is admitted next. Sessions that need less room do not overtake it."""
        if self._returned:
            return self._returned[0]
        scope = self._next_scope()
        return None if scope is None else self._waiting[scope][0]

    def pop(self) -> int:
        if self._returned:
            return self._returned.pop(0)
        scope = self._next_scope()
        if scope is None:
            raise IndexError("no session waits")
        session = self._waiting[scope].popleft()
        if not self._waiting[scope]:
            del self._waiting[scope]
        return session

    def charge(self, scope: str, tokens: int) -> None:
        self._served[scope] += tokens

    def leave(self, session: int, scope: str) -> None:
        """Remove a session that has ended, waiting or not."""
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
        """Interleave the sessions by scope: the first of each, then the second of each, in order otherwise."""
        seen: Counter[str] = Counter()
        ranked: list[tuple[int, int, int]] = []
        for order, (session, scope) in enumerate(sessions):
            ranked.append((seen[scope], order, session))
            seen[scope] += 1
        return [session for _, _, session in sorted(ranked)]

    def _next_scope(self) -> str | None:
        return min(self._waiting, key=lambda scope: (self._served[scope], self._waiting[scope][0]), default=None)


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
    beginnings: Beginnings = field(init=False)
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
        self.beginnings = Beginnings(limits.unit)
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
        if not fits(spec.together, self.limits.pass_tokens):
            raise TooLong(
                f"an image takes {max(end - start for start, end in spec.together)} positions, which see each other "
                f"and come in one pass; a pass has {self.limits.pass_tokens}, and {2 * FEW} are for text around it.",
                hint="Send the image in a smaller size.",
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
            together=between(session.spec.together, 0, session.computed),
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
            spec, together = session.spec, session.spec.together
            unread = spec.all_rows and session.delivered < len(spec.prompt)
            match = Match((), 0) if unread else self.pages.match(spec.prefix_scope, session.tokens, together)
            known, source = match.tokens, 0
            if self.limits.copies:
                match, source = self.beginnings.longest(match, self.limits.page_tokens)
            if self.running + len(self.beginnings) >= places and not self._drop_oldest_beginning(source):
                return
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
            session.source = source
            if self.limits.copies and self.limits.prefix:
                session.marks = self.beginnings.marks(known, match.tokens, len(session.tokens), together)
            session.pages_sent = 0
            if session.matched is None:
                session.matched = match.tokens
                self._queue.charge(spec.scope, len(session.tokens))
                self.prompt_tokens += len(spec.prompt)
                self.prefix_tokens += match.tokens

    def _drop_oldest_beginning(self, *needed: int) -> bool:
        """Have the stages drop the copy that was used longest ago and that no session begins with; return whether there
        was one."""
        begins = (one.source for one in self._sessions.values() if one.admitted and one.computed == one.origin)
        number = self.beginnings.drop_oldest({*begins, *needed})
        self.forget([number] if number else ())
        return bool(number)

    def _find_pages(self, session: Session, tokens: int) -> bool:
        """Find pages for the session's first `tokens` positions. If none is free, the youngest idle session younger
        than it gives up its pages."""
        while not self.pages.extend(session.number, tokens):
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
    def adapters(self) -> frozenset[int]:
        """Numbers of the adapters of all sessions that run or wait."""
        return frozenset(session.spec.adapter for session in self._sessions.values())

    @property
    def running(self) -> int:
        return len(self._sessions) - len(self._queue)

    def matched(self, number: int) -> int:
        """Return how many tokens of the session's prompt came from the prefix cache."""
        session = self._sessions.get(number)
        return 0 if session is None or session.matched is None else session.matched
