"""OpenTelemetry spans of requests, by the semantic conventions for generative AI. They contain no text of users.

The standard variables OTEL_* decide where spans go, which are sampled and whose trace a request continues
(`traceparent`); the SDK reads them. `context` and `texts` begin a span for each request that reaches the engine.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

import fusionai
from fusionai.gateway.errors import ApiError, as_api_error
from fusionai.gateway.generation import ApiGeneration, Choice
from fusionai.primitives.environment import trace_endpoint, trace_protocol
from fusionai.primitives.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.trace import Tracer as SdkTracer

Attributes = Mapping[str, str | int | float | list[str]]
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/api/generate": "text_completion"}
_SDK: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
)
"""Modules of the extra `otel`."""
_LAST_SPANS_S: Final = 2.0
"""Time to send the last spans when the gateway stops, in seconds (chosen)."""


class RequestSpan:
    """The span of one request; without a collector it records nothing."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """End the span. `error`: code of the error that ended the request."""
        if self._span is None:
            return
        self._span.set_attributes(attributes)
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def end_of(self, generation: ApiGeneration, choices: list[Choice]) -> None:
        """End the span with what was generated."""
        usage, route = generation.usage, generation.report()
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            "gen_ai.response.finish_reasons": [choice.finish or "error" for choice in choices],
            "fusionai.route": route.route,
        }
        if usage.completion_tokens_details:
            attributes["gen_ai.usage.reasoning.output_tokens"] = usage.completion_tokens_details.reasoning_tokens
        if route.first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = route.first_token_s
        is_complete = all(choice.finish for choice in choices)
        self.end(attributes, generation.problem or (None if is_complete else "cancelled"))


class Tracer:
    """Begins the spans of one gateway. `tracer` None: it records nothing. `shutdown` sends the last spans."""

    def __init__(self, tracer: SdkTracer | None = None, shutdown: Callable[[], None] | None = None) -> None:
        self._tracer = tracer
        self._shutdown = shutdown

    def begin(self, request: Request, model: str, attributes: Attributes, operation: str | None = None) -> RequestSpan:
        """Begin the span of a request, in the trace that its header `traceparent` names."""
        if self._tracer is None:
            return RequestSpan()
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        operation = operation or _OPERATIONS.get(request.url.path, "chat")
        span = self._tracer.start_span(
            f"{operation} {model}",
            propagate.extract(dict(request.headers)),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "fusionai",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "fusionai.request_id": request.state.request_id,
                **attributes,
            },
        )
        if (server := request.scope.get("server")) is not None:
            span.set_attributes({"server.address": request.url.hostname or server[0], "server.port": server[1]})
        return RequestSpan(span)

    def begin_generations(self, request: Request, model: str, choices: list[Choice], *, is_stream: bool) -> RequestSpan:
        """Begin the span of a request for the given answers."""
        generation = choices[0].generation
        sampling = generation.sampling
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.stream": is_stream,
            "gen_ai.request.max_tokens": generation.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
        }
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if len(choices) > 1:
            attributes["gen_ai.request.choice.count"] = len(choices)
        return self.begin(request, model, attributes)

    @contextmanager
    def reading(self, request: Request, model: str, tokens: int, operation: str) -> Iterator[None]:
        """Keep a span open for work that reads texts of `tokens` tokens. Raises the engine's errors as `ApiError`."""
        span = self.begin(request, model, {"gen_ai.usage.input_tokens": tokens}, operation)
        error: str | None = "cancelled"
        try:
            with as_api_error():
                yield
            error = None
        except ApiError as problem:
            error = problem.body.code
            raise
        finally:
            span.end({}, error)

    def close(self) -> None:
        """Send the last spans, for at most two seconds: a collector that is away must not hold up the end."""
        if self._shutdown is not None:
            sending = threading.Thread(target=self._shutdown, daemon=True)
            sending.start()
            sending.join(_LAST_SPANS_S)


def tracer_from_environment() -> Tracer:
    """Return a tracer that sends spans by OTLP if OTEL_EXPORTER_OTLP_ENDPOINT, or the variable of that kind for traces,
    is set. Raises `UsageError` if it is, and the SDK is not installed or another protocol is asked for."""
    endpoint, protocol = trace_endpoint(), trace_protocol()
    if endpoint is None:
        return Tracer()
    if protocol != "http/protobuf":
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; spans are sent by http/protobuf only.",
            hint="Give the collector's HTTP port, usually 4318, with OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf.",
        )
    try:
        exporting, resources, trace, batches = map(importlib.import_module, _SDK)
    except ImportError as problem:
        raise UsageError(
            f"spans are to go to {endpoint}, but OpenTelemetry's SDK is not installed ({problem}).",
            hint="Run: pip install 'fusionai[otel]'; or set OTEL_SDK_DISABLED=true to send none.",
        ) from problem
    version = fusionai.__version__
    detected = resources.OTELResourceDetector().detect().attributes
    resource = resources.Resource.create({"service.name": "fusionai", "service.version": version, **detected})
    provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(batches.BatchSpanProcessor(exporting.OTLPSpanExporter()))
    return Tracer(provider.get_tracer("fusionai.gateway", version), provider.shutdown)
