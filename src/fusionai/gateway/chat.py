"""`POST /v1/chat/completions`: the form of the answer; its content comes from the engine.

Neighbours: `requests.ChatRequest` comes in, `answers.ChatCompletion` or a stream of `answers.ChatChunk` goes out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import asking
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
    TokenLogprobs,
    ToolCallAnswer,
    ToolCallDelta,
    TopLogprob,
)
from fusionai.gateway.desk import GatewayContext, Heading
from fusionai.gateway.errors import invalid
from fusionai.gateway.generating import AnswerText, ApiGeneration, Choice, Delta
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
from fusionai.serving.interface import Constraint, Generation, GenerationPaused
from fusionai.serving.text import Tokenizer
from fusionai.serving.tool_grammar import call_grammar
from fusionai.serving.tool_reading import ToolReader
from fusionai.serving.tools import CallPiece, ToolDefinition, calls_of


class ChatEndpoint:
    """Handles one request per call."""

    def __init__(self, desk: GatewayContext) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        body, heading, is_stream = await self._desk.opened(request, ChatRequest, "chatcmpl")
        choices = await while_connected(request, self._choices(request, body))
        compose = self._chunks if is_stream else self._whole
        return await self._desk.reply(request, choices, lambda started: compose(started, heading, len(choices)))

    async def _choices(self, request: Request, body: ChatRequest) -> list[Choice]:
        desk, text = self._desk, self._desk.text
        count = desk.check_count(body.n or 1, 1)
        tools = _tools(body)
        if tools and text.tool_form is None:
            raise invalid("This model's chat template does not support tools.", "tools", "unsupported_parameter")
        form = self._form(body, tools)
        written = _written(body)
        await asking.check_length(written, text, desk.engine, "messages")
        prompt = await asking.off_loop(
            sum(map(len, written)),
            text.chat_tokens,
            [plain(message) for message in body.messages],
            tools=[msgspec.to_builtins(tool) for tool in body.tools or ()] if tools else None,
            variables=body.chat_template_kwargs,
        )
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("Give `max_completion_tokens` or the older `max_tokens`, not both.", "max_tokens")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = asking.room_for(len(prompt), asked, None, desk.engine, "messages")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
        sampling = asking.sampling_of(body, text.sampling, desk.engine.vocabulary)
        stops = (*asking.stops_of(body), *text.stops)
        stop_tokens = asking.stop_tokens_of(body, desk.stop_tokens, desk.engine.vocabulary)
        choices: list[Choice] = []
        for index in range(count):
            constraint: Constraint | None = None if form is None else await desk.constraint(form)
            generation = Generation(
                prompt=prompt,
                max_tokens=max(room, 1),
                sampling=desk.seeded(sampling, index),
                stop_tokens=stop_tokens,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                scope=desk.scope(request),
                adapter=asking.adapter_of(body.model, desk.config),
                constraint=constraint,
                deadline_s=asking.deadline_of(body, desk.config),
            )
            choices.append(
                Choice(
                    index=index,
                    prompt=0,
                    generation=generation,
                    decoder=text.decoder(stops=stops, tools=bool(tools)),
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
        form = self._desk.text.tool_form
        match body.tool_choice:
            case NamedChoice(function=function) if form is not None:
                called = [tool for tool in tools if tool.name == function.name]
                if not called:
                    raise invalid(f"`tools` has no tool named {function.name!r}.", "tool_choice")
                return self._desk.checked(call_grammar, form, called, self._tokenizer)
            case "required" if form is not None:
                several = body.parallel_tool_calls is not False
                return self._desk.checked(call_grammar, form, tools, self._tokenizer, several=several)
            case _:
                return wanted

    async def _whole(self, generating: ApiGeneration, heading: Heading, count: int) -> ChatCompletion:
        texts: list[list[str]] = [[] for _ in range(count)]
        called: list[list[CallPiece]] = [[] for _ in range(count)]
        said: list[list[AnswerText]] = [[] for _ in range(count)]
        finish: list[FinishWord] = ["stop"] * count
        with_logprobs = heading.with_logprobs
        async for happening in generating.happenings():
            if not isinstance(happening, Delta):
                continue
            at = happening.index
            texts[at].append(happening.text)
            said[at].extend(happening.said)
            called[at].extend(happening.calls)
            finish[at] = happening.finish or finish[at]
        calls = [
            [ToolCallAnswer(call.call_id, FunctionCall(call.name, call.arguments)) for call in calls_of(pieces)]
            for pieces in called
        ]
        choices = [
            ChatChoice(
                at,
                AnswerMessage(("".join(texts[at]) or None) if calls[at] else "".join(texts[at]), calls[at] or UNSET),
                finish[at],
                self._logprobs(said[at]) if with_logprobs else None,
            )
            for at in range(count)
        ]
        return ChatCompletion(
            heading.answer_id,
            heading.created,
            heading.model,
            choices,
            generating.usage,
            fusion=self._desk.report(generating) if heading.with_route else UNSET,
        )

    async def _chunks(self, generating: ApiGeneration, heading: Heading, count: int) -> AsyncGenerator[bytes, None]:
        usage = None if heading.with_usage else UNSET

        def chunk(choice: ChatChunkChoice) -> bytes:
            return event(ChatChunk(heading.answer_id, heading.created, heading.model, [choice], usage))

        for index in range(count):
            yield chunk(ChatChunkChoice(index, MessageDelta("assistant", "")))
        unfinished = count
        async for happening in generating.happenings():
            match happening:
                case GenerationPaused():
                    yield comment(f"{happening.state}: {happening.detail}")
                case Delta(index=at):
                    logprobs = self._logprobs(list(happening.said)) if happening.said else None
                    if happening.text or logprobs is not None:
                        yield chunk(ChatChunkChoice(at, MessageDelta(content=happening.text), logprobs=logprobs))
                    for delta in _call_deltas(happening.calls):
                        yield chunk(ChatChunkChoice(at, MessageDelta(tool_calls=[delta])))
                    if happening.finish is not None:
                        unfinished -= 1
                        last = ChatChunkChoice(at, MessageDelta(), happening.finish)
                        is_told = heading.with_route and not unfinished and not heading.with_usage
                        told = self._desk.report(generating) if is_told else UNSET
                        yield event(
                            ChatChunk(heading.answer_id, heading.created, heading.model, [last], usage, fusion=told)
                        )
                case _:
                    pass
        if heading.with_usage:
            told = self._desk.report(generating) if heading.with_route else UNSET
            yield event(ChatChunk(heading.answer_id, heading.created, heading.model, [], generating.usage, fusion=told))
        yield b"data: [DONE]\n\n"

    def _logprobs(self, said: list[AnswerText]) -> ChatLogprobs:
        tokenizer = self._tokenizer
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
                for one in said
            ]
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._desk.text.tokenizer


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
