"""Fields that no struct has: left out wherever they are, and named once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fusionai.gateway.requests import ChatRequest, decode
from fusionai.gateway.text_bodies import EmbeddingRequest
from fusionai.gateway.unknown_fields import header_of, without_unknown

SAID: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, SAID],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "anything": 1}}}],
    "logit_bias": {"5": 1.0},
    "tool_choice": "auto",
}


def test_what_is_known_stays() -> None:
    ignored: set[str] = set()
    assert without_unknown(BODY, ChatRequest, ignored) == BODY
    assert not ignored


def test_what_is_unknown_is_named_once() -> None:
    body = msgspec.json.decode(msgspec.json.encode(BODY))
    body["colour"] = 1
    body["messages"][0]["tool_calls"] = "known in other messages only"
    body["messages"][0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    for message in body["messages"]:
        message["mood"] = "blue"
    body["messages"][1]["tool_calls"][0]["function"]["speed"] = 2
    body["tools"][0]["function"]["defer"] = True
    ignored: set[str] = set()
    decoded = decode(msgspec.json.encode(body), ChatRequest, ignored=ignored)
    assert ignored == {
        "colour",
        "messages[].tool_calls",
        "messages[].content[].cache_control",
        "messages[].mood",
        "messages[].tool_calls[].function.speed",
        "tools[].function.defer",
    }
    assert decoded == decode(msgspec.json.encode(BODY), ChatRequest)


@pytest.mark.parametrize("body", [[], 5, {"model": 3}, {"messages": {"a": 1}}, {"messages": [5, {"role": "king"}]}])
def test_wrong_types_stay_for_the_error(body: Any) -> None:
    assert without_unknown(body, ChatRequest, set()) == body


def test_numbers_are_not_looked_at() -> None:
    body = {"model": "m", "input": [[1, 2], [3]]}
    assert without_unknown(body, EmbeddingRequest, set()) == body


def test_the_header_has_names_that_headers_can_have() -> None:
    assert header_of({"b", "a[].x_y", "é\n"}) == "a[].x_y, b, %C3%A9%0A"
    many = header_of({f"n{number:02}" for number in range(20)})
    assert many.endswith("n15, and 4 more")
    assert len(header_of({"x" * 10_000})) == 80
