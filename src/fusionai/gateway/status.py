"""The engine's status: `/fusion/status` once, `/fusion/status/events` as a stream of changes.

Neighbours: the engine provides the status; the page shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.desk import Desk
from fusionai.gateway.streaming import EventStream, event
from fusionai.serving.interface import EngineStatus

_LOOK_S: Final = 0.5
"""Period at which the status is compared with the last one sent, in seconds (chosen)."""


class StatusReport(msgspec.Struct, frozen=True):
    """Status of the engine. `at_s`: seconds since 1970."""

    model: str
    context_tokens: int
    at_s: float
    engine: EngineStatus


class StatusEndpoint:
    """`GET /fusion/status`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        del request
        return self._desk.answer(report(self._desk))


class StatusEventsEndpoint:
    """`GET /fusion/status/events`: a report at once, and again after each change."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        del request
        limits = self._desk.config.limits

        async def nothing() -> None:
            """There is no generation to cancel."""

        return EventStream(
            self._changes(), limits, self._desk.streams, on_slow=_ignore, on_gone=_ignore, on_end=nothing
        )

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        told: EngineStatus | None = None
        while True:
            now = report(self._desk)
            if now.engine != told:
                told = now.engine
                yield event(now)
            await asyncio.sleep(_LOOK_S)


def report(desk: Desk) -> StatusReport:
    """The status now."""
    return StatusReport(desk.config.model, desk.engine.context_tokens, desk.clock.wall_s(), desk.engine.status)


def _ignore() -> None:
    """Disconnected status pages are not counted."""
