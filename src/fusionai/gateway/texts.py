"""Answers requests that read texts without continuing them: `POST /v1/embeddings` gives vectors of texts, `/v1/rerank`
(also `/rerank` and `/v2/rerank`) and `/v1/score` say how well texts go with another text, by a cross-encoder.

`text_bodies` has the bodies. The engine computes the vectors (`serving.pooling` says of what), and a logit for each
pair of texts; the model's files say what turns a logit into a score.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import invalid, nearest
from fusionai.gateway.prompts import check_inputs, check_limit, cut_of, prompts_of
from fusionai.gateway.streaming import while_connected
from fusionai.gateway.text_bodies import (
    RERANK,
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Ranked,
    RankedList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextUsage,
)
from fusionai.serving.interface import TextPair


class EmbeddingEndpoint:
    """Computes vectors of texts."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def text_embeddings(self, request: Request) -> Response:
        """Answer one request."""
        context = self._context
        body = await context.read(request, EmbeddingRequest, gift="vectors")
        adapter = context.adapter_of(body.model)
        if isinstance(body.input, list) and not isinstance(body.input[0], int):
            check_inputs(len(body.input), context, "input")
        answer = await while_connected(request, self._answer(request, body, adapter))
        return json_response(answer)

    async def _answer(self, request: Request, body: EmbeddingRequest, adapter: str | None) -> EmbeddingList:
        context = self._context
        prompts = await self._prompts(body)
        model, tokens = adapter or context.config.model, sum(map(len, prompts))
        with context.tracer.reading(request, model, tokens, "embeddings"):
            vectors = await context.engine.embed(prompts, request.state.holder.scope, adapter)
        if body.dimensions is not None:
            normalises = context.text.sentences.pooling.normalises
            vectors = [_shortened(vector, body.dimensions, normalises=normalises) for vector in vectors]
        data = [
            Embedding(index, _base64(vector) if body.encoding_format == "base64" else vector)
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingList(data, model, TextUsage(tokens, tokens))

    async def _prompts(self, body: EmbeddingRequest) -> list[tuple[int, ...]]:
        context, sentences = self._context, self._context.text.sentences
        before, cut = self._prompt_before(body), cut_of(body.truncate_prompt_tokens, context)

        async def read(text: str) -> tuple[int, ...]:
            if not text:
                raise invalid("`input` has an empty text: expected at least one character.", "input")
            text = (before + text).lower() if sentences.lowers else before + text
            if cut is not None:
                return tuple(await context.off_loop(context.text.tokenizer.limited, text, cut))
            await context.check_length([text], "input")
            return await context.off_loop(context.text.text_tokens, text)

        prompts = [prompt[:cut] for prompt in await prompts_of(body.input, context, "input", read)]
        for prompt in prompts:
            check_limit(len(prompt), context, "input", "one input")
        return prompts

    def _prompt_before(self, body: EmbeddingRequest) -> str:
        """Return the model's own prompt that the request, or the model's default, puts before texts."""
        sentences = self._context.text.sentences
        is_text = isinstance(body.input, str) or isinstance(body.input[0], str)
        name = body.prompt_name or (sentences.default_prompt if is_text else None)
        if name is None:
            return ""
        if name not in sentences.prompts:
            known = (
                nearest(name, tuple(sentences.prompts)) or f" Its prompts: {', '.join(sentences.prompts) or 'none'}."
            )
            raise invalid(f"The model has no prompt `{name[:64]}`.{known}", "prompt_name")
        if not is_text:
            raise invalid("A prompt can be put before texts only, not before tokens.", "prompt_name")
        if sentences.pooling.excludes_prompt and sentences.prompts[name]:
            message = "This model leaves its prompts out of its vectors, which is not supported."
            raise invalid(message, "prompt_name", "unsupported_value")
        return sentences.prompts[name]


def _shortened(vector: list[float], dimensions: int, *, normalises: bool) -> list[float]:
    """The first `dimensions` entries, scaled to length 1 again if all vectors are, as OpenAI does. Raises `ApiError` if
    the vector is shorter."""
    if dimensions > len(vector):
        raise invalid(f"The model's vectors have {len(vector)} dimensions, not {dimensions}.", "dimensions")
    cut = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in cut)) if normalises else 0.0
    return [value / length for value in cut] if length else cut


def _base64(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")


_COHERE: Final = "/v2/"
"""Paths under which answers have no documents, unless the request asks for them."""


class RerankEndpoint:
    """Scores pairs of texts."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def rerank(self, request: Request) -> Response:
        """Sort documents by how well they answer a query."""
        context = self._context
        body = await context.read(request, RerankRequest, RERANK, gift="scores")
        documents = [one.text if isinstance(one, Document) else one for one in body.documents]
        pairs = [(body.query, document) for document in documents]
        scores, usage = await self._scored(request, body, pairs, ("query", "documents"), body.max_tokens_per_doc)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
        shows = not request.url.path.startswith(_COHERE) if body.return_documents is None else body.return_documents
        results = [
            Ranked(index, scores[index], Document(documents[index])) if shows else Ranked(index, scores[index])
            for index in best
        ]
        return json_response(RankedList(f"rerank-{secrets.token_hex(12)}", context.config.model, results, usage))

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        context = self._context
        body = await context.read(request, ScoreRequest, gift="scores")
        first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            message = f"`text_1` has {len(first)} texts and `text_2` {len(second)}: expected one, or as many."
            raise invalid(message, "text_1")
        pairs = list(zip(first, second, strict=True))
        scores, usage = await self._scored(request, body, pairs, ("text_1", "text_2"))
        data = [Score(index, score) for index, score in enumerate(scores)]
        created = int(context.clock.wall_s())
        return json_response(ScoreList(f"score-{secrets.token_hex(12)}", created, context.config.model, data, usage))

    async def _scored(
        self,
        request: Request,
        body: RerankRequest | ScoreRequest,
        texts: Sequence[tuple[str, str]],
        params: tuple[str, str],
        most: int | None = None,
    ) -> tuple[list[float], TextUsage]:
        """Return the score of each pair. `params`: the fields that both texts come from. `most`: tokens to which the
        second text is cut."""
        context = self._context
        context.adapter_of(body.model)
        check_inputs(len(texts), context, params[1])
        logits, tokens = await while_connected(request, self._logits(request, body, texts, params, most))
        plain = body.use_activation is False or context.text.sentences.activation == "identity"
        return [logit if plain else _sigmoid(logit) for logit in logits], TextUsage(tokens, tokens)

    async def _logits(
        self,
        request: Request,
        body: RerankRequest | ScoreRequest,
        texts: Sequence[tuple[str, str]],
        params: tuple[str, str],
        most: int | None,
    ) -> tuple[list[float], int]:
        context, cut = self._context, cut_of(body.truncate_prompt_tokens, self._context)
        pairs = [await self._pair(pair, params, cut, most) for pair in texts]
        tokens = sum(len(pair.tokens) for pair in pairs)
        with context.tracer.reading(request, context.config.model, tokens, "rerank"):
            found = await context.engine.score(pairs, request.state.holder.scope)
        return [logit for (logit,) in found], tokens

    async def _pair(
        self, texts: tuple[str, str], params: tuple[str, str], cut: int | None, most: int | None
    ) -> TextPair:
        context, tokenizer = self._context, self._context.text.tokenizer
        for text, param in zip(texts, params, strict=True):
            if not text:
                raise invalid(f"`{param}` has an empty text: expected at least one character.", param)
            if cut is None:
                await context.check_length([text], param)
        tokens, second_from = await context.off_loop(tokenizer.pair, *texts, cut, most)
        check_limit(len(tokens), context, params[1], f"`{params[0]}` with one of `{params[1]}`")
        return TextPair(tuple(tokens), second_from)


def _sigmoid(value: float) -> float:
    if value < 0:
        grown = math.exp(value)
        return grown / (1.0 + grown)
    return 1.0 / (1.0 + math.exp(-value))
