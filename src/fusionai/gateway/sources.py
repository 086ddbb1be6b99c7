"""Prompts of encoder-decoder models: a text goes to the encoder, and the answer comes from the decoder.

`chat` and `completions` use it; `serving.sources` runs the encoder, `audio` reads sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusionai.gateway.context import GatewayContext
from fusionai.gateway.errors import invalid, of_failure
from fusionai.gateway.prompts import check_limit
from fusionai.primitives.errors import FusionError
from fusionai.serving.images import PlacedImage


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """`tokens`: of the prompt, first the rows of `images`, then `start`, the tokens that the decoder begins with."""

    tokens: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    start: tuple[int, ...]


async def read_source(context: GatewayContext, tokens: Sequence[int], scope: str, param: str) -> SourcePrompt:
    """Return the prompt for the answer to a text. `scope`: of the request's key. Raises `ApiError`."""
    source = context.text.source
    assert source is not None
    if source.longest is not None and len(tokens) > source.longest:
        message = f"The model's encoder reads {source.longest} tokens at most; the text has {len(tokens)}."
        raise invalid(message, param, "context_length_exceeded")
    check_limit(len(tokens), context, param, "the text")
    try:
        rows = await source.read_text(tokens, scope)
    except FusionError as problem:
        raise of_failure(problem) from problem
    return SourcePrompt(source.prompt(rows), (rows,), source.rules.start)


def chat_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return the text of a conversation, whose roles such models don't know: the messages, one after the other."""
    return "\n".join(text for message in messages if (text := _content(message.get("content"))))


def _content(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""
