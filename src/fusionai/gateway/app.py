"""The gateway as an ASGI application: its routes, and one form for all errors.

Neighbours: `desk` has what the endpoints share, `guards` checks requests before they reach an endpoint, `server`
listens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import fusionai
from fusionai.gateway.answers import ModelCard, ModelList
from fusionai.gateway.asking import adapter_of
from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.completions import CompletionEndpoint
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.desk import Desk
from fusionai.gateway.embeddings import EmbeddingEndpoint
from fusionai.gateway.errors import ApiError, error_response
from fusionai.gateway.guards import Guards
from fusionai.gateway.metrics import CONTENT_TYPE, Metrics
from fusionai.gateway.openapi import description
from fusionai.gateway.status import StatusEndpoint, StatusEventsEndpoint
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.serving.interface import Engine
from fusionai.serving.model_text import ModelText

_PAGE: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "pool.js": ("pool.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Gateway:
    """The ASGI application. `config` and `metrics` are for the server that runs it."""

    def __init__(self, config: GatewayConfig, engine: Engine, text: ModelText, clock: Clock) -> None:
        self.config = config
        self.metrics = Metrics(lambda: engine.status)
        self._desk = Desk(config, engine, text, self.metrics, clock)
        self._inner = Starlette(
            routes=_routes(self._desk, self.metrics),
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: self._own_mistake},
        )
        self._guards = Guards(self._inner, config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guards(scope, receive, send)

    def end_streams(self) -> None:
        """Send the error "The gateway stops." on every stream and close it."""
        self._desk.streams.end(ApiError(503, "The gateway stops.", code="shutting_down"))

    def close(self) -> None:
        """Release resources after the last request."""
        self._desk.close()

    async def _own_mistake(self, request: Request, problem: Exception) -> Response:
        del request
        self.metrics.broken(problem)
        return error_response(ApiError(500, "The gateway failed; its log says why.", code="internal_error"))


def make_app(config: GatewayConfig, engine: Engine, text: ModelText, clock: Clock | None = None) -> Gateway:
    """Create the gateway for an engine; `server.serve` listens for it."""
    return Gateway(config, engine, text, clock or SystemClock())


def _routes(desk: Desk, metrics: Metrics) -> list[BaseRoute]:
    document = msgspec.json.encode(description(fusionai.__version__, has_keys=desk.config.keys is not None))
    chat, completions, embeddings = ChatEndpoint(desk), CompletionEndpoint(desk), EmbeddingEndpoint(desk)
    status, events = StatusEndpoint(desk), StatusEventsEndpoint(desk)

    async def chat_completions(request: Request) -> Response:
        return await chat(request)

    async def text_completions(request: Request) -> Response:
        return await completions(request)

    async def text_embeddings(request: Request) -> Response:
        return await embeddings(request)

    async def pool_status(request: Request) -> Response:
        return await status(request)

    async def pool_status_events(request: Request) -> Response:
        return await events(request)

    async def models(request: Request) -> Response:
        del request
        config = desk.config
        return desk.answer(ModelList([_card(desk, name) for name in (config.model, *config.aliases, *config.adapters)]))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        adapter_of(name, desk.config)
        return desk.answer(_card(desk, name))

    async def health(request: Request) -> Response:
        del request
        return Response(b'{"status":"up"}', media_type="application/json")

    async def ready(request: Request) -> Response:
        del request
        state = desk.engine.status
        body = msgspec.json.encode({"ready": state.state == "ready", "state": state.state, "detail": state.detail})
        return Response(body, 200 if state.state == "ready" else 503, media_type="application/json")

    async def numbers(request: Request) -> Response:
        del request
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(request: Request) -> Response:
        del request
        return Response(document, media_type="application/json")

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", text_completions, methods=["POST"]),
        Route("/v1/embeddings", text_embeddings, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/fusion/status", pool_status),
        Route("/fusion/status/events", pool_status_events),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", numbers),
        Route("/openapi.json", openapi),
        *(Route(f"/{path}", _page(*_PAGE[path])) for path in _PAGE),
    ]


def _card(desk: Desk, name: str) -> ModelCard:
    parent = desk.config.model if name in desk.config.adapters else None
    return ModelCard(name, desk.config.created_s, desk.engine.context_tokens, parent=parent)


def _page(file: str, media: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files("fusionai.gateway").joinpath("page", file).read_bytes()

    async def page(request: Request) -> Response:
        del request
        return Response(content, headers={**_PAGE_HEADERS, "Content-Type": media})

    return page


async def _api_error(request: Request, problem: Exception) -> Response:
    del request
    assert isinstance(problem, ApiError)
    return error_response(problem)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    path = request.url.path[:200]
    match problem.status_code:
        case 404:
            told = ApiError(404, f"There is no path `{path}`; see `/openapi.json` for all paths.", code="not_found")
        case 405:
            headers = dict(problem.headers or {})
            taken = headers.get("Allow", "other methods")
            message = f"`{path}` accepts {taken}, not {request.method}."
            told = ApiError(405, message, code="method_not_allowed", headers=headers)
        case status:
            told = ApiError(status, problem.detail, code="http_error")
    return error_response(told)
