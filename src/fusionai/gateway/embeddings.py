"""`POST /v1/embeddings`: vectors of texts. Decides their encoding.

Neighbours: the engine computes the vectors, `prompts` reads the inputs.
"""

from __future__ import annotations

import base64
import math

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import asking
from fusionai.gateway.answers import Embedding, EmbeddingList, EmbeddingUsage
from fusionai.gateway.desk import Desk
from fusionai.gateway.errors import invalid, of_failure
from fusionai.gateway.prompts import prompts_of
from fusionai.gateway.reading import read
from fusionai.gateway.requests import EmbeddingRequest
from fusionai.gateway.streaming import while_connected
from fusionai.primitives.errors import FusionError


class EmbeddingEndpoint:
    """Handles one request per call."""

    def __init__(self, desk: Desk) -> None:
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
