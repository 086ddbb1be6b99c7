"""The broker's page over HTTP: its files, its sessions, a stream of overviews, and the actions that a session may ask
for.

A thin shell: `access` decides about requests, `desk` reads the pool and acts. `gateway.server` runs the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Final, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fusionai.cli.page.access import PageRefusal, RequestHead, SessionGate, check_source
from fusionai.cli.page.actions import Action, ActionDone
from fusionai.cli.page.overview import PageOverview
from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.gateway.metrics import HttpMetrics
from fusionai.gateway.pages import PAGE_HEADERS
from fusionai.gateway.streaming import event
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError

LOOK_S: Final = 1.0
"""Period at which the overview is compared with the last one sent, in seconds (chosen)."""
QUIET_S: Final = 15.0
"""Time without a change after which a comment shows that the stream lives (chosen)."""
MOST_BODY_BYTES: Final = 65_536
BODY_S: Final = 15.0
_FILES: Final = {
    "": ("fusionai.cli.page", "files/index.html", "text/html; charset=utf-8"),
    "style.css": ("fusionai.gateway", "page/style.css", "text/css; charset=utf-8"),
    "page.css": ("fusionai.cli.page", "files/page.css", "text/css; charset=utf-8"),
    "page.js": ("fusionai.cli.page", "files/page.js", "text/javascript; charset=utf-8"),
    "dom.js": ("fusionai.gateway", "page/dom.js", "text/javascript; charset=utf-8"),
    "draw.js": ("fusionai.cli.page", "files/draw.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("fusionai.gateway", "page/icon.svg", "image/svg+xml"),
}


class PageDesk(Protocol):
    """What the page shows and does."""

    def overview(self) -> PageOverview:
        """Return the present overview."""
        ...

    def log(self, job: str) -> tuple[str, ...]:
        """Return the history of a job. Raises `FusionError` for an unknown one."""
        ...

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the last lines of a program's log. Raises `FusionError` for an unknown one."""
        ...

    async def act(self, action: Action) -> ActionDone:
        """Perform an action of the pool's owner. Raises `FusionError`."""
        ...


class SecretShown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of the request that opens a session."""

    secret: str


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page is: its scheme, the names of its machine that requests may use, and its port."""

    scheme: str
    hosts: frozenset[str]
    port: int

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers send cookies to all ports of a host."""
        return f"fusion_page_{self.port}"


class BrokerPage:
    """The ASGI application. `config` and `metrics` are for the server that runs it."""

    def __init__(self, desk: PageDesk, gate: SessionGate, address: PageAddress, clock: Clock) -> None:
        self.config = GatewayConfig(model="", limits=RequestLimits(connections=64, drain_s=1.0))
        self.metrics = HttpMetrics()
        self._desk = desk
        self._gate = gate
        self._address = address
        self._clock = clock
        self._ending = asyncio.Event()
        files = [Route(f"/{name}", _file(*_FILES[name])) for name in _FILES]
        self._inner = Starlette(
            routes=[
                *files,
                Route("/session", self._open_session, methods=["POST"]),
                Route("/session", self._close_session, methods=["DELETE"]),
                Route("/events", self._events),
                Route("/jobs/{job}", self._job),
                Route("/programs/{number:int}", self._program),
                Route("/actions", self._act, methods=["POST"]),
            ],
            exception_handlers={FusionError: _refused, HTTPException: _not_here},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        headers = request.headers
        head = RequestHead(
            method=request.method,
            host=headers.get("host"),
            origin=headers.get("origin"),
            fetch_site=headers.get("sec-fetch-site"),
            content_type=headers.get("content-type"),
        )
        try:
            check_source(head, scheme=self._address.scheme, hosts=self._address.hosts)
            if scope["path"].lstrip("/") not in (*_FILES, "session"):
                self._gate.check(request.cookies.get(self._address.cookie), self._clock.now_s())
        except PageRefusal as refusal:
            await (await _refused(request, refusal))(scope, receive, send)
            return
        await self._inner(scope, receive, send)

    def end_streams(self) -> None:
        """End the streams of overviews."""
        self._ending.set()

    async def close(self) -> None:
        """Nothing is left to release."""

    async def _open_session(self, request: Request) -> Response:
        shown = await _body(request, msgspec.json.Decoder(SecretShown))
        token = self._gate.open(shown.secret, self._clock.now_s())
        answer = _json({"open": True})
        secure = self._address.scheme == "https"
        answer.set_cookie(self._address.cookie, token, path="/", secure=secure, httponly=True, samesite="strict")
        return answer

    async def _close_session(self, request: Request) -> Response:
        self._gate.close(request.cookies.get(self._address.cookie))
        answer = _json({"open": False})
        answer.delete_cookie(self._address.cookie, path="/")
        return answer

    async def _events(self, request: Request) -> Response:
        token = request.cookies.get(self._address.cookie)
        return StreamingResponse(self._overviews(token), media_type="text/event-stream", headers=PAGE_HEADERS)

    async def _overviews(self, token: str | None) -> AsyncGenerator[bytes]:
        """Yield each overview that differs from the last one, until the session or the program ends."""
        sent, quiet_s = b"", 0.0
        while not self._ending.is_set():
            try:
                self._gate.check(token, self._clock.now_s())
            except PageRefusal:
                return
            shown = event(self._desk.overview())
            if shown != sent:
                yield shown
                sent, quiet_s = shown, 0.0
            elif quiet_s >= QUIET_S:
                yield b": still here\n\n"
                quiet_s = 0.0
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._ending.wait()
            except TimeoutError:
                quiet_s += LOOK_S

    async def _job(self, request: Request) -> Response:
        return _json({"lines": self._desk.log(request.path_params["job"])})

    async def _program(self, request: Request) -> Response:
        return _json({"lines": self._desk.lines(request.path_params["number"])})

    async def _act(self, request: Request) -> Response:
        action = await _body(request, msgspec.json.Decoder(Action))
        return _json(await self._desk.act(action))


def _file(package: str, name: str, media: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files(package).joinpath(*name.split("/")).read_bytes()

    async def file(request: Request) -> Response:
        del request
        return Response(content, headers={**PAGE_HEADERS, "Content-Type": media})

    return file


def _json(value: object, status: int = 200) -> Response:
    headers = {**PAGE_HEADERS, "Cache-Control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _refused(request: Request, problem: Exception) -> Response:
    del request
    assert isinstance(problem, FusionError)
    status = problem.status if isinstance(problem, PageRefusal) else 400
    return _json({"message": problem.message, "hint": problem.hint or ""}, status)


async def _not_here(request: Request, problem: Exception) -> Response:
    del request
    assert isinstance(problem, HTTPException)
    return _json({"message": problem.detail, "hint": ""}, problem.status_code)


_T = TypeVar("_T")


async def _body(request: Request, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Return the request's body. Raises `PageRefusal`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BODY_BYTES:
                    raise PageRefusal(413, f"Expected a body of at most {MOST_BODY_BYTES} bytes.")
    except TimeoutError:
        raise PageRefusal(408, f"The body did not arrive within {BODY_S:g} s.") from None
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise PageRefusal(400, f"The request does not fit: {problem}.") from None
