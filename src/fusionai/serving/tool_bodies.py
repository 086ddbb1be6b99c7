"""The common interface of readers of announced tool calls: text in, pieces of calls out.

Neighbours: `tool_json` and `tool_xml` are such readers, `tool_reading` finds the announcements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from fusionai.serving.tools import CallPiece


class CallState(Enum):
    """`MORE`: the call continues; `TEXT`: it is no call, and nothing of it was passed on; `DONE`: the call is over."""

    MORE = "more"
    TEXT = "text"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Given:
    """Result of reading some text. A piece with a name begins a call, other pieces belong to the call begun last;
    `whole`: number of calls that ended. `rest`: unused text; after `MORE` it must be passed again, before the text that
    follows."""

    outcome: CallState
    rest: str
    pieces: tuple[CallPiece, ...] = ()
    whole: int = 0


class Body(Protocol):
    """Reads the text behind one announcement."""

    @property
    def begun(self) -> bool:
        """True once a call was passed on; from then on the text can't be plain text any more."""
        ...

    def take(self, rest: str, *, final: bool) -> Given:
        """Read `rest`, all text that was not used so far. If `final`, no text follows, and the outcome is never
        `MORE`."""
        ...
