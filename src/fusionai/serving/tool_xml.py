"""Reads tool calls as Qwen's coder models write them: `<function=name><parameter=x>`, each value on lines of its own,
both tags closed.

The text does not say what type a value has; the tool's schema decides, and without a schema the value is a string.
Strings are passed on as they come, other values when they are complete. Neighbours: `tool_reading` finds the
announcement, `tools` has the forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from fusionai.serving.decoding import overlap
from fusionai.serving.tools import CallPiece, CallState, Given, ToolDefinition, ToolForm

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
    """See `tool_bodies.Body`."""

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
