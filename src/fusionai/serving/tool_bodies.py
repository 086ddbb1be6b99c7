"""Reads tool calls with arguments in JSON, piece by piece. Decides where a call and its arguments begin and end.

A JSON object with the tool's name first and its arguments after that (as chat templates ask for) is passed on while it
is written; any other order is read when the object is complete. In the forms of DeepSeek, Kimi and gpt-oss the name
stands before the JSON of the arguments, between marks; calls of one section follow each other, and marks behind the
arguments may be missing. These forms are those of the models' chat templates and of vLLM's parsers for them
(vllm/tool_parsers: deepseekv3, deepseekv31, kimi_k2; gpt-oss: https://github.com/openai/harmony).

Neighbours: `tool_reading` finds the announcement, `tool_tags` reads the other forms, `tools` has the forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from fusionai.serving.tools import CallPiece, CallState, Followed, Given, Part, ToolForm, follow, without_mark

_DECODER: Final = json.JSONDecoder()
_CALL_KEYS: Final = ("name", "parameters", "arguments", "type", "function", "id")
_LONGEST_LITERAL: Final = len("-Infinity")
_STRING: Final = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
_BEFORE_ARGUMENTS: Final = (
    rf'\{{\s*(?:"type"\s*:\s*{_STRING}\s*,\s*)?(?:"id"\s*:\s*(?P<id>{_STRING})\s*,\s*)?'
    rf'"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_HEADS: Final = {
    ToolForm.HERMES: re.compile(rf"\s*{_BEFORE_ARGUMENTS}"),
    ToolForm.LLAMA: re.compile(rf"\s*{_BEFORE_ARGUMENTS}"),
    ToolForm.MISTRAL: re.compile(rf"\s*(?P<list>\[\s*)?{_BEFORE_ARGUMENTS}"),
    ToolForm.MISTRAL_ARGS: re.compile(r"\s*(?P<plain>[\w.-]+)(?:\[CALL_ID\](?P<plain_id>\w+))?\[ARGS\]\s*(?=\{)"),
}
_NEXT_OF_LIST: Final = re.compile(rf"\s*,\s*{_BEFORE_ARGUMENTS}")


class JsonBody:
    """Implements `tools.Body` for objects that have the name inside."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._at = _At.HEAD
        self._scan = JsonScan()
        self._in_list = False

    @property
    def begun(self) -> bool:
        return self._at is not _At.HEAD

    def take(self, rest: str, *, final: bool) -> Given:
        pieces: list[CallPiece] = []
        whole = 0
        while True:
            match self._at:
                case _At.HEAD:
                    head = _HEADS[self._form].match(rest)
                    if head is None:
                        return _all_at_once(rest, self._form, final=final)
                    self._in_list = bool(head.groupdict().get("list"))
                    piece, rest = self._begin(head, rest)
                    pieces.append(piece)
                case _At.ARGUMENTS:
                    taken = self._scan.object_end(rest)
                    if taken or rest:
                        pieces.append(CallPiece(0, rest[:taken]))
                    rest = rest[taken:]
                    if self._scan.depth:
                        return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces), whole)
                    whole += 1
                    self._at = _At.BEHIND if self._form is ToolForm.MISTRAL_ARGS else _At.OBJECT
                case _At.OBJECT:
                    # Further members of the object, such as an id, are skipped; anything else is text.
                    inside = rest.lstrip()
                    if self._scan.depth or inside.startswith(","):
                        self._scan.depth = self._scan.depth or 1
                        taken = self._scan.object_end(rest)
                        rest = rest[taken:]
                        if self._scan.depth:
                            return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces), whole)
                    elif inside.startswith("}"):
                        rest = inside[1:]
                    elif not inside and not final:
                        return Given(CallState.MORE, rest, tuple(pieces), whole)
                    else:
                        return Given(CallState.DONE, rest if inside else "", tuple(pieces), whole)
                    self._at = _At.BEHIND
                case _At.BEHIND:
                    following = _NEXT_OF_LIST.match(rest) if self._in_list else None
                    if following is not None:
                        piece, rest = self._begin(following, rest)
                        pieces.append(piece)
                        continue
                    given = self._behind(rest, final=final)
                    return Given(given.outcome, given.rest, (*pieces, *given.pieces), whole + given.whole)

    def _begin(self, head: re.Match[str], rest: str) -> tuple[CallPiece, str]:
        known = head.groupdict()
        name = known.get("plain") or json.loads(known["name"])
        written_id = known.get("plain_id") or (json.loads(known["id"]) if known.get("id") else "")
        self._at, self._scan = _At.ARGUMENTS, JsonScan()
        return CallPiece(0, "", written_id or self._form.new_id(), name), rest[head.end() :]

    def _behind(self, rest: str, *, final: bool) -> Given:
        """Read the closing mark of the announcement; a model may end without it."""
        if self._in_list:
            return self._behind_in_list(rest, rest.lstrip(), final=final)
        if self._form is not ToolForm.HERMES:
            return Given(CallState.DONE, rest)
        after = without_mark(rest, self._form.marks[1], final=final)
        return Given(CallState.MORE, rest) if after is None else Given(CallState.DONE, after)

    def _behind_in_list(self, rest: str, bare: str, *, final: bool) -> Given:
        if bare.startswith("]"):
            return Given(CallState.DONE, bare[1:])
        if not bare:
            return Given(CallState.DONE if final else CallState.MORE, "" if final else rest)
        if not bare.startswith(","):
            return Given(CallState.DONE, rest)
        parsed = _value(bare[1:], final=final)
        if not isinstance(parsed, _Parsed):
            return Given(CallState.MORE if parsed is CallState.MORE else CallState.DONE, rest)
        piece = _piece(parsed.value, self._form)
        if piece is None:
            return Given(CallState.DONE, rest)
        following = self._behind(parsed.rest, final=final)
        return Given(following.outcome, following.rest, (piece, *following.pieces), 1 + following.whole)


class _At(Enum):
    """Place in the call: before its arguments, in them, in the object behind them, behind the object."""

    HEAD = "head"
    ARGUMENTS = "arguments"
    OBJECT = "object"
    BEHIND = "behind"


@dataclass(slots=True)
class JsonScan:
    """Follows JSON text by its brackets and strings only; the caller of the tool validates the JSON."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def object_end(self, text: str) -> int:
        """Number of characters of `text` that belong to the object: all of them while `depth` stays above 0."""
        for at, sign in enumerate(text):
            if self.in_string:
                self.in_string = self.escaped or sign != '"'
                self.escaped = sign == "\\" and not self.escaped
            elif sign == '"':
                self.in_string = True
            elif sign in "{[":
                self.depth += 1
            elif sign in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at + 1
        return len(text)


# ------------------------------------------------------------------------------------------------------ read when whole


def _all_at_once(text: str, form: ToolForm, *, final: bool) -> Given:
    """Read a call whose members are in another order than the form asks for."""
    match form:
        case ToolForm.MISTRAL_ARGS:
            return _named(text, form, final=final)
        case ToolForm.LLAMA:
            if not text.strip() and not final:
                return Given(CallState.MORE, text)
            if not _may_name_a_tool(text):
                return Given(CallState.TEXT, text)
        case _:
            pass
    parsed = _value(text, final=final)
    if not isinstance(parsed, _Parsed):
        return Given(parsed, text)
    values = parsed.value if form is ToolForm.MISTRAL and isinstance(parsed.value, list) else [parsed.value]
    known = [piece for value in values if (piece := _piece(value, form)) is not None]
    if not known or len(known) < len(values):
        return Given(CallState.TEXT, text)
    rest = parsed.rest
    if form is ToolForm.HERMES:
        bare, closer = rest.lstrip(), form.marks[1]
        if bare.startswith(closer):
            rest = bare[len(closer) :]
        elif not closer.startswith(bare):  # anything else in there is no call
            return Given(CallState.TEXT, text)
        elif not final:
            return Given(CallState.MORE, text)
        else:
            rest = ""
    return Given(CallState.DONE, rest, tuple(known), len(known))


def _named(text: str, form: ToolForm, *, final: bool) -> Given:
    head = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]", text)
    if head is None:
        begun = re.fullmatch(r"\s*[\w.-]*(\[[A-Z_]*(\]\w*(\[[A-Z]*)?)?)?", text)
        return Given(CallState.MORE if begun and not final else CallState.TEXT, text)
    parsed = _value(text[head.end() :], final=final)
    if not isinstance(parsed, _Parsed):
        return Given(parsed, text)
    piece = _piece({"name": head[1], "arguments": parsed.value, "id": head[2]}, form)
    return Given(CallState.TEXT, text) if piece is None else Given(CallState.DONE, parsed.rest, (piece,), 1)


def _may_name_a_tool(text: str) -> bool:
    """Return whether this start of an object may become a call. An answer in JSON must not be held back for long."""
    begun = re.match(r'\s*\{\s*(?:"([^"]*)("?))?', text)
    if begun is None or begun[1] is None:
        return begun is not None and text[begun.end() :].strip() == ""
    if begun[2]:
        return begun[1] in _CALL_KEYS
    return any(name.startswith(begun[1]) for name in _CALL_KEYS)


@dataclass(frozen=True, slots=True)
class _Parsed:
    value: Any
    rest: str


def _value(text: str, *, final: bool) -> _Parsed | CallState:
    """The JSON value at the start of `text`; otherwise whether more text could complete it."""
    begun = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(begun)
    except json.JSONDecodeError as problem:
        # If text is missing, the error is at one of the last few characters, or at the start of the last string.
        unfinished = problem.msg.startswith("Unterminated") or problem.pos >= len(begun) - _LONGEST_LITERAL
        return CallState.MORE if unfinished and not final else CallState.TEXT
    except RecursionError:
        return CallState.TEXT
    return _Parsed(value, begun[end:])


def _piece(value: Any, form: ToolForm) -> CallPiece | None:
    """Build a piece from a whole object; models differ in how they name the arguments."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id")}
    name, arguments, call_id = value.get("name"), value.get("arguments", value.get("parameters", {})), value.get("id")
    if isinstance(arguments, str):
        parsed = _value(arguments, final=True)
        arguments = parsed.value if isinstance(parsed, _Parsed) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    call_id = call_id if isinstance(call_id, str) and call_id else form.new_id()
    return CallPiece(0, json.dumps(arguments, ensure_ascii=False), call_id, name)


_OBJECT: Final = re.compile(r"\s*(?=\{)")
_NAME: Final = re.compile(r"\s*(?P<name>[\w.-]+)\s*")
_NUMBERED: Final = re.compile(r"\s*(?P<id>[\w.:-]+)\s*")


@dataclass(frozen=True, slots=True)
class _Section:
    """`head`: what stands before the arguments; `tail`: marks behind them; `closer`: mark behind the last call, None:
    each call has an announcement of its own."""

    head: Sequence[Part]
    tail: Sequence[str] = ()
    closer: str | None = None


_SECTIONS: Final[Mapping[ToolForm, _Section]] = {
    ToolForm.HARMONY: _Section((_NAME, "<|message|>", _OBJECT)),
    ToolForm.DEEPSEEK_V3: _Section(
        ("<｜tool▁call▁begin｜>", re.compile(r"\w*"), "<｜tool▁sep｜>", _NAME, "```json", _OBJECT),
        ("```", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    ToolForm.DEEPSEEK_V31: _Section(
        ("<｜tool▁call▁begin｜>", _NAME, "<｜tool▁sep｜>", _OBJECT), ("<｜tool▁call▁end｜>",), "<｜tool▁calls▁end｜>"
    ),
    ToolForm.KIMI: _Section(
        ("<|tool_call_begin|>", _NUMBERED, "<|tool_call_argument_begin|>", _OBJECT),
        ("<|tool_call_end|>",),
        "<|tool_calls_section_end|>",
    ),
}
SECTIONS: Final = frozenset(_SECTIONS)
"""The forms that have the name before the JSON."""


class SectionBody:
    """Implements `tools.Body` for arguments with the name before them."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._section = _SECTIONS[form]
        self._scan: JsonScan | None = None
        """The arguments that are being read."""
        self._tail: list[str] = []
        """Marks that may follow next."""
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    def take(self, rest: str, *, final: bool) -> Given:
        pieces: list[CallPiece] = []
        whole = 0
        while True:
            if self._scan is not None:
                taken = self._scan.object_end(rest)
                pieces.append(CallPiece(0, rest[:taken]))
                rest = rest[taken:]
                if self._scan.depth:
                    return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces), whole)
                whole += 1
                self._scan, self._tail = None, list(self._section.tail)
            while self._tail:
                after = without_mark(rest, self._tail[0], final=final)
                if after is None:
                    return Given(CallState.MORE, rest, tuple(pieces), whole)
                rest = after
                del self._tail[0]
            if self._begun:
                closer = self._section.closer
                after = rest if closer is None else without_mark(rest, closer, final=final)
                if after is None:
                    return Given(CallState.MORE, rest, tuple(pieces), whole)
                if closer is None or after != rest:
                    return Given(CallState.DONE, after, tuple(pieces), whole)
            bare = rest.lstrip()
            head = follow(self._section.head, bare, final=final)
            if isinstance(head, CallState):
                outcome = CallState.DONE if self._begun and head is CallState.TEXT else head
                return Given(outcome, rest, tuple(pieces), whole)
            rest = bare[head.length :]
            pieces.append(self._begin(head))

    def _begin(self, head: Followed) -> CallPiece:
        self._begun, self._scan = True, JsonScan()
        written_id = head.groups.get("id")
        name = (written_id or head.groups["name"]).removeprefix("functions.")
        return CallPiece(0, "", written_id or self._form.new_id(), name.rpartition(":")[0] or name)
