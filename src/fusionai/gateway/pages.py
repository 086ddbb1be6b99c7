"""The gateway's own web page: its files, and the headers that keep foreign content out of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_PAGE: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
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


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [Route(f"/{path}", _page(*_PAGE[path])) for path in _PAGE]


def _page(file: str, media: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files("fusionai.gateway").joinpath("page", file).read_bytes()

    async def page(request: Request) -> Response:
        del request
        return Response(content, headers={**_PAGE_HEADERS, "Content-Type": media})

    return page
