"""Grammars for answers that must be a tool call, as `tool_choice` demands.

Neighbours: `tools` has the forms, `constraint` compiles the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusionai.serving.constraint import (
    DEFINITIONS,
    WHITESPACE,
    Choices,
    ConstraintError,
    ConstraintLimits,
    Grammar,
    JsonObject,
    JsonSchema,
    Pattern,
    check_levels,
    choices_rule,
    read_schema,
)
from fusionai.serving.text import Tokenizer
from fusionai.serving.tool_tags import TAG_FORMS, TagForm, is_key, schema_of, types_of
from fusionai.serving.tools import ToolDefinition, ToolForm


def call_grammar(
    form: ToolForm,
    tools: Sequence[ToolDefinition],
    tokenizer: Tokenizer,
    *,
    several: bool = False,
    instead: JsonSchema | JsonObject | Pattern | Choices | None = None,
) -> Grammar:
    """Grammar of exactly one call of one of `tools`; with `several`, of one or more if the form allows that. `instead`:
    the form of an answer without a call, None if a call is demanded. Raises `ConstraintError` for a name or a schema
    that can't be used."""
    limits = ConstraintLimits()
    if not tools:
        raise ConstraintError("the request demands a tool call but lists no tools.")
    for tool in tools:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", tool.name):
            raise ConstraintError(f"tool {tool.name[:50]!r}: a name may only have letters, digits, '_', '.' and '-'.")
        try:
            check_levels(tool.parameters, limits)
        except ConstraintError as problem:
            raise ConstraintError(f"tool {tool.name}: {problem.message}", hint=problem.hint) from None
    written = _Writer(form, tokenizer)
    marks = [written.text(mark) for mark in form.marks]
    rules = _rules(form, tools, written, several=several)
    if instead is not None:
        channel = f'{marks[0]} "final" {marks[2]} ' if form is ToolForm.HARMONY else ""
        calls = rules[0].removeprefix("start: ")
        rules = ["start: calls | answer", f"calls: {calls}", f"answer: {channel}plain", *rules[1:]]
        rules.append(f"plain: {_plain(instead, limits)}")
    return Grammar("\n".join(rules) + "\n")


class _Writer:
    """Writes texts of a form in a grammar's notation: marks that are special tokens by their numbers."""

    def __init__(self, form: ToolForm, tokenizer: Tokenizer) -> None:
        ids = {mark: tokenizer.added[mark] for mark in form.marks if mark in tokenizer.added}
        self._special = {mark: token for mark, token in ids.items() if token in tokenizer.special_ids}
        self._split = re.compile("|".join(f"({re.escape(mark)})" for mark in self._special) or "(?!)")

    def text(self, text: str) -> str:
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in self._parts(text)
        )

    def any_text_until(self, end: str) -> str:
        """A rule named `text`: anything up to the first `end`."""
        first, *others = self._parts(end)
        ending = re.escape(first).replace("\\\n", "\\n").replace("/", "\\/")
        if not others:
            return f"text[lazy]: /(.|\\n)*{ending}/"
        # A special token can't be part of a text, so that the text ends before the first one.
        return f"text: /(.|\\n)*{ending}/ {' '.join(map(self.text, others))}"

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._split.split(text) if part]


def _rules(form: ToolForm, tools: Sequence[ToolDefinition], written: _Writer, *, several: bool) -> list[str]:
    opener, *others = map(written.text, form.marks)
    match form:
        case ToolForm.HERMES | ToolForm.QWEN_XML | ToolForm.SEED:
            is_json = form is ToolForm.HERMES
            calls = _bodies(tools, "arguments") if is_json else _functions(tools, TAG_FORMS[form], written)
            return [_repeated("call", "\n", several), f'call: {opener} "\\n" body "\\n" {others[0]}', *calls]
        case ToolForm.GLM:
            return [
                _repeated("call", "\n", several),
                f"call: {opener} body",
                *_functions(tools, TAG_FORMS[form], written),
            ]
        case ToolForm.MINIMAX | ToolForm.DEEPSEEK_V32 | ToolForm.DEEPSEEK_V4:
            inside = _repeated("body", "\n", several).removeprefix("start: ")
            return [f'start: {opener} "\\n" {inside} "\\n" {others[0]}', *_functions(tools, TAG_FORMS[form], written)]
        case ToolForm.LLAMA:
            return [_repeated("body", "; ", several), *_bodies(tools, "parameters")]
        case ToolForm.MISTRAL:
            inside = _repeated("body", ", ", several).removeprefix("start: ")
            return [f'start: {opener} " "? "[" {inside} "]"', *_bodies(tools, "arguments")]
        case ToolForm.MISTRAL_ARGS:
            heads = [f'{opener} "{tool.name}" {others[0]}' for tool in tools]
            return [_repeated("call", "", several), *_headed(tools, heads)]
        case ToolForm.HARMONY:
            constrain, message = others
            heads = [f'{opener} "commentary to=functions.{tool.name} " {constrain} "json" {message}' for tool in tools]
            # A call ends the answer, so there is only one.
            return ["start: call", *_headed(tools, heads)]
        case ToolForm.DEEPSEEK_V3 | ToolForm.DEEPSEEK_V31 | ToolForm.KIMI:
            begin, separator, end, closer = others
            inside = _repeated("call", "", several).removeprefix("start: ")
            heads = [f"{begin} {_named(form, tool.name, separator)}" for tool in tools]
            end = f'"\\n```" {end}' if form is ToolForm.DEEPSEEK_V3 else end
            return [f"start: {opener} {inside} {closer}", *_headed(tools, heads, end)]


def _plain(form: JsonSchema | JsonObject | Pattern | Choices, limits: ConstraintLimits) -> str:
    match form:
        case JsonSchema(text, is_compact):
            return f"%json {_schema(read_schema(text, limits), '' if is_compact else WHITESPACE)}"
        case JsonObject():
            return f"%json {_schema(None)}"
        case Pattern(text):
            return "/" + re.sub(r"\\.|/|\n", _in_slashes, text, flags=re.DOTALL) + "/"
        case Choices(texts):
            return choices_rule(texts)


def _in_slashes(found: re.Match[str]) -> str:
    """A regular expression's escape, slash or line break as it is written between slashes."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


def _repeated(rule: str, between: str, several: bool) -> str:
    """The start rule for one `rule`, or for several with a text between them."""
    return f"start: {rule} ({json.dumps(between)} {rule})*" if several else f"start: {rule}"


def _named(form: ToolForm, name: str, separator: str) -> str:
    match form:
        case ToolForm.DEEPSEEK_V3:
            return f'"function" {separator} "{name}\\n```json\\n"'
        case ToolForm.KIMI:
            return f'"functions.{name}:" /[0-9]{{1,4}}/ {separator}'
        case _:
            return f'"{name}" {separator}'


def _headed(tools: Sequence[ToolDefinition], heads: Sequence[str], end: str = "") -> list[str]:
    """Rules for calls of a head, the arguments and an end."""
    calls = [f"{head} args{n} {end}".rstrip() for n, head in enumerate(heads)]
    arguments = [f"args{n}: %json {_schema(tool.parameters)}" for n, tool in enumerate(tools)]
    return ["call: " + " | ".join(calls), *arguments]


def _bodies(tools: Sequence[ToolDefinition], arguments: str) -> list[str]:
    names = [f"body{n}" for n in range(len(tools))]
    rules = ["body: " + " | ".join(names)]
    for name, tool in zip(names, tools, strict=True):
        schema = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments: dict(tool.parameters or {"type": "object"})},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        # References to definitions start at the top level, so the definitions are moved there.
        for keyword in DEFINITIONS:
            if tool.parameters and keyword in tool.parameters:
                schema[keyword] = tool.parameters[keyword]
        rules.append(f"{name}: %json {_schema(schema)}")
    return rules


def _functions(tools: Sequence[ToolDefinition], tags: TagForm, written: _Writer) -> list[str]:
    """Rules for calls that `tool_tags` can read. A string ends with the first closing tag; of its schema only `enum`
    and `const` are enforced."""
    rules = ["body: " + " | ".join(f"body{n}" for n in range(len(tools))), written.any_text_until(tags.written_end)]
    for number, tool in enumerate(tools):
        parameters = tool.parameters or {}
        properties = {key: schema_of(tool, key) for key in parameters.get("properties", {})}
        required = [str(key) for key in parameters.get("required", ())]
        properties |= {key: {} for key in required if key not in properties}
        parts: list[str] = []
        for place, (key, schema) in enumerate(properties.items()):
            if not is_key(tags, key):
                raise ConstraintError(
                    f"tool {tool.name}: this model's tool calls can't express the parameter name {key[:50]!r}."
                )
            value = f"value{number}_{place}"
            rules.append(f"{value}: {_written_value(schema, parameters, written.text(tags.written_end))}")
            is_text = json.dumps("string" in types_of(schema))
            argument = f"{written.text(tags.written_key.format(key, is_text))} {value}"
            parts.append(argument if key in required else f"({argument})?")
        head = written.text(tags.written_head.format(tool.name))
        rules.append(f"body{number}: {' '.join([head, *parts, written.text(tags.call_end)])}")
    return rules


def _written_value(schema: Mapping[str, Any], whole: Mapping[str, Any], end: str) -> str:
    """Rule for a value with its closing tag and line end."""
    types = types_of(schema)
    if "string" not in types:
        definitions = {keyword: whole[keyword] for keyword in DEFINITIONS if keyword in whole}
        return f"%json {_schema({**schema, **definitions})} {end}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if types == {"string"} and isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return "(" + " | ".join(json.dumps(one) for one in choices) + f") {end}"
    return "text"


def _schema(schema: Mapping[str, Any] | None, whitespace: str = WHITESPACE) -> str:
    plain = dict({"type": "object"} if schema is None else schema)
    return json.dumps({**plain, "x-guidance": {"whitespace_pattern": whitespace}})
