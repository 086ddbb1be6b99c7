"""Tool calls: what a tool is, and in which form a model writes its calls, as its chat template shows.

Neighbours: `templates` offers tools to the model, `tool_reading` finds calls in its answer, `tool_grammar` forces it to
call one, the gateway sends the calls.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol

_MISTRAL_ID: Final = 9
"""Mistral's templates require ids of exactly this many letters and digits."""
_ALPHABET: Final = string.ascii_letters + string.digits


class ToolForm(Enum):
    """How a model writes tool calls; the enum value is the text that announces a call.

    `HERMES`: `<tool_call>{"name", "arguments"}</tool_call>` (Qwen and many more).
    `QWEN_XML`: `<tool_call><function=name><parameter=x>value</parameter></function></tool_call>` (Qwen's coder models).
    `LLAMA`: the whole answer is `{"name", "parameters"}`; several calls are separated by `;`.
    `MISTRAL`: `[TOOL_CALLS]` and a list of `{"name", "arguments"}`.
    `MISTRAL_ARGS`: `[TOOL_CALLS]name[ARGS]{...}`.
    """

    HERMES = "<tool_call>"
    QWEN_XML = "<tool_call><function="
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"
    MISTRAL_ARGS = "[TOOL_CALLS][ARGS]"

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens whose names must stay in the decoded text, so that calls can be found."""
        match self:
            case ToolForm.HERMES | ToolForm.QWEN_XML:
                return ("<tool_call>", "</tool_call>")
            case ToolForm.LLAMA:
                return ("<|python_tag|>",)
            case ToolForm.MISTRAL:
                return ("[TOOL_CALLS]",)
            case ToolForm.MISTRAL_ARGS:
                return ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_id(self) -> str:
        """Make an id for a call to which the model gave none."""
        length, prefix = (_MISTRAL_ID, "") if self in (ToolForm.MISTRAL, ToolForm.MISTRAL_ARGS) else (24, "call_")
        return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


def tool_form(template: str) -> ToolForm | None:
    """The form in a chat template's text; None if it has no place for tools, or writes calls in an unknown form."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return ToolForm.MISTRAL_ARGS if "[ARGS]" in template else ToolForm.MISTRAL
    # Two forms share this mark.
    if "<tool_call>" in template and "<function=" in template:
        return ToolForm.QWEN_XML if "<parameter=" in template else None
    if "<tool_call>" in template:
        return ToolForm.HERMES
    if "<|python_tag|>" in template or re.search(r'"parameters\\?"', template):
        return ToolForm.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """`parameters`: JSON schema of an object; None: the model may choose any arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: JSON text of an object, as the model wrote it; incomplete if the answer ended too early."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of the answer's call `index`. The first piece has the id and name; each piece has arguments to append."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


def calls_of(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Assemble calls from their pieces, ordered by index. The pieces of a call must be in order."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        known = calls.get(piece.index)
        if known is None:
            calls[piece.index] = ToolCall(piece.call_id or "", piece.name or "", piece.arguments)
        else:
            calls[piece.index] = replace(known, arguments=known.arguments + piece.arguments)
    return [calls[index] for index in sorted(calls)]


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
