"""The form that a request enforces: one of several names for it, and never two."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fusionai.gateway.errors import ApiError
from fusionai.gateway.requests import ChatRequest, CompletionRequest, decode
from fusionai.gateway.structured import enforced_form
from fusionai.serving.constraint import Choices, ClientGrammar, JsonObject, JsonSchema, Pattern

SCHEMA = {"type": "object"}
TEXT = json.dumps(SCHEMA)


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return decode(json.dumps(body).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            JsonSchema(TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(TEXT)),
        ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, JsonSchema(TEXT, is_compact=True)),
        ({"structured_outputs": {"json_object": True}}, JsonSchema(TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Pattern("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choices(("a", "b"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ClientGrammar('root ::= "a"')),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT)),
        ({"guided_regex": "a+"}, Pattern("a+")),
        ({"guided_choice": ["a"]}, Choices(("a",))),
        ({"guided_grammar": 'start: "a"'}, ClientGrammar('start: "a"')),
    ],
)
def test_names_of_a_form(fields: dict[str, Any], form: object) -> None:
    assert enforced_form(chat(**fields)) == form


def test_completions_have_vllms_names() -> None:
    body = decode(b'{"model": "m", "prompt": "x", "structured_outputs": {"regex": "a+"}}', CompletionRequest)
    assert enforced_form(body) == Pattern("a+")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_forms_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        enforced_form(chat(**fields))
    assert refused.value.body.param == param
