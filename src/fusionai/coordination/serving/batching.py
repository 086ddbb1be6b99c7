"""Continuous batching over sessions and stages: what the next pass carries, and which sessions its result counts for.

Decoding sessions are spread over the pipeline: with n of them and S passes that can be computed at a time, a pass
carries about n/S, and no more than S such passes are under way: sessions that become ready meanwhile go together.
Prompts are read in pieces (`piece_sizes`); a pass with decoding sessions carries one piece's worth of them at most, one
without fills up. A session that decodes is in one pass at most. One that reads sends its next piece while earlier ones
are under way: attention looks back only, and links keep their order, so each stage has computed what comes before a
piece. After `rewind` all sessions go on from their last emitted token: only what `returned` took counts.

Never sees a tensor, never chooses a token. Neighbours: `admission` says who has pages, `sessions` packs passes;
`coordination.serving.driver` owns it and says when passes may go; the serving driver submits, sends and samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fusionai.coordination.serving.admission import Admission
from fusionai.coordination.serving.pages import Key
from fusionai.coordination.serving.sessions import Flight, PassPlan, Session, SessionShare, packed
from fusionai.coordination.serving.stage_times import PassWork, PieceSizes, StageTimes
from fusionai.coordination.serving.together import between, piece_end
from fusionai.wire.serving import Segment


@dataclass(frozen=True, slots=True)
class _Sent:
    """A pass under way. `decodes`: it carries a decoding session."""

    parts: tuple[SessionShare, ...]
    decodes: bool
    forget: tuple[int, ...]
    at_s: float
    work: PassWork


@dataclass(slots=True)
class Batcher(Admission):
    """`times`: measured stage times, from which the length of prompt pieces is chosen. Without it all pieces have
    `chunk_tokens`. The serving machine adds measurements to it."""

    times: StageTimes | None = None
    pieces: PieceSizes = field(init=False)
    _passes: dict[int, _Sent] = field(default_factory=dict[int, _Sent])

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        self.pieces = PieceSizes(self.limits.tile, self.limits.chunk_tokens, self.times)

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
        """Process a pass that came back, and return the sessions for which it counts: only their tokens may be emitted.
        `tokens`: session -> its new tokens, if the row of its next token was in the pass: the correct proposals and one
        more; may be empty for sessions in `finished`. A void pass changes nothing. Raises `ValueError` if tokens
        contradict the proposals."""
        sent = self._passes.pop(number, None)
        if sent is None:
            return frozenset()
        self.dropped(number, sent.forget)
        counted: set[int] = set()
        for part in sent.parts:
            session = part.session
            counts = self._counts(part, number)
            if part.kept_as:
                self._kept(part, counts=counts)
            if counts:
                counted.add(session.number)
                self._advance(number, part, tuple(tokens.get(session.number, ())), session.number in finished, now_s)
        return frozenset(counted)

    def _kept(self, part: SessionShare, *, counts: bool) -> None:
        """All stages have copied a session at the end of this share; if that does not count, they drop the copy."""
        if counts and self.beginnings.add(part.kept_as, self._key(part.session, part.end)):
            return
        self.beginnings.drop(part.kept_as)
        self.forget([part.kept_as])

    def _key(self, session: Session, end: int) -> Key:
        return self.pages.key(session.spec.prefix_scope, session.tokens[:end], session.spec.together)

    def failed(self, number: int, now_s: float) -> tuple[int, ...]:
        """Handle a pass that could not be computed. Each of its sessions tries again in a pass of its own. Sessions
        that were already alone in this pass end and are returned."""
        sent = self._passes.pop(number, None)
        if sent is None:
            return ()
        over: list[int] = []
        for part in sent.parts:
            session = part.session
            if part.kept_as:
                self._kept(part, counts=False)
            if not self._counts(part, number):
                continue
            session.put_back()
            session.failures += 1
            if session.failures > 1:
                self._end(session.number, now_s)
                over.append(session.number)
        return tuple(over)

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
        self.pages.confirm(spec.number, session.tokens[: session.computed], spec.together)
        if finished or (not reads_on and session.emitted >= spec.max_tokens):
            self._end(spec.number, now_s)

    def _counts(self, part: SessionShare, number: int) -> bool:
        session = part.session
        return self._sessions.get(session.number) is session and session.flight(number) is not None

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

    # ----------------------------------------------------------------------------------------------------------- faults

    def rewind(self) -> None:
        """Void all passes under way. The next passes carry whole page tables. A session without a computed position
        since its admission waits again, so that all stages have the positions in `live`."""
        self._passes.clear()
        self.forget(self.beginnings.clear())
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
        """Return the segments, over all sessions, that a stage without caches needs; each has its whole page table.
        Pages shared by several sessions are in the first one's segment only; the others start behind them, or are read
        again from their tokens if they can't: windows and states are not in pages."""
        segments: list[Segment] = []
        seen: set[int] = set()
        for number, computed in sorted(self.live.items()):
            table = self.pages.table(number)[: self.pages.pages_for(computed)]
            shared = next((entry for entry, page in enumerate(table) if page not in seen), len(table))
            start = min(shared * self.limits.page_tokens, computed)
            if start and self.limits.copies:
                self._give_up(self._sessions[number])
                continue
            seen.update(table)
            if start < computed:
                spec = self._sessions[number].spec
                together = between(spec.together, start, computed)
                segments.append(Segment(number, start, computed - start, 0, table, spec.adapter, together=together))
        return tuple(segments)

    def tokens_of(self, segment: Segment) -> tuple[int, ...]:
        """Return the tokens to send for this segment in a rebuild from tokens."""
        return tuple(self._sessions[segment.session].tokens[segment.start : segment.start + segment.length])

    def caches_lost(self) -> None:
        """Drop what a rebuild does not restore: a rebuilt stage has only the positions of live sessions."""
        self._make_room()
        self.pages.drop_index()

    def compute_again(self) -> None:
        """Read all sessions again from their tokens, because no cache can be trusted or rebuilt."""
        self._make_room()
        for session in self._sessions.values():
            if session.admitted:
                self._give_up(session)
        self.pages.drop_index()

    # ---------------------------------------------------------------------------------------------------------- figures

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

    # ------------------------------------------------------------------------------------------------- composing a pass

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
            room = min(room, max(chunk, self.limits.chunk_tokens))
        if reading:
            # Where pieces are short because they take long, passes are no longer than one.
            allowed = self.pieces.allowed(reading[0].sent, others_wait=others_wait)
            room = room if allowed >= self.limits.chunk_tokens else min(room, max(chunk, allowed))
        for session in reading:
            if not session.admitted:
                continue  # it made room for another
            end, start = ends[session.number], session.sent
            # A text that is read again may have a token more than when it was admitted.
            if not self._find_pages(session, end):
                continue
            if end - start > room:
                break
            room -= end - start
            session.flights.append(Flight(number, end))
            session.turn = next(self._turns)
            parts.append(SessionShare(session, start, end, (), kept_as=self._copy_at(session, end)))
        return parts

    def _piece_end(self, session: Session, *, others_wait: bool) -> int:
        end = self.pieces.end(session.sent, len(session.tokens), others_wait=others_wait)
        end = min(end, next((mark for mark in session.marks if mark > session.sent), end))
        if not (ranges := session.spec.together):
            return end
        unit, most = self.limits.tile, self.limits.pass_tokens
        return piece_end(ranges, session.sent, end, len(session.tokens), unit=unit, most=most)

    def _copy_at(self, session: Session, end: int) -> int:
        """Return the number of the copy that stages take of the session at `end`; 0 if none is wanted there, or all
        places are taken."""
        if end not in session.marks or self._key(session, end) in self.beginnings:
            return 0
        if self.running + len(self.beginnings) >= self.limits.sessions and not self._drop_oldest_beginning():
            return 0
        return self.beginnings.begin()

    def _may_send(self, session: Session, end: int) -> bool:
        """Return whether after a piece that ends at `end` the stages can still go back to the computed positions."""
        ahead = self.limits.ahead_tokens
        return ahead is None or not session.flights or end - session.computed <= ahead

    def _decoding_parts(self, number: int, decoding: Sequence[Session], room: int) -> list[SessionShare]:
        """Return as many decoding parts as make passes with decoding sessions about equally large, counting sessions
        under way."""
        parts: list[SessionShare] = []
        sessions = sum(one.decodes for one in self._sessions.values())
        passes = self.limits.spread if self.times is None else self.times.best_passes(sessions, self.limits.spread)
        if sum(sent.decodes for sent in self._passes.values()) >= passes:
            return parts
        group = -(-sessions // passes)
        for session in decoding:
            if len(parts) >= group or room < 1:
                break
            if not session.admitted:
                continue
            proposals = self._proposals(session, room - 1)
            if not self._find_pages(session, len(session.tokens)):
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
