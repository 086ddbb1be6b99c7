"""Prometheus metrics: the gateway's own counters, and the engine's figures when scraped. They contain no text of users.

The measurements that vLLM has too are also given under vLLM's names, so that its dashboards and autoscalers work.

`admission` counts requests, `generation` counts tokens, `app` serves `/metrics`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fusionai.serving.interface import EngineStatus, PromptRead

_LOG: Final = logging.getLogger(__name__)
_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WHOLE_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_STAGE_LABELS: Final = ("pipeline", "stage", "peer")
GenerationEnd = Literal["stop", "length", "abort", "error"]
"""How a generation ended, in vLLM's words; `abort`: cancelled, by its client or its deadline."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    """What is counted for every request, with a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("fusion_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self.active = Gauge("fusion_requests_active", "Requests being answered.", registry=registry)
        self.connections = Gauge("fusion_connections", "Connections open.", registry=registry)
        self.disconnected = Counter(
            "fusion_disconnects", "Generations cancelled because the client disconnected.", registry=registry
        )
        self.slow = Counter("fusion_slow_readers", "Streams ended because the client did not read.", registry=registry)
        self._broken = Counter("fusion_internal_errors", "Internal errors of the gateway.", registry=registry)

    def broken(self, problem: Exception) -> None:
        """Count and log an internal error."""
        self._broken.inc()
        _LOG.error("a request failed", exc_info=problem)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Metrics(HttpMetrics):
    """One per served model. `model`: value of the label `model_name` that vLLM's metrics have."""

    def __init__(self, status: Callable[[], EngineStatus], model: str) -> None:
        super().__init__()
        registry = self._registry
        self._prompt = Counter("fusion_prompt_tokens", "Prompt tokens read.", registry=registry)
        self._cached = Counter(
            "fusion_prompt_cached_tokens", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self._tokens = Counter("fusion_generated_tokens", "Tokens generated.", registry=registry)
        self._first = Histogram(
            "fusion_first_token_seconds", "Time from a request to its first token.", buckets=_FIRST_S, registry=registry
        )
        self._between = Histogram(
            "fusion_between_tokens_seconds", "Time between two tokens.", buckets=_BETWEEN_S, registry=registry
        )
        self._whole = Histogram(
            "fusion_generation_seconds", "Time from a request to its last token.", buckets=_WHOLE_S, registry=registry
        )
        self._ended = Counter("fusion_generations", "Generations ended.", ("finished_reason",), registry=registry)
        registry.register(_EngineNumbers(status))
        also = {
            "prompt_tokens": self._prompt,
            "generation_tokens": self._tokens,
            "prefix_cache_queries": self._prompt,
            "prefix_cache_hits": self._cached,
            "time_to_first_token_seconds": self._first,
            "inter_token_latency_seconds": self._between,
            "time_per_output_token_seconds": self._between,
            "e2e_request_latency_seconds": self._whole,
            "request_success": self._ended,
        }
        registry.register(_VllmNames(status, also, {"model_name": model, "engine": "0"}))

    def prompt(self, read: PromptRead) -> None:
        """Count a prompt that has been read."""
        self._prompt.inc(read.prompt_tokens)
        self._cached.inc(read.cached_tokens)

    def token(self, index: int, after_s: float) -> None:
        """Count a token that came `after_s` after the previous one, or after the request."""
        self._tokens.inc()
        (self._between if index else self._first).observe(after_s)

    def ended(self, how: GenerationEnd, after_s: float) -> None:
        """Count a generation that ended `after_s` after its request."""
        self._ended.labels(how).inc()
        self._whole.observe(after_s)


class _EngineNumbers(Collector):
    """The engine's figures, read at each scrape."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for name, value, what in (
            ("ready", float(status.state == "ready"), "1 if a probe has crossed all stages."),
            ("sessions_running", status.running, "Generations in progress."),
            ("sessions_queued", status.queued, "Generations waiting for room."),
            ("pages", status.pages, "Pages of the KV cache."),
            ("pages_free", status.pages_free, "Free pages of the KV cache."),
            (
                "tokens_per_second",
                status.tokens_per_s,
                "Tokens per second of all generations, over the last ten seconds.",
            ),
            ("members", len(status.members), "Machines of the pool that the job knows."),
        ):
            yield GaugeMetricFamily(f"fusion_engine_{name}", what, value=value)
        yield CounterMetricFamily("fusion_engine_tokens", "Tokens emitted.", value=status.emitted_tokens)
        yield CounterMetricFamily(
            "fusion_engine_prefix_hit_tokens",
            "Prompt tokens found in the prefix cache.",
            value=status.prefix_hit_tokens,
        )
        yield CounterMetricFamily("fusion_engine_faults", "Faults survived.", value=len(status.faults))
        compute = GaugeMetricFamily(
            "fusion_stage_compute_seconds", "Mean compute time of a stage per pass.", labels=_STAGE_LABELS
        )
        resident = GaugeMetricFamily("fusion_stage_resident_bytes", "Memory used by a stage.", labels=_STAGE_LABELS)
        for stage in status.stages:
            labels = (str(stage.pipeline), str(stage.stage), stage.name or stage.peer)
            compute.add_metric(labels, stage.mean_compute_s)
            resident.add_metric(labels, stage.resident_bytes)
        yield compute
        yield resident
        for name, value in sorted(status.extra.items()):
            yield GaugeMetricFamily(f"fusion_engine_{name}", "Further figure of the engine.", value=value)


class _VllmNames(Collector):
    """The same measurements under the names and with the labels of vLLM's metrics. `also`: by name without `vllm:`."""

    def __init__(
        self, status: Callable[[], EngineStatus], also: Mapping[str, Counter | Histogram], labels: dict[str, str]
    ) -> None:
        self._status = status
        self._also = also
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for name, value, what in (
            ("num_requests_running", float(status.running), "Generations in progress."),
            ("num_requests_waiting", float(status.queued), "Generations waiting for room."),
            ("kv_cache_usage_perc", _used(status), "Fraction of the KV cache in use; 1 is all of it."),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", what, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family
        for name, metric in self._also.items():
            for family in metric.collect():
                renamed = Metric(f"vllm:{name}", family.documentation, family.type)
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        suffix = sample.name.removeprefix(family.name)
                        renamed.add_sample(f"vllm:{name}{suffix}", {**self._labels, **sample.labels}, sample.value)
                yield renamed


def _used(status: EngineStatus) -> float:
    return 1.0 - status.pages_free / status.pages if status.pages else 0.0
