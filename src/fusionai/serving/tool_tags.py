"""Reads tool calls written in tags, piece by piece: those of Qwen's coder models, GLM, MiniMax, Seed and DeepSeek from
V3.2 on. Decides where each argument begins and ends.

Most tags do not say what type a value has; the tool's schema decides, and without a schema the value is a string.
Strings are passed on as they come, other values when they are complete.

The forms are those of the models' chat templates and of vLLM's parsers for them (vllm/tool_parsers: qwen3coder,
glm4_moe, glm47_moe, minimax_m2, seed_oss, deepseekv32).

Neighbours: `tool_reading` finds the announcement, `tool_grammar` writes the same tags, `tools` has the forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.serving.text import overlap
from fusionai.serving.tools import (
    CallPiece,
    CallState,
    Followed,
    Given,
    Part,
    ToolDefinition,
    ToolForm,
    follow,
    without_mark,
)

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TagForm:
    """Tags of one form. `head`, `key`: what is read as the start of a call and of an argument; `value_end`, `call_end`:
    what ends them; `closer`: mark behind a call. `is_on_lines`: a value is on lines of its own.

    `written_head`, `written_key`, `written_end`: the same as models write it, with `{}` for the name, and for whether
    the value is a text; `written_end` is what follows a value."""

    head: Sequence[Part]
    key: Sequence[Part]
    value_end: str
    call_end: str
    closer: str
    is_on_lines: bool = False
    written_head: str
    written_key: str
    written_end: str


_TAG_FORMS: Final[Mapping[ToolForm, TagForm]] = {
    ToolForm.QWEN_XML: TagForm(
        head=("<function=", re.compile(r"(?P<name>[^<>\s]+)"), ">"),
        key=("<parameter=", re.compile(r"(?P<key>[^<>\n]+)"), ">"),
        value_end="</parameter>",
        call_end="</function>",
        closer="</tool_call>",
        is_on_lines=True,
        written_head="<function={}>\n",
        written_key="<parameter={}>\n",
        written_end="\n</parameter>\n",
    ),
    ToolForm.GLM: TagForm(
        head=(re.compile(r"(?P<name>[\w.-]+)\s*"), re.compile(r"(?=<)")),
        key=("<arg_key>", re.compile(r"(?P<key>[^<>\n]+)"), "</arg_key>", re.compile(r"\s*"), "<arg_value>"),
        value_end="</arg_value>",
        call_end="</tool_call>",
        closer="",
        written_head="{}\n",
        written_key="<arg_key>{}</arg_key>\n<arg_value>",
        written_end="</arg_value>\n",
    ),
    ToolForm.MINIMAX: TagForm(
        head=('<invoke name="', re.compile(r'(?P<name>[^"<>\s]+)'), '">'),
        key=('<parameter name="', re.compile(r'(?P<key>[^"<>\n]+)'), '">'),
        value_end="</parameter>",
        call_end="</invoke>",
        closer="</minimax:tool_call>",
        written_head='<invoke name="{}">\n',
        written_key='<parameter name="{}">',
        written_end="</parameter>\n",
    ),
}
_DSML: Final = TagForm(
    head=('<｜DSML｜invoke name="', re.compile(r'(?P<name>[^"<>\s]+)'), '">'),
    key=(
        '<｜DSML｜parameter name="',
        re.compile(r'(?P<key>[^"<>\n]+)'),
        '" string="',
        re.compile(r"(?P<string>[a-z]+)"),
        '">',
    ),
    value_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
    closer="</｜DSML｜function_calls>",
    written_head='<｜DSML｜invoke name="{}">\n',
    written_key='<｜DSML｜parameter name="{}" string="{}">',
    written_end="</｜DSML｜parameter>\n",
)
TAG_FORMS: Final[Mapping[ToolForm, TagForm]] = {
    **_TAG_FORMS,
    ToolForm.SEED: replace(
        _TAG_FORMS[ToolForm.QWEN_XML],
        closer="</seed:tool_call>",
        is_on_lines=False,
        written_key="<parameter={}>",
        written_end="</parameter>\n",
    ),
    ToolForm.DEEPSEEK_V32: _DSML,
    ToolForm.DEEPSEEK_V4: replace(_DSML, closer="</｜DSML｜tool_calls>"),
}


class TagBody:
    """Implements `tools.Body`."""

    def __init__(self, form: ToolForm, tools: Mapping[str, ToolDefinition]) -> None:
        self._form = form
        self._tags = TAG_FORMS[form]
        self._tools = tools
        self._tool: ToolDefinition | None = None
        self._value: _Value | None = None
        self._has_arguments = False
        self._is_closed = False

    @property
    def begun(self) -> bool:
        return self._tool is not None

    def take(self, rest: str, *, final: bool) -> Given:
        pieces: list[CallPiece] = []
        if self._tool is None:
            bare = rest.lstrip()
            head = follow(self._tags.head, bare, final=final)
            if not isinstance(head, Followed):
                return Given(head, rest)
            name = head.groups["name"]
            self._tool = self._tools.get(name, ToolDefinition(name))
            pieces.append(CallPiece(0, "", self._form.new_id(), name))
            rest = bare[head.length :]
        while not self._is_closed:
            if self._value is not None:
                rest, is_over = self._value.take(rest, pieces, final=final)
                if not is_over:
                    return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces))
                self._value = None
            bare = rest.lstrip()
            key = follow(self._tags.key, bare)
            may_be_tag = key is CallState.MORE or self._tags.call_end.startswith(bare)
            if isinstance(key, Followed):
                name = key.groups["key"]
                # Where the tag says whether the value is a text, the schema need not.
                told = {"true": {"string"}, "false": _TYPES.keys()}.get(key.groups.get("string", ""))
                types = told or types_of(schema_of(self._tool, name))
                self._value = _Value(self._tags, name, types, is_first=not self._has_arguments)
                self._has_arguments = True
                rest = bare[key.length :]
            elif may_be_tag and bare != self._tags.call_end and not final:
                return Given(CallState.MORE, rest, tuple(pieces))
            else:
                # If the text ends here, or has something other than a tag, the call keeps the arguments it has so far.
                rest = bare.removeprefix(self._tags.call_end) if bare.startswith(self._tags.call_end) else rest
                rest = "" if final and may_be_tag else rest
                pieces.append(CallPiece(0, "}" if self._has_arguments else "{}"))
                self._is_closed = True
        after = without_mark(rest, self._tags.closer, final=final)
        if after is None:
            return Given(CallState.MORE, rest, tuple(pieces))
        return Given(CallState.DONE, after, tuple(pieces), 1)


class _Value:
    """The reader is in one argument's value, from behind its opening tag to behind its closing tag."""

    def __init__(self, tags: TagForm, key: str, types: Collection[str], *, is_first: bool) -> None:
        self._end = tags.value_end
        self._line = "\n" if tags.is_on_lines else ""
        self._types = frozenset(types)
        self._is_text = self._types == {"string"}
        self._before = ("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._is_fresh = True

    def take(self, rest: str, pieces: list[CallPiece], *, final: bool) -> tuple[str, bool]:
        """Read the value. Return the text that was not used, and whether the value is complete."""
        end = rest.find(self._end)
        if not self._is_text:
            if end < 0 and not final:
                return rest, False
            written = rest if end < 0 else rest[:end]
            value = self._before + _json(written.removeprefix(self._line).removesuffix(self._line), self._types)
            pieces.append(CallPiece(0, value))
            return ("", False) if end < 0 else (rest[end + len(self._end) :], True)
        if self._is_fresh:
            if not rest and not final:
                return rest, False
            dropped = len(self._line) if rest.startswith(self._line) else 0
            rest, end = rest[dropped:], end - dropped
            pieces.append(CallPiece(0, self._before + '"'))
            self._is_fresh = False
        if end >= 0:
            pieces.append(CallPiece(0, _escaped(rest[:end].removesuffix(self._line)) + '"'))
            return rest[end + len(self._end) :], True
        held = 0 if final else max(overlap(rest, self._end), overlap(rest, self._line + self._end))
        given = rest[: len(rest) - held]
        if given:
            pieces.append(CallPiece(0, _escaped(given)))
        return rest[len(given) :], False


def is_key(tags: TagForm, name: str) -> bool:
    """Return whether an argument's tag can hold this name."""
    read = follow(tags.key, tags.written_key.format(name, "true"), final=True)
    return isinstance(read, Followed) and read.groups["key"] == name


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
