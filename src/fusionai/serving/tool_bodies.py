"""What readers of announced tool calls have in common: text in, pieces of calls out. Decides names only.

Neighbours: `tool_json` and `tool_xml` are such readers, `tool_reading` finds the announcements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from fusionai.serving.tools import CallPiece


class Outcome(Enum):
    """`MORE`: it goes on; `TEXT`: it is no call, and nothing was given out of it; `DONE`: it is over."""

    MORE = "more"
    TEXT = "text"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Given:
    """What some text came to. A piece with a name begins a call, others belong to the one begun last; `whole`: how many
    calls ended. `rest`: was not used; with `MORE` it must come again, before what follows."""

    outcome: Outcome
    rest: str
    pieces: tuple[CallPiece, ...] = ()
    whole: int = 0


class Body(Protocol):
    """Reads what stands behind one announcement."""

    @property
    def begun(self) -> bool:
        """Whether a call was given out: then it is no text any more."""
        ...

    def take(self, rest: str, *, final: bool) -> Given:
        """All that is known behind what was used before. `final`: nothing follows, so `MORE` can't come out."""
        ...
