"""Continuous batching over sessions and stages: what the next pass carries. Decides sessions, pages, chunks, order.

A session is admitted when there are pages for all its tokens and a reserve for its answer; then it gets pages as it
grows. When pages run out, the youngest session that is not under way gives its own up, waits in front of the queue and
is computed again later from its tokens (most of its pages are usually still there and found again). The oldest session
is never asked to and fits alone, so something always goes on.

Decoding sessions are spread over the pipeline: with n of them and S passes that can be computed at a time, a pass
carries about n/S, and no more than S such passes are under way: who is ready meanwhile goes together. Prompts are read
in pieces (`piece_sizes`); a pass with decoding sessions carries one piece's worth of them at most, one without fills
up. A session that decodes is in one pass at most. One that reads sends its next piece while earlier ones are under way:
attention looks back only, and links keep their order, so each stage has computed what comes before a piece.
After `rewind` all of them go on from their last emitted token: only what `returned` took counts.

Each pass names the sessions that stages may drop, until a pass that named them came back from the last stage: a pass
that fails at one stage does not reach the stages after it, and passes behind it may already use the dropped sessions'
places. Pages of a session that ended may be handed out while a pass with it is under way: links keep their order, so
whatever that pass writes is overwritten. Where texts may be checked when they are over (`holds`), their pages are held
until `let_go`, or until somebody needs the room.

Never sees a tensor, never chooses a token. Neighbours: `pages`, `fair_queue`, `sessions`, `passes`, `piece_sizes`;
`coordination.serving.driver` owns it and says when passes may go; the serving driver submits, sends and samples.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.serving.fair_queue import FairQueue
from fusionai.coordination.serving.limits import BatchLimits, QueueFull, TooLong
from fusionai.coordination.serving.pages import Match, Pages
from fusionai.coordination.serving.piece_sizes import PieceSizes
from fusionai.coordination.serving.sessions import Flight, PassPlan, Session, SessionShare, SessionSpec, Text, packed
from fusionai.coordination.serving.stage_times import PassWork, StageTimes
from fusionai.wire.serving import MAX_SESSIONS, Segment

PROBE_SESSION: Final = 0
"""Session number of the probe. It owns its pages for the life of the job. Other sessions count from 1."""
LONGEST_RETRY_S: Final = 60.0
FORGET_AT_ONCE: Final = MAX_SESSIONS // 2
"""Largest number of sessions that one pass has stages drop; half of what its message has room for (chosen)."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A pass under way. `decodes`: it carries a decoding session."""

    parts: tuple[SessionShare, ...]
    decodes: bool
    forget: tuple[int, ...]
    at_s: float
    work: PassWork


@dataclass(slots=True)
class Batcher:
    """`times`: measured stage times, from which the length of prompt pieces is chosen. Without it all pieces have
    `chunk_tokens`. The serving machine adds measurements to it."""

    limits: BatchLimits
    holds: bool = False
    """Whether pages of ended texts are held for checks. `take_over` returns these texts; each needs a call of
    `let_go`."""
    times: StageTimes | None = None
    pages: Pages = field(init=False)
    pieces: PieceSizes = field(init=False)
    _sessions: dict[int, Session] = field(default_factory=dict[int, Session])
    _queue: FairQueue = field(init=False)
    _passes: dict[int, _Sent] = field(default_factory=dict[int, _Sent])
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
    prompt_tokens: int = 0
    """Prompt tokens read so far, including those from the prefix cache. The next field counts only the cached ones."""
    prefix_tokens: int = 0
    computed_positions: int = 0
    """Positions computed so far in all texts, including repeated computation."""

    def __post_init__(self) -> None:
        limits = self.limits
        self.pages = Pages(limits.pages, limits.page_tokens, prefix=limits.prefix)
        self._queue = FairQueue(limits.queue)
        self.pieces = PieceSizes(limits.tile, limits.chunk_tokens, self.times)
        self.pages.admit(PROBE_SESSION, "", Match((), 0))
        if not self.pages.extend(PROBE_SESSION, limits.probe_tokens):
            raise ValueError(f"expected more pages than a probe takes, got {limits.pages}")

    # ------------------------------------------------------------------------------------------------- coming, going

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

    def hold(self, number: int) -> None:
        """Keep the session out of passes until `propose`, because speculative tokens are being generated."""
        session = self._sessions.get(number)
        if session is not None:
            session.held = True

    def propose(self, number: int, tokens: Sequence[int]) -> None:
        """Set the speculative tokens after the session's last token; its next pass verifies them. A later call replaces
        an earlier one. Ignored for sessions that have ended or do not decode yet."""
        session = self._sessions.get(number)
        if session is not None:
            session.held = False
            session.proposals = tuple(tokens)

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

    # ------------------------------------------------------------------------------------------------ texts, when over

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

    # --------------------------------------------------------------------------------------------------------- passes

    def next_pass(self, now_s: float) -> PassPlan | None:
        """Return the next pass, or None if the pipeline is full or no session has anything to compute."""
        if len(self._passes) >= self.limits.in_flight:
            return None
        self._admit()
        parts = self._chosen(self._next_number)
        number = self.take_number()
        if not parts:
            return None
        forget = self.forgotten
        plan = packed(number, parts, self.pages.table, forget)
        work = (self.times or StageTimes()).work_of(plan.segments)
        self._passes[number] = _Sent(tuple(parts), any(part.decodes for part in parts), forget, now_s, work)
        return plan

    def sessions_of(self, number: int) -> tuple[int, ...]:
        """Return the sessions for which this pass still counts and the driver samples; empty for a void pass."""
        sent = self._passes.get(number)
        return () if sent is None else tuple(part.session.number for part in sent.parts if self._counts(part, number))

    def returned(
        self, number: int, tokens: Mapping[int, Sequence[int]], finished: Collection[int], now_s: float
    ) -> frozenset[int]:
        """A pass came back. `tokens`: for each session whose next token's row was in it what follows: as many of the
        proposals as were right and one more; it may be empty for one in `finished`. Gives the sessions for which it
        counts: only theirs may be given out. A void pass changes nothing.

        Raises `ValueError` where the tokens contradict what was proposed."""
        sent = self._passes.pop(number, None)
        if sent is None:
            return frozenset()
        self.dropped(number, sent.forget)
        counted: set[int] = set()
        for part in sent.parts:
            session = part.session
            if self._counts(part, number):
                counted.add(session.number)
                self._advance(number, part, tuple(tokens.get(session.number, ())), session.number in finished, now_s)
        return frozenset(counted)

    def failed(self, number: int, now_s: float) -> tuple[int, ...]:
        """Handle a pass that could not be computed. Each of its sessions tries again in a pass of its own. Sessions
        that were already alone in this pass end and are returned."""
        sent = self._passes.pop(number, None)
        if sent is None:
            return ()
        over: list[int] = []
        for part in sent.parts:
            session = part.session
            if not self._counts(part, number):
                continue
            session.put_back()
            session.failures += 1
            if session.failures > 1:
                self._end(session.number, now_s)
                over.append(session.number)
        return tuple(over)

    # --------------------------------------------------------------------------------------------------------- faults

    def rewind(self) -> None:
        """All passes under way are void. Stages are told whole page tables again; a session of which nothing was
        computed since it was admitted waits again, so that all stages have what `live` says."""
        self._passes.clear()
        for session in self._sessions.values():
            if session.admitted and session.computed == session.origin:
                self._give_up(session)
            else:
                session.put_back()
                session.undisturbed = session.undisturbed and not session.admitted
        self._make_room()

    @property
    def live(self) -> dict[int, int]:
        """Session -> positions that every stage must have before passes go on."""
        return {number: session.computed for number, session in self._sessions.items() if session.computed > 0}

    def segments_for_rebuild(self) -> tuple[Segment, ...]:
        """What a stage without caches needs, of all sessions: each with its page table. Pages that several have are in
        one segment only, the first; the others start behind them."""
        segments: list[Segment] = []
        seen: set[int] = set()
        for number, computed in sorted(self.live.items()):
            table = self.pages.table(number)[: self.pages.pages_for(computed)]
            shared = next((entry for entry, page in enumerate(table) if page not in seen), len(table))
            start = min(shared * self.limits.page_tokens, computed)
            seen.update(table)
            if start < computed:
                adapter = self._sessions[number].spec.adapter
                segments.append(Segment(number, start, computed - start, 0, table, adapter))
        return tuple(segments)

    def tokens_of(self, segment: Segment) -> tuple[int, ...]:
        """Return the tokens to send for this segment in a rebuild from tokens."""
        return tuple(self._sessions[segment.session].tokens[segment.start : segment.start + segment.length])

    def caches_lost(self) -> None:
        """A stage has to be rebuilt. Afterwards it has only the positions of living sessions."""
        self._make_room()
        self.pages.drop_index()

    def compute_again(self) -> None:
        """Read all sessions again from their tokens, because no cache can be trusted or rebuilt."""
        self._make_room()
        for session in self._sessions.values():
            if session.admitted:
                self._give_up(session)
        self.pages.drop_index()

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
            if self._forget.get(session, number + 1) <= number:
                del self._forget[session]

    def take_number(self) -> int:
        """Return the next number of a pass, probe or rebuild. All share one numbering."""
        self._next_number += 1
        return self._next_number - 1

    # -------------------------------------------------------------------------------------------------------- figures

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._sessions) - len(self._queue)

    @property
    def under_way(self) -> int:
        """Number of passes under way."""
        return len(self._passes)

    @property
    def oldest_s(self) -> float | None:
        """Time at which the oldest pass under way was created."""
        return min((sent.at_s for sent in self._passes.values()), default=None)

    def work_of(self, number: int) -> PassWork | None:
        """Return the work of a pass under way, or None."""
        sent = self._passes.get(number)
        return None if sent is None else sent.work

    @property
    def works(self) -> tuple[PassWork, ...]:
        """Work of all passes under way."""
        return tuple(sent.work for sent in self._passes.values())

    @property
    def sessions_under_way(self) -> tuple[int, ...]:
        """Sessions for which a pass under way still counts."""
        return tuple(number for number, session in self._sessions.items() if session.flights)

    def matched(self, number: int) -> int:
        """Return how many tokens of the session's prompt came from the prefix cache."""
        session = self._sessions.get(number)
        return 0 if session is None or session.matched is None else session.matched

    # -------------------------------------------------------------------------------------------------------- details

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
            session.told = 0
            if session.matched is None:
                session.matched = match.tokens
                self._queue.charge(spec.scope, len(session.tokens))
                self.prompt_tokens += len(spec.prompt)
                self.prefix_tokens += match.tokens

    def _chosen(self, number: int) -> list[SessionShare]:
        """Return the parts of the next pass: sessions of one kind whose turn it is. If all of these lack pages, the
        other kind."""
        ready = sorted(
            (
                one
                for one in self._sessions.values()
                if one.admitted and not one.held and (not one.flights or one.reads_on)
            ),
            key=lambda one: one.turn,
        )
        while ready:
            first = ready[0]
            alike = [one for one in ready if not one.failures and one.spec.output == first.spec.output]
            together = ready[:1] if first.failures else alike
            parts = self._composed(number, together)
            if parts:
                return parts
            ready = [one for one in ready if one.admitted and one not in together]
        return []

    def _composed(self, number: int, ready: Sequence[Session]) -> list[SessionShare]:
        """Compose pass `number` and mark its sessions as under way in it."""
        decoding = [one for one in ready if one.decodes]
        ranked = self._queue.rank((one.number, one.spec.scope) for one in ready if not one.decodes)
        others_wait = any(one.decodes for one in self._sessions.values())
        ends = {one: self._piece_end(self._sessions[one], others_wait=others_wait) for one in ranked}
        reading = [self._sessions[one] for one in ranked if self._may_send(self._sessions[one], ends[one])]
        chunk = ends[reading[0].number] - reading[0].sent if reading else 0
        takes_turns = chunk == self.limits.pass_tokens
        if takes_turns and decoding and decoding[0].turn > reading[0].turn:
            decoding = []
        parts = self._decoding_parts(number, decoding, self.limits.pass_tokens - (0 if takes_turns else chunk))
        if parts and takes_turns:
            return parts
        room = self.limits.pass_tokens - sum(1 + len(part.proposals) for part in parts)
        if parts:
            room = min(room, self.limits.chunk_tokens)
        if reading:
            # Where pieces are short because they take long, passes are no longer than one.
            allowed = self.pieces.allowed(reading[0].sent, others_wait=others_wait)
            room = room if allowed >= self.limits.chunk_tokens else min(room, max(chunk, allowed))
        for session in reading:
            if not session.admitted:
                continue  # it made room for one that decodes
            end, start = ends[session.number], session.sent
            if end - start > room:
                break
            room -= end - start
            session.flights.append(Flight(number, end))
            session.turn = next(self._turns)
            parts.append(SessionShare(session, start, end, ()))
        return parts

    def _piece_end(self, session: Session, *, others_wait: bool) -> int:
        return self.pieces.end(session.sent, len(session.tokens), others_wait=others_wait)

    def _may_send(self, session: Session, end: int) -> bool:
        """Return whether after a piece that ends at `end` the stages can still go back to the computed positions."""
        ahead = self.limits.ahead_tokens
        return ahead is None or not session.flights or end - session.computed <= ahead

    def _decoding_parts(self, number: int, decoding: Sequence[Session], room: int) -> list[SessionShare]:
        """Return as many decoding parts as make passes with decoding sessions about equally large, counting sessions
        under way."""
        parts: list[SessionShare] = []
        if sum(sent.decodes for sent in self._passes.values()) >= self.limits.spread:
            return parts
        group = -(-sum(one.decodes for one in self._sessions.values()) // self.limits.spread)
        for session in decoding:
            if len(parts) >= group or room < 1:
                break
            if not session.admitted:
                continue
            proposals = self._proposals(session, room - 1)
            if not self._find_page(session):
                continue
            if not self.pages.extend(session.number, len(session.tokens) + len(proposals)):
                proposals = ()
            session.flights.append(Flight(number, len(session.tokens)))
            room -= 1 + len(proposals)
            parts.append(SessionShare(session, session.computed, len(session.tokens), proposals, decodes=True))
            self._queue.charge(session.spec.scope, 1)
        return parts

    def _proposals(self, session: Session, room: int) -> tuple[int, ...]:
        left = session.spec.max_tokens - session.emitted - 1
        return session.proposals[: max(0, min(left, room))]

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

    def _advance(self, number: int, part: SessionShare, emitted: tuple[int, ...], finished: bool, now_s: float) -> None:
        session, spec = part.session, part.session.spec
        flight = session.flight(number)
        assert flight is not None
        self.computed_positions += part.end - part.start + len(part.proposals)
        reads_on = part.end < len(session.tokens)
        if (reads_on and emitted) or (not reads_on and spec.max_tokens and not emitted and not finished):
            raise ValueError(f"expected tokens after the last position of session {spec.number} and only there")
        accepted = emitted[:-1]
        if accepted != part.proposals[: len(accepted)] or session.emitted + len(emitted) > spec.max_tokens:
            raise ValueError(f"session {spec.number} was given {emitted}, proposed were {part.proposals}")
        session.tokens += emitted
        flight.accepted = len(accepted)
        session.land()
        if part.start <= session.delivered:
            session.delivered = max(session.delivered, part.end + len(accepted))
        session.failures = 0
        session.passes += 1
        session.proposals = ()
        session.turn = next(self._turns)
        self.pages.confirm(spec.number, session.tokens[: session.computed])
        if finished or (not reads_on and session.emitted >= spec.max_tokens):
            self._end(spec.number, now_s)

    def _counts(self, part: SessionShare, number: int) -> bool:
        session = part.session
        return self._sessions.get(session.number) is session and session.flight(number) is not None

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
