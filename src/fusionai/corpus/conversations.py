"""Turns a row of chat or instruction data into a conversation. Decides what a valid row is and which answers are
trained.

Two layouts: OpenAI's, `{"messages": [{"role", "content", "tool_calls"?, "weight"?}], "tools"?}`, and Alpaca's,
`{"instruction", "input"?, "output"}`. Messages about an invalid row never quote it, because they may leave this
machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fusionai.corpus.files import RowError
from fusionai.corpus.strict import kind_of
from fusionai.primitives.errors import nearest

Layout = Literal["chat", "instructions"]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
KEYS: Final[dict[Layout, tuple[str, ...]]] = {
    "chat": ("messages", "tools"),
    "instructions": ("instruction", "input", "output"),
}
"""Keys of a row that are read; others are ignored."""
_OTHER_NAMES: Final = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """`messages`: in the form that templates read. `answers`: indices of those that are trained, at least one."""

    messages: tuple[dict[str, Any], ...]
    answers: frozenset[int]
    tools: tuple[dict[str, Any], ...] = ()


def conversation_of(row: Mapping[str, object], layout: Layout) -> ChatConversation:
    """Convert a row. Raises `RowError` if it is invalid."""
    match layout:
        case "chat":
            return _chat(row)
        case "instructions":
            return _instruction(row)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages from the form that clients send to the form that templates read: arguments of earlier calls
    become objects instead of JSON text, content in parts becomes one text, missing content an empty text."""
    return [_for_template(message) for message in messages]


def _chat(row: Mapping[str, object]) -> ChatConversation:
    if "messages" not in row:
        raise RowError(f"expected the key 'messages'; {nearest('messages', row)}")
    messages, tools = row["messages"], row.get("tools")
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else kind_of(messages)
        raise RowError(f"expected messages to be a list of messages, got {got}.")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError(f"expected tools to be a list of tables, got {kind_of(tools)}.")
    checked = [_message(message, number) for number, message in enumerate(messages, start=1)]
    answers = frozenset(
        number for number, message in enumerate(checked) if message["role"] == "assistant" and message["weight"]
    )
    if not answers:
        raise RowError("expected an answer (a message of role 'assistant', its weight not 0), got none.")
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in checked]
    return ChatConversation(tuple(for_template(plain)), answers, tuple(tools or ()))


def _message(message: object, number: int) -> dict[str, Any]:
    """Check a message; return it without null values (Parquet has every key in every message) and with a weight."""
    where = f"message {number}: "
    if not isinstance(message, dict):
        raise RowError(f"{where}expected a table, got {kind_of(message)}.")
    given = {name: value for name, value in message.items() if value is not None}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls", [])
    if role not in ROLES:
        raise RowError(f"{where}expected a role, one of {', '.join(ROLES)}; got {_role_word(role)}.")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"{where}expected tool_calls to be a list of tables, got {kind_of(calls)}.")
    if calls and role != "assistant":
        raise RowError(
            f"{where}expected tool_calls only in an assistant's message, got some in a message of role {role!r}."
        )
    weight = given.get("weight", 1)
    if weight not in (0, 1) or ("weight" in given and role != "assistant"):
        raise RowError(f"{where}expected a weight of 0 or 1, and only in an assistant's message.")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RowError(f"{where}expected every part of the content to be a text, got something else.")
    elif content is not None and not isinstance(content, str):
        raise RowError(f"{where}expected the content to be a text, got {kind_of(content)}.")
    if content is None and not calls:
        raise RowError(f"{where}expected the key 'content', got none.")
    if role == "assistant" and not calls and not for_template([given])[0]["content"].strip():
        raise RowError(f"{where}expected an answer, got an empty one.")
    return {**given, "weight": weight}


def _instruction(row: Mapping[str, object]) -> ChatConversation:
    for key in ("instruction", "output"):
        if key not in row:
            raise RowError(f"expected the key {key!r}; {nearest(key, row)}")
    texts: dict[str, str] = {}
    for key in KEYS["instructions"]:
        value = row.get(key)
        if value is None and key == "input":
            value = ""
        if not isinstance(value, str):
            raise RowError(f"expected {key} to be a text, got {kind_of(value)}.")
        if not value.strip() and key != "input":
            raise RowError(f"expected {key} not to be empty, got an empty text.")
        texts[key] = value
    asked = f"{texts['instruction']}\n\n{texts['input']}" if texts["input"].strip() else texts["instruction"]
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]})
    return ChatConversation(messages, frozenset({1}))


def _role_word(role: object) -> str:
    if not isinstance(role, str):
        return kind_of(role)
    meant = _OTHER_NAMES.get(role)
    return "another text" if meant is None else f"{role!r}, which is {meant!r} here"


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    content = changed.get("content")
    if content is None:
        changed["content"] = ""
    elif isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        changed["content"] = "\n".join(str(part["text"]) for part in content)
    if isinstance(changed.get("tool_calls"), list):
        changed["tool_calls"] = [_with_object(call) for call in changed["tool_calls"]]
        if not changed["tool_calls"]:
            del changed["tool_calls"]
    return changed


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
