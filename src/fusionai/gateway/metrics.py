"""Numbers for Prometheus: what the gateway counts itself, and what the engine says when asked. Never a word of a text.

Neighbours: `guards` counts requests, `generating` tokens, `app` serves `/metrics`.
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
    """One per gateway, with a registry of its own."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("fusion_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self.active = Gauge("fusion_requests_active", "Requests being answered.", registry=registry)
        self.connections = Gauge("fusion_connections", "Connections open.", registry=registry)
        self.disconnected = Counter(
            "fusion_disconnects", "Generations cancelled because the client left.", registry=registry
        )
        self.slow = Counter("fusion_slow_readers", "Streams ended because the client did not read.", registry=registry)
        self._prompt = Counter("fusion_prompt_tokens", "Tokens of prompts read.", registry=registry)
        self._cached = Counter(
            "fusion_prompt_cached_tokens", "Tokens of prompts that were in a cache.", registry=registry
        )
        self._tokens = Counter("fusion_generated_tokens", "Tokens generated.", registry=registry)
        self._first = Histogram(
            "fusion_first_token_seconds", "From a request to its first token.", buckets=_FIRST_S, registry=registry
        )
        self._between = Histogram(
            "fusion_between_tokens_seconds", "Between two tokens.", buckets=_BETWEEN_S, registry=registry
        )
        self._broken = Counter("fusion_internal_errors", "Failures of the gateway itself.", registry=registry)
        registry.register(_EngineNumbers(status))

    def prompt(self, read: PromptRead) -> None:
        """A prompt is in the caches."""
        self._prompt.inc(read.prompt_tokens)
        self._cached.inc(read.cached_tokens)

    def token(self, index: int, after_s: float) -> None:
        """A token came, `after_s` after the one before, or after the request."""
        self._tokens.inc()
        (self._between if index else self._first).observe(after_s)

    def broken(self, problem: Exception) -> None:
        """The gateway's own mistake."""
        self._broken.inc()
        _LOG.error("a request failed", exc_info=problem)

    def text(self) -> bytes:
        """All of it, in Prometheus' form."""
        return generate_latest(self._registry)


class _EngineNumbers(Collector):
    """Read at the moment somebody asks."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for name, value, what in (
            ("ready", float(status.state == "ready"), "1: a probe token has crossed all stages."),
            ("sessions_running", status.running, "Generations being worked on."),
            ("sessions_queued", status.queued, "Generations that wait for room."),
            ("pages", status.pages, "Pages of the cache of keys and values."),
            ("pages_free", status.pages_free, "Of them, free."),
            ("tokens_per_second", status.tokens_per_s, "Tokens of all generations, over the last ten seconds."),
            ("members", len(status.members), "Machines of the pool that the job knows."),
        ):
            yield GaugeMetricFamily(f"fusion_engine_{name}", what, value=value)
        yield CounterMetricFamily("fusion_engine_tokens", "Tokens given out.", value=status.emitted_tokens)
        yield CounterMetricFamily(
            "fusion_engine_prefix_hit_tokens",
            "Prompt tokens found in a cache.",
            value=status.prefix_hit_tokens,
        )
        yield CounterMetricFamily("fusion_engine_faults", "Faults survived.", value=len(status.faults))
        compute = GaugeMetricFamily(
            "fusion_stage_compute_seconds", "Mean time of a stage for one pass.", labels=("stage", "peer")
        )
        resident = GaugeMetricFamily("fusion_stage_resident_bytes", "Memory of a stage.", labels=("stage", "peer"))
        for stage in status.stages:
            labels = (str(stage.stage), stage.name or stage.peer)
            compute.add_metric(labels, stage.mean_compute_s)
            resident.add_metric(labels, stage.resident_bytes)
        yield compute
        yield resident
        for name, value in sorted(status.extra.items()):
            yield GaugeMetricFamily(f"fusion_engine_{name}", "A further number of the engine.", value=value)
