"""One session of a served model: what was asked for, and how far it is. Decides nothing.

Neighbours: `coordination.serving.batching` moves it on, `coordination.serving.sessions` packs its share of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusionai.wire.serving import Segment

Output = Literal["logits", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """`number`: from 1 on, ascending, never used again. `max_tokens` 0: the prompt is read, nothing is generated.
    `all_rows`: the output of every prompt position is wanted, so none is taken from the prefix cache."""

    number: int
    scope: str
    prompt: tuple[int, ...]
    max_tokens: int
    deadline_s: float | None = None
    """On the clock that `now_s` is told from."""
    all_rows: bool = False
    output: Output = "logits"
    adapter: int = 0
    """Number of the adapter it goes through, 0 for none."""

    @property
    def prefix_scope(self) -> str:
        """Who may go on from what is cached of it: another scope may not, and what went through another adapter is of
        no use."""
        return f"{self.adapter}\x00{self.scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What is left of a session that is over: what may be checked of it, as long as its pages are held."""

    number: int
    tokens: tuple[int, ...]
    """Of all positions that were computed."""
    origin: int
    """What comes before was computed for another session."""
    pages: tuple[int, ...]
    adapter: int
    passes: int
    """That crossed each stage."""
    over_at: int
    """How many positions all texts together had had computed when it was over."""


@dataclass(slots=True, eq=False)
class Flight:
    """A session's share of a pass under way: positions up to `end`. `accepted`: proposals behind them that were right,
    once it came back, which may be before shares that were sent earlier."""

    number: int
    end: int
    accepted: int | None = None


@dataclass(slots=True, eq=False)
class Session:
    spec: SessionSpec
    tokens: list[int]
    """Prompt and what was emitted."""
    turn: int
    """The smaller, the sooner it is its turn in a pass."""
    admitted: bool = False
    computed: int = 0
    """Positions that all stages have in their caches."""
    origin: int = 0
    """First position computed since it was admitted."""
    delivered: int = 0
    """Positions whose rows have come, for `all_rows`."""
    matched: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    pages_sent: int = 0
    """Entries of its page table that the stages know."""
    flights: list[Flight] = field(default_factory=list[Flight])
    """Its passes under way, in the order they were sent: of one that decodes one, of one that reads any number. From
    the first on that is not back, so that `computed` leaves nothing out."""
    proposals: tuple[int, ...] = ()
    held: bool = False
    """Until somebody has guessed what follows."""
    lacking: bool = False
    """Its next position finds no page."""
    failures: int = 0
    passes: int = 0
    """That came back."""
    undisturbed: bool = True
    """Whether all that was computed of it since it was admitted was computed in one round."""

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
        """Whether tokens that it has are in no pass yet, though another pass with it is under way."""
        last = self.flights[-1] if self.flights else None
        return last is not None and last.accepted is None and not self.failures and last.end < len(self.tokens)

    def flight(self, number: int) -> Flight | None:
        """Of this pass, where it still counts."""
        return next((one for one in self.flights if one.number == number and one.accepted is None), None)

    def land(self) -> None:
        """What is back counts as computed as far as nothing before it is missing."""
        while self.flights and (accepted := self.flights[0].accepted) is not None:
            self.computed = self.flights.pop(0).end + accepted

    def put_back(self) -> None:
        """Its passes are void: it goes on from what is computed, and stages are told its whole page table."""
        self.flights.clear()
        self.pages_sent = 0
        self.proposals = ()

    def leave_pages(self) -> None:
        """It waits as if it had never been admitted; what was emitted stays."""
        self.put_back()
        self.admitted = self.lacking = False
        self.computed = self.origin = self.passes = 0
        self.undisturbed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """`tokens` packed in the order of `segments`. `wanted`: rows along `tokens`, ascending; `wanted_sessions`: whose
    each is. A pass that only reads prompts may want no row at all; its return counts all the same."""

    number: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    wanted_sessions: tuple[int, ...]
    forget: tuple[int, ...]
    output: Output


@dataclass(frozen=True, slots=True)
class SessionShare:
    """One session's share of a pass. `start` to `end` are tokens it has; `proposals` follow them."""

    session: Session
    start: int
    end: int
    proposals: tuple[int, ...]
    decodes: bool = False
    """Whether the session was decoding, not reading its prompt."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.session.tokens[self.start : self.end], *self.proposals)

    @property
    def first_wanted(self) -> int:
        """From this row of the share on all are wanted: of the prompt those that have not come yet, where all of it
        are; then the last token's, and the proposals'."""
        session = self.session
        first = len(self.tokens)
        if session.spec.all_rows:  # behind the prompt, whatever was computed has been delivered
            first = min(first, max(0, session.delivered - self.start))
        if self.end == len(session.tokens):
            first = min(first, self.end - 1 - self.start)
        return first


def packed(
    number: int, parts: Sequence[SessionShare], table: Callable[[int], tuple[int, ...]], forget: tuple[int, ...]
) -> PassPlan:
    """Of at least one share. `table`: session -> its pages, of which the stages are told what they don't know yet; the
    sessions remember that."""
    segments: list[Segment] = []
    tokens: list[int] = []
    wanted: list[int] = []
    owners: list[int] = []
    for part in parts:
        session, own = part.session, part.tokens
        pages = table(session.number)
        pages_sent = session.pages_sent
        segments.append(
            Segment(session.number, part.start, len(own), pages_sent, pages[pages_sent:], session.spec.adapter)
        )
        session.pages_sent = len(pages)
        first = part.first_wanted
        wanted += range(len(tokens) + first, len(tokens) + len(own))
        owners += [session.number] * (len(own) - first)
        tokens += own
    return PassPlan(
        number=number,
        segments=tuple(segments),
        tokens=tuple(tokens),
        wanted=tuple(wanted),
        wanted_sessions=tuple(owners),
        forget=forget,
        output=parts[0].session.spec.output,
    )
