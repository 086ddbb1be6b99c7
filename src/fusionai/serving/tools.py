"""Tool calls: what a tool is, and in which form a model writes its calls, as its chat template shows.

Also has what the readers of all forms share. Neighbours: `templates` offers tools to the model, `tool_reading` finds
calls in its answer, `tool_bodies` and `tool_tags` read them, `tool_grammar` forces a model to call a tool, the gateway
sends the calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
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
    `HARMONY`: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}` (gpt-oss).
    `DEEPSEEK_V3`: a section of calls, `function<｜tool▁sep｜>name` with the arguments in a block of code.
    `DEEPSEEK_V31`: a section of calls, `name<｜tool▁sep｜>{...}`.
    `DEEPSEEK_V32`, `DEEPSEEK_V4`: a section of calls, `<｜DSML｜invoke name="name">`, then
    `<｜DSML｜parameter name="x" string="true">value</｜DSML｜parameter>` for each argument.
    `KIMI`: a section of calls, `functions.name:0<|tool_call_argument_begin|>{...}`.
    `GLM`: `<tool_call>name`, then `<arg_key>x</arg_key><arg_value>value</arg_value>` for each argument.
    `MINIMAX`: `<minimax:tool_call>`, then `<invoke name="name"><parameter name="x">value</parameter></invoke>`.
    `SEED`: as `QWEN_XML`, in `<seed:tool_call>` (ByteDance's Seed-OSS).
    """

    HERMES = "<tool_call>"
    QWEN_XML = "<tool_call><function="
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"
    MISTRAL_ARGS = "[TOOL_CALLS][ARGS]"
    HARMONY = "<|channel|>commentary to="
    DEEPSEEK_V3 = "<｜tool▁calls▁begin｜>```json"
    DEEPSEEK_V31 = "<｜tool▁calls▁begin｜>"
    DEEPSEEK_V32 = "<｜DSML｜function_calls>"
    DEEPSEEK_V4 = "<｜DSML｜tool_calls>"
    KIMI = "<|tool_calls_section_begin|>"
    GLM = "<tool_call><arg_key>"
    MINIMAX = "<minimax:tool_call>"
    SEED = "<seed:tool_call>"

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts that announce a call: the first one stands before it, the others are part of it."""
        match self:
            case ToolForm.QWEN_XML:
                return ("<tool_call>", "<function=")
            case ToolForm.SEED:
                return ("<seed:tool_call>", "<function=")
            case ToolForm.MINIMAX:
                return ("<minimax:tool_call>", "<invoke name=")
            case ToolForm.DEEPSEEK_V32 | ToolForm.DEEPSEEK_V4:
                return (self.value, "<｜DSML｜invoke name=")
            case ToolForm.HARMONY:
                return (self.value,)
            case ToolForm.DEEPSEEK_V3 | ToolForm.DEEPSEEK_V31 | ToolForm.KIMI:
                return self.marks[:2]
            case _:
                return self.marks[:1]

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
            case ToolForm.HARMONY:
                return ("<|channel|>", "<|constrain|>", "<|message|>")
            case ToolForm.DEEPSEEK_V3 | ToolForm.DEEPSEEK_V31:
                names = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
                return tuple(f"<｜tool▁{name}｜>" for name in names)
            case ToolForm.KIMI:
                names = ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
                return tuple(f"<|tool_{name}|>" for name in names)
            case ToolForm.GLM:
                return ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
            case ToolForm.MINIMAX | ToolForm.SEED:
                return (self.value, self.value.replace("<", "</"))
            case ToolForm.DEEPSEEK_V32 | ToolForm.DEEPSEEK_V4:
                return (self.value, self.value.replace("<", "</"), "｜DSML｜")

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
    if "<｜tool▁calls▁begin｜>" in template:
        return ToolForm.DEEPSEEK_V3 if "```json" in template else ToolForm.DEEPSEEK_V31
    if "｜DSML｜" in template:
        return ToolForm.DEEPSEEK_V32 if "function_calls>" in template else ToolForm.DEEPSEEK_V4
    for form in (ToolForm.KIMI, ToolForm.MINIMAX, ToolForm.SEED):
        if form.value in template:
            return form
    if "<|channel|>" in template and "functions" in template:
        return ToolForm.HARMONY
    # Three forms share this mark; MiniMax M3 has it in a form of its own.
    if "<tool_call>" in template and "<invoke name=" in template:
        return None
    if "<tool_call>" in template and "<function=" in template:
        return ToolForm.QWEN_XML if "<parameter=" in template else None
    if "<tool_call>" in template:
        return ToolForm.GLM if "<arg_key>" in template else ToolForm.HERMES
    # Cohere's calls have this name in them.
    if "tool_name" in template:
        return None
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

    @property
    def parsed_arguments(self) -> dict[str, Any] | None:
        """The arguments as an object; None if their text is incomplete or no JSON object."""
        try:
            value = json.loads(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


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


Part = str | re.Pattern[str]
"""A piece of a call's head: a mark as it is, or letters that match a pattern. A pattern's named groups are kept."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A head that was read: the groups of its patterns, and the number of its characters."""

    groups: Mapping[str, str]
    length: int


def follow(parts: Sequence[Part], text: str, *, final: bool = False) -> Followed | CallState:
    """Match `parts` one after the other at the start of `text`. Returns `MORE` if the text ends too early to tell,
    `TEXT` if it does not match. If `final`, no text follows, and the outcome is never `MORE`."""
    groups: dict[str, str] = {}
    at = 0
    for part in parts:
        rest = text[at:]
        if isinstance(part, str):
            if not rest.startswith(part):
                return CallState.MORE if part.startswith(rest) and not final else CallState.TEXT
            at += len(part)
            continue
        found = part.match(rest)
        if found is None:
            return CallState.TEXT if rest.strip() or final else CallState.MORE
        at += found.end()
        if at == len(text) and not final:
            return CallState.MORE  # more letters of the same kind may follow
        groups |= found.groupdict()
    return Followed(groups, at)


def without_mark(rest: str, mark: str, *, final: bool) -> str | None:
    """Remove a mark, and whitespace before it, from the start of `rest`, if it is there. Returns None if the text ends
    too early to tell; if `final`, the mark's beginning is removed then."""
    bare = rest.lstrip()
    if bare.startswith(mark):
        return bare[len(mark) :]
    if not mark.startswith(bare):
        return rest
    return "" if final else None


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
