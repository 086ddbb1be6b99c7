"""What all endpoints of a gateway share: the engine, the tokenizer and templates, headings of answers, sending.

`app` creates it for the endpoints in `chat` and `completions`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import parameters
from fusionai.gateway.answers import RouteReport
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.errors import as_api_error, invalid
from fusionai.gateway.generation import ApiGeneration, Choice
from fusionai.gateway.metrics import Metrics
from fusionai.gateway.parameters import GenerationParameters
from fusionai.gateway.requests import ChatRequest, CompletionRequest, read
from fusionai.gateway.streaming import EventStream, Streams, while_connected
from fusionai.primitives.clock import Clock
from fusionai.serving.constraint import ConstraintCompiler, Form
from fusionai.serving.interface import Constraint, Engine
from fusionai.serving.model_text import ModelText

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Compose = Callable[[ApiGeneration], AsyncGenerator[bytes, None] | Coroutine[Any, Any, msgspec.Struct]]


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every chunk of an answer has, and which optional parts the answer contains."""

    answer_id: str
    created: int
    model: str
    is_stream: bool
    with_usage: bool
    with_route: bool
    with_logprobs: bool

    def route(self, generation: ApiGeneration) -> RouteReport | UnsetType:
        """The route up to now, if the answer contains it."""
        return generation.report() if self.with_route else UNSET


def json_response(body: object, status: int = 200) -> Response:
    """A complete answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class GatewayContext:
    """The endpoints' shared state; one per gateway."""

    def __init__(self, config: GatewayConfig, engine: Engine, text: ModelText, metrics: Metrics, clock: Clock) -> None:
        self.config = config
        self.engine = engine
        self.text = text
        self.metrics = metrics
        self.streams = Streams()
        self.clock = clock
        self._compiler: ConstraintCompiler | None = None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The model's own stop tokens."""
        return self.text.stop_tokens | self.engine.stop_tokens

    def check_count(self, n: int, prompts: int) -> int:
        """Total number of generations. Raises `ApiError` if one request must not have that many."""
        most = self.config.limits.choices
        if n * prompts > most:
            raise invalid(f"The request asks for {n * prompts} generations; at most {most} are allowed.", "n")
        return n * prompts

    def parameters(self, request: Request, body: ChatRequest | CompletionRequest) -> GenerationParameters:
        """Parameters of the request's generations. Raises `ApiError`."""
        return GenerationParameters(
            sampling=parameters.sampling_of(body, self.text.sampling, self.engine.vocabulary),
            stops=parameters.stops_of(body),
            stop_tokens=parameters.stop_tokens_of(body, self.stop_tokens, self.engine.vocabulary),
            scope=request.state.holder.scope,
            adapter=parameters.adapter_of(body.model, self.config),
            deadline_s=parameters.deadline_of(body, self.config),
        )

    async def constraint(self, form: Form) -> Constraint:
        """Compile a constraint. Raises `ApiError`."""
        with as_api_error():
            if self._compiler is None:
                self._compiler = ConstraintCompiler(
                    self.text.tokenizer, vocabulary=self.engine.vocabulary, stop_tokens=self.stop_tokens
                )
            return await self._compiler.compile(form)

    async def opened(self, request: Request, kind: type[Body], prefix: str) -> tuple[Body, Heading]:
        """Return the request's checked body and the heading of its answer. Raises `ApiError`."""
        parameters.check_ready(self.engine)
        body = await read(request, kind, self.config.limits)
        heading = Heading(
            answer_id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(self.clock.wall_s()),
            model=parameters.adapter_of(body.model, self.config) or self.config.model,
            is_stream=parameters.stream_wanted(body),
            with_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
            with_route=parameters.wants_route(request, body.fusion_route),
            with_logprobs=body.logprobs is not None and body.logprobs is not False,
        )
        return body, heading

    async def reply(self, request: Request, choices: Sequence[Choice], compose: Compose) -> Response:
        """Start the generations and answer: with chunks as they come, or with the whole answer once it is there."""
        generation = ApiGeneration(self.engine, choices, self.metrics, self.clock.now_s)
        await generation.open()
        body = compose(generation)
        if isinstance(body, AsyncGenerator):
            return EventStream(
                body,
                self.config.limits,
                self.streams,
                on_slow=self.metrics.slow.inc,
                on_gone=self.metrics.disconnected.inc,
                on_end=generation.close,
            )
        try:
            whole = await while_connected(request, body)
        finally:
            await generation.close()
        return json_response(whole)

    def close(self) -> None:
        """Release the constraint compiler's thread."""
        if self._compiler is not None:
            self._compiler.close()
