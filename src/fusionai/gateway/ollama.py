"""Answers Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`.

A request becomes a chat, which `chat` generates as if it had come in OpenAI's form; this module converts the request
and words the answer. `ollama_bodies` has the structs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import ollama_bodies as bodies
from fusionai.gateway.answers import FinishWord
from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.context import GatewayContext, Heading, json_response
from fusionai.gateway.errors import ApiError, invalid, ollama_error
from fusionai.gateway.generation import AnswerUpdate, ApiGeneration, Delta
from fusionai.gateway.requests import (
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    JsonSchemaFormat,
    MadeToolCall,
    Message,
    NamedSchema,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
    checked,
)
from fusionai.serving.reasoning import THINKING_SWITCHES
from fusionai.serving.tools import CallPiece, calls_of

_VERSION: Final = "0.13.0"
"""Programs compare this with the version of Ollama that they need."""
TAG: Final = ":latest"
_NS: Final = 1_000_000_000


class OllamaEndpoint:
    """Answers what Ollama's clients ask."""

    def __init__(self, context: GatewayContext, chat: ChatEndpoint) -> None:
        self._context = context
        self._chat = chat

    async def ollama_chat(self, request: Request) -> Response:
        """Continue a conversation."""
        body = await self._context.read(request, bodies.OllamaChatRequest, bodies.OLLAMA, any_type=True)
        return await self._answer(request, body, _messages_of(body.messages or ()), body.tools)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer a single prompt."""
        body = await self._context.read(request, bodies.OllamaGenerateRequest, bodies.OLLAMA, any_type=True)
        messages: list[Message] = [SystemMessage(body.system)] if body.system else []
        asked = [*messages, _asked(body.prompt or "", body.images)] if body.prompt or body.images else []
        return await self._answer(request, body, asked)

    async def tags(self, request: Request) -> Response:
        """List the model and its adapters."""
        del request
        config = self._context.config
        size = sum(stage.resident_bytes for stage in self._context.engine.status.stages)
        names = [_tagged(name) for name in (config.model, *config.aliases, *self._context.adapters)]
        return json_response(
            bodies.OllamaModels(
                [bodies.OllamaModel(name, name, _time(config.created_s), size, self._details(name)) for name in names]
            )
        )

    async def show(self, request: Request) -> Response:
        """Describe one of the models."""
        body = await self._context.read(request, bodies.OllamaShowRequest, bodies.OLLAMA, any_type=True, gift=None)
        context, name = self._context, self._served(body.model)
        context.adapter_of(name)
        shown = bodies.OllamaShown(
            context.text.template.source,
            self._capabilities(),
            # Clients look for the context's length under the name of the architecture.
            {
                "general.architecture": "fusion",
                "general.basename": context.config.model,
                "fusion.context_length": context.engine.context_tokens,
            },
            self._details(name),
            _time(context.config.created_s),
        )
        return json_response(shown)

    def _capabilities(self) -> list[bodies.Capability]:
        text = self._context.text
        match self._context.engine.purpose:
            case "embed":
                return ["embedding"]
            case "score":
                return []
            case "generate":
                tools: list[bodies.Capability] = ["tools"] if text.tool_form is not None else []
                eyes: list[bodies.Capability] = ["vision"] if text.images is not None else []
                return ["completion", *tools, *(("thinking",) if text.reasoning_form is not None else ()), *eyes]

    async def _answer(
        self, request: Request, body: bodies.OllamaSettings, messages: list[Message], tools: list[Tool] | None = None
    ) -> Response:
        context = self._context
        if body.think not in (None, False) and context.text.reasoning_form is None:
            raise invalid(f'"{body.model}" does not support thinking: leave `think` out.', "think")
        options = checked(body.options or {}, bodies.OllamaOptions, bodies.OLLAMA_OPTIONS)
        asked = ChatRequest(
            model=self._served(body.model),
            messages=messages,
            stream=body.stream is not False,
            tools=tools or None,
            response_format=_format_of(body.format),
            reasoning_effort=body.think if isinstance(body.think, str) else "none" if body.think is False else None,
            chat_template_kwargs=dict.fromkeys(THINKING_SWITCHES, True) if body.think is True else None,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
        )
        is_chat = isinstance(body, bodies.OllamaChatRequest)
        form = _Lines(context.heading(request, asked, ""), body.model, context.clock.wall_s, is_chat=is_chat)
        if not messages:
            return json_response(form.ready())
        limit = options.num_predict
        return await self._chat.answer(request, asked, form, at_most=None if limit is None or limit < 0 else limit)

    def _served(self, name: str) -> str:
        """Return the name without the tag that Ollama's clients add."""
        config = self._context.config
        return name if name in (config.model, *config.aliases, *self._context.adapters) else name.removesuffix(TAG)

    def _details(self, name: str) -> bodies.OllamaDetails:
        config = self._context.config
        return bodies.OllamaDetails(config.model if self._served(name) in self._context.adapters else "")


async def version(request: Request) -> Response:
    """Say which version of Ollama's API this is."""
    del request
    return json_response(bodies.OllamaVersion(_VERSION))


class _Lines:
    """`context.AnswerForm` of one answer, in lines of JSON. A tool call is sent once it is complete."""

    media_type = "application/x-ndjson"

    def __init__(self, heading: Heading, model: str, wall_s: Callable[[], float], *, is_chat: bool) -> None:
        self._heading = heading
        self._model = model
        self._wall_s = wall_s
        self._is_chat = is_chat
        self._call: list[CallPiece] = []
        self._finish: FinishWord | None = None

    def ready(self) -> Struct:
        """Return the answer to a request that asks for nothing."""
        return self._line(done=True, done_reason="load")

    def keep_alive(self) -> bytes:
        return _encoded(self._line())

    def failed(self, problem: ApiError) -> bytes:
        return _encoded(ollama_error(problem))

    def begin(self, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        return ()

    def update(self, update: AnswerUpdate, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        if not isinstance(update, Delta):
            return
        if update.reasoning or update.text:
            yield _encoded(self._line(update.text, update.reasoning))
        for piece in update.calls:
            if piece.name is not None:
                yield from self._called()
            self._call.append(piece)
        self._finish = update.finish

    def end(self, generation: ApiGeneration) -> Iterable[bytes]:
        yield from self._called()
        yield _encoded(self._line(**self._counts(generation, self._finish)))

    def whole(self, answers: Sequence[Delta], generation: ApiGeneration) -> Struct:
        (answer,) = answers
        calls, broken = _complete(answer.calls)
        return self._line(answer.text + broken, answer.reasoning, calls, **self._counts(generation, answer.finish))

    def _called(self) -> Iterator[bytes]:
        if self._call:
            calls, broken = _complete(self._call)
            self._call = []
            yield _encoded(self._line(broken, calls=calls))

    def _counts(self, generation: ApiGeneration, finish: FinishWord | None) -> dict[str, Any]:
        usage, report = generation.usage, generation.report()
        first_s = report.total_s if report.first_token_s is None else report.first_token_s
        return {
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": int(report.total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(first_s * _NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((report.total_s - first_s) * _NS),
            "fusion": self._heading.route(generation),
        }

    def _line(
        self, text: str = "", thinking: str = "", calls: Sequence[bodies.OllamaCall] = (), **counts: Any
    ) -> Struct:
        thought = thinking or UNSET
        if self._is_chat:
            message = bodies.OllamaAnswer(text, thought, list(calls) or UNSET)
            return bodies.OllamaChatLine(model=self._model, created_at=_time(self._wall_s()), message=message, **counts)
        created = _time(self._wall_s())
        return bodies.OllamaTextLine(model=self._model, created_at=created, response=text, thinking=thought, **counts)


def _encoded(value: Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _time(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat().replace("+00:00", "Z")


def _tagged(name: str) -> str:
    return name if ":" in name else name + TAG


def _complete(pieces: Sequence[CallPiece]) -> tuple[list[bodies.OllamaCall], str]:
    """Return the calls, and the text of those without valid arguments, because the answer ended too early or the model
    erred."""
    calls: list[bodies.OllamaCall] = []
    broken = ""
    for call, index in zip(calls_of(pieces), sorted({piece.index for piece in pieces}), strict=True):
        arguments = call.parsed_arguments
        if arguments is None:
            broken += f"{call.name} {call.arguments}"
        else:
            calls.append(bodies.OllamaCall(bodies.OllamaFunction(call.name, arguments, index), call.call_id))
    return calls, broken


def _format_of(given: str | dict[str, Any] | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    if isinstance(given, dict):
        return JsonSchemaFormat(NamedSchema("answer", given))
    return JsonObjectFormat() if given == "json" else None


def _asked(text: str, images: Sequence[str] | None) -> UserMessage:
    """A user's message; images come before its text, as with Ollama."""
    if not images:
        return UserMessage(text)
    # Which picture format it is shows in the bytes.
    pictures = [ImagePart(ImageUrl(f"data:image/png;base64,{image}")) for image in images]
    return UserMessage([*pictures, TextPart(text)])


def _messages_of(given: Sequence[bodies.OllamaMessage]) -> list[Message]:
    """Convert a conversation. Calls have no ids in it, so a result belongs to the first call of its tool that has none
    yet. Raises `ApiError`."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for number, message in enumerate(given):
        content = message.content or ""
        if message.images and message.role != "user":
            where = f"messages[{number}].images"
            raise invalid(f"`{where}`: images are read in messages of the user only.", where)
        match message.role:
            case "system":
                messages.append(SystemMessage(content))
            case "user":
                messages.append(_asked(content, message.images))
            case "assistant":
                # Nine characters, because some templates want exactly as many.
                calls = [
                    MadeToolCall(
                        call.id or f"call{number:03}{at:02}",
                        CalledFunction(call.function.name, json.dumps(call.function.arguments, ensure_ascii=False)),
                    )
                    for at, call in enumerate(message.tool_calls or ())
                ]
                waiting = [(call.id, call.function.name) for call in calls]
                messages.append(
                    AssistantMessage(content, tool_calls=calls or UNSET, reasoning_content=message.thinking or UNSET)
                )
            case "tool":
                fits = [one for one in waiting if message.tool_name in (None, one[1])]
                if message.tool_call_id is None and fits:
                    waiting.remove(fits[0])
                call_id = message.tool_call_id or (fits[0][0] if fits else "")
                messages.append(ToolMessage(content, call_id, message.tool_name or UNSET))
    return messages
