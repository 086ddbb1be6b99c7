"""What Prometheus and a supervisor read of a broker: its figures, and whether it is ready."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusionai.broker.engines import opening
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import BrokerServer, run_broker
from fusionai.cli.main import main
from fusionai.cli.pool.monitoring import WAITING, open_monitoring, run_monitored
from fusionai.gateway.metrics import Metrics
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.serving.interface import EngineStatus
from fusionai.transport.enrolment import enrol
from fusionai.transport.security.certificates import load_authority
from harness.memory_engine import MemoryEngine
from harness.patience import CEILING_S, until

SHIPPED = Path(__file__).parents[4] / "release" / "monitoring"


def read(text: str) -> Mapping[tuple[str, str], float]:
    """Return each sample by its name and its state, with Prometheus' own parser."""
    families = text_string_to_metric_families(text)
    return {(one.name, one.labels.get("state", "")): one.value for family in families for one in family.samples}


class Watched:
    """A broker with its metrics on free ports."""

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        self.said = list[str]()
        self.server: BrokerServer | None = None
        self.stop = asyncio.Event()
        self.opened = open_monitoring("127.0.0.1", 0)

    async def run(self) -> None:
        async def keep(opened: Callable[[BrokerServer], None]) -> None:
            def both(server: BrokerServer) -> None:
                self.server = server
                opened(server)

            await run_broker(
                self.options, announce=lambda _: None, stop=self.stop, notice=self.said.append, opened=both
            )

        await run_monitored(self.opened, keep)


def test_the_figures_follow_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)

    async def run() -> None:
        watched = Watched(BrokerOptions(home=tmp_path, host="127.0.0.1", port=0, pool="friends"))
        running = asyncio.create_task(watched.run())
        await until(lambda: watched.server is not None)
        assert watched.server is not None
        async with httpx.AsyncClient(base_url=watched.opened.url) as http:
            assert (await http.get("/ready")).json() == {"ready": True, "reason": ""}
            text = (await http.get("/metrics")).text
            before = read(text)
            invitation = watched.server.service.invite(uses=2, lifetime_s=60.0)
            await enrol(invitation, tmp_path / "member", "provider")
            after = read((await http.get("/metrics")).text)
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.post("/metrics")).status_code == 405
        assert "friends" not in text
        gateway = Metrics(lambda: EngineStatus(state="ready"), "model").text().decode()
        assert not unanswered("alerts.yml", text + gateway)
        assert not unanswered("grafana.json", text + gateway)
        assert (before["fusion_broker_ready", ""], before["fusion_pool_machines", "lost"]) == (1, 0)
        assert before["fusion_pool_jobs", "queued"] == 0
        assert after["fusion_pool_invitations", ""] == before["fusion_pool_invitations", ""] + 1
        # One row for the invitation and one for the machine, each written by one append.
        assert after["fusion_journal_rows_total", ""] == before["fusion_journal_rows_total", ""] + 2
        assert after["fusion_journal_append_seconds_count", ""] == 2
        watched.stop.set()
        async with asyncio.timeout(CEILING_S):
            await running
        assert watched.opened.listener.fileno() == -1

    asyncio.run(run())


def test_a_broker_that_waits_or_has_lost_its_engine_is_healthy_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)
    authority = load_authority(tmp_path / "broker", "home", now_wall_s=1.0)
    engine = MemoryEngine()
    other = EngineJournal.open(engine, "home", PeerId("other"), lambda _: authority.public_key)
    monkeypatch.setattr(opening, "engine_at", lambda _: MemoryEngine(engine.store))
    options = BrokerOptions(home=tmp_path, pool="home", host="127.0.0.1", port=0, journal="etcd://one")

    async def run() -> None:
        watched = Watched(options)
        running = asyncio.create_task(watched.run())
        await until(lambda: watched.said)
        async with httpx.AsyncClient(base_url=watched.opened.url) as http:
            waiting = await http.get("/ready")
            assert (waiting.status_code, waiting.json()["reason"]) == (503, WAITING)
            assert (await http.get("/health")).status_code == 200
            assert read((await http.get("/metrics")).text)["fusion_broker_ready", ""] == 0
            other.close()
            await until(lambda: watched.server is not None)
            assert (await http.get("/ready")).status_code == 200
            assert watched.server is not None
            journal = watched.server.service.journal
            assert isinstance(journal, EngineJournal)
            journal.outage = "the engine is away"
            away = await http.get("/ready")
            assert (away.status_code, away.json()["reason"]) == (503, "the engine is away")
            assert (await http.get("/health")).status_code == 200
            journal.outage = ""
        watched.stop.set()
        async with asyncio.timeout(CEILING_S):
            await running

    asyncio.run(run())


def test_a_broker_that_can_not_start_ends_its_metrics(tmp_path: Path):
    async def run() -> None:
        watched = Watched(BrokerOptions(home=tmp_path, host="127.0.0.1", port=0, losses_before_rest=99))
        try:
            await watched.run()
        finally:
            assert watched.opened.listener.fileno() == -1

    with pytest.raises(ExceptionGroup) as refusal:
        asyncio.run(run())
    assert isinstance(refusal.value.exceptions[0], UsageError)


def test_wrong_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["broker", "--metrics-host", "0.0.0.0", "--home", str(tmp_path)]) == 2
    assert "--metrics-host is for a broker with metrics" in capsys.readouterr().err
    taken = open_monitoring("127.0.0.1", 0)
    taken.listener.listen()
    port = taken.listener.getsockname()[1]
    assert main(["broker", "--metrics-port", str(port), "--home", str(tmp_path)]) == 2
    assert "--metrics-port 0 for any free one" in " ".join(capsys.readouterr().err.split())
    taken.listener.close()


def unanswered(file: str, answered: str) -> set[str]:
    """Return the metrics that a shipped file names and no program answers."""
    exposed = {family.name for family in text_string_to_metric_families(answered)}
    named = set(re.findall(r"\b(?:fusion|process)_[a-z_]+", (SHIPPED / file).read_text(encoding="utf-8")))
    assert len(named) > 4
    endings = ("_total", "_bucket")
    return {name for name in named if not exposed & {name, *(name.removesuffix(end) for end in endings)}}


RULES_TEST = """
rule_files: [alerts.yml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {series: 'fusion_broker_ready{instance="first"}', values: "1x8 0x8"}
      - {series: 'fusion_broker_ready{instance="second"}', values: "0x16"}
      - {series: 'fusion_pool_jobs{state="queued"}', values: "1x90"}
      - {series: 'fusion_pool_machines{state="idle"}', values: "2x90"}
      - {series: 'fusion_journal_append_seconds_bucket{instance="first",le="1"}', values: "0+1x60"}
      - {series: 'fusion_journal_append_seconds_bucket{instance="first",le="2.5"}', values: "0+2x60"}
      - {series: 'fusion_journal_append_seconds_bucket{instance="first",le="+Inf"}', values: "0+2x60"}
    alert_rule_test:
      - {eval_time: 1m, alertname: FusionPoolWithoutBroker, exp_alerts: []}
      - eval_time: 3m30s
        alertname: FusionPoolWithoutBroker
        exp_alerts: [{exp_labels: {severity: critical}, exp_annotations: {
          summary: No broker decides for the pool.,
          description: "Running jobs go on; machines can't join and jobs can't start.
          See each broker's /ready for its reason."}}]
      - {eval_time: 10m, alertname: FusionJobsWait, exp_alerts: []}
      - eval_time: 16m
        alertname: FusionJobsWait
        exp_alerts: [{exp_labels: {severity: info}, exp_annotations: {
          summary: "Jobs wait although machines are free; they may be too small or fewer than a job needs."}}]
      - eval_time: 12m
        alertname: FusionJournalSlow
        exp_alerts: [{exp_labels: {severity: warning, instance: first}, exp_annotations: {
          summary: The journal of first takes longer than a second for one append in a hundred.,
          description: "A broker answers nothing else while it writes, and heartbeats wait."}}]
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus, which has promtool, is not installed")
def test_prometheus_takes_the_shipped_files_and_raises_the_alerts(tmp_path: Path):
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(SHIPPED / name, tmp_path)
    (tmp_path / "test.yml").write_text(RULES_TEST)
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "test.yml")):
        done = subprocess.run(("promtool", *command), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
