"""What all endpoints of a gateway share: the engine, the tokenizer and templates, headings of answers, sending.

Also answers the status endpoints.

Neighbours: `chat`, `completions` and `embeddings` use it, `app` creates it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import asking
from fusionai.gateway.answers import RouteReport
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.errors import invalid, of_failure
from fusionai.gateway.generating import ApiGeneration, Choice
from fusionai.gateway.metrics import Metrics
from fusionai.gateway.requests import ChatRequest, CompletionRequest, read
from fusionai.gateway.streaming import EventStream, Streams, event, while_connected
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError
from fusionai.serving.constraint import ConstraintCompiler, Form
from fusionai.serving.interface import Constraint, Engine, EngineStatus, Sampling
from fusionai.serving.model_text import ModelText

P = ParamSpec("P")
Result = TypeVar("Result")
Asked = TypeVar("Asked", ChatRequest, CompletionRequest)
Compose = Callable[[ApiGeneration], AsyncGenerator[bytes, None] | Coroutine[Any, Any, msgspec.Struct]]
_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every chunk of an answer has, and which optional parts the answer contains."""

    answer_id: str
    created: int
    model: str
    with_usage: bool
    with_route: bool
    with_logprobs: bool


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

    def heading(self, prefix: str, body: ChatRequest | CompletionRequest, *, with_route: bool) -> Heading:
        """Heading of a new answer."""
        return Heading(
            answer_id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(self.clock.wall_s()),
            model=asking.adapter_of(body.model, self.config) or self.config.model,
            with_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
            with_route=with_route,
            with_logprobs=body.logprobs is not None and body.logprobs is not False,
        )

    def check_count(self, n: int, prompts: int) -> int:
        """Total number of generations. Raises `ApiError` if one request must not have that many."""
        most = self.config.limits.choices
        if n * prompts > most:
            raise invalid(f"The request asks for {n * prompts} generations; at most {most} are allowed.", "n")
        return n * prompts

    def seeded(self, sampling: Sampling, index: int) -> Sampling:
        """Sampling for answer `index`: each answer of a request has its own seed, so that it can be reproduced
        alone."""
        return replace(sampling, seed=(sampling.seed + index) % _SEEDS)

    def scope(self, request: Request) -> str:
        """Scope of the prefix cache for this request."""
        return request.state.holder.scope

    async def constraint(self, form: Form) -> Constraint:
        """Compile a constraint. Raises `ApiError`."""
        try:
            if self._compiler is None:
                self._compiler = ConstraintCompiler(
                    self.text.tokenizer, vocabulary=self.engine.vocabulary, stop_tokens=self.stop_tokens
                )
            return await self._compiler.compile(form)
        except FusionError as problem:
            raise of_failure(problem) from problem

    def checked(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call `work`; a failure becomes an `ApiError`."""
        try:
            return work(*args, **kwargs)
        except FusionError as problem:
            raise of_failure(problem) from problem

    async def start(self, choices: Sequence[Choice]) -> ApiGeneration:
        """Submit all generations. Raises `ApiError`."""
        generating = ApiGeneration(self.engine, choices, self.metrics, self.clock.now_s)
        await generating.open()
        return generating

    async def opened(self, request: Request, kind: type[Asked], prefix: str) -> tuple[Asked, Heading, bool]:
        """Return the request's checked body, the heading of its answer, and whether to stream. Raises `ApiError`."""
        asking.check_ready(self.engine)
        body = await read(request, kind, self.config.limits)
        asking.adapter_of(body.model, self.config)
        is_stream = asking.stream_wanted(body)
        return body, self.heading(prefix, body, with_route=asking.wants_route(request, body.fusion_route)), is_stream

    async def reply(self, request: Request, choices: Sequence[Choice], compose: Compose) -> Response:
        """Start the generations and answer: with chunks as they come, or with the whole answer once it is there."""
        generating = await self.start(choices)
        body = compose(generating)
        if isinstance(body, AsyncGenerator):
            return self.stream(generating, body)
        try:
            whole = await while_connected(request, body)
        finally:
            await generating.close()
        return self.answer(whole)

    def stream(self, generating: ApiGeneration, pieces: AsyncGenerator[bytes, None]) -> Response:
        """A streamed answer."""
        return EventStream(
            pieces,
            self.config.limits,
            self.streams,
            on_slow=self.metrics.slow.inc,
            on_gone=self.metrics.disconnected.inc,
            on_end=generating.close,
        )

    def answer(self, body: msgspec.Struct) -> Response:
        """A complete answer."""
        return Response(msgspec.json.encode(body), media_type="application/json")

    def report(self, generating: ApiGeneration) -> RouteReport:
        """The route up to now."""
        return generating.route.report(self.clock.now_s())

    def close(self) -> None:
        """Release the constraint compiler's thread."""
        if self._compiler is not None:
            self._compiler.close()


_LOOK_S: Final = 0.5
"""Period at which the status is compared with the last one sent, in seconds (chosen)."""


class StatusReport(msgspec.Struct, frozen=True):
    """Status of the engine. `at_s`: seconds since 1970."""

    model: str
    context_tokens: int
    at_s: float
    engine: EngineStatus


class StatusEndpoint:
    """`GET /fusion/status`."""

    def __init__(self, desk: GatewayContext) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        del request
        return self._desk.answer(report(self._desk))


class StatusEventsEndpoint:
    """`GET /fusion/status/events`: a report at once, and again after each change."""

    def __init__(self, desk: GatewayContext) -> None:
        self._desk = desk

    async def __call__(self, request: Request) -> Response:
        del request
        limits = self._desk.config.limits

        async def nothing() -> None:
            """There is no generation to cancel."""

        return EventStream(
            self._changes(), limits, self._desk.streams, on_slow=_ignore, on_gone=_ignore, on_end=nothing
        )

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        told: EngineStatus | None = None
        while True:
            now = report(self._desk)
            if now.engine != told:
                told = now.engine
                yield event(now)
            await asyncio.sleep(_LOOK_S)


def report(desk: GatewayContext) -> StatusReport:
    """The status now."""
    return StatusReport(desk.config.model, desk.engine.context_tokens, desk.clock.wall_s(), desk.engine.status)


def _ignore() -> None:
    """Disconnected status pages are not counted."""
