"""Items of the Responses API as a chat: what becomes one message, what is refused, what is dropped first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fusionai.gateway.errors import ApiError
from fusionai.gateway.requests import ChatRequest, NamedChoice, decode, plain
from fusionai.gateway.response_input import chat_of, sealed, shortened
from fusionai.gateway.response_requests import OTHER_FIELDS, InputItem, InputMessage, ResponsesRequest

CALL: Any = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": None}
RESULT: Any = {"type": "function_call_output", "call_id": "c1", "output": "4"}
REASONING: Any = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
ANSWER: Any = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
}


def read(body: dict[str, Any]) -> tuple[ResponsesRequest, list[InputItem]]:
    request = decode(msgspec.json.encode({"model": "m", **body}), ResponsesRequest, OTHER_FIELDS)
    return request, [InputMessage("user", request.input)] if isinstance(request.input, str) else request.input


def chat(**body: Any) -> ChatRequest:
    return chat_of(*read(body))


def messages(items: list[Any], **body: Any) -> list[dict[str, Any]]:
    return [plain(message) for message in chat(input=items, **body).messages]


def test_a_text_is_a_message_of_the_user():
    request = chat(input="hi", instructions="be brief", max_output_tokens=5, top_k=3, reasoning={"effort": "low"})
    assert [plain(message) for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (request.max_completion_tokens, request.top_k, request.reasoning_effort) == (5, 3, "low")


def test_items_of_one_answer_are_one_message():
    made = messages([{"role": "user", "content": "2+2?"}, REASONING, ANSWER, CALL, RESULT, REASONING, ANSWER])
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert made == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "so", "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]


def test_answers_that_follow_each_other_stay_apart():
    made = messages([ANSWER, REASONING, ANSWER, CALL, {**CALL, "call_id": "c2"}])
    assert [message["content"] for message in made] == ["so", "so"]
    assert [call["id"] for call in made[1]["tool_calls"]] == ["c1", "c2"]


def test_leading_system_messages_are_one():
    rules: list[Any] = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    made = messages([*rules, {"role": "user", "content": "x"}, rules[0]], instructions="a")
    assert [(message["role"], message["content"]) for message in made] == [
        ("system", "a\n\nb\n\nc"),
        ("user", "x"),
        ("system", "b"),
    ]


def test_parts_and_refusals_are_joined():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    made = messages([{"role": "user", "content": parts}, refused, CALL, {**RESULT, "output": parts}])
    assert [message["content"] for message in made] == ["ab", "no", "ab"]


@pytest.mark.parametrize(
    ("reasoning", "read_as"),
    [
        ({"summary": [], "encrypted_content": sealed("thin\u00e9")}, "thin\u00e9"),
        ({"summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "x"}], "encrypted_content": "other"}, "x"),
    ],
)
def test_reasoning_is_read_from_what_there_is(reasoning: dict[str, Any], read_as: str):
    (made,) = messages([{"type": "reasoning", "id": "r", **reasoning}])
    assert made["reasoning_content"] == read_as


@pytest.mark.parametrize("foreign", ["gAAAA", "fusionai:?", "fusionai:/w=="])
def test_foreign_encrypted_reasoning_is_refused(foreign: str):
    with pytest.raises(ApiError, match="not of this gateway"):
        messages([{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": foreign}])


def test_tools_and_formats_get_the_names_of_chats():
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    request = chat(input="x", tools=[tool], tool_choice={"type": "function", "name": "f"}, text={"format": schema})
    assert request.tools is not None
    assert (request.tools[0].function.name, request.tools[0].function.strict) == ("f", True)
    assert isinstance(request.tool_choice, NamedChoice)
    assert msgspec.to_builtins(request.response_format) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "description": None, "strict": True},
    }


def test_only_allowed_tools_are_offered():
    tools: Any = [{"type": "function", "name": name} for name in "fg"]
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    request = chat(input="x", tools=tools, tool_choice=allowed)
    assert [tool.function.name for tool in request.tools or ()] == ["g"]
    assert request.tool_choice == "auto"
    with pytest.raises(ApiError, match="'h'"):
        chat(input="x", tools=tools, tool_choice={**allowed, "tools": [{"type": "function", "name": "h"}]})


def test_a_beginning_is_dropped_up_to_a_users_message():
    rule: Any = {"role": "system", "content": "s"}
    turns: list[Any] = [
        item for name in "abc" for item in ({"role": "user", "content": name}, {**ANSWER, "id": f"msg_{name}"})
    ]
    _, items = read({"input": [rule, *turns]})
    assert [
        [item.content for item in rest if isinstance(item, InputMessage) and item.role != "assistant"]
        for rest in shortened(items)
    ] == [["s", "b", "c"], ["s", "c"]]
    assert shortened(items[:2]) == []
