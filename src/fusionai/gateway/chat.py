"""Answers `POST /v1/chat/completions`: the form of the answer; its content comes from the engine.

Neighbours: `requests.ChatRequest` comes in, `answers.ChatCompletion` or a stream of `answers.ChatChunk` goes out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import parameters
from fusionai.gateway.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    FinishWord,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    RouteReport,
    TokenLogprobs,
    ToolCallAnswer,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from fusionai.gateway.context import GatewayContext, Heading
from fusionai.gateway.errors import as_api_error, invalid
from fusionai.gateway.generation import AnswerLogprob, ApiGeneration, Choice, Delta
from fusionai.gateway.requests import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    RefusalPart,
    TextPart,
    plain,
)
from fusionai.gateway.streaming import comment, event, while_connected
from fusionai.serving.constraint import Form, JsonObject, JsonSchema
from fusionai.serving.interface import GenerationPaused
from fusionai.serving.tool_grammar import call_grammar
from fusionai.serving.tool_reading import ToolReader
from fusionai.serving.tools import CallPiece, ToolDefinition, calls_of


class ChatEndpoint:
    """Answers chats."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def chat_completions(self, request: Request) -> Response:
        """Answer one request."""
        body, heading = await self._context.opened(request, ChatRequest, "chatcmpl")
        choices = await while_connected(request, self._choices(request, body))
        compose = self._chunks if heading.is_stream else self._whole
        return await self._context.reply(request, choices, lambda started: compose(started, heading, len(choices)))

    async def _choices(self, request: Request, body: ChatRequest) -> list[Choice]:
        context, text = self._context, self._context.text
        count = context.check_count(body.n or 1, 1)
        tools = _tools(body)
        if tools and text.tool_form is None:
            raise invalid("This model's chat template does not support tools.", "tools", "unsupported_parameter")
        form = self._form(body, tools)
        written = _written(body)
        await parameters.check_length(written, text, context.engine, "messages")
        prompt = await parameters.off_loop(
            sum(map(len, written)),
            text.chat_tokens,
            [plain(message) for message in body.messages],
            tools=[msgspec.to_builtins(tool) for tool in body.tools or ()] if tools else None,
            variables=body.chat_template_kwargs,
        )
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("Give `max_completion_tokens` or the older `max_tokens`, not both.", "max_tokens")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = parameters.room_for(len(prompt), asked, None, context.engine, "messages")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
        shared = context.parameters(request, body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        choices: list[Choice] = []
        for index in range(count):
            constraint = None if form is None else await context.constraint(form)
            choices.append(
                Choice(
                    index=index,
                    prompt=0,
                    generation=shared.generation(index, prompt, room, logprobs, constraint=constraint),
                    decoder=text.decoder(stops=(*shared.stops, *text.stops), tools=bool(tools)),
                    tools=ToolReader(text.tool_form, tools) if tools and text.tool_form is not None else None,
                    one_call=body.parallel_tool_calls is False,
                    keeps=None if room else 0,
                )
            )
        return choices

    def _form(self, body: ChatRequest, tools: list[ToolDefinition]) -> Form | None:
        """The constraint for the answer's form, None if there is none."""
        wanted: Form | None = None
        match body.response_format:
            case JsonObjectFormat():
                wanted = JsonObject()
            case JsonSchemaFormat(json_schema=named):
                if named.schema is None:
                    raise invalid("The schema is missing.", "response_format.json_schema.schema")
                wanted = JsonSchema(json.dumps(named.schema))
            case _:
                pass
        if wanted is not None and tools:
            raise invalid(
                "An answer can't be both a tool call and of `response_format`: leave one out, or set `tool_choice` "
                'to "none".',
                "response_format",
            )
        form = self._context.text.tool_form
        match body.tool_choice:
            case NamedChoice(function=function) if form is not None:
                called = [tool for tool in tools if tool.name == function.name]
                if not called:
                    raise invalid(f"`tools` has no tool named {function.name!r}.", "tool_choice")
                with as_api_error():
                    return call_grammar(form, called, self._context.text.tokenizer)
            case "required" if form is not None:
                several = body.parallel_tool_calls is not False
                with as_api_error():
                    return call_grammar(form, tools, self._context.text.tokenizer, several=several)
            case _:
                return wanted

    async def _whole(self, generation: ApiGeneration, heading: Heading, count: int) -> ChatCompletion:
        texts: list[list[str]] = [[] for _ in range(count)]
        called: list[list[CallPiece]] = [[] for _ in range(count)]
        logprobs: list[list[AnswerLogprob]] = [[] for _ in range(count)]
        finish: list[FinishWord] = ["stop"] * count
        with_logprobs = heading.with_logprobs
        async for update in generation.updates():
            if not isinstance(update, Delta):
                continue
            at = update.index
            texts[at].append(update.text)
            logprobs[at].extend(update.logprobs)
            called[at].extend(update.calls)
            finish[at] = update.finish or finish[at]
        calls = [
            [ToolCallAnswer(call.call_id, FunctionCall(call.name, call.arguments)) for call in calls_of(pieces)]
            for pieces in called
        ]
        choices = [
            ChatChoice(
                at,
                AnswerMessage(("".join(texts[at]) or None) if calls[at] else "".join(texts[at]), calls[at] or UNSET),
                finish[at],
                self._logprobs(logprobs[at]) if with_logprobs else None,
            )
            for at in range(count)
        ]
        return ChatCompletion(
            heading.answer_id,
            heading.created,
            heading.model,
            choices,
            generation.usage,
            fusion=heading.route(generation),
        )

    async def _chunks(self, generation: ApiGeneration, heading: Heading, count: int) -> AsyncGenerator[bytes, None]:
        no_usage = None if heading.with_usage else UNSET

        def chunk(
            *choices: ChatChunkChoice,
            usage: Usage | UnsetType | None = no_usage,
            route: RouteReport | UnsetType = UNSET,
        ) -> bytes:
            name, created_s, model = heading.answer_id, heading.created, heading.model
            return event(ChatChunk(name, created_s, model, list(choices), usage, fusion=route))

        for index in range(count):
            yield chunk(ChatChunkChoice(index, MessageDelta("assistant", "")))
        unfinished = count
        async for update in generation.updates():
            match update:
                case GenerationPaused():
                    yield comment(f"{update.state}: {update.detail}")
                case Delta(index=at):
                    logprobs = self._logprobs(list(update.logprobs)) if update.logprobs else None
                    if update.text or logprobs is not None:
                        yield chunk(ChatChunkChoice(at, MessageDelta(content=update.text), logprobs=logprobs))
                    for delta in _call_deltas(update.calls):
                        yield chunk(ChatChunkChoice(at, MessageDelta(tool_calls=[delta])))
                    if update.finish is not None:
                        unfinished -= 1
                        last = ChatChunkChoice(at, MessageDelta(), update.finish)
                        is_end = not unfinished and not heading.with_usage
                        yield chunk(last, route=heading.route(generation) if is_end else UNSET)
                case _:
                    pass
        if heading.with_usage:
            yield chunk(usage=generation.usage, route=heading.route(generation))
        yield b"data: [DONE]\n\n"

    def _logprobs(self, logprobs: list[AnswerLogprob]) -> ChatLogprobs:
        tokenizer = self._context.text.tokenizer
        return ChatLogprobs(
            [
                TokenLogprobs(
                    tokenizer.token_text(one.logprob.token),
                    one.logprob.logprob,
                    list(tokenizer.token_bytes(one.logprob.token)),
                    [
                        TopLogprob(tokenizer.token_text(token), value, list(tokenizer.token_bytes(token)))
                        for token, value in one.logprob.top
                    ],
                )
                for one in logprobs
            ]
        )


def _call_deltas(pieces: Sequence[CallPiece]) -> Iterator[ToolCallDelta]:
    """Yield one delta per call. A call's first delta has its id and name, later ones only more arguments."""
    for index, of_call in itertools.groupby(pieces, lambda piece: piece.index):
        first, *others = of_call
        arguments = "".join((first.arguments, *(piece.arguments for piece in others)))
        if first.name is not None:
            function = FunctionDelta(arguments, first.name)
            yield ToolCallDelta(index, function, first.call_id or UNSET, "function")
        elif arguments:
            yield ToolCallDelta(index, FunctionDelta(arguments))


def _tools(body: ChatRequest) -> list[ToolDefinition]:
    """Tools that the model may call. Raises `ApiError` for a choice without tools, and for two tools of one name."""
    given = [ToolDefinition(tool.function.name, tool.function.parameters) for tool in body.tools or ()]
    names = [tool.name for tool in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid(f"Two tools are named {twice!r}.", "tools")
    if body.tool_choice not in (None, "none") and not given:
        raise invalid("`tool_choice` needs `tools`.", "tool_choice")
    return [] if body.tool_choice == "none" else given


def _written(body: ChatRequest) -> list[str]:
    texts: list[str] = []
    for message in body.messages:
        content = message.content
        if isinstance(content, str):
            texts.append(content)
        for part in content if isinstance(content, list) else ():
            match part:
                case TextPart(text=text):
                    texts.append(text)
                case RefusalPart(refusal=text):
                    texts.append(text)
    return texts
