"""`POST /v1/completions`: continues texts. Decides the form of the answer; its content comes from the engine.

Also answers `/v1/embeddings`, which takes the same prompts.

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
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import asking
from fusionai.gateway.answers import (
    Completion,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    FinishWord,
    TextChoice,
    TextLogprobs,
)
from fusionai.gateway.asking import check_length, check_tokens, off_loop
from fusionai.gateway.desk import GatewayContext, Heading
from fusionai.gateway.errors import invalid, of_failure
from fusionai.gateway.generating import AnswerText, ApiGeneration, Choice, Delta, PromptSaid
from fusionai.gateway.requests import CompletionRequest, EmbeddingRequest, read
from fusionai.gateway.streaming import comment, event, while_connected
from fusionai.primitives.errors import FusionError
from fusionai.serving.interface import Engine, Generation, GenerationPaused, TokenLogprob
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
        check_tokens(prompt, engine.vocabulary, param)
    return prompts


async def _texts(texts: Sequence[str], text: ModelText, engine: Engine, param: str) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for one in texts:
        await check_length([one], text, engine, param)
        prompts.append(await off_loop(len(one), text.text_tokens, one))
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
    """Handles one request per call."""

    def __init__(self, desk: GatewayContext) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        body, heading, is_stream = await self._desk.opened(request, CompletionRequest, "cmpl")
        choices, echoes = await while_connected(request, self._choices(request, body))
        compose = self._chunks if is_stream else self._whole
        return await self._desk.reply(request, choices, lambda started: compose(started, heading, echoes))

    async def _choices(self, request: Request, body: CompletionRequest) -> tuple[list[Choice], list[_Echo | None]]:
        desk, text = self._desk, self._desk.text
        each = body.n or 1
        many = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
        desk.check_count(each, many)
        prompts = await prompts_of(body.prompt, text, desk.engine, "prompt")
        sampling = asking.sampling_of(body, text.sampling, desk.engine.vocabulary)
        stop_tokens = asking.stop_tokens_of(body, desk.stop_tokens, desk.engine.vocabulary)
        stops = asking.stops_of(body)
        choices: list[Choice] = []
        echoes: list[_Echo | None] = []
        for number, prompt in enumerate(prompts):
            room = asking.room_for(len(prompt), body.max_tokens, _DEFAULT_TOKENS, desk.engine, "prompt")
            echo = self._echo(prompt) if body.echo else None
            for index in range(number * each, (number + 1) * each):
                generation = Generation(
                    prompt=prompt,
                    max_tokens=max(room, 1),
                    sampling=desk.seeded(sampling, index),
                    stop_tokens=stop_tokens,
                    logprobs=body.logprobs,
                    scope=desk.scope(request),
                    adapter=asking.adapter_of(body.model, desk.config),
                    deadline_s=asking.deadline_of(body, desk.config),
                    prompt_logprobs=echo is not None and body.logprobs is not None,
                )
                decoder = text.decoder(stops=stops, after=prompt)
                choices.append(Choice(index, number, generation, decoder, keeps=None if room else 0))
                echoes.append(echo)
        return choices, echoes

    def _echo(self, prompt: Sequence[int]) -> _Echo:
        decoder = self._desk.text.decoder()
        pieces = [decoder.add(token) for token in prompt]
        text = "".join(piece.text for piece in (*pieces, decoder.finish()))
        return _Echo(text, tuple(prompt), tuple(piece.offset for piece in pieces))

    async def _whole(self, generating: ApiGeneration, heading: Heading, echoes: Sequence[_Echo | None]) -> Completion:
        texts: list[list[str]] = [[] for _ in echoes]
        logprobs = [_empty() for _ in echoes]
        finish: list[FinishWord] = ["stop"] * len(echoes)
        async for happening in generating.happenings():
            match happening:
                case PromptSaid(index=at) if (echo := echoes[at]) is not None:
                    texts[at].append(echo.text)
                    _extend(logprobs[at], self._of_prompt(echo, happening.read.logprobs))
                case Delta(index=at):
                    texts[at].append(happening.text)
                    _extend(logprobs[at], self._of_answer(happening.said, echoes[at]))
                    finish[at] = happening.finish or finish[at]
                case _:
                    pass
        choices = [
            TextChoice(at, "".join(texts[at]), finish[at], logprobs[at] if heading.with_logprobs else None)
            for at in range(len(echoes))
        ]
        told = self._desk.report(generating) if heading.with_route else UNSET
        return Completion(heading.answer_id, heading.created, heading.model, choices, generating.usage, fusion=told)

    async def _chunks(
        self, generating: ApiGeneration, heading: Heading, echoes: Sequence[_Echo | None]
    ) -> AsyncGenerator[bytes, None]:
        usage = None if heading.with_usage else UNSET
        unfinished = len(echoes)
        async for happening in generating.happenings():
            match happening:
                case GenerationPaused():
                    yield comment(f"{happening.state}: {happening.detail}")
                case PromptSaid(index=at) if (echo := echoes[at]) is not None:
                    told = self._of_prompt(echo, happening.read.logprobs) if heading.with_logprobs else None
                    choice = TextChoice(at, echo.text, None, told)
                    yield event(Completion(heading.answer_id, heading.created, heading.model, [choice], usage))
                case Delta(index=at):
                    unfinished -= happening.finish is not None
                    is_last = heading.with_route and not unfinished and not heading.with_usage
                    said = self._of_answer(happening.said, echoes[at]) if happening.said else None
                    choice = TextChoice(at, happening.text, happening.finish, said)
                    route = self._desk.report(generating) if is_last else UNSET
                    yield event(
                        Completion(heading.answer_id, heading.created, heading.model, [choice], usage, fusion=route)
                    )
                case _:
                    pass
        if heading.with_usage:
            route = self._desk.report(generating) if heading.with_route else UNSET
            yield event(
                Completion(heading.answer_id, heading.created, heading.model, [], generating.usage, fusion=route)
            )
        yield b"data: [DONE]\n\n"

    def _of_answer(self, said: Sequence[AnswerText], echo: _Echo | None) -> TextLogprobs:
        before = 0 if echo is None else len(echo.text)
        return self._lists([(one.logprob.token, one.logprob, before + one.offset) for one in said])

    def _of_prompt(self, echo: _Echo, told: Sequence[TokenLogprob]) -> TextLogprobs:
        """Log-probabilities of the prompt; the first token has none, because nothing precedes it."""
        known = [*itertools.repeat(None, len(echo.tokens) - len(told)), *told]
        return self._lists(list(zip(echo.tokens, known, echo.offsets, strict=True)))

    def _lists(self, rows: Sequence[tuple[int, TokenLogprob | None, int]]) -> TextLogprobs:
        named = self._desk.text.tokenizer.token_text
        return TextLogprobs(
            tokens=[named(token) for token, _, _ in rows],
            token_logprobs=[None if said is None else said.logprob for _, said, _ in rows],
            top_logprobs=[
                None if said is None else {named(token): value for token, value in reversed(said.top)}
                for _, said, _ in rows
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
    """Handles one request per call."""

    def __init__(self, desk: GatewayContext) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        desk = self._desk
        asking.check_ready(desk.engine)
        body = await read(request, EmbeddingRequest, desk.config.limits)
        adapter = asking.adapter_of(body.model, desk.config)
        most = desk.config.limits.inputs
        if isinstance(body.input, list) and not isinstance(body.input[0], int) and len(body.input) > most:
            raise invalid(f"The request has {len(body.input)} inputs; at most {most} are allowed.", "input")
        answer = await while_connected(request, self._answer(body, desk.scope(request), adapter))
        return desk.answer(answer)

    async def _answer(self, body: EmbeddingRequest, scope: str, adapter: str | None) -> EmbeddingList:
        desk = self._desk
        prompts = await prompts_of(body.input, desk.text, desk.engine, "input")
        for prompt in prompts:
            if len(prompt) > desk.engine.context_tokens:
                message = f"The model's limit is {desk.engine.context_tokens} tokens; one input has {len(prompt)}."
                raise invalid(message, "input", "context_length_exceeded")
        try:
            vectors = await desk.engine.embed(prompts, scope, adapter)
        except FusionError as problem:
            raise of_failure(problem) from problem
        if body.dimensions is not None:
            vectors = [_shortened(vector, body.dimensions) for vector in vectors]
        data = [
            Embedding(index, _base64(vector) if body.encoding_format == "base64" else vector)
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(map(len, prompts))
        return EmbeddingList(data, adapter or desk.config.model, EmbeddingUsage(tokens, tokens))


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
