"""Streamed answers (server-sent events, lines of JSON), and cancellation of work whose client has disconnected.

Decides how much data waits for a client that does not read: past the limit its stream ends with an error, and its
request is cancelled, so that nothing else has to wait. The endpoints produce the pieces, each in its protocol's form.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError, ClientGone, openai_error

Answer = TypeVar("Answer")
ABORT_EXTENSION: Final = "fusionai.abort"
"""In a request's scope: a function that closes the connection at once, without sending what is still unsent."""
_KEEP_ALIVE: Final = b": still here\n\n"
_HEADERS: Final = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


def event(value: object, name: str | None = None) -> bytes:
    """Encode an event of a stream; OpenAI's older streams have events without names."""
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + msgspec.json.encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """Encode a comment, which clients skip."""
    return b": " + " ".join(text.split()).encode(errors="replace") + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of `work`. If the client disconnects first, cancel the work and raise `ClientGone`."""
    return await unless(_left(request.receive), ClientGone, work)


async def unless(end: Coroutine[Any, Any, object], error: type[Exception], work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of `work`. If `end` returns first, cancel the work and raise `error`."""
    task, watch = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Streams:
    """All open streams of a gateway, so that they can be ended together."""

    def __init__(self) -> None:
        self._open: set[_Outbox] = set()

    def __len__(self) -> int:
        return len(self._open)

    def end(self, why: ApiError) -> None:
        """Send the error on every stream and close it."""
        for outbox in tuple(self._open):
            outbox.fail(why)

    def opened(self, outbox: _Outbox) -> None:
        self._open.add(outbox)

    def closed(self, outbox: _Outbox) -> None:
        self._open.discard(outbox)


class StreamForm(Protocol):
    """What a stream sends that is not part of the answer, in its protocol's form."""

    @property
    def media_type(self) -> str:
        """Value of the header `Content-Type`."""
        ...

    def keep_alive(self) -> bytes:
        """Return what is sent while nothing happens."""
        ...

    def failed(self, problem: ApiError) -> bytes:
        """Return what is sent last if the stream fails."""
        ...


class EventForm:
    """`StreamForm` of server-sent events, with errors as OpenAI's clients expect them."""

    media_type = "text/event-stream"

    def keep_alive(self) -> bytes:
        return _KEEP_ALIVE

    def failed(self, problem: ApiError) -> bytes:
        return event(openai_error(problem))


class AnswerStream(Response):
    """Sends `pieces` as they come. An `ApiError` raised by them becomes the last piece, in the form that `form` gives
    it."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        form: StreamForm,
        limits: RequestLimits,
        streams: Streams,
        *,
        on_slow: Callable[[], None],
        on_gone: Callable[[], None],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_end` is called once, however the stream ends, even if no piece was requested: as soon as no more pieces
        are wanted, which can be long before a client that does not read is disconnected."""
        super().__init__(headers=_HEADERS, media_type=form.media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._form = form
        self._limits = limits
        self._streams = streams
        self._on_slow = on_slow
        self._on_gone = on_gone
        self._on_end = on_end
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = _Outbox(self._limits.unread_bytes, self._form)
        self._streams.opened(outbox)
        pump = asyncio.create_task(self._pump(outbox))
        watch = asyncio.create_task(_left(receive))
        watch.add_done_callback(lambda _: outbox.leave())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (piece := await outbox.take(self._limits.keep_alive_s)) is not None:
                async with asyncio.timeout(self._limits.stalled_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                if outbox.is_failed:
                    pump.cancel()
            if not outbox.is_left:
                async with asyncio.timeout(self._limits.stalled_s):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self._on_slow()
            if (abort := scope.get("extensions", {}).get(ABORT_EXTENSION)) is not None:
                abort()
        finally:
            self._streams.closed(outbox)
            if outbox.is_left and not outbox.is_complete:
                self._on_gone()
            for task in (pump, watch):
                task.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)
            await self._end()

    async def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            await self._on_end()

    async def _pump(self, outbox: _Outbox) -> None:
        try:
            async for piece in self._pieces:
                if not outbox.put(piece):
                    if outbox.is_overfull:
                        self._on_slow()
                    return
            outbox.complete()
        except ApiError as problem:
            outbox.fail(problem)
        except Exception:
            # An error, so that the client does not take the partial answer for a complete one.
            outbox.fail(ApiError(500, "The gateway failed; its log says why.", code="internal_error"))
            raise
        finally:
            await self._pieces.aclose()
            await self._end()


class _Outbox:
    """Pieces that the connection has not taken yet."""

    def __init__(self, limit_bytes: int, form: StreamForm) -> None:
        self._limit_bytes = limit_bytes
        self._form = form
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self.is_complete = False
        self.is_failed = False
        self.is_left = False
        self.is_overfull = False

    def put(self, piece: bytes) -> bool:
        """Add a piece, of any size, unless too much waits already. Return whether more may follow."""
        if self.is_left or self.is_failed:
            return False
        if not piece:
            return True
        if self._bytes >= self._limit_bytes:
            self.is_overfull = True
            message = (
                f"The client read too slowly: {self._bytes} bytes waited for it, the limit is {self._limit_bytes}."
            )
            self.fail(ApiError(408, message, code="slow_reader"))
            return False
        self._append(piece)
        return True

    def complete(self) -> None:
        self.is_complete = True
        self._news.set()

    def fail(self, problem: ApiError) -> None:
        """Append the error as the last piece."""
        if not (self.is_failed or self.is_complete):
            self.is_failed = True
            self._append(self._form.failed(problem))

    def leave(self) -> None:
        """Note that the client has disconnected."""
        self.is_left = True
        self._news.set()

    async def take(self, patience_s: float) -> bytes | None:
        """Return all waiting pieces, or a piece to keep the connection alive after `patience_s`; None at the end."""
        if not (self._pieces or self.is_complete or self.is_failed or self.is_left):
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                return self._form.keep_alive()
        self._news.clear()
        if self.is_left or not self._pieces:
            return None
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._bytes = 0
        return taken

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        self._news.set()
