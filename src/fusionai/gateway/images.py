"""Images in requests: data URLs to pictures' bytes, and these to rows for the prompt.

Decides what may be sent: `data:` URLs with a picture in base64, at most `RequestLimits.images` in a request. Other URLs
are fetched only if the gateway allows it (`fusion serve --image-urls`). A client chooses the URL, and the gateway may
stand in a network that the client can't enter. So only addresses of the public internet are dialled: a name is resolved
once, all of its addresses are checked, and the checked address is the one that is connected to; redirects go through
the same check. Fetching blocks, so it runs in a thread.

`chat` puts the images into prompts; `serving.images` has them encoded.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from fusionai.gateway.context import GatewayContext
from fusionai.gateway.errors import invalid
from fusionai.gateway.requests import ImagePart, Message
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.serving.images import PlacedImage

_DATA_URL: Final = re.compile(r"data:image/[\w.+-]+(?:;[\w=.-]+)*;base64,", re.IGNORECASE)
_SHOWN: Final = 60


async def read_images(context: GatewayContext, messages: Sequence[Message], scope: str) -> tuple[PlacedImage, ...]:
    """Return the images of a conversation in order, encoded. `scope`: of the request's key. Raises `ApiError`."""
    urls = [
        part.image_url.url
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    ]
    if not urls:
        return ()
    reader = context.text.images
    if reader is None:
        raise invalid("This model reads text only: leave images out.", "messages", "unsupported_parameter")
    most = context.config.limits.images
    if len(urls) > most:
        raise invalid(f"The request has {len(urls)} images; at most {most} are accepted.", "messages")
    placed: list[PlacedImage] = []
    for number, url in enumerate(urls, 1):
        try:
            placed.append(await reader.read(await _bytes_of(url, context), scope))
        except (UsageError, ModelError) as problem:
            # A request may have come in another protocol, so the image is named by its number.
            raise invalid(f"Image {number} of the request: {problem}", "messages", "invalid_image") from None
    return tuple(placed)


async def _bytes_of(url: str, context: GatewayContext) -> bytes:
    start = _DATA_URL.match(url)
    if start is None and context.config.fetches_images and not url.startswith("data:"):
        return await context.off_loop(fetched, url, context.config.limits.image_body_bytes)
    if start is None:
        raise UsageError(
            f"expected a data URL (data:image/png;base64,...), got {url[:_SHOWN]!r}.",
            hint="This gateway fetches nothing from other servers; `fusion serve --image-urls` lets it.",
        )
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except binascii.Error as problem:
        raise UsageError(f"the data URL is not valid base64: {problem}.") from None


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which images are as chat templates expect them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in content]}


FETCH_S: Final = 15.0
"""Time for a whole picture, in seconds (chosen)."""
REDIRECTS: Final = 3
"""Redirects that are followed (chosen)."""
_PIECE_BYTES: Final = 2**16
_REDIRECTED: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}
_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 addresses that stand for IPv4 ones, which may be internal."""


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet: not to this machine, its network, or a group."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not found.is_multicast


def fetched(url: str, most_bytes: int, allowed: Callable[[str], bool] = is_public) -> bytes:
    """Return the bytes at `url`, at most `most_bytes`. `allowed`: whether an address may be dialled. Raises
    `UsageError`."""
    until_s = time.monotonic() + FETCH_S
    for _ in range(1 + REDIRECTS):
        parts = _checked(url)
        try:
            with _connected(parts, allowed, until_s) as connection:
                target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
                connection.request("GET", target, headers={"User-Agent": "fusionai", "Accept": "image/*"})
                answer = connection.getresponse()
                if answer.status not in _REDIRECTED:
                    return _body(answer, url, most_bytes, until_s)
                url = urljoin(url, answer.headers.get("Location", ""))
        except (OSError, HTTPException, UnicodeError) as error:
            raise UsageError(f"{url[:200]} can't be fetched: {error or type(error).__name__}.") from error
    raise UsageError(f"{url[:200]} was reached by more than {REDIRECTS} redirects.")


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url[:200]!r} is no URL: {error}.") from None
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or port == 0:
        raise UsageError(f"expected a URL such as https://example.org/cat.png, got {url[:200]!r}.")
    return parts


class _Connection(HTTPConnection):
    """A connection to an address that has been checked. As a context manager it is closed at the end, and cut off after
    `timeout_s`: a server that sends a byte now and then must not hold the thread, whatever part of the answer it is in.
    """

    def __init__(self, host: str, port: int, address: tuple[str, int], *, tls: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address = address
        self._tls = tls
        self._end = threading.Timer(timeout_s, self._cut_off)
        self._end.daemon = True

    def connect(self) -> None:
        """Connect to the checked address instead of resolving the name again."""
        self.sock = socket.create_connection(self._address, self.timeout)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def _cut_off(self) -> None:
        with suppress(OSError, AttributeError):  # it may be closed already, or not connected yet
            self.sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Connection:
        self._end.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.cancel()
        self.close()


def _connected(parts: SplitResult, allowed: Callable[[str], bool], until_s: float) -> _Connection:
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    inner = next((address for address in addresses if not allowed(address)), None)
    if inner is not None or not addresses:
        raise UsageError(
            f"{host} has the address {inner}, which is not on the public internet.",
            hint="Send the picture itself, as a data URL.",
        )
    return _Connection(host, port, (addresses[0], port), tls=parts.scheme == "https", timeout_s=_left_s(until_s))


def _body(answer: HTTPResponse, url: str, most_bytes: int, until_s: float) -> bytes:
    if answer.status != 200:
        raise UsageError(f"{url[:200]} can't be fetched: its server answered {answer.status} {answer.reason[:80]}.")
    body = bytearray()
    while piece := answer.read1(_PIECE_BYTES):
        body += piece
        if len(body) > most_bytes:
            raise UsageError(f"{url[:200]} has more than {most_bytes} bytes.", hint="Send a smaller picture.")
        _left_s(until_s)
    _left_s(until_s)  # cut off in the middle, it looks like an end
    return bytes(body)


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise UsageError(f"the picture could not be fetched within {FETCH_S:g} s.")
    return left_s
