"""How a gateway is watched: metrics under vLLM's names, spans of OpenTelemetry as a collector receives them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.tracing import Tracer, tracer_from_environment
from fusionai.primitives.errors import UsageError
from harness.gateway_stand import Stand, chat, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import STAGES, ScriptedEngine, calls_weather

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def client(stand: Stand) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False)


def test_metrics_have_the_names_of_vllm_and_the_values_of_ours(engine: ScriptedEngine):
    async def scenario() -> str:
        async with gateway_stand(engine, GatewayConfig("owner/tiny")) as stand, client(stand) as http:
            for more in ({}, {"max_tokens": 1}, {"stream": True}):
                assert (await http.post(CHAT, json=chat(model="owner/tiny", **more))).status_code == 200
            engine.fails_after = 1
            assert (await http.post(CHAT, json=chat(model="owner/tiny"))).status_code == 503
            engine.fails_after, engine.gate = None, asyncio.Event()
            with contextlib.suppress(httpx.ReadTimeout):
                await http.post(CHAT, json=chat(model="owner/tiny"), timeout=0.2)
            await until(lambda: not engine.live)
            engine.pages_free = 72
            return (await http.get("/metrics")).text

    text = asyncio.run(scenario())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, sample.labels.get("finished_reason")): sample
        for family in families.values()
        for sample in family.samples
        if "le" not in sample.labels
    }
    said = len(engine.text.tokenizer.encode("You said: hello", framed=False))
    prompt = len(engine.given[0].prompt)
    expected = {
        ("vllm:num_requests_running", None): 0,
        ("vllm:num_requests_waiting", None): 0,
        ("vllm:kv_cache_usage_perc", None): 0.25,
        ("vllm:prompt_tokens_total", None): 5 * prompt,
        ("vllm:generation_tokens_total", None): 2 * said + 1 + 1,
        ("vllm:prefix_cache_queries_total", None): 5 * prompt,
        ("vllm:prefix_cache_hits_total", None): 4 * (prompt // 8 * 8),
        ("vllm:time_to_first_token_seconds_count", None): 4,
        ("vllm:inter_token_latency_seconds_count", None): 2 * (said - 1),
        ("vllm:time_per_output_token_seconds_count", None): 2 * (said - 1),
        ("vllm:e2e_request_latency_seconds_count", None): 5,
        ("vllm:request_success_total", "stop"): 2,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:request_success_total", "error"): 1,
        ("vllm:request_success_total", "abort"): 1,
    }
    assert {name: samples[name].value for name in expected} == expected
    for name in expected:
        labels = {"model_name": "owner/tiny", "engine": "0"} | ({"finished_reason": name[1]} if name[1] else {})
        assert samples[name].labels == labels
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    for ours, theirs in (("first_token", "time_to_first_token"), ("generation", "e2e_request_latency")):
        both = (samples[f"fusion_{ours}_seconds_sum", None], samples[f"vllm:{theirs}_seconds_sum", None])
        assert both[0].value == both[1].value > 0


@dataclass
class Collector:
    """Receives OTLP over HTTP and decodes it with OpenTelemetry's own messages."""

    bodies: list[bytes] = field(default_factory=list)
    url: str = ""

    @property
    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        resources = [one for body in self.bodies for one in ExportTraceServiceRequest.FromString(body).resource_spans]
        for resource in resources:
            assert plain(resource.resource.attributes)["service.name"] == "home pool"
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Tests print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


@pytest.fixture
def tracer(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Tracer:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs the packages of fusionai[otel]")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "home pool")
    return tracer_from_environment()


def test_a_span_says_what_was_asked_and_generated_in_the_callers_trace(
    engine: ScriptedEngine, collector: Collector, tracer: Tracer
):
    async def scenario() -> None:
        async with gateway_stand(engine, tracer=tracer) as stand, client(stand) as http:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
            asked = chat("a secret of mine", max_tokens=100, top_p=0.5, n=2, stop=["never"])
            assert (await http.post(CHAT, json=asked, headers=headers)).status_code == 200
            engine.script = calls_weather
            tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
            assert (await http.post(CHAT, json=chat(tools=tools, stream=True))).status_code == 200
            assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})).status_code == 200
            assert (await http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})).status_code == 200

    asyncio.run(scenario())
    tracer.close()
    first, calling, text, embedding = collector.spans
    assert (first.name, first.kind) == ("chat tiny", 2)  # 2: server
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    said = len(engine.text.tokenizer.encode("You said: a secret of mine", framed=False))
    attributes = plain(first.attributes)
    assert 0 < attributes.pop("gen_ai.response.time_to_first_chunk") < CEILING_S
    assert attributes.pop("server.port") > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fusionai",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.usage.input_tokens": len(engine.given[0].prompt),
        "gen_ai.usage.output_tokens": 2 * said,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "fusionai.request_id": "mine-1",
        "fusionai.route": list(STAGES),
        "server.address": "127.0.0.1",
    }
    assert first.status.code == 0
    assert plain(calling.attributes)["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert plain(calling.attributes)["gen_ai.request.stream"] is True
    assert calling.trace_id.hex() != TRACE
    assert not calling.parent_span_id
    assert text.name == "text_completion tiny"
    assert (embedding.name, plain(embedding.attributes)["gen_ai.usage.input_tokens"]) == ("embeddings tiny", 1)
    assert not any(b"secret" in body for body in collector.bodies)


def test_a_span_says_how_a_request_failed(engine: ScriptedEngine, collector: Collector, tracer: Tracer):
    async def scenario() -> None:
        async with gateway_stand(engine, tracer=tracer) as stand, client(stand) as http:
            engine.is_busy = True
            assert (await http.post(CHAT, json=chat())).status_code == 429
            engine.is_busy, engine.fails_after = False, 2
            assert (await http.post(CHAT, json=chat())).status_code == 503
            engine.fails_after, engine.gate = None, asyncio.Event()
            with contextlib.suppress(httpx.ReadTimeout):
                await http.post(CHAT, json=chat(), timeout=0.2)
            await until(lambda: not engine.live)

    asyncio.run(scenario())
    tracer.close()
    spans = collector.spans
    assert all(span.status.code == 2 for span in spans)  # 2: error
    codes = [plain(span.attributes)["error.type"] for span in spans]
    assert codes == ["engine_busy", "generation_failed", "cancelled"]
    assert plain(spans[1].attributes)["gen_ai.response.finish_reasons"] == ["error"]
    assert plain(spans[1].attributes)["gen_ai.usage.output_tokens"] == 2


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf only"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "http/protobuf only"),
        ({}, r"SDK is not installed"),
    ],
)
def test_what_is_missing_for_spans_is_named(variables: dict[str, str], word: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=word) as found:
        tracer_from_environment()
    assert found.value.hint


@pytest.mark.parametrize("variable", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_no_spans_without_need(variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://nowhere:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv(*variable)
    assert tracer_from_environment()._tracer is None
