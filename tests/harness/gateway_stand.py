"""A gateway on loopback over a scripted engine, for as long as a test's `async with` lasts.

Neighbours: `scripted_engine`, `tiny_text`; the tests of the gateway speak HTTP to it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fusionai.gateway.app import Gateway
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.server import HttpApplication, open_listener, serve
from fusionai.gateway.tracing import Tracer
from fusionai.serving.interface import AdapterLoader
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine

LIMIT_S = CEILING_S


@dataclass(frozen=True, slots=True)
class Stand:
    url: str
    engine: ScriptedEngine
    app: Gateway
    stop: asyncio.Event
    served: asyncio.Task[None]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@asynccontextmanager
async def gateway_stand(
    engine: ScriptedEngine,
    config: GatewayConfig | None = None,
    tls: ssl.SSLContext | None = None,
    tracer: Tracer | None = None,
    loader: AdapterLoader | None = None,
) -> AsyncIterator[Stand]:
    app = Gateway(config or GatewayConfig("tiny"), engine, engine.text, tracer=tracer, loader=loader)
    async with listening(app, tls) as (url, stop, served):
        yield Stand(url, engine, app, stop, served)


@asynccontextmanager
async def listening(
    app: HttpApplication, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[None]]]:
    """The address of an application, the event that stops it, and its server."""
    stop = asyncio.Event()
    listener, url = open_listener("127.0.0.1", 0, has_keys=app.config.keys is not None, has_tls=tls is not None)
    ready = asyncio.Event()
    served = asyncio.create_task(serve(app, listener, stop=stop, on_listening=ready.set, tls=tls))
    waiting = asyncio.create_task(ready.wait())
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait((served, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if served.done():
        await served
    try:
        yield url, stop, served
    finally:
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await served


async def until(condition: Any, *, limit_s: float = LIMIT_S) -> None:
    """Waits for what another task brings about."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the condition is no event
            await asyncio.sleep(0.01)


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    """A request's body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
