"""The form that a request enforces for its answer: OpenAI's `response_format`, and vLLM's `structured_outputs` with the
older `guided_*` fields.

Neighbours: `requests` has the fields, `serving.constraint` enforces the form, `chat` combines it with tool calls.
"""

from __future__ import annotations

import json
from typing import Any

from fusionai.gateway.errors import invalid
from fusionai.gateway.requests import ChatRequest, JsonObjectFormat, JsonSchemaFormat, Settings, StructuredOutputs
from fusionai.serving.constraint import Choices, ClientGrammar, JsonObject, JsonSchema, Pattern

EnforcedForm = JsonSchema | JsonObject | Pattern | Choices | ClientGrammar


def enforced_form(body: Settings) -> EnforcedForm | None:
    """Return the form that the answer must have, None if it is free. Raises `ApiError` if the request gives several."""
    guided = StructuredOutputs(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    given = [
        ("response_format", _of_format(body)),
        *_of_outputs(body.structured_outputs or StructuredOutputs(), "structured_outputs."),
        *_of_outputs(guided, "guided_"),
    ]
    wanted = [(name, form) for name, form in given if form is not None]
    if len(wanted) > 1:
        names = " and ".join(f"`{name}`" for name, _ in wanted)
        raise invalid(
            f"An answer can have one form, and the request gives {names}: leave all but one out.", wanted[1][0]
        )
    if body.structured_outputs is not None and not any(name.startswith("structured") for name, _ in wanted):
        raise invalid(
            "`structured_outputs` needs one of `json`, `regex`, `choice`, `grammar` and `json_object`.",
            "structured_outputs",
        )
    return wanted[0][1] if wanted else None


def _of_format(body: Settings) -> EnforcedForm | None:
    match body:
        case ChatRequest(response_format=JsonObjectFormat()):
            return JsonObject()
        case ChatRequest(response_format=JsonSchemaFormat(json_schema=named)):
            if named.schema is None:
                raise invalid("The schema is missing.", "response_format.json_schema.schema")
            return JsonSchema(json.dumps(named.schema))
        case _:
            return None


def _of_outputs(outputs: StructuredOutputs, prefix: str) -> list[tuple[str, EnforcedForm | None]]:
    is_compact = outputs.disable_any_whitespace is True
    schema = None if outputs.json is None else JsonSchema(_text(outputs.json), is_compact)
    return [
        (f"{prefix}json", schema),
        (f"{prefix}regex", None if outputs.regex is None else Pattern(outputs.regex)),
        (f"{prefix}choice", None if outputs.choice is None else Choices(tuple(outputs.choice))),
        (f"{prefix}grammar", None if outputs.grammar is None else ClientGrammar(outputs.grammar)),
        (f"{prefix}json_object", JsonSchema('{"type": "object"}', is_compact) if outputs.json_object else None),
    ]


def _text(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
