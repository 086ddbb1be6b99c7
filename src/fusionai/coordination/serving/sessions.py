"""Sessions of a served model: the request, the progress, and the shares of passes that are packed from them.

Neighbours: `coordination.serving.admission` and `batching` change sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusionai.coordination.serving.together import between
from fusionai.wire.serving import Segment

Output = Literal["logits", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """`number`: from 1 on, ascending, never used again. `max_tokens` 0: the prompt is read, no token is generated.
    `all_rows`: the output of every prompt position is wanted, so none comes from the prefix cache."""

    number: int
    scope: str
    prompt: tuple[int, ...]
    max_tokens: int
    deadline_s: float | None = None
    """On the clock of `now_s`."""
    all_rows: bool = False
    first_row: bool = False
    """Only the output of the first position is wanted. For texts that come in one pass."""
    second_from: int = 0
    """Position at which the second of two texts begins, 0 for one text."""
    output: Output = "logits"
    states: bool = False
    """The states of every computed position are wanted besides, for a head that guesses tokens."""
    adapter: int = 0
    """Number of the adapter, 0 for none."""
    edition: int = 0
    """How often another adapter had got this number before."""
    together: tuple[tuple[int, int], ...] = ()
    """Ranges of the prompt whose positions see each other (`coordination.serving.together`)."""

    @property
    def prefix_scope(self) -> str:
        """Scope of its cached prefix: other scopes may not continue from it, and other adapters can't."""
        return f"{self.adapter}.{self.edition}\x00{self.scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A session that has ended, for spot checks while its pages are held."""

    number: int
    tokens: tuple[int, ...]
    """Tokens of all computed positions."""
    origin: int
    """First position that was computed for this session."""
    pages: tuple[int, ...]
    adapter: int
    together: tuple[tuple[int, int], ...]
    passes: int
    """Number of passes that crossed each stage."""
    over_at: int
    """Number of positions computed in all texts together when this one ended."""


@dataclass(slots=True, eq=False)
class Flight:
    """A session's share of a pass under way: positions up to `end`. `accepted`: number of correct proposals behind
    them; set when the pass is back, which may be before shares that were sent earlier."""

    number: int
    end: int
    accepted: int | None = None


@dataclass(slots=True, eq=False)
class Session:
    spec: SessionSpec
    tokens: list[int]
    """Prompt and emitted tokens."""
    turn: int
    """Rank in the order of passes, lowest first."""
    admitted: bool = False
    computed: int = 0
    """Positions that all stages have in their caches."""
    origin: int = 0
    """First position computed since it was admitted."""
    delivered: int = 0
    """Positions whose rows have arrived, for `all_rows`."""
    matched: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    pages_sent: int = 0
    """Number of page table entries that the stages know."""
    flights: list[Flight] = field(default_factory=list[Flight])
    """Its passes in the order they were sent, from the first that is not back: at most one while it decodes, any
    number while it reads its prompt."""
    proposals: tuple[int, ...] = ()
    held: bool = False
    """Whether it waits for speculative tokens."""
    lacking: bool = False
    """Whether no page is free for its next position."""
    failures: int = 0
    passes: int = 0
    """Number of passes that came back since it was admitted."""
    undisturbed: bool = True
    """Whether all its positions since its admission were computed in one round."""
    source: int = 0
    """Number of the copy with which it begins (`beginnings`), 0 for none."""
    marks: tuple[int, ...] = ()
    """Positions of its prompt at which stages keep copies of it."""

    @property
    def number(self) -> int:
        return self.spec.number

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.spec.prompt)

    @property
    def decodes(self) -> bool:
        return self.emitted > 0 and self.computed == len(self.tokens) - 1

    @property
    def sent(self) -> int:
        """Positions that are computed or in a pass under way."""
        return self.flights[-1].end if self.flights else self.computed

    @property
    def reads_on(self) -> bool:
        """Whether it reads its prompt: passes are under way, and some of its tokens are in none yet."""
        last = self.flights[-1] if self.flights else None
        return last is not None and last.accepted is None and not self.failures and last.end < len(self.tokens)

    def flight(self, number: int) -> Flight | None:
        """Return its share of pass `number`, None if that does not count any more."""
        return next((one for one in self.flights if one.number == number and one.accepted is None), None)

    def land(self) -> None:
        """Count returned shares as computed, up to the first that is not back."""
        while self.flights and (accepted := self.flights[0].accepted) is not None:
            self.computed = self.flights.pop(0).end + accepted

    def put_back(self) -> None:
        """Void its passes: it continues from the computed positions, and its next pass carries its whole page table."""
        self.flights.clear()
        self.pages_sent = 0
        self.proposals = ()

    def leave_pages(self) -> None:
        """Return it to the state before its admission; emitted tokens stay."""
        self.put_back()
        self.admitted = self.lacking = False
        self.computed = self.origin = self.passes = self.source = 0
        self.marks = ()
        self.undisturbed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """`tokens` packed in the order of `segments`. `wanted`: rows along `tokens`, ascending; `wanted_sessions`: the
    session of each wanted row. A pass that only reads prompts may want no rows; its result counts all the same."""

    number: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    wanted_sessions: tuple[int, ...]
    forget: tuple[int, ...]
    output: Output
    state_rows: tuple[int, ...] = ()
    """Rows along `tokens` whose states are wanted: all rows of some segments."""
    types: tuple[int, ...] = ()
    """Types of the tokens (`SessionShare.types`); empty if all are 0."""


@dataclass(frozen=True, slots=True)
class SessionShare:
    """One session's share of a pass. `start` to `end` are tokens it has; `proposals` follow them."""

    session: Session
    start: int
    end: int
    proposals: tuple[int, ...]
    decodes: bool = False
    """Whether the session was decoding, not reading its prompt."""
    kept_as: int = 0
    """Number of the copy that stages take at its end, 0 for none."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.session.tokens[self.start : self.end], *self.proposals)

    @property
    def wanted(self) -> range:
        """Rows of the share that are wanted. With `all_rows`, the prompt's rows that have not arrived yet; always the
        last token's row, and the proposals'. With `first_row`, that row alone."""
        session = self.session
        first = end = len(self.tokens)
        if session.spec.first_row:
            return range(int(self.start == 0))
        if session.spec.all_rows:  # behind the prompt, whatever was computed has been delivered
            first = min(first, max(0, session.delivered - self.start))
        if self.end == len(session.tokens):
            first = min(first, self.end - 1 - self.start)
        return range(first, end)

    @property
    def types(self) -> tuple[int, ...]:
        """1 for tokens of the second of two texts, 0 for others."""
        second = self.session.spec.second_from
        return tuple(int(0 < second <= position) for position in range(self.start, self.start + len(self.tokens)))


def packed(
    number: int, parts: Sequence[SessionShare], table: Callable[[int], tuple[int, ...]], forget: tuple[int, ...]
) -> PassPlan:
    """Pack at least one share into a pass. `table`: session -> its pages. The pass carries the page table entries that
    the stages do not know yet, and the sessions record that."""
    segments: list[Segment] = []
    tokens: list[int] = []
    wanted: list[int] = []
    owners: list[int] = []
    state_rows: list[int] = []
    types: list[int] = []
    typed = any(part.session.spec.second_from for part in parts)
    for part in parts:
        session, own = part.session, part.tokens
        pages = table(session.number)
        pages_sent = session.pages_sent
        segments.append(
            Segment(
                session.number,
                part.start,
                len(own),
                pages_sent,
                pages[pages_sent:],
                session.spec.adapter,
                session.source if part.start == session.origin else 0,
                part.kept_as,
                between(session.spec.together, part.start, part.end),
            )
        )
        session.pages_sent = len(pages)
        rows = part.wanted
        wanted += (len(tokens) + row for row in rows)
        owners += [session.number] * len(rows)
        if session.spec.states:
            state_rows += range(len(tokens), len(tokens) + len(own))
        types += part.types if typed else ()
        tokens += own
    return PassPlan(
        number=number,
        segments=tuple(segments),
        tokens=tuple(tokens),
        wanted=tuple(wanted),
        wanted_sessions=tuple(owners),
        forget=forget,
        output=parts[0].session.spec.output,
        state_rows=tuple(state_rows),
        types=tuple(types),
    )
