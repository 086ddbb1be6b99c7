"""Answers `POST /v1/embeddings`: vectors of texts, in OpenAI's form.

`text_bodies.EmbeddingRequest` comes in, `text_bodies.EmbeddingList` goes out. The engine computes the vectors,
`serving.pooling` says of what.
"""

from __future__ import annotations

import base64
import math

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import ApiError, as_api_error, invalid, nearest
from fusionai.gateway.prompts import check_inputs, check_limit, cut_of, prompts_of
from fusionai.gateway.streaming import while_connected
from fusionai.gateway.text_bodies import Embedding, EmbeddingList, EmbeddingRequest, TextUsage


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
        span = context.tracer.begin(request, model, {"gen_ai.usage.input_tokens": tokens}, "embeddings")
        error: str | None = "cancelled"
        try:
            with as_api_error():
                vectors = await context.engine.embed(prompts, request.state.holder.scope, adapter)
            error = None
        except ApiError as problem:
            error = problem.body.code
            raise
        finally:
            span.end({}, error)
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
