"""Answers `/v1/rerank` (also `/rerank` and `/v2/rerank`) and `/v1/score`: how well texts go with another text, by a
cross-encoder.

`text_bodies` has the bodies. The engine computes a logit for each pair; the model's files say what turns it into a
score.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import ApiError, as_api_error, invalid
from fusionai.gateway.prompts import check_inputs, check_limit, cut_of
from fusionai.gateway.streaming import while_connected
from fusionai.gateway.text_bodies import (
    RERANK,
    Document,
    Ranked,
    RankedList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextUsage,
)
from fusionai.serving.interface import TextPair

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
        span = context.tracer.begin(request, context.config.model, {"gen_ai.usage.input_tokens": tokens}, "rerank")
        error: str | None = "cancelled"
        try:
            with as_api_error():
                found = await context.engine.score(pairs, request.state.holder.scope)
            error = None
        except ApiError as problem:
            error = problem.body.code
            raise
        finally:
            span.end({}, error)
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
