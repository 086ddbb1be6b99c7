"""The gateway's own web page: its files, and the headers that keep foreign content out of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MEDIA: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES: Final = (
    "style.css",
    "page.css",
    "page.js",
    "chats.js",
    "dom.js",
    "markdown.js",
    "markdown-it.js",
    "pictures.js",
    "pool.js",
    "icon.svg",
)
PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [Route("/", _page("index.html")), *(Route(f"/{file}", _page(file)) for file in _FILES)]


def _page(file: str) -> Callable[[Request], Awaitable[Response]]:
    media = _MEDIA[file.rpartition(".")[2]]
    content = resources.files("fusionai.gateway").joinpath("page", file).read_bytes()

    async def page(request: Request) -> Response:
        del request
        return Response(content, headers={**PAGE_HEADERS, "Content-Type": media})

    return page
