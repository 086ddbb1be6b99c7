"""Rows of chat and instruction data: what is taken, and how what is not is said, without a word of it."""

from __future__ import annotations

from typing import Any

import pytest

from fusionai.corpus.conversations import conversation_of, for_template
from fusionai.corpus.files import RowError

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "good day"}


def test_openais_layout() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    row: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "be short"},
            USER,
            {"role": "assistant", "content": "no", "weight": 0},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            ANSWER,
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "source": "somewhere",
    }
    told = conversation_of(row, "chat")
    assert told.answers == {4, 6}
    assert told.messages[3] == {"role": "user", "content": "a\nb"}
    assert told.messages[4]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert told.messages[4]["content"] == ""
    assert "weight" not in told.messages[2]
    assert told.tools == ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "add", "input": "1 2", "output": "3"}, "add\n\n1 2"),
        ({"instruction": "add", "input": "", "output": "3"}, "add"),
        ({"instruction": "add", "input": None, "output": "3", "text": "all"}, "add"),
        ({"instruction": "add", "output": "3"}, "add"),
    ],
)
def test_alpacas_layout(row: dict[str, object], asked: str) -> None:
    told = conversation_of(row, "instructions")
    assert told.messages == ({"role": "user", "content": asked}, {"role": "assistant", "content": "3"})
    assert told.answers == {1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "expected the key 'messages'"),
        ({"message": [USER]}, "expected the key 'messages'; did you mean 'message'?"),
        ({"messages": "secret"}, "a list of messages, got a text."),
        ({"messages": []}, "a list of messages, got an empty list."),
        ({"messages": [USER]}, "expected an answer (a message of role 'assistant', its weight not 0), got none."),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "got none."),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2: expected a weight of 0 or 1"),
        ({"messages": [{**USER, "weight": 1}, ANSWER]}, "message 1: expected a weight of 0 or 1"),
        ({"messages": ["secret", ANSWER]}, "message 1: expected a table, got a text."),
        ({"messages": [{"role": "secret", "content": "x"}, ANSWER]}, "message 1: expected a role, one of system,"),
        ({"messages": [{"role": "human", "content": "x"}, ANSWER]}, "got 'human', which is 'user' here."),
        ({"messages": [{"content": "x"}, ANSWER]}, "got nothing."),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "message 1: expected the content to be a text, got"),
        ({"messages": [{"role": "user"}, ANSWER]}, "message 1: expected the key 'content', got none."),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "part of the content to be a text"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "message 2: expected an answer, got an empty"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "f"}]}, "tool_calls to be a list of tables, got a text."),
        (
            {"messages": [{**USER, "tool_calls": [{}]}, ANSWER]},
            "tool_calls only in an assistant's message, got some in a message of role",
        ),
        ({"messages": [USER, ANSWER], "tools": "secret"}, "tools to be a list of tables, got a text."),
    ],
)
def test_what_is_no_chat(row: dict[str, object], said: str) -> None:
    with pytest.raises(RowError) as raised:
        conversation_of(row, "chat")
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "x"}, "expected the key 'output'; known: instruction."),
        ({"instruction": "x", "output": 3}, "expected output to be a text, got a number."),
        ({"instruction": "x", "output": " "}, "expected output not to be empty, got an empty text."),
        ({"instruction": "", "output": "x"}, "expected instruction not to be empty, got an empty text."),
        ({"instruction": "x", "input": [], "output": "x"}, "expected input to be a text, got a list."),
    ],
)
def test_what_is_no_instruction(row: dict[str, object], said: str) -> None:
    with pytest.raises(RowError) as raised:
        conversation_of(row, "instructions")
    assert str(raised.value) == said


def test_messages_as_templates_read_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    told = for_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
            {"role": "assistant", "content": "x", "tool_calls": []},
        ]
    )
    assert told[0]["content"] == "a\nb"
    assert told[1]["content"] == ""
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert told[1]["tool_calls"][1] == broken
    assert "tool_calls" not in told[2]
    assert call["function"]["arguments"] == '{"a": [1]}'
