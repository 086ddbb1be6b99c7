"""Checks on every request before its endpoint: request id, API key, number of requests; also counts answers.

Also limits connections (`limited`).

Decides who is admitted and how many at once. Without keys, only programs on this machine and the gateway's own page may
send requests; otherwise a foreign web page could use the pool through its reader's browser. `app` puts it before its
routes, `config` has the key holders.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fusionai.gateway.config import GatewayConfig, KeyHolder, RequestLimits
from fusionai.gateway.errors import ApiError, ClientGone, error_response
from fusionai.gateway.metrics import HttpMetrics
from fusionai.gateway.streaming import ABORT_EXTENSION
from fusionai.gateway.unknown_fields import IGNORED_HEADER, header_of

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_COUNTED: Final = ("/v1/", "/api/", "/fusion/")
_GUARDED: Final = (*_COUNTED, "/metrics")
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_NOBODY: Final = KeyHolder("", "")
_CLOSING: Final = {"Connection": "close"}
SURPLUS_EXTENSION: Final = "fusionai.surplus"
"""In a request's scope: the connection exceeds the limit of connections. Older connections are unaffected."""


class AdmissionMiddleware:
    """ASGI middleware."""

    def __init__(self, inner: ASGIApp, config: GatewayConfig, metrics: HttpMetrics) -> None:
        self._inner = inner
        self._config = config
        self._metrics = metrics
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        ignored: set[str] = set()
        scope.setdefault("state", {}).update(request_id=request_id, ignored=ignored)
        path: str = scope["path"]
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Anthropic's clients read the name without the x.
                answered = MutableHeaders(scope=message)
                answered.update({"x-request-id": request_id, "request-id": request_id})
                if ignored:
                    answered[IGNORED_HEADER] = header_of(ignored)
            await send(message)

        counted = path.startswith(_COUNTED)
        self._active += counted
        self._metrics.active.set(self._active)
        try:
            scope["state"]["holder"] = self._admitted(scope, headers, path, counted)
            await self._inner(scope, receive, send_named)
        except ClientGone:
            status = 499
            self._metrics.disconnected.inc()
        except ApiError as problem:
            await error_response(problem, path)(scope, receive, send_named)
        finally:
            self._active -= counted
            self._metrics.active.set(self._active)
            endpoint = scope["endpoint"].__name__ if "endpoint" in scope else "none"
            self._metrics.requests.labels(endpoint, str(status)).inc()

    def _admitted(self, scope: Scope, headers: Headers, path: str, counted: bool) -> KeyHolder:
        limits = self._config.limits
        if scope.get("extensions", {}).get(SURPLUS_EXTENSION, False):
            message = f"{limits.connections} connections are open, which is the limit."
            raise ApiError(503, message, code="too_many_connections", retry_after_s=2.0, headers=_CLOSING)
        self._refuse_foreign_pages(headers)
        holder = self._holder(headers) if path.startswith(_GUARDED) else _NOBODY
        if counted and self._active > limits.requests:
            message = f"{limits.requests} requests are being answered, which is the limit."
            raise ApiError(429, message, code="too_many_requests", retry_after_s=1.0, headers=_CLOSING)
        return holder

    def _holder(self, headers: Headers) -> KeyHolder:
        ring = self._config.keys
        if ring is None:
            return _NOBODY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme and (anthropic := headers.get("x-api-key")) is not None:
            scheme, key = "bearer", anthropic
        holder = ring.holder(key.strip()) if scheme.lower() == "bearer" else None
        if holder is None:
            message = (
                "The API key is not valid for this gateway."
                if scheme
                else "Expected the header `Authorization: Bearer KEY` or `x-api-key: KEY` with a key of this gateway."
            )
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return holder

    def _refuse_foreign_pages(self, headers: Headers) -> None:
        if self._config.keys is not None:
            return
        host = headers.get("host", "")
        if host_name(host) not in _LOCAL_NAMES:
            message = f"Without API keys the gateway only serves localhost and 127.0.0.1, got the host {host[:80]!r}."
            raise ApiError(403, message, code="foreign_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            message = "Without API keys, the gateway only serves its own web page, not pages of other origins."
            raise ApiError(403, message, code="foreign_origin")


def host_name(host: str) -> str:
    """Return the name in a `Host` header, without its port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def limited(limits: RequestLimits) -> type[H11Protocol]:
    """uvicorn's protocol class with `limits` enforced."""

    class LimitedConnection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > 2 * limits.connections:
                transport.abort()
                return
            # Bounds the data that the system and the event loop buffer for a client that does not read.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_bytes)
            transport.set_write_buffer_limits(high=limits.socket_bytes)
            self.app = _Marked(self.app, transport, is_surplus=len(self.connections) > limits.connections)
            self._await_head(limits.head_timeout_s)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._forget_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # A timer for the next request's head, because uvicorn's own timer ends with the first byte.
            self._await_head(self.timeout_keep_alive + limits.head_timeout_s)

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def _await_head(self, patience_s: float) -> None:
            self._forget_head()
            self._head_timer = self.loop.call_later(patience_s, self._head_is_late)

        def _forget_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_is_late(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return LimitedConnection


class _Marked:
    """Gives the application a function to close the connection at once, and whether the connection exceeds the
    limit."""

    def __init__(self, inner: ASGIApp, transport: asyncio.Transport, *, is_surplus: bool) -> None:
        self._inner = inner
        self._transport = transport
        self._is_surplus = is_surplus

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions: dict[str, Any] = scope.setdefault("extensions", {})
        extensions[ABORT_EXTENSION] = self._transport.abort
        extensions[SURPLUS_EXTENSION] = self._is_surplus
        await self._inner(scope, receive, send)
