"""Pages and batches under arbitrary courses of calls: nothing shared wrongly, nothing lost, nobody starves.

The model keeps what every page really holds, as one stage would: a pass writes tokens into pages in the order passes
were made, and a session must find its own tokens, all of them, on its pages before what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusionai.coordination.serving.admission import PROBE_SESSION, BatchLimits, QueueFull
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.beginnings import Beginnings
from fusionai.coordination.serving.sessions import PassPlan, SessionSpec
from fusionai.wire.serving import Segment
from harness.examples import examples

pytestmark = pytest.mark.slow

PATIENCE = 400
"""Passes within which everybody who waits must have ended."""


class Batches(RuleBasedStateMachine):
    batcher: Batcher
    limits: BatchLimits

    @initialize(
        pages=st.integers(10, 24),
        sessions=st.integers(1, 5),
        in_flight=st.integers(1, 3),
        chunks=st.integers(1, 2),
        reserve=st.sampled_from((0, 6)),
        kind=st.sampled_from(("nothing shared", "pages", "copies")),
        queue=st.integers(1, 6),
    )
    def begin(
        self, pages: int, sessions: int, in_flight: int, chunks: int, reserve: int, kind: str, queue: int
    ) -> None:
        self.limits = BatchLimits(
            pages=pages,
            page_tokens=3,
            sessions=sessions,
            pass_tokens=5 * chunks,
            in_flight=in_flight,
            chunk_tokens=5,
            queue=queue,
            prefix=kind != "nothing shared",
            copies=kind == "copies",
            tile_tokens=1 if kind == "copies" else None,
            reserve_tokens=reserve,
            probe_tokens=3,
        )
        self.batcher = Batcher(self.limits)
        self.batcher.beginnings = Beginnings(self.limits.unit, least_tokens=3, tokens_behind=1)
        self.now_s = 0.0
        self.numbers = 0
        self.last_pass = -1
        self.content: dict[tuple[int, int], tuple[str, int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.states: dict[int, list[tuple[str, int]]] = {}
        """What a state stands for that a stage carries, by session or copy."""
        self.tokens: dict[int, list[int]] = {}
        """Of those that have not ended: prompt and what was emitted."""
        self.specs: dict[int, SessionSpec] = {}
        self.flying: list[PassPlan] = []
        self.copies = self.begun = 0
        self.held: set[int] = set()
        """For whom somebody guesses."""
        self.retries_s: list[float] = []

    # ----------------------------------------------------------------------------------------------------- the calls

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.integers(0, 8),
        scope=st.sampled_from("ab"),
        deadline_s=st.none() | st.floats(1.0, 60.0),
    )
    def submit(self, prompt: list[int], max_tokens: int, scope: str, deadline_s: float | None) -> None:
        self.numbers += 1
        if self.limits.copies:  # texts that begin alike
            scope, max_tokens, prompt = "a", max(1, max_tokens), [0] * (3 + len(prompt))
        spec = SessionSpec(
            number=self.numbers,
            scope=scope,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
            all_rows=not max_tokens,
            output="logits" if max_tokens else "hidden",
        )
        try:
            self.batcher.submit(spec, self.now_s)
        except QueueFull as full:
            self.retries_s.append(full.retry_after_s)
        else:
            self.specs[spec.number] = spec
            self.tokens[spec.number] = list(prompt)

    @rule()
    def send(self) -> None:
        plan = self.batcher.next_pass(self.now_s)
        if plan is not None:
            self._compute(plan)
            self.flying.append(plan)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def return_one(self, data: st.DataObject) -> None:
        """Mostly in order; what nobody wants to see may come a shorter way."""
        place = data.draw(st.sampled_from((0, 0, 0, len(self.flying) - 1)))
        self._return(data, self.flying.pop(place))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def guess_late(self, data: st.DataObject) -> None:
        """Whatever happened meanwhile, also that it is over."""
        self.guess(data, data.draw(st.sampled_from(sorted(self.held))))

    def guess(self, data: st.DataObject, number: int) -> None:
        self.held.discard(number)
        self.batcher.propose(number, data.draw(st.lists(st.integers(0, 1), max_size=4)))

    @precondition(lambda self: self.flying)
    @rule()
    def fail_one(self) -> None:
        for number in self.batcher.failed(self.flying.pop(0).number, self.now_s):
            self._over(number)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        assert self.batcher.cancel(number)
        self._over(number)

    @rule(passed_s=st.floats(0.1, 20.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        for number in self.batcher.expire(self.now_s):
            assert self.specs[number].deadline_s is not None
            self._over(number)

    @rule()
    def lose_passes(self) -> None:
        """A fault that no cache was lost by: the stage keeps what it has."""
        self.batcher.rewind()
        self.flying.clear()

    @rule()
    def lose_caches(self) -> None:
        """A stage is lost and rebuilt from what was retained of living sessions."""
        self.batcher.rewind()
        self.flying.clear()
        segments = self.batcher.segments_for_rebuild()
        self.batcher.caches_lost()
        retained, self.content, self.tables, self.cached = self.content, {}, {}, {}
        self.states.clear()
        written: set[tuple[int, int]] = set()
        for segment in segments:
            places = self._places(segment.pages, segment.start, segment.length)
            assert not written & set(places), "a shared page is rebuilt once"
            written.update(places)
            self.content |= {place: retained[place] for place in places}
            if self.limits.copies:
                assert segment.start == 0, "states are computed from the beginning"
                self.states[segment.session] = [retained[place] for place in places]
            self.tables[segment.session] = list(segment.pages)
            self.cached[segment.session] = segment.start + segment.length

    @rule()
    def read_again(self) -> None:
        self.batcher.rewind()
        self.flying.clear()
        self.batcher.compute_again()
        self.content.clear()

    # -------------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def pages_are_in_one_place(self) -> None:
        pages = self.batcher.pages
        held: dict[int, int] = {}
        for session in pages.sessions:
            table = pages.table(session)
            assert len(set(table)) == len(table)
            for page in table:
                held[page] = held.get(page, 0) + 1
        assert all(pages._references[page] == count for page, count in held.items())
        assert pages.room == pages.count - len(held)
        assert set(pages.sessions) - {PROBE_SESSION} <= set(self.tokens)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.batcher.running <= self.limits.sessions
        assert self.batcher.under_way <= self.limits.in_flight
        assert all(0 < retry_s <= 60.0 for retry_s in self.retries_s)
        assert self.batcher.running + self.batcher.queued == len(self.tokens)

    def teardown(self) -> None:
        """Left alone, everybody ends: nobody starves, nothing is lost."""
        for number in getattr(self, "held", ()):
            self.batcher.propose(number, ())
        getattr(self, "held", set()).clear()
        for _ in range(PATIENCE):
            if not self.tokens:
                break
            while (plan := self.batcher.next_pass(self.now_s)) is not None:
                self._compute(plan)
                self.flying.append(plan)
            assert self.flying, f"{sorted(self.tokens)} wait for ever"
            self._return(None, self.flying.pop(0))
        assert not self.tokens, f"{sorted(self.tokens)} starve"
        if hasattr(self, "batcher"):
            assert self.batcher.pages.room == self.limits.pages - 1

    # -------------------------------------------------------------------------------------------------------- details

    def _compute(self, plan: PassPlan) -> None:
        assert plan.number > self.last_pass
        self.last_pass = plan.number
        assert len(plan.tokens) <= self.limits.pass_tokens
        assert list(plan.wanted) == sorted(set(plan.wanted))
        # Later pieces of a prompt whose earlier one failed are under way and count for nothing.
        under_way = {
            one.session: one
            for other in self.flying
            for one in other.segments
            if one.session in self.batcher.sessions_of(other.number)
        }
        for gone in plan.forget:
            self.tables.pop(gone, None)
            self.cached.pop(gone, None)
            self.states.pop(gone, None)
        given = iter(plan.tokens)
        for segment in plan.segments:
            before = under_way.get(segment.session)
            if before is not None and segment.session in self.tokens:
                ahead = before.start + before.length
                # A prompt, or a text whose cache was given away and that is read again, answer included.
                assert segment.start == ahead < len(self.tokens[segment.session]), "only known tokens go on meanwhile"
            assert segment.session not in self.held
            spec = self.specs[segment.session]
            table = self.tables.setdefault(segment.session, [])
            table[segment.first_page :] = segment.pages
            known = [self.content[place] for place in self._places(table, 0, segment.start)]
            assert known == [(spec.scope, token) for token in self.tokens[segment.session][: segment.start]]
            for place in self._places(table, segment.start, segment.length):
                sharing = [one for one, pages in self._living_tables() if place[0] in pages]
                assert sharing in ([], [segment.session]), "a page that others read is written"
                self.content[place] = (spec.scope, next(given))
            self.cached[segment.session] = segment.start + segment.length
            if self.limits.copies:
                self._carry(segment, known)
        assert len(self.tables) <= self.limits.sessions
        assert len(self.states) <= self.limits.sessions

    def _carry(self, segment: Segment, known: list[tuple[str, int]]) -> None:
        """What a stage does that has a state for each session: it begins at nothing, at a copy, or goes on."""
        before = self.states[segment.source or segment.session] if segment.start else []
        assert before[: segment.start] == known, "a state is that of another text"
        assert len(before) == segment.start or not segment.source
        after = self._places(self.tables[segment.session], segment.start, segment.length)
        self.states[segment.session] = known + [self.content[place] for place in after]
        if segment.kept_as:
            assert segment.kept_as not in self.states
            self.states[segment.kept_as] = list(self.states[segment.session])
            self.copies += 1
        self.begun += segment.source > 0

    def _living_tables(self) -> list[tuple[int, tuple[int, ...]]]:
        pages = self.batcher.pages
        return [(one, pages.table(one)) for one in pages.sessions if one != PROBE_SESSION]

    def _places(self, table: Sequence[int], start: int, length: int) -> list[tuple[int, int]]:
        return [(table[at // 3], at % 3) for at in range(start, start + length)]

    def _return(self, data: st.DataObject | None, plan: PassPlan) -> None:
        sessions = self.batcher.sessions_of(plan.number)
        ends = {one for one in plan.wanted_sessions if self.specs[one].max_tokens} & set(sessions)
        tokens = {one: self._verified(plan, one) for one in sorted(ends)}
        finished = {one for one in tokens if data is not None and data.draw(st.integers(0, 9)) == 0}
        counted = self.batcher.returned(plan.number, tokens, finished, self.now_s)
        assert counted == set(sessions)
        for number in counted:
            spec = self.specs[number]
            self.tokens[number] += tokens.get(number, ())
            ends_at = next(one.start + one.length for one in plan.segments if one.session == number)
            read = not spec.max_tokens and ends_at == len(spec.prompt)
            if number in finished or read or (tokens and self._emitted(number) == spec.max_tokens > 0):
                self._over(number)
            elif number in tokens and data is not None:
                self.batcher.hold(number)
                self.held.add(number)
                if data.draw(st.booleans()):
                    self.guess(data, number)

    def _verified(self, plan: PassPlan, number: int) -> tuple[int, ...]:
        """The token at index n is n modulo 2: as many of the proposals as that is true of, and one more."""
        packed, start = 0, 0
        for segment in plan.segments:
            if segment.session == number:
                start = segment.start
                break
            packed += segment.length
        known = len(self.tokens[number])
        proposed = plan.tokens[packed + known - start : packed + segment.length]
        emitted = [known % 2]
        for token in proposed:
            if token != emitted[-1]:
                break
            emitted.append((known + len(emitted)) % 2)
        return tuple(emitted)

    def _emitted(self, number: int) -> int:
        return len(self.tokens[number]) - len(self.specs[number].prompt)

    def _over(self, number: int) -> None:
        del self.tokens[number]


Batches.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None, derandomize=True)
TestBatches = Batches.TestCase
