"""The gateway of one model as an ASGI application: its routes and the OpenAPI description.

Also answers what is not generated: models and their adapters (loaded by `serving.interface.AdapterLoader`), status,
health, metrics. `chat` and `completions` answer the rest, `context` has what the endpoints share, `admission` checks
requests before they reach an endpoint, `server` listens. `front` stands before several such gateways.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final, Literal

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import fusionai
from fusionai.gateway.admission import AdmissionMiddleware
from fusionai.gateway.answers import ChatCompletion, Completion, ModelCard, ModelList
from fusionai.gateway.audio import AudioEndpoint, SpeechReport, SpeechRequest, SpeechText
from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.completions import CompletionEndpoint
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import (
    AnthropicError,
    ApiError,
    ErrorAnswer,
    OllamaError,
    as_api_error,
    error_handlers,
    invalid,
)
from fusionai.gateway.forms import MULTIPART
from fusionai.gateway.message_bodies import MessageAnswer, MessageRequest, TokenCount, TokenCountRequest
from fusionai.gateway.messages import MessagesEndpoint
from fusionai.gateway.metrics import CONTENT_TYPE, Metrics
from fusionai.gateway.ollama import OllamaEndpoint, version
from fusionai.gateway.ollama_bodies import (
    OllamaChatLine,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaShown,
    OllamaShowRequest,
    OllamaTextLine,
    OllamaVersion,
)
from fusionai.gateway.pages import page_routes
from fusionai.gateway.requests import ChatRequest, CompletionRequest, LoadAdapterRequest, UnloadAdapterRequest
from fusionai.gateway.response_bodies import DeletedResponse, InputTokenCount, ResponseObject
from fusionai.gateway.response_requests import ResponsesRequest
from fusionai.gateway.responses import ResponsesEndpoint
from fusionai.gateway.streaming import AnswerStream, EventForm, event
from fusionai.gateway.text_bodies import (
    EmbeddingList,
    EmbeddingRequest,
    RankedList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from fusionai.gateway.texts import EmbeddingEndpoint, RerankEndpoint
from fusionai.gateway.tracing import Tracer
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import StorageError
from fusionai.serving.interface import AdapterLoader, Engine, EngineStatus
from fusionai.serving.model_text import ModelText

_STATUS_PERIOD_S: Final = 0.5
"""Period at which the status is compared with the last one sent, in seconds (chosen)."""
_RERANK_PATHS: Final = {"/v1/rerank": "rerank", "/rerank": "jina_rerank", "/v2/rerank": "cohere_rerank"}
"""Paths that sort documents, with the names of their operations: vLLM's, Jina's as vLLM has it, and Cohere's."""
_REFERENCE: Final = "#/components/schemas/{name}"


class StatusReport(msgspec.Struct, frozen=True):
    """Status of the engine. `at_s`: seconds since 1970."""

    model: str
    context_tokens: int
    at_s: float
    engine: EngineStatus


_ERRORS: Final = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or invalid.",
    "403": "Without API keys, the gateway only serves this machine; or the path needs a flag of the server.",
    "404": "No such model or response.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The `Content-Type` is not `application/json`.",
    "429": "Too many requests; `Retry-After` says when to try again.",
    "500": "Internal error of the gateway.",
    "503": "Not ready, or the pool failed; `Retry-After` says when to try again.",
    "504": "The generation took too long.",
}
_GET_ERRORS: Final = ("401", "403", "429", "500", "503")


def description(version: str, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document."""
    forms: dict[type[msgspec.Struct], None] = {}
    components: dict[str, Any] = {}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "FusionAI",
            "version": version,
            "description": "Inference over a pool of peers, by OpenAI's, Anthropic's and Ollama's APIs.",
        },
        "paths": _with_references(_paths(), forms),
        "components": components,
    }
    _, components["schemas"] = msgspec.json.schema_components(forms, ref_template=_REFERENCE)
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths() -> dict[str, Any]:
    """Return the operations of each path, with forms in the place of references to their schemas."""
    return {
        "/v1/chat/completions": {"post": _post("chat", "Continue a conversation.", ChatRequest, ChatCompletion)},
        "/v1/completions": {"post": _post("completions", "Continue a text.", CompletionRequest, Completion)},
        **_text_paths(),
        "/v1/audio/transcriptions": {"post": _spoken("transcriptions", "Write down speech.")},
        "/v1/audio/translations": {"post": _spoken("translations", "Write down speech in English.")},
        "/v1/responses": {"post": _post("responses", "Continue a conversation.", ResponsesRequest, ResponseObject)},
        "/v1/responses/input_tokens": {
            "post": _post("input_tokens", "Count a prompt's tokens.", ResponsesRequest, InputTokenCount)
        },
        "/v1/responses/{response_id}": {
            "get": _get("response", "A stored response.", ResponseObject, (*_GET_ERRORS, "404")),
            "delete": _get("deleteResponse", "Forget a stored response.", DeletedResponse, (*_GET_ERRORS, "404")),
            "parameters": [_path_parameter("response_id")],
        },
        "/v1/messages": {
            "post": _post("messages", "Continue a conversation.", MessageRequest, MessageAnswer, AnthropicError)
        },
        "/v1/messages/count_tokens": {
            "post": _post("count_tokens", "Count a prompt's tokens.", TokenCountRequest, TokenCount, AnthropicError)
        },
        "/api/chat": {
            "post": _post("ollama_chat", "Continue a conversation.", OllamaChatRequest, OllamaChatLine, OllamaError)
        },
        "/api/generate": {
            "post": _post("ollama_generate", "Answer.", OllamaGenerateRequest, OllamaTextLine, OllamaError)
        },
        "/api/show": {"post": _post("show", "Describe a model.", OllamaShowRequest, OllamaShown, OllamaError)},
        "/api/tags": {"get": _get("tags", "Models served here.", OllamaModels, failure=OllamaError)},
        "/api/version": {"get": _get("version", "Version of the API.", OllamaVersion, failure=OllamaError)},
        "/v1/load_lora_adapter": {"post": _post("load_adapter", "Load an adapter.", LoadAdapterRequest)},
        "/v1/unload_lora_adapter": {"post": _post("unload_adapter", "Unload an adapter.", UnloadAdapterRequest)},
        "/v1/models": {"get": _get("models", "Models served here.", ModelList)},
        "/v1/models/{model}": {
            "get": {
                **_get("model", "One of the models.", ModelCard, (*_GET_ERRORS, "404")),
                "parameters": [_path_parameter("model")],
            }
        },
        "/fusion/status": {"get": _get("status", "The pool's state.", StatusReport)},
        "/health": {"get": _plain("health", "The process is up.", {"200"})},
        "/ready": {"get": _plain("ready", "A probe has crossed all stages.", {"200", "503"})},
        "/metrics": {"get": _plain("metrics", "Metrics for Prometheus.", {"200", "401"}, "text/plain")},
    }


def _text_paths() -> dict[str, Any]:
    """Return the paths that read texts without continuing them."""
    vectors = _post("embeddings", "Compute vectors of texts.", EmbeddingRequest, EmbeddingList)
    ranks = {
        path: {"post": _post(name, "Sort documents by relevance.", RerankRequest, RankedList)}
        for path, name in _RERANK_PATHS.items()
    }
    scores = _post("score", "Score pairs of texts.", ScoreRequest, ScoreList)
    return {"/v1/embeddings": {"post": vectors}, **ranks, "/v1/score": {"post": scores}}


def _spoken(name: str, summary: str) -> dict[str, Any]:
    """Return the operation of a path that hears speech."""
    operation = _post(name, summary, SpeechRequest, SpeechText)
    operation["requestBody"]["content"] = {MULTIPART: {"schema": SpeechRequest}}
    answers = operation["responses"]["200"]["content"]
    answers["application/json"] = {"schema": {"anyOf": [SpeechText, SpeechReport]}}
    answers |= {"text/plain": {}, "text/vtt": {}}
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _post(
    name: str,
    summary: str,
    form: type[msgspec.Struct],
    answer: type[msgspec.Struct] | None = None,
    failure: type[msgspec.Struct] = ErrorAnswer,
) -> dict[str, Any]:
    operation = _get(name, summary, answer, tuple(_ERRORS), failure)
    if "stream" in form.__struct_fields__:
        media = "application/x-ndjson" if failure is OllamaError else "text/event-stream"
        operation["responses"]["200"]["content"][media] = {"schema": {"type": "string"}}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": form}}}
    return operation


def _get(
    name: str,
    summary: str,
    answer: type[msgspec.Struct] | None,
    errors: tuple[str, ...] = _GET_ERRORS,
    failure: type[msgspec.Struct] = ErrorAnswer,
) -> dict[str, Any]:
    failures = {
        status: {"description": _ERRORS[status], "content": {"application/json": {"schema": failure}}}
        for status in errors
    }
    content = {"text/plain": {}} if answer is None else {"application/json": {"schema": answer}}
    success = {"description": summary, "content": content}
    return {"operationId": name, "summary": summary, "responses": {"200": success, **failures}}


def _plain(name: str, summary: str, statuses: set[str], media: str = "application/json") -> dict[str, Any]:
    answers = {
        status: {"description": _ERRORS.get(status, summary), "content": {media: {}}} for status in sorted(statuses)
    }
    for status in ("401", "403"):
        answers[status] = {"description": _ERRORS[status], "content": {"application/json": {}}}
    answers["503"] = {"description": _ERRORS["503"], "content": {"application/json": {}}}
    return {"operationId": name, "summary": summary, "responses": answers}


def _with_references(part: Any, forms: dict[type[msgspec.Struct], None]) -> Any:
    """Replace the forms in a part of the document by references to their schemas; adds them to `forms`."""
    match part:
        case dict():
            return {key: _with_references(value, forms) for key, value in part.items()}
        case list():
            return [_with_references(value, forms) for value in part]
        case type():
            forms[part] = None
            return {"$ref": _REFERENCE.format(name=part.__name__)}
        case _:
            return part


class Gateway:
    """The ASGI application; `server.serve` listens for it. `config` and `metrics` are for the server that runs it."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        text: ModelText,
        clock: Clock | None = None,
        *,
        tracer: Tracer | None = None,
        loader: AdapterLoader | None = None,
    ) -> None:
        """`tracer`: sends spans; the caller closes it. `loader`: lets requests load and unload adapters."""
        self.config = config
        self.metrics = Metrics(lambda: engine.status, config.model)
        clock, tracer = clock or SystemClock(), tracer or Tracer()
        self._context = GatewayContext(config, engine, text, self.metrics, clock, tracer, loader)
        self._inner = Starlette(
            routes=_routes(self._context, self.metrics),
            exception_handlers=error_handlers(self.metrics.broken),
        )
        self._admission = AdmissionMiddleware(self._inner, config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._admission(scope, receive, send)

    def end_streams(self) -> None:
        """Send the error "The gateway stops." on every stream and close it."""
        self._context.streams.end(ApiError(503, "The gateway stops.", code="shutting_down"))

    async def close(self) -> None:
        """Release resources after the last request."""
        self._context.close()


def _routes(context: GatewayContext, metrics: Metrics) -> list[BaseRoute]:
    models, status = ModelEndpoint(context), StatusEndpoint(context, metrics)
    chat = ChatEndpoint(context)
    audio = AudioEndpoint(context)
    messages = MessagesEndpoint(context, chat)
    responses = ResponsesEndpoint(context, chat)
    ollama = OllamaEndpoint(context, chat)
    ranks = RerankEndpoint(context)
    return [
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/v1/audio/transcriptions", audio.transcriptions, methods=["POST"]),
        Route("/v1/audio/translations", audio.translations, methods=["POST"]),
        Route("/v1/responses", responses.responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.response),
        Route("/v1/responses/{response_id}", responses.deleted_response, methods=["DELETE"]),
        Route("/v1/messages", messages.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/api/chat", ollama.ollama_chat, methods=["POST"]),
        Route("/api/generate", ollama.ollama_generate, methods=["POST"]),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/tags", ollama.tags),
        Route("/api/version", version),
        Route("/v1/completions", CompletionEndpoint(context).text_completions, methods=["POST"]),
        Route("/v1/embeddings", EmbeddingEndpoint(context).text_embeddings, methods=["POST"]),
        *(Route(path, ranks.rerank, methods=["POST"]) for path in _RERANK_PATHS),
        Route("/v1/score", ranks.score, methods=["POST"]),
        Route("/v1/load_lora_adapter", models.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", models.unload_adapter, methods=["POST"]),
        Route("/v1/models", models.models),
        Route("/v1/models/{model:path}", models.model),
        Route("/fusion/status", status.pool_status),
        Route("/fusion/status/events", status.pool_status_events),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/metrics", status.numbers),
        Route("/openapi.json", status.openapi),
        *page_routes(),
    ]


class ModelEndpoint:
    """Lists the model and its adapters, and loads and unloads adapters as vLLM's server does."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def models(self, request: Request) -> Response:
        """Every name that a request may give as its model."""
        del request
        config = self._context.config
        names = (config.model, *config.aliases, *self._context.adapters)
        return json_response(ModelList([self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """One of the models."""
        name = request.path_params["model"]
        self._context.adapter_of(name)
        return json_response(self._card(name))

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter, after which requests may name it as their model."""
        loader, config = self._loader(), self._context.config
        body = await self._context.read(request, LoadAdapterRequest, gift=None)
        if body.lora_name in (config.model, *config.aliases):
            raise invalid(f"The name `{body.lora_name}` is the model's own.", "lora_name")
        with as_api_error():
            try:
                await loader.load(body.lora_name, body.lora_path)
            except StorageError as problem:
                raise invalid(str(problem), "lora_path") from problem
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unload an adapter. Answers that use it are finished."""
        loader = self._loader()
        body = await self._context.read(request, UnloadAdapterRequest, gift=None)
        if self._context.adapter_of(body.lora_name) is None:
            raise invalid(f"`{body.lora_name}` is the model itself, not an adapter.", "lora_name")
        await loader.unload(body.lora_name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _loader(self) -> AdapterLoader:
        if (loader := self._context.loader) is None:
            message = "Adapters can't be loaded here: the server was started without --adapter-directory."
            raise ApiError(403, message, code="adapters_fixed")
        return loader

    def _card(self, name: str) -> ModelCard:
        config = self._context.config
        parent = config.model if name in self._context.adapters else None
        engine, text = self._context.engine, self._context.text
        reads: tuple[Literal["text", "image", "audio"], ...] = ("text",)
        if text.images is not None:
            reads = ("text", "image")
        elif text.source is not None and text.source.speech is not None:
            reads = ("audio",)
        return ModelCard(name, config.created_s, engine.context_tokens, engine.purpose, reads, parent=parent)


def _said(text: str) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


class StatusEndpoint:
    """Reports the state of the pool, of this process, its metrics and its API."""

    def __init__(self, context: GatewayContext, metrics: Metrics) -> None:
        self._context = context
        self._metrics = metrics
        has_keys = context.config.keys is not None
        self._document = msgspec.json.encode(description(fusionai.__version__, has_keys=has_keys))

    async def pool_status(self, request: Request) -> Response:
        """The state of the engine and the members."""
        del request
        return json_response(self._report())

    async def pool_status_events(self, request: Request) -> Response:
        """A stream of reports: one at once, and one after each change."""
        del request

        async def nothing() -> None:
            """There is no generation to cancel."""

        context = self._context
        return AnswerStream(
            self._changes(),
            EventForm(),
            context.config.limits,
            context.streams,
            on_slow=_ignore,
            on_gone=_ignore,
            on_end=nothing,
        )

    async def health(self, request: Request) -> Response:
        """Answers while the process runs."""
        del request
        return Response(b'{"status":"up"}', media_type="application/json")

    async def ready(self, request: Request) -> Response:
        """Status 200 while the engine is ready, else 503."""
        del request
        state = self._context.engine.status
        is_ready = state.state == "ready"
        body = {"ready": is_ready, "state": state.state, "detail": state.detail}
        return json_response(body, 200 if is_ready else 503)

    async def numbers(self, request: Request) -> Response:
        """Metrics in Prometheus' format."""
        del request
        return Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        del request
        return Response(self._document, media_type="application/json")

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        sent: EngineStatus | None = None
        while True:
            report = self._report()
            if report.engine != sent:
                sent = report.engine
                yield event(report)
            await asyncio.sleep(_STATUS_PERIOD_S)

    def _report(self) -> StatusReport:
        context = self._context
        return StatusReport(
            context.config.model, context.engine.context_tokens, context.clock.wall_s(), context.engine.status
        )


def _ignore() -> None:
    """Disconnected status pages are not counted."""
