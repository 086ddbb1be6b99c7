"""One address for several models: forwards each request to the process that serves the model which it names.

A request for a model that is not loaded waits until it is. What concerns all models (their list, metrics, the page) is
answered here. Requests without a model, such as those for the pool's status, go to the model that was used last, and
keep none loaded.

`client.serving.hosts` runs the models' processes, whose gateways (`app`) check and answer what arrives here; they
receive the client's API key. `admission` checks it here first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

import httpx
import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Message, Receive, Scope, Send

import fusionai
from fusionai.gateway.admission import AdmissionMiddleware
from fusionai.gateway.app import description
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.context import json_response
from fusionai.gateway.errors import ApiError, ClientGone, error_handlers, no_such_model
from fusionai.gateway.forms import is_form, parts_of
from fusionai.gateway.metrics import CONTENT_TYPE, HttpMetrics
from fusionai.gateway.ollama import TAG, version
from fusionai.gateway.pages import page_routes
from fusionai.gateway.requests import read_body
from fusionai.gateway.streaming import ABORT_EXTENSION, unless, while_connected
from fusionai.primitives.errors import FusionError

LIST_S: Final = 5.0
"""Time for a loaded model to answer about itself, in seconds (chosen)."""
CONNECT_S: Final = 10.0
SMALL_BYTES: Final = 2**18
"""Size of a body up to which it is read on the event loop (chosen: a millisecond)."""
_STORED: Final = "/v1/responses/"
"""Paths of stored responses, which name no model: each loaded model is asked."""
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
"""Headers of one connection (RFC 9110, section 7.6.1)."""
_NOT_SENT: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"x-request-id"}
_NOT_ANSWERED: Final = _HOP_BY_HOP | {b"date", b"server"}


class FrontModel(Protocol):
    """A model and the names of its adapters."""

    @property
    def name(self) -> str: ...

    @property
    def adapters(self) -> tuple[str, ...]: ...


class LoadedOnDemand(Protocol):
    """Models that are loaded when they are used."""

    @property
    def programs(self) -> Sequence[FrontModel]:
        """All models."""
        ...

    @property
    def phases(self) -> Mapping[str, str]:
        """What each model's process does: `cold` if there is none, `starting`, `ready` or `ending`."""
        ...

    @property
    def urls(self) -> Mapping[str, str]:
        """Addresses of the models that are loaded, the one that was used last first."""
        ...

    def use(self, name: str) -> AbstractAsyncContextManager[str]:
        """Yield the model's address once it is loaded. Raises `FusionError` if it can't be."""
        ...


class Front:
    """The ASGI application. `config` and `metrics` are for the server that runs it; `config.model` is not used."""

    def __init__(self, config: GatewayConfig, models: LoadedOnDemand) -> None:
        self.config = replace(config, limits=replace(config.limits, body_bytes=config.limits.image_body_bytes))
        self.metrics = HttpMetrics()
        self._forwarder = _Forwarder(self.config, models)
        inner = Starlette(
            routes=_routes(self.config, models, self._forwarder, self.metrics),
            exception_handlers=error_handlers(self.metrics.broken),
        )
        self._admission = AdmissionMiddleware(inner, self.config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._admission(scope, receive, send)

    def end_streams(self) -> None:
        """Cut off all answers that are still being forwarded."""
        self._forwarder.cut_off()

    async def close(self) -> None:
        """Close the connections to the models."""
        await self._forwarder.close()


def _routes(
    config: GatewayConfig, models: LoadedOnDemand, forwarder: _Forwarder, metrics: HttpMetrics
) -> list[BaseRoute]:
    lists = _Lists(config, models, forwarder, metrics)
    return [
        Route("/v1/models", lists.cards),
        Route("/v1/models/{model:path}", lists.card),
        Route("/api/tags", lists.tags),
        Route("/api/version", version),
        Route("/health", lists.health),
        Route("/ready", lists.ready),
        Route("/metrics", lists.numbers),
        Route("/openapi.json", lists.openapi),
        *page_routes(),
        Mount("/", forwarder.forward),
    ]


class _Named(msgspec.Struct):
    """The only field of a body that is read here."""

    model: str | None = None


class _Forwarder:
    """Passes requests on."""

    def __init__(self, config: GatewayConfig, models: LoadedOnDemand) -> None:
        self._limits = config.limits
        self._models = models
        self._names = {name: model.name for model in models.programs for name in (model.name, *model.adapters)}
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # the models are on this machine, whatever proxy the environment names
        )
        self._cut = asyncio.Event()

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        request, passage = Request(scope, receive), _Passage(send)
        body = await read_body(request, self._limits)
        try:
            answered = self._answered(request, body, passage)
            await while_connected(request, unless(self._cut.wait(), _CutOff, answered))
        except ClientGone:
            if not passage.is_complete:
                raise
        except _CutOff:
            if not passage.is_begun:
                raise ApiError(503, "The gateway stops.", code="shutting_down") from None
            _abort(scope)
            return
        # Not earlier: once an answer has ended, its client counts as gone.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(self, url: str, path: str, headers: Mapping[str, str]) -> bytes | None:
        """Return a loaded model's answer to a GET; None if it does not answer or refuses."""
        try:
            async with asyncio.timeout(LIST_S):
                answer = await self._client.get(url + path, headers=headers)
        except (httpx.HTTPError, TimeoutError):
            return None
        return answer.content if answer.status_code == httpx.codes.OK else None

    def known(self, name: str) -> str:
        """Return a request's name of a model or adapter without the tag that Ollama's clients add. Raises
        `ApiError`."""
        for each in (name, name.removesuffix(TAG)):
            if each in self._names:
                return each
        raise no_such_model(name, self._names, [*self._names])

    def cut_off(self) -> None:
        """End all answers."""
        self._cut.set()

    async def close(self) -> None:
        await self._client.aclose()

    async def _answered(self, request: Request, body: bytes, passage: _Passage) -> None:
        path: str = request.scope["path"]
        if path.startswith(_STORED) and request.method in ("GET", "DELETE"):
            await self._stored(request, passage)
            return
        name = None
        if request.method == "POST":
            # All streams would wait while a long body is read.
            kind = request.headers.get("content-type", "")
            small = len(body) < SMALL_BYTES
            name = _model_of(body, kind) if small else await asyncio.to_thread(_model_of, body, kind)
        if name is None:
            async with AsyncExitStack() as stack:
                await self._relay(await self._sent(request, body, self._last(), stack), passage)
            return
        async with AsyncExitStack() as stack:
            try:
                url = await stack.enter_async_context(self._models.use(self._names[self.known(name)]))
            except FusionError as problem:
                raise ApiError(503, str(problem), code="model_unavailable", retry_after_s=5.0) from problem
            await self._relay(await self._sent(request, body, url, stack), passage)

    def _last(self) -> str:
        urls = tuple(self._models.urls.values())
        if not urls:
            raise ApiError(503, "No model is loaded now. A request that names one loads it.", code="not_ready")
        return urls[0]

    async def _stored(self, request: Request, passage: _Passage) -> None:
        """Pass on the answer of the model that has this response, or a refusal."""
        async with AsyncExitStack() as stack:
            answer = None
            for url in self._models.urls.values():
                answer = await self._sent(request, b"", url, stack)
                if answer.status_code != httpx.codes.NOT_FOUND:
                    break
            if answer is None:
                name = request.scope["path"].removeprefix(_STORED)[:64]
                raise ApiError(404, f"There is no response `{name}`: no model is loaded now.", code="not_found")
            await self._relay(answer, passage)

    async def _sent(self, request: Request, body: bytes, url: str, stack: AsyncExitStack) -> httpx.Response:
        """Send the request to a model and return its answer, of which only the head has been read. `stack` closes
        it."""
        scope = request.scope
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_SENT]
        headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        query = scope["query_string"].decode("latin-1")
        target = httpx.URL(url).copy_with(raw_path=f"{_raw_path(scope)}{'?' if query else ''}{query}".encode("latin-1"))
        try:
            sent = self._client.build_request(request.method, target, headers=headers, content=body)
            answer = await self._client.send(sent, stream=True)
        except httpx.HTTPError as problem:
            message = f"The model's process does not answer: {problem or type(problem).__name__}."
            raise ApiError(503, message, code="model_unavailable", retry_after_s=5.0) from problem
        stack.push_async_callback(answer.aclose)
        return answer

    async def _relay(self, answer: httpx.Response, passage: _Passage) -> None:
        """Send the answer to the client as it comes. A client that does not read makes the model's process wait, which
        ends the generation by its own limits."""
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _NOT_ANSWERED]
        left_bytes = int(answer.headers["content-length"]) if "content-length" in answer.headers else None
        await passage.begin({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        try:
            async for piece in answer.aiter_raw():
                if left_bytes is not None:
                    left_bytes -= len(piece)
                async with asyncio.timeout(self._limits.stalled_s):
                    await passage.piece(piece, is_last=left_bytes == 0)
        except (httpx.HTTPError, TimeoutError):
            raise _CutOff from None
        passage.is_complete = True


class _Passage:
    """An answer on its way to the client. `is_complete`: all of it was sent, after which the client may leave."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_begun = False
        self.is_complete = False

    async def begin(self, head: Message) -> None:
        self.is_begun = True
        await self._send(head)

    async def piece(self, piece: bytes, *, is_last: bool) -> None:
        self.is_complete = is_last
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})


class _CutOff(Exception):
    """The answer can't be completed."""


def _abort(scope: Scope) -> None:
    """Close the connection. Once an answer's head is sent, only that says that the answer is incomplete."""
    if (abort := scope.get("extensions", {}).get(ABORT_EXTENSION)) is not None:
        abort()


def _model_of(body: bytes, content_type: str) -> str | None:
    """Return the model that a request names, in JSON or in a form; None if its body is not such a request, which the
    model's own gateway then explains."""
    try:
        if is_form(content_type):
            return next((part.text for part in parts_of(body, content_type) if part.name == "model"), None)
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ApiError):
        return None


def _raw_path(scope: Scope) -> str:
    raw = scope.get("raw_path")
    return scope["path"] if raw is None else raw.decode("latin-1").partition("?")[0]


class _Lists:
    """Answers about all models together."""

    def __init__(
        self, config: GatewayConfig, models: LoadedOnDemand, forwarder: _Forwarder, metrics: HttpMetrics
    ) -> None:
        self._config = config
        self._models = models
        self._forwarder = forwarder
        self._metrics = metrics
        self._known: dict[str, dict[str, Any]] = {}
        """What a model said of each of its names when it was loaded last."""
        self._document = msgspec.json.encode(description(fusionai.__version__, has_keys=config.keys is not None))

    async def cards(self, request: Request) -> Response:
        """Every name that a request may give as its model."""
        return json_response({"object": "list", "data": await self._cards(request)})

    async def card(self, request: Request) -> Response:
        """One of the models."""
        name = self._forwarder.known(request.path_params["model"])
        return json_response(next(card for card in await self._cards(request) if card["id"] == name))

    async def tags(self, request: Request) -> Response:
        """Every name, in Ollama's form."""
        known: dict[str, Any] = {}
        for said in await self._asked(request, "/api/tags"):
            known |= {model["name"]: model for model in said.get("models", ())}
        listed = [name if ":" in name else name + TAG for name in self._all_names()]
        unloaded = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": "", "details": {}}
        return json_response(
            {"models": [known.get(name, {"name": name, "model": name, **unloaded}) for name in listed]}
        )

    async def health(self, request: Request) -> Response:
        """Answers while the process runs."""
        del request
        return json_response({"status": "up"})

    async def ready(self, request: Request) -> Response:
        """Status 200 while a model is loaded, else 503; says of each what its process does."""
        del request
        is_ready = bool(self._models.urls)
        return json_response({"ready": is_ready, "models": self._models.phases}, 200 if is_ready else 503)

    async def numbers(self, request: Request) -> Response:
        """The metrics of this process, and those of each loaded model with its name as the label `model`."""
        urls = self._models.urls
        headers = _key(request)
        texts = await asyncio.gather(*(self._forwarder.ask(url, "/metrics", headers) for url in urls.values()))
        registry = CollectorRegistry()
        registry.register(_Together({name: text for name, text in zip(urls, texts, strict=True) if text is not None}))
        content = self._metrics.text() + generate_latest(registry)
        return Response(content, headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        del request
        return Response(self._document, media_type="application/json")

    def _all_names(self) -> list[str]:
        return [name for model in self._models.programs for name in (model.name, *model.adapters)]

    async def _cards(self, request: Request) -> list[dict[str, Any]]:
        loaded = self._models.urls
        for said in await self._asked(request, "/v1/models"):
            self._known |= {card["id"]: card for card in said.get("data", ())}
        own = {name: model.name for model in self._models.programs for name in (model.name, *model.adapters)}
        return [
            {
                "id": name,
                "object": "model",
                "created": self._config.created_s,
                "owned_by": "fusionai",
                **self._known.get(name, {}),
                "loaded": own[name] in loaded,
            }
            for name in self._all_names()
        ]

    async def _asked(self, request: Request, path: str) -> list[dict[str, Any]]:
        """Return the answers of all loaded models to this GET."""
        headers = _key(request)
        said = await asyncio.gather(*(self._forwarder.ask(url, path, headers) for url in self._models.urls.values()))
        return [msgspec.json.decode(answer, type=dict[str, Any]) for answer in said if answer is not None]


def _key(request: Request) -> dict[str, str]:
    """Return the headers that carry the client's API key."""
    return {name: request.headers[name] for name in ("authorization", "x-api-key") if name in request.headers}


class _Together(Collector):
    """The metrics of several models in one text: name of the model -> its metrics. Those that have vLLM's label of the
    model's name keep it."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, text in self._texts.items():
            for family in text_string_to_metric_families(text.decode(errors="replace")):
                if family.name.endswith("_created"):  # times of counters, which the text form shows as gauges
                    continue
                name = f"fusion_model_{family.name.removeprefix('fusion_')}" if family.name in _OWN else family.name
                into = families.setdefault(name, Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    labels = sample.labels if "model_name" in sample.labels else {"model": model, **sample.labels}
                    into.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
        return families.values()


_OWN: Final = frozenset(family.name for family in text_string_to_metric_families(HttpMetrics().text().decode()))
"""Metrics that this process has too: those of the models get other names."""
