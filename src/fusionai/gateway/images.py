"""Images in requests: data URLs to pictures' bytes, and these to rows for the prompt.

Decides what may be sent: `data:` URLs with a picture in base64, at most `RequestLimits.images` in a request. Other URLs
are fetched only if the gateway allows it (`remote_images`). `chat` puts the images into prompts; `serving.images` has
them encoded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

from fusionai.gateway.context import GatewayContext
from fusionai.gateway.errors import invalid
from fusionai.gateway.remote_images import fetched
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
