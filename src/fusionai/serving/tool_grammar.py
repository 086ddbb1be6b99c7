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
    limits: ConstraintLimits | None = None,
) -> Grammar:
    """Grammar of exactly one call of one of `tools`; with `several`, of one or more if the form allows that. `instead`:
    the form of an answer without a call, None if a call is demanded. Raises `ConstraintError` for a name or a schema
    that can't be used."""
    limits = limits or ConstraintLimits()
    if not tools:
        raise ConstraintError("the request demands a tool call but lists no tools.")
    for tool in tools:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", tool.name):
            raise ConstraintError(f"tool {tool.name[:50]!r}: a name may only have letters, digits, '_', '.' and '-'.")
        try:
            check_levels(tool.parameters, limits)
        except ConstraintError as problem:
            raise ConstraintError(f"tool {tool.name}: {problem.message}", hint=problem.hint) from None
    marks = [_mark(mark, tokenizer) for mark in form.marks]
    rules = _rules(form, tools, marks, several=several)
    if instead is not None:
        channel = f'{marks[0]} "final" {marks[2]} ' if form is ToolForm.HARMONY else ""
        calls = rules[0].removeprefix("start: ")
        rules = ["start: calls | answer", f"calls: {calls}", f"answer: {channel}plain", *rules[1:]]
        rules.append(f"plain: {_plain(instead, limits)}")
    return Grammar("\n".join(rules) + "\n")


def _rules(form: ToolForm, tools: Sequence[ToolDefinition], marks: Sequence[str], *, several: bool) -> list[str]:
    opener, *others = marks
    match form:
        case ToolForm.HERMES | ToolForm.QWEN_XML:
            calls = _bodies(tools, "arguments") if form is ToolForm.HERMES else _functions(tools, TAG_FORMS[form])
            return [_repeated("call", "\n", several), f'call: {opener} "\\n" body "\\n" {others[0]}', *calls]
        case ToolForm.GLM:
            return [_repeated("call", "\n", several), f"call: {opener} body", *_functions(tools, TAG_FORMS[form])]
        case ToolForm.MINIMAX:
            inside = _repeated("body", "\n", several).removeprefix("start: ")
            return [f'start: {opener} "\\n" {inside} "\\n" {others[0]}', *_functions(tools, TAG_FORMS[form])]
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


def _functions(tools: Sequence[ToolDefinition], tags: TagForm) -> list[str]:
    """Rules for calls that `tool_tags` can read. A string ends with the first closing tag; of its schema only `enum`
    and `const` are enforced."""
    ending = re.escape(tags.written_end).replace("\\\n", "\\n").replace("/", "\\/")
    rules = ["body: " + " | ".join(f"body{n}" for n in range(len(tools))), f"text[lazy]: /(.|\\n)*{ending}/"]
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
            rules.append(f"{value}: {_written_value(schema, parameters, tags)}")
            written = f"{json.dumps(tags.written_key.format(key))} {value}"
            parts.append(written if key in required else f"({written})?")
        head = json.dumps(tags.written_head.format(tool.name))
        rules.append(f"body{number}: {' '.join([head, *parts, json.dumps(tags.call_end)])}")
    return rules


def _written_value(schema: Mapping[str, Any], whole: Mapping[str, Any], tags: TagForm) -> str:
    """Rule for a value with its closing tag and line end."""
    end = json.dumps(tags.written_end)
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


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A special token by its number, any other mark as text."""
    token = tokenizer.added.get(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else json.dumps(mark)
