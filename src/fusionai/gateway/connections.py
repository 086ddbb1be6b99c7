"""Limits on one connection before its first request is complete, so that idle connections are closed.

uvicorn's timers only start after the first answer: without this, a client that connects and sends nothing, or one line
a minute, would stay connected for ever. Neighbours: `server` passes this protocol to uvicorn.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fusionai.gateway.config import Limits
from fusionai.gateway.guards import SURPLUS_EXTENSION
from fusionai.gateway.streaming import ABORT_EXTENSION


def limited(limits: Limits) -> type[H11Protocol]:
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
