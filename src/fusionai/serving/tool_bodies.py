"""Reads tool calls piece by piece: JSON objects, or the tags of Qwen's coder models. Decides where arguments begin and
end.

A JSON object with the tool's name first and its arguments after that (as chat templates ask for) is passed on while it
is written; any other order is read when the object is complete. In the form `<function=name><parameter=x>` each value
is on lines of its own and both tags are closed. That text does not say what type a value has; the tool's schema
decides, and without a schema the value is a string. Strings are passed on as they come, other values when they are
complete.

Neighbours: `tool_reading` finds the announcement, `tools` has the forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from fusionai.serving.text import overlap
from fusionai.serving.tools import CallPiece, CallState, Given, ToolDefinition, ToolForm

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
    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._at = _At.HEAD
        self._scan = _Scan()
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
        self._at, self._scan = _At.ARGUMENTS, _Scan()
        return CallPiece(0, "", written_id or self._form.new_id(), name), rest[head.end() :]

    def _behind(self, rest: str, *, final: bool) -> Given:
        """Read the closing mark of the announcement; a model may end without it."""
        bare = rest.lstrip()
        if self._in_list:
            return self._behind_in_list(rest, bare, final=final)
        closer = self._form.marks[1] if self._form is ToolForm.HERMES else ""
        if bare.startswith(closer):
            return Given(CallState.DONE, bare[len(closer) :] if closer else rest)
        if closer.startswith(bare):
            return Given(CallState.DONE if final else CallState.MORE, "" if final else rest)
        return Given(CallState.DONE, rest)

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
class _Scan:
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


FUNCTION: Final = "<function="
_PARAMETER: Final = "<parameter="
_FUNCTION_END: Final = "</function>"
_PARAMETER_END: Final = "</parameter>"
_NAME: Final = re.compile(r"\s*<function=([^<>\s]+)>")
_KEY: Final = re.compile(r"<parameter=([^<>\n]+)>")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class XmlBody:
    def __init__(self, form: ToolForm, tools: Mapping[str, ToolDefinition]) -> None:
        self._form = form
        self._tools = tools
        self._tool: ToolDefinition | None = None
        self._state: _Tag | _Value | None = None
        self._has_arguments = False

    @property
    def begun(self) -> bool:
        return self._state is not None

    def take(self, rest: str, *, final: bool) -> Given:
        pieces: list[CallPiece] = []
        if self._state is None:
            name = _NAME.match(rest)
            if name is None:
                begun = rest.lstrip()
                may_begin = FUNCTION.startswith(begun) or re.fullmatch(r"<function=[^<>\s]*", begun)
                return Given(CallState.MORE if may_begin and not final else CallState.TEXT, rest)
            self._tool = self._tools.get(name[1], ToolDefinition(name[1]))
            pieces.append(CallPiece(0, "", self._form.new_id(), name[1]))
            rest = rest[name.end() :]
            self._state = _Tag()
        while True:
            if isinstance(self._state, _Value):
                rest, is_over = self._state.take(rest, pieces, final=final)
                if not is_over:
                    return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces))
                self._state = _Tag()
                continue
            if self._state is not None and self._state.is_last:
                return self._behind(rest, pieces, final=final)
            bare = rest.lstrip()
            key = _KEY.match(bare)
            if key is not None:
                self._state = _Value(key[1], schema_of(self._tool, key[1]), is_first=not self._has_arguments)
                self._has_arguments = True
                rest = bare[key.end() :]
            elif bare.startswith(_FUNCTION_END):
                self._close(pieces)
                rest = bare[len(_FUNCTION_END) :]
            elif not final and _may_be_tag(bare):
                return Given(CallState.MORE, rest, tuple(pieces))
            else:
                # The text ends here, or has something other than a tag: the call keeps the arguments it has so far.
                self._close(pieces)
                rest = "" if final and _may_be_tag(bare) else rest

    def _close(self, pieces: list[CallPiece]) -> None:
        pieces.append(CallPiece(0, "}" if self._has_arguments else "{}"))
        self._state = _Tag(is_last=True)

    def _behind(self, rest: str, pieces: list[CallPiece], *, final: bool) -> Given:
        bare, closer = rest.lstrip(), self._form.marks[1]
        if bare.startswith(closer):
            return Given(CallState.DONE, bare[len(closer) :], tuple(pieces), 1)
        if closer.startswith(bare) and not final:
            return Given(CallState.MORE, rest, tuple(pieces))
        return Given(CallState.DONE, "" if closer.startswith(bare) else rest, tuple(pieces), 1)


class _Tag:
    """The reader is between values; `is_last`: it is behind the function's closing tag."""

    def __init__(self, *, is_last: bool = False) -> None:
        self.is_last = is_last


class _Value:
    """The reader is in one parameter's value, from behind its opening tag to behind its closing tag."""

    def __init__(self, key: str, schema: Mapping[str, Any], *, is_first: bool) -> None:
        self._types = types_of(schema)
        self._is_text = self._types == {"string"}
        self._before = ("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._is_fresh = True

    def take(self, rest: str, pieces: list[CallPiece], *, final: bool) -> tuple[str, bool]:
        """Read the value. Return the text that was not used, and whether the value is complete."""
        end = rest.find(_PARAMETER_END)
        if not self._is_text:
            if end < 0 and not final:
                return rest, False
            written = rest if end < 0 else rest[:end]
            value = self._before + _json(_without_lines(written), self._types)
            pieces.append(CallPiece(0, value))
            return ("", False) if end < 0 else (rest[end + len(_PARAMETER_END) :], True)
        if self._is_fresh:
            if not rest and not final:
                return rest, False
            # The value begins on a line of its own.
            dropped = rest.startswith("\n")
            rest, end = rest[dropped:], end - dropped
            pieces.append(CallPiece(0, self._before + '"'))
            self._is_fresh = False
        if end >= 0:
            pieces.append(CallPiece(0, _escaped(rest[:end].removesuffix("\n")) + '"'))
            return rest[end + len(_PARAMETER_END) :], True
        held = 0 if final else max(overlap(rest, _PARAMETER_END), overlap(rest, "\n" + _PARAMETER_END))
        given = rest[: len(rest) - held]
        if given:
            pieces.append(CallPiece(0, _escaped(given)))
        return rest[len(given) :], False


def is_key(name: str) -> bool:
    """Return whether a parameter's tag can hold this name."""
    return re.fullmatch(r"[^<>\n]+", name) is not None


def _may_be_tag(bare: str) -> bool:
    begun = _PARAMETER.startswith(bare) or _FUNCTION_END.startswith(bare)
    return begun or re.fullmatch(r"<parameter=[^<>\n]*", bare) is not None


def _without_lines(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def schema_of(tool: ToolDefinition | None, key: str) -> Mapping[str, Any]:
    """The schema of one argument; a reference to the schema's own definitions is resolved. Empty if there is none."""
    whole = tool.parameters if tool is not None and tool.parameters is not None else {}
    properties = whole.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        found: Any = whole
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a value may have; `string` if the schema names none."""
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)} if kinds else set()
    for option in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        if isinstance(option, Mapping):
            found |= types_of(option)
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found |= {_type_name(value) for value in values} if not found else set()
    return frozenset(found & {"string", *_TYPES} or {"string"})


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_name(value: Any) -> str:
    return next((name for name, kinds in _TYPES.items() if isinstance(value, kinds)), "string")


def _json(written: str, types: frozenset[str]) -> str:
    """The value as JSON: of one of the types if it can be read as such, else a string."""
    bare = written.strip()
    # Models sometimes write Python literals.
    spelled = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        value = json.loads(spelled)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    fits = any(isinstance(value, _TYPES[name]) for name in types if name in _TYPES)
    if isinstance(value, bool) and "boolean" not in types:
        fits = False
    return spelled if fits else json.dumps(written, ensure_ascii=False)
