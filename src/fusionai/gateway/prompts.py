"""Texts and tokens of a request as the model reads them. Completions and vectors take the same prompts.

With an encoder-decoder model, a text goes to the encoder and the answer comes from the decoder: `serving.sources` runs
the encoder, `audio` reads sound. `context` has the tokenizer and the limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusionai.gateway.context import GatewayContext
from fusionai.gateway.errors import invalid, of_failure
from fusionai.primitives.errors import FusionError
from fusionai.serving.images import PlacedImage

Given = str | list[str | int | list[int]]


async def prompts_of(
    given: Given, context: GatewayContext, param: str, read: Callable[[str], Awaitable[tuple[int, ...]]] | None = None
) -> list[tuple[int, ...]]:
    """Return one or more prompts as tokens, none of them empty. `read`: turns a text into tokens, by default as a
    prompt to be continued. Raises `ApiError`."""

    async def plain(text: str) -> tuple[int, ...]:
        await context.check_length([text], param)
        return await context.off_loop(context.text.text_tokens, text)

    parts: list[Any] = [given] if isinstance(given, str) else given
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        raise invalid(
            f"`{param}` must be a text, texts, tokens or lists of tokens, not a mixture.", param, "invalid_type"
        )
    if kinds == {int}:
        parts = [parts]
    prompts = [await (read or plain)(part) if isinstance(part, str) else tuple(part) for part in parts]
    for prompt in prompts:
        if not prompt:
            raise invalid(f"`{param}` is empty: expected at least one token.", param)
        if max(prompt) >= context.engine.vocabulary:
            message = f"Token {max(prompt)} is outside the vocabulary of {context.engine.vocabulary}."
            raise invalid(message, param)
    return prompts


def check_inputs(count: int, context: GatewayContext, param: str) -> None:
    """Raise `ApiError` for more texts than one request may have."""
    most = context.config.limits.inputs
    if count > most:
        raise invalid(f"The request has {count} inputs; at most {most} are allowed.", param)


def cut_of(asked: int | None, context: GatewayContext) -> int | None:
    """Return the length to which the request cuts texts, None if it cuts none. Raises `ApiError`."""
    limit = context.engine.context_tokens
    if asked is None or asked == -1:
        return None if asked is None else limit
    if not 1 <= asked <= limit:
        message = f"Expected -1, or a number from 1 to the model's limit of {limit} tokens, got {asked}."
        raise invalid(message, "truncate_prompt_tokens")
    return asked


def check_limit(tokens: int, context: GatewayContext, param: str, what: str) -> None:
    """Raise `ApiError` for a text that is longer than the model can read."""
    limit = context.engine.context_tokens
    if tokens > limit:
        message = f"The model's limit is {limit} tokens; {what} has {tokens}."
        raise invalid(message, param, "context_length_exceeded")


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
