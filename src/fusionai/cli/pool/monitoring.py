"""What monitoring reads of a broker over HTTP: `/metrics` for Prometheus, `/health` and `/ready` for a supervisor.

Only counts, sums, times and the ids of running jobs are shown, no machines' names, keys or addresses, so that reading
them helps no stranger to join. A broker that waits for another one's lease is healthy and not ready. `broker.server`
runs the broker, `gateway.server` the HTTP server.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import msgspec
from prometheus_client import Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.server import BrokerServer
from fusionai.coordination.broker.job import OPEN
from fusionai.coordination.broker.state import PRESENT
from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.gateway.metrics import CONTENT_TYPE, HttpMetrics
from fusionai.gateway.server import open_listener, serve

_APPEND_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WAITING: Final = "another broker keeps the pool, or its journal is not open yet"


class ReadinessShown(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `/ready`. `reason`: why the broker is not ready; empty if it is."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OpenMonitoring:
    """The address, reserved. `url`: for the terminal."""

    listener: socket.socket
    url: str


def open_monitoring(host: str, port: int) -> OpenMonitoring:
    """Reserve the address. Raises `UsageError` where nothing can listen there."""
    return OpenMonitoring(*open_listener(host, port, has_keys=True, clear_text=True, flag="--metrics-port"))


async def run_monitored(
    opened: OpenMonitoring,
    run: Callable[[Callable[[BrokerServer], None]], Awaitable[None]],
) -> None:
    """Run a broker with its monitoring beside it, which also answers while the broker still waits. `run` runs the
    broker, and calls its argument once the broker is open."""
    monitoring, ended = BrokerMonitoring(), asyncio.Event()

    async def broker() -> None:
        try:
            await run(monitoring.watch)
        finally:
            ended.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(monitoring, opened.listener, stop=ended, on_listening=lambda: None))
        tasks.create_task(broker())


class BrokerMonitoring:
    """The ASGI application. `config` and `metrics` are for the server that runs it."""

    def __init__(self) -> None:
        self.config = GatewayConfig(model="", limits=RequestLimits(connections=64, drain_s=1.0))
        self.metrics = BrokerMetrics()
        self._inner = Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/health", _healthy),
                Route("/ready", self._ready),
            ]
        )

    def watch(self, server: BrokerServer) -> None:
        """Show the figures of this broker, which is open now."""
        self.metrics.server = server
        server.service.appended = self.metrics.append_s.observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._inner(scope, receive, send)

    def end_streams(self) -> None:
        """No answer is a stream."""

    async def close(self) -> None:
        """Nothing is left to release."""

    async def _metrics(self, request: Request) -> Response:
        del request
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _ready(self, request: Request) -> Response:
        del request
        reason = self.metrics.unready()
        shown = ReadinessShown(ready=not reason, reason=reason)
        return Response(msgspec.json.encode(shown), 503 if reason else 200, media_type="application/json")


async def _healthy(request: Request) -> Response:
    """Answer that the process lives and its event loop runs."""
    del request
    return Response(b'{"healthy":true}', media_type="application/json")


class BrokerMetrics(HttpMetrics, Collector):
    """The HTTP server's counters, the time of appends, and the pool's figures, which are read at each scrape. `server`:
    None until the broker is open."""

    def __init__(self) -> None:
        super().__init__()
        registry = self._registry
        self.server: BrokerServer | None = None
        self.append_s = Histogram(
            "fusion_journal_append_seconds",
            "Time to make facts durable in the pool's journal.",
            buckets=_APPEND_S,
            registry=registry,
        )
        build = Gauge("fusion_build", "Version of this program.", ("version",), registry=registry)
        build.labels(version("fusionai")).set(1)
        ProcessCollector(registry=registry)
        registry.register(self)

    def unready(self) -> str:
        """Return why the broker can't decide anything now; empty if it can."""
        if self.server is None:
            return WAITING
        journal = self.server.service.journal
        if isinstance(journal, EngineJournal) and journal.outage:
            return journal.outage
        return f"the lease in {journal.name} has ended" if journal.lapsed else ""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "fusion_broker_ready", "1 if this broker decides for the pool.", value=float(not self.unready())
        )
        if self.server is None:
            return
        service = self.server.service
        state, pool = service.state, service.state.pool
        machines = [one for one in pool.members.values() if one.sponsor is None]
        present = [one for one in machines if one.phase in PRESENT]
        phases = Counter(one.phase for one in machines)
        yield _by_state(
            "fusion_pool_machines", "Machines that lend themselves, or were lost.", (*PRESENT, "lost"), phases
        )
        phases = Counter(one.phase for one in pool.jobs.values())
        yield _by_state("fusion_pool_jobs", "Jobs that have not ended.", OPEN, phases)
        for name, value, what in (
            ("pool_memory_bytes", sum(one.memory_bytes for one in present), "Memory that the machines lend."),
            ("pool_flops_per_s", sum(one.flops_per_s for one in present), "Speed that the machines lend."),
            ("pool_invitations", len(pool.invitations), "Invitations that are kept."),
            ("pool_evicted", len(pool.evicted), "Keys that were sent away."),
            ("broker_connections", self.server.connections, "Connections of machines and job owners."),
            ("journal_term", service.journal.term, "Number of this broker's start, or of its last connection."),
        ):
            yield GaugeMetricFamily(f"fusion_{name}", what, value=value)
        yield CounterMetricFamily(
            "fusion_journal_rows", "Facts journalled since the pool began.", value=service.sequence
        )
        yield CounterMetricFamily(
            "fusion_relayed_bytes",
            "Bytes copied between machines that can't connect to each other.",
            value=service.relayed.copied_bytes(),
        )
        steps = GaugeMetricFamily("fusion_job_step", "Last step that a running job reported.", labels=("job",))
        for job, step in state.progress.items():
            steps.add_metric((job,), step)
        yield steps


def _by_state(name: str, what: str, states: Iterable[str], counts: Counter[str]) -> Metric:
    """Return the count of each of `states`, 0 included, so that a rule finds the state before anything is in it."""
    family = GaugeMetricFamily(name, what, labels=("state",))
    for state in states:
        family.add_metric((state,), counts[state])
    return family
