"""What one pass carries, packed from the shares of its sessions. Decides which rows are wanted.

Neighbours: `coordination.serving.batching` chooses the shares; the serving driver sends the plan (`wire.serving.Pass`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusionai.coordination.serving.sessions import Output, Session
from fusionai.wire.serving import Segment


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
class Part:
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
    number: int, parts: Sequence[Part], table: Callable[[int], tuple[int, ...]], forget: tuple[int, ...]
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
        told = session.told
        segments.append(Segment(session.number, part.start, len(own), told, pages[told:], session.spec.adapter))
        session.told = len(pages)
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
