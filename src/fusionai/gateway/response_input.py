"""Turns a request of the Responses API into a chat: items become messages, and settings get the names of chats.

One answer of a model is several items (reasoning, a message, calls) and becomes one message. `chat` generates from the
result, as it does from `POST /v1/chat/completions`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec import UNSET

from fusionai.gateway import requests
from fusionai.gateway.errors import invalid, shown
from fusionai.gateway.requests import ChatRequest, Message
from fusionai.gateway.response_requests import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputImage,
    InputItem,
    InputMessage,
    InputReasoning,
    InputText,
    ItemReference,
    ResponsesRequest,
    SaidRefusal,
    SaidText,
    SchemaFormat,
)

ContentPart = InputText | InputImage | SaidText | SaidRefusal

_SEALED: Final = "fusionai:"
"""Begins an `encrypted_content` of this gateway."""


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, for clients that send it back in this form only. It is encoded, not
    encrypted: the client gets the same text in `content`."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def chat_of(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """Return the chat that asks for the same answer to the conversation `items`. Raises `ApiError`."""
    tools, choice = _tools(body)
    shared = {name: getattr(body, name) for name in requests.Options.__struct_fields__}
    return ChatRequest(
        **shared,
        messages=messages_of(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs(body),
        top_logprobs=body.top_logprobs or None,
        response_format=_format(body),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Return whether the answer contains log-probabilities."""
    return bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Return the messages of a conversation. Instructions, and system messages that begin the conversation, become one
    message, because many templates accept a single one. Raises `ApiError`."""
    begun = leading(items)
    texts = [instructions] if instructions else []
    texts += [_text(item.content) for item in items[:begun] if isinstance(item, InputMessage)]
    messages: list[Message] = [requests.SystemMessage("\n\n".join(texts))] if texts else []
    messages += _later_messages(items[begun:])
    if not messages:
        raise invalid("Expected `input` with a text or at least one item, got none.", "input")
    return messages


def leading(items: Sequence[InputItem]) -> int:
    """Return the number of system messages that begin a conversation."""
    rules = (isinstance(item, InputMessage) and item.role in ("system", "developer") for item in items)
    return next((at for at, is_rule in enumerate(rules) if not is_rule), len(items))


def shortened(items: Sequence[InputItem]) -> list[list[InputItem]]:
    """Return the ways to drop a beginning of the conversation, longest conversation first. System messages that begin
    it stay; what follows them begins with a user's message."""
    begun = leading(items)
    users = [at for at, item in enumerate(items) if isinstance(item, InputMessage) and item.role == "user"]
    return [[*items[:begun], *items[at:]] for at in users if at > begun]


@dataclass(slots=True)
class _Answer:
    """Items of one answer of the model."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[requests.MadeToolCall] = field(default_factory=list)

    def message(self) -> Iterator[Message]:
        if self.reasoning or self.texts or self.calls:
            yield requests.AssistantMessage(
                content="".join(self.texts) if self.texts else None,
                tool_calls=self.calls or UNSET,
                reasoning_content="".join(self.reasoning) if self.reasoning else UNSET,
            )


def _later_messages(items: Sequence[InputItem]) -> Iterator[Message]:
    answer = _Answer()
    called: set[str] = set()
    for at, item in enumerate(items):
        match item:
            case InputMessage(role="assistant") | InputReasoning():
                # A text without calls was the end of its answer.
                if answer.texts and not answer.calls:
                    yield from answer.message()
                    answer = _Answer()
                if isinstance(item, InputReasoning):
                    answer.reasoning.append(_reasoning(item))
                else:
                    answer.texts.append(_text(item.content))
            case InputCall():
                called.add(item.call_id)
                function = requests.CalledFunction(item.name, item.arguments)
                answer.calls.append(requests.MadeToolCall(item.call_id, function))
            case InputCallOutput():
                yield from answer.message()
                answer = _Answer()
                if item.call_id not in called:
                    message = f"No function call has the `call_id` `{shown(item.call_id)}` of this output."
                    raise invalid(f"{message} Send the call before it, or `previous_response_id`.", "input")
                yield requests.ToolMessage(_text(item.output), item.call_id)
            case InputMessage(role="user" | "system" | "developer" as role):
                yield from answer.message()
                answer = _Answer()
                yield _said(role, item.content)
            case ItemReference():
                raise AssertionError(f"item {at} is an unresolved reference")
    yield from answer.message()


def _said(role: Literal["user", "system", "developer"], content: str | Sequence[ContentPart]) -> Message:
    match role:
        case "user" if any(isinstance(part, InputImage) for part in content):
            return requests.UserMessage([_seen(part) for part in content if not isinstance(part, str)])
        case "user":
            return requests.UserMessage(_text(content))
        case "developer":
            return requests.DeveloperMessage(_text(content))
        case "system":
            return requests.SystemMessage(_text(content))


def _seen(part: ContentPart) -> requests.TextPart | requests.ImagePart:
    if isinstance(part, InputImage):
        return requests.ImagePart(requests.ImageUrl(part.image_url))
    return requests.TextPart(_text([part]))


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        match part:
            case InputImage():
                raise invalid("Images are read in messages of the user only.", "input", "unsupported_parameter")
            case SaidRefusal(refusal=text) | InputText(text=text) | SaidText(text=text):
                texts.append(text)
    return "".join(texts)


def _reasoning(item: InputReasoning) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is None:
        return "\n".join(part.text for part in item.summary)
    if item.encrypted_content.startswith(_SEALED):
        try:
            return base64.b64decode(item.encrypted_content.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            pass
    message = "This `encrypted_content` is not of this gateway. Leave the reasoning item out, or send its `content`."
    raise invalid(message, "input", "invalid_encrypted_content")


def _format(
    body: ResponsesRequest,
) -> requests.TextFormat | requests.JsonObjectFormat | requests.JsonSchemaFormat | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, SchemaFormat):
        named = requests.NamedSchema(wanted.name, wanted.schema, wanted.description, wanted.strict)
        return requests.JsonSchemaFormat(named)
    return wanted


def _tools(
    body: ResponsesRequest,
) -> tuple[list[requests.Tool] | None, Literal["none", "auto", "required"] | requests.NamedChoice | None]:
    """Return the tools to offer and the choice among them. Raises `ApiError`."""
    tools, choice = body.tools, body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {tool.name for tool in choice.tools}
        unknown = sorted(names - {tool.name for tool in tools or ()})
        if unknown:
            raise invalid(f"`tools` has no tool named {shown(unknown[0])!r}.", "tool_choice.tools")
        tools = [tool for tool in tools or () if tool.name in names]
        choice = choice.mode
    named = requests.NamedChoice(requests.FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice
    return None if tools is None else [_tool(tool) for tool in tools], named


def _tool(tool: FunctionTool) -> requests.Tool:
    return requests.Tool(requests.Function(tool.name, tool.description, tool.parameters, tool.strict))
