"""Answers `POST /v1/completions` and `POST /v1/embeddings`, which take the same prompts.

Neighbours: `requests.CompletionRequest` comes in, `answers.Completion` goes out, whole or in parts.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import parameters
from fusionai.gateway.answers import (
    Completion,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    FinishWord,
    RouteReport,
    TextChoice,
    TextLogprobs,
    Usage,
)
from fusionai.gateway.context import GatewayContext, Heading, json_response
from fusionai.gateway.errors import as_api_error, invalid
from fusionai.gateway.generation import AnswerLogprob, ApiGeneration, Choice, Delta, PromptProcessed
from fusionai.gateway.requests import CompletionRequest, EmbeddingRequest, read
from fusionai.gateway.streaming import comment, event, while_connected
from fusionai.serving.interface import Engine, GenerationPaused, TokenLogprob
from fusionai.serving.model_text import ModelText


async def prompts_of(
    given: str | list[str | int | list[int]], text: ModelText, engine: Engine, param: str
) -> list[tuple[int, ...]]:
    """Return one or more prompts as tokens, none of them empty. Raises `ApiError`."""
    if isinstance(given, str):
        prompts = await _texts([given], text, engine, param)
    elif all(isinstance(part, str) for part in given):
        prompts = await _texts([part for part in given if isinstance(part, str)], text, engine, param)
    elif all(isinstance(part, int) for part in given):
        prompts = [tuple(part for part in given if isinstance(part, int))]
    elif all(isinstance(part, list) for part in given):
        prompts = [tuple(part) for part in given if isinstance(part, list)]
    else:
        raise invalid(
            f"`{param}` must be a text, texts, tokens or lists of tokens, not a mixture.", param, "invalid_type"
        )
    for prompt in prompts:
        if not prompt:
            raise invalid(f"`{param}` is empty: expected at least one token.", param)
        parameters.check_tokens(prompt, engine.vocabulary, param)
    return prompts


async def _texts(texts: Sequence[str], text: ModelText, engine: Engine, param: str) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for one in texts:
        await parameters.check_length([one], text, engine, param)
        prompts.append(await parameters.off_loop(len(one), text.text_tokens, one))
    return prompts


_DEFAULT_TOKENS: Final = 16
"""OpenAI's default."""


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt to be included in the answer: its text, and where each of its tokens begins in it."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class CompletionEndpoint:
    """Continues texts."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def text_completions(self, request: Request) -> Response:
        """Answer one request."""
        body, heading = await self._context.opened(request, CompletionRequest, "cmpl")
        choices, echoes = await while_connected(request, self._choices(request, body))
        compose = self._chunks if heading.is_stream else self._whole
        return await self._context.reply(request, choices, lambda started: compose(started, heading, echoes))

    async def _choices(self, request: Request, body: CompletionRequest) -> tuple[list[Choice], list[_Echo | None]]:
        context, text = self._context, self._context.text
        each = body.n or 1
        many = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
        context.check_count(each, many)
        prompts = await prompts_of(body.prompt, text, context.engine, "prompt")
        shared = context.parameters(request, body)
        choices: list[Choice] = []
        echoes: list[_Echo | None] = []
        for number, prompt in enumerate(prompts):
            room = parameters.room_for(len(prompt), body.max_tokens, _DEFAULT_TOKENS, context.engine, "prompt")
            echo = self._echo(prompt) if body.echo else None
            for index in range(number * each, (number + 1) * each):
                with_prompt = echo is not None and body.logprobs is not None
                generation = shared.generation(index, prompt, room, body.logprobs, prompt_logprobs=with_prompt)
                decoder = text.decoder(stops=shared.stops, after=prompt)
                choices.append(Choice(index, number, generation, decoder, keeps=None if room else 0))
                echoes.append(echo)
        return choices, echoes

    def _echo(self, prompt: Sequence[int]) -> _Echo:
        decoder = self._context.text.decoder()
        pieces = [decoder.add(token) for token in prompt]
        text = "".join(piece.text for piece in (*pieces, decoder.finish()))
        return _Echo(text, tuple(prompt), tuple(piece.offset for piece in pieces))

    async def _whole(self, generation: ApiGeneration, heading: Heading, echoes: Sequence[_Echo | None]) -> Completion:
        texts: list[list[str]] = [[] for _ in echoes]
        logprobs = [_empty() for _ in echoes]
        finish: list[FinishWord] = ["stop"] * len(echoes)
        async for update in generation.updates():
            match update:
                case PromptProcessed(index=at) if (echo := echoes[at]) is not None:
                    texts[at].append(echo.text)
                    _extend(logprobs[at], self._of_prompt(echo, update.read.logprobs))
                case Delta(index=at):
                    texts[at].append(update.text)
                    _extend(logprobs[at], self._of_answer(update.logprobs, echoes[at]))
                    finish[at] = update.finish or finish[at]
                case _:
                    pass
        choices = [
            TextChoice(at, "".join(texts[at]), finish[at], logprobs[at] if heading.with_logprobs else None)
            for at in range(len(echoes))
        ]
        route = heading.route(generation)
        return Completion(heading.answer_id, heading.created, heading.model, choices, generation.usage, fusion=route)

    async def _chunks(
        self, generation: ApiGeneration, heading: Heading, echoes: Sequence[_Echo | None]
    ) -> AsyncGenerator[bytes, None]:
        no_usage = None if heading.with_usage else UNSET
        unfinished = len(echoes)

        def chunk(
            *choices: TextChoice,
            usage: Usage | UnsetType | None = no_usage,
            route: RouteReport | UnsetType = UNSET,
        ) -> bytes:
            name, created_s, model = heading.answer_id, heading.created, heading.model
            return event(Completion(name, created_s, model, list(choices), usage, fusion=route))

        async for update in generation.updates():
            match update:
                case GenerationPaused():
                    yield comment(f"{update.state}: {update.detail}")
                case PromptProcessed(index=at) if (echo := echoes[at]) is not None:
                    logprobs = self._of_prompt(echo, update.read.logprobs) if heading.with_logprobs else None
                    yield chunk(TextChoice(at, echo.text, None, logprobs))
                case Delta(index=at):
                    unfinished -= update.finish is not None
                    logprobs = self._of_answer(update.logprobs, echoes[at]) if update.logprobs else None
                    is_end = not unfinished and not heading.with_usage
                    route = heading.route(generation) if is_end else UNSET
                    yield chunk(TextChoice(at, update.text, update.finish, logprobs), route=route)
                case _:
                    pass
        if heading.with_usage:
            yield chunk(usage=generation.usage, route=heading.route(generation))
        yield b"data: [DONE]\n\n"

    def _of_answer(self, logprobs: Sequence[AnswerLogprob], echo: _Echo | None) -> TextLogprobs:
        before = 0 if echo is None else len(echo.text)
        return self._lists([(one.logprob.token, one.logprob, before + one.offset) for one in logprobs])

    def _of_prompt(self, echo: _Echo, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        """Log-probabilities of the prompt; the first token has none, because nothing precedes it."""
        known = [*itertools.repeat(None, len(echo.tokens) - len(logprobs)), *logprobs]
        return self._lists(list(zip(echo.tokens, known, echo.offsets, strict=True)))

    def _lists(self, rows: Sequence[tuple[int, TokenLogprob | None, int]]) -> TextLogprobs:
        named = self._context.text.tokenizer.token_text
        return TextLogprobs(
            tokens=[named(token) for token, _, _ in rows],
            token_logprobs=[None if known is None else known.logprob for _, known, _ in rows],
            top_logprobs=[
                None if known is None else {named(token): value for token, value in reversed(known.top)}
                for _, known, _ in rows
            ],
            text_offset=[offset for _, _, offset in rows],
        )


def _empty() -> TextLogprobs:
    return TextLogprobs([], [], [], [])


def _extend(all_of: TextLogprobs, more: TextLogprobs) -> None:
    all_of.tokens.extend(more.tokens)
    all_of.token_logprobs.extend(more.token_logprobs)
    all_of.top_logprobs.extend(more.top_logprobs)
    all_of.text_offset.extend(more.text_offset)


class EmbeddingEndpoint:
    """Computes vectors of texts."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def text_embeddings(self, request: Request) -> Response:
        """Answer one request."""
        context = self._context
        parameters.check_ready(context.engine)
        body = await read(request, EmbeddingRequest, context.config.limits)
        adapter = parameters.adapter_of(body.model, context.config)
        most = context.config.limits.inputs
        if isinstance(body.input, list) and not isinstance(body.input[0], int) and len(body.input) > most:
            raise invalid(f"The request has {len(body.input)} inputs; at most {most} are allowed.", "input")
        answer = await while_connected(request, self._answer(body, request.state.holder.scope, adapter))
        return json_response(answer)

    async def _answer(self, body: EmbeddingRequest, scope: str, adapter: str | None) -> EmbeddingList:
        context = self._context
        prompts = await prompts_of(body.input, context.text, context.engine, "input")
        for prompt in prompts:
            if len(prompt) > context.engine.context_tokens:
                message = f"The model's limit is {context.engine.context_tokens} tokens; one input has {len(prompt)}."
                raise invalid(message, "input", "context_length_exceeded")
        with as_api_error():
            vectors = await context.engine.embed(prompts, scope, adapter)
        if body.dimensions is not None:
            vectors = [_shortened(vector, body.dimensions) for vector in vectors]
        data = [
            Embedding(index, _base64(vector) if body.encoding_format == "base64" else vector)
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(map(len, prompts))
        return EmbeddingList(data, adapter or context.config.model, EmbeddingUsage(tokens, tokens))


def _shortened(vector: list[float], dimensions: int) -> list[float]:
    """The first `dimensions` entries, scaled to length 1 again, as OpenAI does. Raises `ApiError` if the vector is
    shorter."""
    if dimensions > len(vector):
        raise invalid(f"The model's vectors have {len(vector)} dimensions, not {dimensions}.", "dimensions")
    cut = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in cut))
    return [value / length for value in cut] if length else cut


def _base64(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")
