"""Prometheus metrics: the gateway's own counters, and the engine's figures when scraped. They contain no text of users.

`admission` counts requests, `generation` counts tokens, `app` serves `/metrics`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fusionai.serving.interface import EngineStatus, PromptRead

_LOG: Final = logging.getLogger(__name__)
_FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One per gateway, with its own registry."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("fusion_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self.active = Gauge("fusion_requests_active", "Requests being answered.", registry=registry)
        self.connections = Gauge("fusion_connections", "Connections open.", registry=registry)
        self.disconnected = Counter(
            "fusion_disconnects", "Generations cancelled because the client disconnected.", registry=registry
        )
        self.slow = Counter("fusion_slow_readers", "Streams ended because the client did not read.", registry=registry)
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
        self._broken = Counter("fusion_internal_errors", "Internal errors of the gateway.", registry=registry)
        registry.register(_EngineNumbers(status))

    def prompt(self, read: PromptRead) -> None:
        """Count a prompt that has been read."""
        self._prompt.inc(read.prompt_tokens)
        self._cached.inc(read.cached_tokens)

    def token(self, index: int, after_s: float) -> None:
        """Count a token that came `after_s` after the previous one, or after the request."""
        self._tokens.inc()
        (self._between if index else self._first).observe(after_s)

    def broken(self, problem: Exception) -> None:
        """Count and log an internal error."""
        self._broken.inc()
        _LOG.error("a request failed", exc_info=problem)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


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
            "fusion_stage_compute_seconds", "Mean compute time of a stage per pass.", labels=("stage", "peer")
        )
        resident = GaugeMetricFamily("fusion_stage_resident_bytes", "Memory used by a stage.", labels=("stage", "peer"))
        for stage in status.stages:
            labels = (str(stage.stage), stage.name or stage.peer)
            compute.add_metric(labels, stage.mean_compute_s)
            resident.add_metric(labels, stage.resident_bytes)
        yield compute
        yield resident
        for name, value in sorted(status.extra.items()):
            yield GaugeMetricFamily(f"fusion_engine_{name}", "Further figure of the engine.", value=value)
