"""Real brokers on a real engine: a move there, an outage, and a second broker that takes over from a killed one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine_servers import EngineServer, EtcdServer, PostgresServer, why_not
from harness.live_pool import Process, fusion

pytestmark = pytest.mark.slow

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


def test_a_pool_moves_outlives_an_outage_and_a_broker(server: EngineServer, tmp_path: Path):
    first, second, url = tmp_path / "first", tmp_path / "second", server.url("pool")
    one = broker(first)
    one.wait_for("Press Ctrl-C")
    before = invitations(first)
    one.interrupt()
    assert one.ended() == 0

    refused = fusion("broker", "--home", first, "--port", "0", "--journal", url)
    assert (refused.code, "Move it with --journal-from" in refused.err) == (2, True)
    one = broker(first, "--journal", url, "--journal-from", "sqlite")
    assert "both end with row 1, hash" in one.wait_for("Moved 1 rows from")
    one.wait_for("Press Ctrl-C")
    assert invitations(first) == before

    server.kill()
    one.wait_for("The pool's journal can't be used")
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
    other = broker(second, "--journal", url)
    other.wait_for("waits to take over")
    one.end()
    killed_s = time.monotonic()
    other.wait_for("Press Ctrl-C")
    assert time.monotonic() - killed_s < TAKEOVER_S
    assert invitations(second) == before
    assert fusion("invite", "--home", second).code == 0
