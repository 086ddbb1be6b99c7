"""Answers `POST /v1/chat/completions`: what a chat asks of the engine, and the form of its answer.

`context` runs the generations; `requests.ChatRequest` comes in, `answers.ChatCompletion` or a stream of
`answers.ChatChunk` goes out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import answers
from fusionai.gateway.chunks import ChunkForm
from fusionai.gateway.context import AnswerForm, GatewayContext, Heading, numbered
from fusionai.gateway.errors import as_api_error, invalid
from fusionai.gateway.generation import AnswerLogprob, Choice, Delta, PromptProcessed
from fusionai.gateway.images import for_template, read_images
from fusionai.gateway.prompts import chat_text, read_source
from fusionai.gateway.requests import ChatRequest, NamedChoice, plain
from fusionai.gateway.streaming import while_connected
from fusionai.gateway.structured import enforced_form
from fusionai.primitives.errors import UsageError
from fusionai.serving.constraint import ClientGrammar, Form, is_deeper
from fusionai.serving.images import PlacedImage
from fusionai.serving.interface import PromptRead
from fusionai.serving.model_text import ModelText
from fusionai.serving.text import Tokenizer
from fusionai.serving.tool_grammar import call_grammar
from fusionai.serving.tool_reading import ToolReader
from fusionai.serving.tools import CallPiece, ToolDefinition, calls_of


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a prompt, with the images whose rows are among them."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    start: tuple[int, ...] = ()
    """Its last tokens, which a decoder behind an encoder begins with."""


class ChatEndpoint:
    """Answers chats."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def chat_completions(self, request: Request) -> Response:
        """Answer one request."""
        body = await self._context.read(request, ChatRequest)
        heading = self._context.heading(request, body, "chatcmpl-")
        form = ChunkForm(heading, body.n or 1, _ChatForm(self._context.text, heading))
        return await self.answer(request, body, form)

    async def answer(
        self, request: Request, body: ChatRequest, form: AnswerForm, *, at_most: int | None = None
    ) -> Response:
        """Generate what a chat asks for, also a chat that came in another protocol, and answer in the given form.
        `at_most`: limit of tokens of an answer that may be less if the context ends before."""
        choices = await while_connected(request, self._choices(request, body, at_most))
        return await self._context.reply(request, choices, form, is_stream=bool(body.stream))

    async def prompt(self, body: ChatRequest, scope: str) -> ChatPrompt:
        """Return a chat's prompt. `scope`: of the request's key. Raises `ApiError`."""
        context, text = self._context, self._context.text
        tools = _tools(body)
        if tools and text.tool_form is None:
            raise invalid("This model's chat template does not support tools.", "tools", "unsupported_parameter")
        messages = [for_template(plain(message)) for message in body.messages]
        offered = [msgspec.to_builtins(tool) for tool in body.tools or ()] if tools else None
        _check_depth(body, context.config.limits.template_depth)
        await context.check_length(_texts((messages, offered, body.chat_template_kwargs)), "messages")
        images = await read_images(context, body.messages, scope)
        if text.source is not None:
            source = await context.off_loop(text.text_tokens, chat_text(messages))
            asked = await read_source(context, source, scope, "messages")
            return ChatPrompt(asked.tokens, asked.images, asked.start)
        tokens = await context.off_loop(
            text.chat_tokens, messages, tools=offered, variables=self._variables(body, tools), images=images
        )
        return ChatPrompt(tokens, images)

    async def _choices(self, request: Request, body: ChatRequest, at_most: int | None = None) -> list[Choice]:
        context, text = self._context, self._context.text
        count = context.check_count(body.n or 1, 1)
        asked_for = await self.prompt(body, request.state.holder.scope)
        prompt = asked_for.tokens
        tools = _tools(body)
        form = await context.off_loop(self._form, body, tools)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("Give `max_completion_tokens` or the older `max_tokens`, not both.", "max_tokens")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = context.room_for(len(prompt), asked, at_most, "messages", start=len(asked_for.start))
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
        shared, stops = context.generation(request, body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        thinks = text.reasoning_form is not None
        with as_api_error():
            free = None if form is None else text.free_thinking(prompt, to_call=bool(tools))
        choices: list[Choice] = []
        for index in range(count):
            constraint = None if form is None else await context.constraint(form, free)
            constraint = context.ruled(asked_for.start, constraint)
            choices.append(
                Choice(
                    index=index,
                    prompt=0,
                    generation=numbered(
                        shared,
                        index,
                        prompt,
                        room,
                        logprobs=logprobs,
                        constraint=constraint,
                        images=asked_for.images,
                    ),
                    decoder=text.decoder(
                        stops=() if thinks else (*stops, *text.stops), tools=bool(tools), reasoning=thinks
                    ),
                    reasoning=text.reasoning_reader(prompt, stops=(*stops, *text.stops)),
                    tools=ToolReader(text.tool_form, tools) if tools and text.tool_form is not None else None,
                    one_call=body.parallel_tool_calls is False,
                    keeps=None if room else 0,
                )
            )
        return choices

    def _variables(self, body: ChatRequest, tools: list[ToolDefinition]) -> dict[str, Any]:
        """Variables for the template: the request's own, and those of `reasoning_effort`."""
        given = body.chat_template_kwargs or {}
        if body.reasoning_effort is None:
            return given
        try:
            variables = self._context.text.effort_variables(body.reasoning_effort, with_tools=bool(tools))
        except UsageError as problem:
            raise invalid(f"`reasoning_effort`: {problem}", "reasoning_effort", "unsupported_parameter") from None
        other = next((name for name, value in variables.items() if given.get(name, value) != value), None)
        if other is not None:
            raise invalid(
                f"`reasoning_effort` sets the template's `{other}` to {json.dumps(variables[other])}, and "
                f"`chat_template_kwargs` to {json.dumps(given[other])}: leave one out.",
                "reasoning_effort",
            )
        return {**given, **variables}

    def _form(self, body: ChatRequest, tools: list[ToolDefinition]) -> Form | None:
        """The constraint for the answer's form, None if there is none."""
        wanted = enforced_form(body)
        form, several = self._context.text.tool_form, body.parallel_tool_calls is not False
        match body.tool_choice:
            case NamedChoice(function=function) if form is not None:
                called = [tool for tool in tools if tool.name == function.name]
                if not called:
                    raise invalid(f"`tools` has no tool named {function.name!r}.", "tool_choice")
                return call_grammar(form, called, self._context.text.tokenizer)
            case "required" if form is not None:
                return call_grammar(form, tools, self._context.text.tokenizer, several=several)
            case _ if tools and form is not None and wanted is not None:
                if isinstance(wanted, ClientGrammar):
                    raise invalid("A `grammar` can't be combined with tools: write the calls into it.", "tools")
                return call_grammar(form, tools, self._context.text.tokenizer, several=several, instead=wanted)
            case _:
                return wanted


@dataclass(frozen=True, slots=True)
class _ChatForm:
    """`chunks.ChoiceForm` of chats."""

    text: ModelText
    heading: Heading

    def first(self, index: int) -> list[answers.ChatChunkChoice]:
        return [answers.ChatChunkChoice(index, answers.MessageDelta("assistant", ""))]

    def parts(self, update: Delta | PromptProcessed) -> list[answers.ChatChunkChoice]:
        if not isinstance(update, Delta):
            return []
        logprobs = self._logprobs(update.logprobs) if update.logprobs else None
        deltas = [answers.MessageDelta(tool_calls=[delta]) for delta in _call_deltas(update.calls)]
        choices = [answers.ChatChunkChoice(update.index, delta) for delta in deltas]
        if update.text or logprobs is not None:
            text = answers.MessageDelta(content=update.text)
            choices.insert(0, answers.ChatChunkChoice(update.index, text, logprobs=logprobs))
        if update.reasoning:
            thought = answers.MessageDelta(reasoning_content=update.reasoning)
            choices.insert(0, answers.ChatChunkChoice(update.index, thought))
        if update.finish is not None:
            choices.append(answers.ChatChunkChoice(update.index, answers.MessageDelta(), update.finish))
        return choices

    def whole(self, answer: Delta, prompt: PromptRead | None) -> answers.ChatChoice:
        del prompt
        calls = [
            answers.ToolCallAnswer(call.call_id, answers.FunctionCall(call.name, call.arguments))
            for call in calls_of(answer.calls)
        ]
        message = answers.AnswerMessage(
            (answer.text or None) if calls else answer.text,
            calls or UNSET,
            UNSET if self.text.reasoning_form is None else answer.reasoning or None,
        )
        logprobs = self._logprobs(answer.logprobs) if self.heading.with_logprobs else None
        return answers.ChatChoice(answer.index, message, answer.finish or "stop", logprobs)

    def body(
        self,
        heading: Heading,
        choices: list[Any],
        usage: answers.Usage | UnsetType | None,
        route: answers.RouteReport | UnsetType,
    ) -> answers.ChatChunk | answers.ChatCompletion:
        if heading.is_stream:
            return answers.ChatChunk(heading.answer_id, heading.created, heading.model, choices, usage, fusion=route)
        assert isinstance(usage, answers.Usage)
        return answers.ChatCompletion(heading.answer_id, heading.created, heading.model, choices, usage, fusion=route)

    def _logprobs(self, logprobs: Sequence[AnswerLogprob]) -> answers.ChatLogprobs:
        return answers.ChatLogprobs(token_logprobs(self.text.tokenizer, logprobs))


def token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[AnswerLogprob]) -> list[answers.TokenLogprobs]:
    """Return log-probabilities with the tokens' texts."""

    def named(token: int, value: float) -> tuple[str, float, list[int]]:
        return tokenizer.token_text(token), value, list(tokenizer.token_bytes(token))

    return [
        answers.TokenLogprobs(
            *named(one.logprob.token, one.logprob.logprob),
            [answers.TopLogprob(*named(token, value)) for token, value in one.logprob.top],
        )
        for one in logprobs
    ]


def _call_deltas(pieces: Sequence[CallPiece]) -> Iterator[answers.ToolCallDelta]:
    """Yield one delta per call. A call's first delta has its id and name, later ones only more arguments."""
    for index, of_call in itertools.groupby(pieces, lambda piece: piece.index):
        first, *others = of_call
        arguments = "".join((first.arguments, *(piece.arguments for piece in others)))
        if first.name is not None:
            function = answers.FunctionDelta(arguments, first.name)
            yield answers.ToolCallDelta(index, function, first.call_id or UNSET, "function")
        elif arguments:
            yield answers.ToolCallDelta(index, answers.FunctionDelta(arguments))


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


def _check_depth(body: ChatRequest, most: int) -> None:
    """Raise `ApiError` for data that a template would have to descend into too deeply."""
    for name, value in (
        ("tools", [tool.function.parameters for tool in body.tools or ()]),
        ("chat_template_kwargs", body.chat_template_kwargs),
    ):
        if is_deeper(value, most):
            raise invalid(f"`{name}` is nested too deeply: at most {most} levels are accepted.", name)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts of JSON data, names of fields too, and an empty one for each other value: whatever a template may
    render."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                yield text
            case dict() as fields:
                yield ""
                pending += fields
                pending += fields.values()
            case list() | tuple() as items:
                yield ""
                pending += items
            case _:
                yield ""
