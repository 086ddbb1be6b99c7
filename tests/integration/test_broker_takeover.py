"""Real brokers on a real engine: a move there, an outage, and a second broker that takes over from a killed one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.engine_servers import EngineServer, EtcdServer, PostgresServer, why_not
from harness.fault_proxy import free_port
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow

STEPS = 100_000
"""More than the test sees: the job is stopped."""
TAKEOVER_S = 10.0
"""From the kill of one broker to the other's open port; an idle machine takes 6 s or less."""


@pytest.fixture(params=[PostgresServer, EtcdServer], ids=["postgresql", "etcd"])
def server(request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    if reason := why_not(request.param):
        pytest.skip(reason)
    with request.param() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    for process in Process.started:
        process.end()
    Process.started.clear()


def broker(home: Path, *more: object) -> Process:
    return Process("broker", "--home", home, "--host", "127.0.0.1", "--port", "0", "--no-announce", *more)


def invitations(home: Path) -> str:
    said = fusion("invite", "--list", "--home", home)
    assert said.code == 0, said.err
    return said.out


def ready(port: int) -> tuple[int, str]:
    """Return what a broker answers to the question of its supervisor."""
    answer = httpx.get(f"http://127.0.0.1:{port}/ready")
    return answer.status_code, answer.json()["reason"]


def test_a_pool_moves_outlives_an_outage_and_a_broker(server: EngineServer, tmp_path: Path):
    first, second, url = tmp_path / "first", tmp_path / "second", server.url("pool")
    one = broker(first)
    one.wait_for("Press Ctrl-C")
    before = invitations(first)
    one.interrupt()
    assert one.ended() == 0

    refused = fusion("broker", "--home", first, "--port", "0", "--journal", url)
    assert (refused.code, "Move it with --journal-from" in refused.err) == (2, True)
    watched, waiting = free_port(), free_port()
    one = broker(first, "--journal", url, "--journal-from", "sqlite", "--metrics-port", watched)
    assert "both end with row 1, hash" in one.wait_for("Moved 1 rows from")
    one.wait_for("Press Ctrl-C")
    assert invitations(first) == before
    assert ready(watched) == (200, "")

    server.kill()
    one.wait_for("The pool's journal can't be used")
    status, reason = ready(watched)
    assert (status, bool(reason)) == (503, True)
    refused = fusion("invite", "--home", first)
    assert (refused.code, "can't be used now" in refused.err) == (1, True)
    unreachable = fusion("broker", "--home", second, "--port", "0", "--journal", url)
    assert (unreachable.code, "can't be reached" in unreachable.err) == (1, True)
    server.start()
    one.wait_for("is back")
    assert fusion("invite", "--home", first).code == 0
    before = invitations(first)

    unkeyed = fusion("broker", "--home", second, "--port", "0", "--pool", "pool", "--journal", url)
    assert (unkeyed.code, "Copy broker/authority.pem" in unkeyed.err) == (2, True)
    for name in ("authority.pem", "authority.der"):
        shutil.copy(first / "broker" / name, second / "broker" / name)
    other = broker(second, "--journal", url, "--metrics-port", waiting)
    other.wait_for("waits to take over")
    assert (ready(watched)[0], ready(waiting)[0]) == (200, 503)
    one.end()
    killed_s = time.monotonic()
    other.wait_for("Press Ctrl-C")
    assert time.monotonic() - killed_s < TAKEOVER_S
    assert ready(waiting) == (200, "")
    assert invitations(second) == before
    assert fusion("invite", "--home", second).code == 0


@pytest.mark.long
@pytest.mark.parametrize("server", [EtcdServer], ids=["etcd"], indirect=True)
def test_a_job_goes_on_without_the_engine_and_with_another_broker(server: EngineServer, tmp_path: Path):
    ports = (free_port(), free_port())
    named = [flag for port in ports for flag in ("--address", f"tcp://127.0.0.1:{port}")]
    options = ("--journal", server.url("pool"), *named)
    with LivePool(tmp_path, peers=("one", "two"), port=str(ports[0]), broker_options=options) as pool:
        keys = tmp_path / "second" / "broker"
        keys.mkdir(parents=True, mode=0o700)
        for name in ("authority.pem", "authority.der"):
            shutil.copy(tmp_path / "broker" / "broker" / name, keys / name)
        write_text(tmp_path / "text.txt", lines=200)
        recipe = write_recipe(tmp_path / "r.toml", job__steps=STEPS, placement={"stages": 2})
        job = Process("train", recipe, "--home", pool.owner, "--threads", 1, "--json", tmp_path / "train.json")
        job.wait_for("step 5/")

        server.kill()
        pool.broker.wait_for("can't be used")
        job.wait_for("the broker can't")
        steps_seen = len(job.lines)
        job.wait_until(lambda: len(job.lines) > steps_seen + 5 or None)
        server.start()
        pool.broker.wait_for("is back")

        other = Process(
            *("broker", "--home", tmp_path / "second", "--host", "127.0.0.1", "--port", ports[1], "--no-announce"),
            *options,
        )
        other.wait_for("waits to take over")
        pool.broker.end()
        other.wait_for("Restored: 2 members, 1 jobs")
        rows = fusion("jobs", "--home", tmp_path / "second").out.splitlines()
        name = next(row.split()[0] for row in rows if " running " in row)
        # The request goes to the second broker, and from there to the job.
        assert "asked to stop" in fusion("stop", name, "--home", pool.owner).out
        assert job.ended() == 0, job.text
        assert "stopped" in fusion("jobs", "--home", tmp_path / "second").out
