"""Answers `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API.

A request becomes a chat, which `chat` generates as if it had come in OpenAI's form; this module converts the request
and words the answer. `message_bodies` has the structs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import message_bodies as bodies
from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.context import GatewayContext, Heading, json_response
from fusionai.gateway.errors import ApiError, anthropic_error, invalid
from fusionai.gateway.generation import AnswerUpdate, ApiGeneration, Delta
from fusionai.gateway.requests import (
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    ImagePart,
    ImageUrl,
    JsonSchemaFormat,
    MadeToolCall,
    Message,
    NamedChoice,
    NamedSchema,
    RefusalPart,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
)
from fusionai.gateway.streaming import EventForm, comment, event, while_connected
from fusionai.serving.interface import GenerationPaused
from fusionai.serving.reasoning import THINKING_SWITCHES
from fusionai.serving.tools import ToolCall, calls_of


class MessagesEndpoint:
    """Answers conversations in Anthropic's form."""

    def __init__(self, context: GatewayContext, chat: ChatEndpoint) -> None:
        self._context = context
        self._chat = chat

    async def messages(self, request: Request) -> Response:
        """Answer one request."""
        body = await self._context.read(request, bodies.MessageRequest, bodies.ANTHROPIC)
        if body.thinking is not None and body.thinking.type == "enabled" and self._context.text.reasoning_form is None:
            raise invalid("This model does not think: leave `thinking` out.", "thinking")
        asked = _chat_of(
            body,
            self._effort(request, body),
            stream=body.stream,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
        )
        form = _MessageForm(self._context.heading(request, asked, "msg_"), body)
        return await self._chat.answer(request, asked, form, at_most=body.max_tokens)

    async def count_tokens(self, request: Request) -> Response:
        """Count a prompt's tokens."""
        body = await self._context.read(request, bodies.TokenCountRequest, bodies.ANTHROPIC)
        asked = _chat_of(body, self._effort(request, body))
        self._context.adapter_of(asked.model)
        prompt = await while_connected(request, self._chat.prompt(asked, request.state.holder.scope))
        return json_response(bodies.TokenCount(len(prompt.tokens)))

    def _effort(self, request: Request, body: bodies.Prompted) -> bodies.Effort | None:
        """How much the model should think, None: as it does by itself."""
        effort = None if body.output_config is None else body.output_config.effort
        has_tools = bool(body.tools)
        is_known = self._context.has_effort(request, effort, "output_config.effort", with_tools=has_tools)
        return effort if is_known else None


class _MessageForm(EventForm):
    """`context.AnswerForm` of one message. A stream's blocks follow each other: one is open at a time."""

    def __init__(self, heading: Heading, body: bodies.MessageRequest) -> None:
        self._heading = heading
        self._body = body
        self._blocks = 0
        self._open: int | str | None = None
        """Content of the open block: `text`, `thinking`, or the number of a tool call."""
        self._has_begun = False
        self._last = Delta(0)
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    def keep_alive(self) -> bytes:
        return _event(bodies.PingEvent())

    def failed(self, problem: ApiError) -> bytes:
        return event(anthropic_error(problem), "error")

    def begin(self, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        return ()  # the first event says how much of the prompt was in the cache, which is not known yet

    def update(self, update: AnswerUpdate, generation: ApiGeneration) -> Iterable[bytes]:
        if isinstance(update, GenerationPaused):
            yield comment(f"{update.state}: {update.detail}")
            return
        if not self._has_begun:
            self._has_begun = True
            yield _event(bodies.MessageStart(self._message([], generation)))
        if isinstance(update, Delta):
            self._last = update
            yield from self._content(update)

    def end(self, generation: ApiGeneration) -> Iterable[bytes]:
        yield from self._close()
        stop = self._stop(self._last, generation, calls=self._last.finish == "tool_calls")
        route = self._heading.route(generation)
        yield _event(bodies.MessageEnd(stop, _usage(generation), route))
        yield _event(bodies.MessageStop())

    def whole(self, answers: Sequence[Delta], generation: ApiGeneration) -> Struct:
        (answer,) = answers
        content: list[bodies.AnswerBlock] = []
        if answer.reasoning and self._shows_thinking:
            content.append(bodies.ThinkingBlock(answer.reasoning))
        content += [bodies.TextBlock(answer.text)] if answer.text else []
        content += [_call_block(call) for call in calls_of(answer.calls)]
        calls = any(isinstance(block, bodies.ToolUseBlock) for block in content)
        return self._message(content, generation, self._stop(answer, generation, calls=calls))

    def _message(
        self, content: list[bodies.AnswerBlock], generation: ApiGeneration, stop: bodies.StopDelta | None = None
    ) -> bodies.MessageAnswer:
        message = bodies.MessageAnswer(self._heading.answer_id, self._heading.model, content, _usage(generation))
        if stop is None:
            return message
        route = self._heading.route(generation)
        return bodies.MessageAnswer(
            message.id, message.model, content, message.usage, stop.stop_reason, stop.stop_sequence, fusion=route
        )

    def _content(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning and self._shows_thinking:
            yield from self._opened("thinking", bodies.ThinkingBlock(""))
            yield self._more(bodies.ThinkingDelta(delta.reasoning))
        if delta.text:
            yield from self._opened("text", bodies.TextBlock(""))
            yield self._more(bodies.TextDelta(delta.text))
        for piece in delta.calls:
            if piece.name is not None:
                yield from self._opened(piece.index, bodies.ToolUseBlock(piece.call_id or "", piece.name, {}))
            if piece.arguments:
                yield self._more(bodies.InputJsonDelta(piece.arguments))

    def _opened(self, content: int | str, empty: bodies.AnswerBlock) -> Iterator[bytes]:
        if self._open != content:
            yield from self._close()
            self._open = content
            yield _event(bodies.BlockStart(self._blocks, empty))

    def _more(self, delta: bodies.TextDelta | bodies.ThinkingDelta | bodies.InputJsonDelta) -> bytes:
        return _event(bodies.BlockDelta(self._blocks, delta))

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            self._blocks += 1
            yield _event(bodies.BlockStop(self._blocks - 1))

    def _stop(self, end: Delta, generation: ApiGeneration, *, calls: bool) -> bodies.StopDelta:
        match end.finish:
            case "length" if generation.usage.completion_tokens < self._body.max_tokens:
                return bodies.StopDelta("model_context_window_exceeded")
            case "length":
                return bodies.StopDelta("max_tokens")
            case _ if calls:
                return bodies.StopDelta("tool_use")
            case _ if end.stop in (self._body.stop_sequences or ()):
                return bodies.StopDelta("stop_sequence", end.stop)
            case _:
                return bodies.StopDelta("end_turn")


def _event(value: Struct) -> bytes:
    name = value.__struct_config__.tag
    assert isinstance(name, str)
    return event(value, name)


def _usage(generation: ApiGeneration) -> bodies.MessageUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    thought = usage.completion_tokens_details
    return bodies.MessageUsage(
        usage.prompt_tokens - cached,
        usage.completion_tokens,
        cached,
        output_tokens_details=bodies.ThinkingDetails(thought.reasoning_tokens) if thought else UNSET,
    )


def _call_block(call: ToolCall) -> bodies.ToolUseBlock | bodies.TextBlock:
    """Return the block of a call. A call without valid arguments, because the answer ended too early or the model
    erred, becomes text, so that it is not run."""
    arguments = call.parsed_arguments
    if arguments is None:
        return bodies.TextBlock(f"{call.name} {call.arguments}")
    return bodies.ToolUseBlock(call.call_id, call.name, arguments)


def _chat_of(body: bodies.Prompted, effort: bodies.Effort | None, **settings: Any) -> ChatRequest:
    """Convert a request. Raises `ApiError`."""
    messages: list[Message] = []
    if body.system:
        messages.append(SystemMessage(_parts(body.system)))
    for kind, turns in itertools.groupby(enumerate(body.messages), lambda turn: type(turn[1])):
        # Turns of the same role in a row are one turn in this API, and templates may require that they alternate.
        blocks = [block for number, turn in turns for block in _blocks(turn, number)]
        if kind is bodies.AssistantTurn:
            messages.append(_answer_of(blocks))
        elif kind is bodies.SystemTurn:
            messages.append(SystemMessage(_parts(blocks)))
        else:
            messages += _asked(blocks)
    if isinstance(body.messages[-1], bodies.AssistantTurn):
        raise invalid("The last message is the assistant's: this gateway can't continue an answer that was begun.")
    output = body.output_config or bodies.OutputConfig()
    thinking = None if body.thinking is None else body.thinking.type
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool_of(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        response_format=JsonSchemaFormat(NamedSchema("answer", output.format.schema)) if output.format else None,
        reasoning_effort="none" if thinking == "disabled" else effort,
        chat_template_kwargs=dict.fromkeys(THINKING_SWITCHES, True) if thinking == "enabled" else None,
        **settings,
    )


def _blocks(turn: bodies.Turn, number: int) -> list[Any]:
    if isinstance(turn.content, str):
        return [bodies.TextBlock(turn.content)]
    for place, block in enumerate(turn.content):
        inside = block.content if isinstance(block, bodies.ToolResultBlock) and block.content else ()
        if any(isinstance(part, bodies.ImageBlock) for part in inside):
            where = f"messages[{number}].content[{place}]"
            raise invalid(f"`{where}`: images in results of tools are not read; leave them out.", where)
    return list(turn.content)


def _parts(content: str | Sequence[bodies.TextBlock]) -> str | list[TextPart | RefusalPart]:
    return content if isinstance(content, str) else [TextPart(block.text) for block in content]


def _seen(block: bodies.TextBlock | bodies.ImageBlock) -> TextPart | ImagePart:
    if isinstance(block, bodies.TextBlock):
        return TextPart(block.text)
    match block.source:
        case bodies.Base64Source(data=data, media_type=kind):
            return ImagePart(ImageUrl(f"data:{kind};base64,{data}"))
        case bodies.UrlSource(url=url):
            return ImagePart(ImageUrl(url))


def _asked(blocks: Sequence[bodies.TextBlock | bodies.ImageBlock | bodies.ToolResultBlock]) -> Iterator[Message]:
    """The messages of one user turn: templates want each tool's result in a message of its own."""
    for is_result, of_kind in itertools.groupby(blocks, lambda block: isinstance(block, bodies.ToolResultBlock)):
        if not is_result:
            yield UserMessage([_seen(block) for block in of_kind if not isinstance(block, bodies.ToolResultBlock)])
            continue
        for block in of_kind:
            assert isinstance(block, bodies.ToolResultBlock)
            content = block.content or ""
            if not isinstance(content, str):
                content = "\n".join(part.text for part in content if isinstance(part, bodies.TextBlock))
            yield ToolMessage(f"Error: {content}" if block.is_error else content, block.tool_use_id)


def _answer_of(blocks: Sequence[bodies.AnswerBlock]) -> AssistantMessage:
    said = [block for block in blocks if isinstance(block, bodies.TextBlock)]
    thought = [block.thinking for block in blocks if isinstance(block, bodies.ThinkingBlock)]
    calls = [
        MadeToolCall(block.id, CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False)))
        for block in blocks
        if isinstance(block, bodies.ToolUseBlock)
    ]
    return AssistantMessage(
        _parts(said) if said else None,
        tool_calls=calls or UNSET,
        reasoning_content="\n".join(thought) if thought else UNSET,
    )


def _tool_of(tool: bodies.ClientTool) -> Tool:
    return Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice_of(policy: bodies.ToolPolicy | None) -> Literal["none", "auto", "required"] | NamedChoice | None:
    if policy is None:
        return None
    if (policy.type == "tool") != (policy.name is not None):
        raise invalid('`tool_choice` needs a `name` if its `type` is "tool", and only then.', "tool_choice")
    match policy.type:
        case "any":
            return "required"
        case "tool":
            return NamedChoice(FunctionName(policy.name or ""))
        case word:
            return word
