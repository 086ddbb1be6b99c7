"""Grammars for answers that must be a tool call, as `tool_choice` demands.

Neighbours: `tools` has the forms, `constraint` compiles the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fusionai.serving.constraint import WHITESPACE, ConstraintError, ConstraintLimits, Grammar, is_deeper
from fusionai.serving.text import Tokenizer
from fusionai.serving.tool_bodies import is_key, schema_of, types_of
from fusionai.serving.tools import ToolDefinition, ToolForm

_TEXT_RULE: Final = "text[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/"
"""Anything up to the first closing tag on a line of its own."""


def call_grammar(
    form: ToolForm,
    tools: Sequence[ToolDefinition],
    tokenizer: Tokenizer,
    *,
    several: bool = False,
    limits: ConstraintLimits | None = None,
) -> Grammar:
    """Grammar of exactly one call of one of `tools`; with `several`, of one or more if the form allows that. Raises
    `ConstraintError` for a name or a schema that can't be used."""
    if not tools:
        raise ConstraintError("the request demands a tool call but lists no tools.")
    for tool in tools:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", tool.name):
            raise ConstraintError(f"tool {tool.name[:50]!r}: a name may only have letters, digits, '_', '.' and '-'.")
        if is_deeper(tool.parameters, (limits or ConstraintLimits()).depth):
            raise ConstraintError(f"tool {tool.name}: the schema is nested too deeply.")
    opener, *others = (_mark(mark, tokenizer) for mark in form.marks)
    rules: list[str] = []
    match form:
        case ToolForm.HERMES:
            rules.append(f'call: {opener} "\\n" body "\\n" {others[0]}')
            rules.append('start: call ("\\n" call)*' if several else "start: call")
            rules.extend(_bodies(tools, "arguments"))
        case ToolForm.QWEN_XML:
            rules.append(f'call: {opener} "\\n" body "\\n" {others[0]}')
            rules.append('start: call ("\\n" call)*' if several else "start: call")
            rules.extend(_functions(tools))
        case ToolForm.LLAMA:
            rules.append('start: body ("; " body)*' if several else "start: body")
            rules.extend(_bodies(tools, "parameters"))
        case ToolForm.MISTRAL:
            inside = 'body (", " body)*' if several else "body"
            rules.append(f'start: {opener} " "? "[" {inside} "]"')
            rules.extend(_bodies(tools, "arguments"))
        case ToolForm.MISTRAL_ARGS:
            rules.append("start: call+" if several else "start: call")
            calls = [f'{opener} "{tool.name}" {others[0]} args{n}' for n, tool in enumerate(tools)]
            rules.append("call: " + " | ".join(calls))
            rules.extend(f"args{n}: %json {_schema(tool.parameters)}" for n, tool in enumerate(tools))
    return Grammar("\n".join(rules) + "\n")


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
        for keyword in ("$defs", "definitions"):
            if tool.parameters and keyword in tool.parameters:
                schema[keyword] = tool.parameters[keyword]
        rules.append(f"{name}: %json {_schema(schema)}")
    return rules


def _functions(tools: Sequence[ToolDefinition]) -> list[str]:
    """Rules for calls that `tool_bodies` can read. A string ends with the first closing tag; of its schema only `enum`
    and `const` are enforced."""
    rules = ["body: " + " | ".join(f"body{n}" for n in range(len(tools))), _TEXT_RULE]
    for number, tool in enumerate(tools):
        parameters = tool.parameters or {}
        properties = {key: schema_of(tool, key) for key in parameters.get("properties", {})}
        required = [str(key) for key in parameters.get("required", ())]
        properties |= {key: {} for key in required if key not in properties}
        parts: list[str] = []
        for place, (key, schema) in enumerate(properties.items()):
            if not is_key(key):
                raise ConstraintError(
                    f"tool {tool.name}: this model's tool calls can't express the parameter name {key[:50]!r}."
                )
            value = f"value{number}_{place}"
            rules.append(f"{value}: {_written_value(schema, parameters)}")
            written = f"{json.dumps(f'<parameter={key}>' + chr(10))} {value}"
            parts.append(written if key in required else f"({written})?")
        head = json.dumps(f"<function={tool.name}>\n")
        rules.append(f'body{number}: {" ".join([head, *parts])} "</function>"')
    return rules


def _written_value(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Rule for a value with its closing tag and line end."""
    end = json.dumps("\n</parameter>\n")
    types = types_of(schema)
    if "string" not in types:
        definitions = {keyword: whole[keyword] for keyword in ("$defs", "definitions") if keyword in whole}
        return f"%json {_schema({**schema, **definitions})} {end}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if types == {"string"} and isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return "(" + " | ".join(json.dumps(one) for one in choices) + f") {end}"
    return "text"


def _schema(schema: Mapping[str, Any] | None) -> str:
    plain = dict(schema or {"type": "object"})
    return json.dumps({**plain, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A special token by its number, any other mark as text."""
    token = tokenizer.added.get(mark)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else json.dumps(mark)
