"""Where the page listens and what opens it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import httpx
import pytest

from fusionai.broker.engines import opening
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import Announcement
from fusionai.cli.main import main
from fusionai.cli.page.programs import PagePrograms
from fusionai.cli.page.run import KEY_FILE, OpenPage, PageOptions, open_page, run_with_page
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.enrolment import enrol
from fusionai.transport.security.certificates import load_authority
from harness.certificates import self_signed
from harness.memory_engine import MemoryEngine
from harness.patience import CEILING_S, until

LOCAL = PageOptions(port=0)


def opened(options: PageOptions, home: Path) -> OpenPage:
    page = open_page(options, home)
    page.listener.close()
    return page


def test_on_loopback_the_key_is_in_the_link_and_stays_the_same(tmp_path: Path):
    first, second = opened(LOCAL, tmp_path), opened(LOCAL, tmp_path)
    key = first.link.partition("#")[2]
    assert len(key) >= 24
    assert second.link.endswith(key)
    assert first.gate.open(key, 0.0)
    assert stat.S_IMODE((tmp_path / "broker" / KEY_FILE).stat().st_mode) == 0o600


def test_beyond_loopback_it_needs_a_password_over_tls(tmp_path: Path):
    certificate, key = self_signed(tmp_path)
    word = tmp_path / "word"
    word.write_text("short\n")
    everywhere = PageOptions(host="0.0.0.0", port=0)
    tls = PageOptions(host="0.0.0.0", port=0, tls_cert=certificate, tls_key=key)
    with pytest.raises(UsageError, match=r"needs TLS"):
        open_page(everywhere, tmp_path)
    with pytest.raises(UsageError, match=r"needs a password"):
        open_page(tls, tmp_path)
    with pytest.raises(UsageError, match=r"at least 12 characters"):
        open_page(PageOptions(host="0.0.0.0", port=0, tls_cert=certificate, tls_key=key, password_file=word), tmp_path)
    with pytest.raises(UsageError, match=r"can't be read"):
        open_page(PageOptions(port=0, password_file=tmp_path / "none"), tmp_path)
    with pytest.raises(UsageError, match=r"--page-tls-cert and --page-tls-key"):
        open_page(PageOptions(port=0, tls_key=key), tmp_path)
    word.write_text("a good long password\n")
    page = opened(PageOptions(host="0.0.0.0", port=0, tls_cert=certificate, tls_key=key, password_file=word), tmp_path)
    assert page.link.startswith("https://")
    assert "#" not in page.link
    assert page.gate.open("a good long password", 0.0)
    assert "localhost" in page.address.hosts


def test_flags_of_the_page_need_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["broker", "--page-port", "0", "--home", str(tmp_path)]) == 2
    assert "--page-port is for a broker with a page" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_stands_beside_the_broker_and_both_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)
    closed: list[str] = []

    async def close(programs: PagePrograms) -> None:
        closed.append(programs.directory.name)

    monkeypatch.setattr(PagePrograms, "close", close)
    page = open_page(LOCAL, tmp_path)
    url, _, key = page.link.partition("#")

    async def run() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()
        options = BrokerOptions(home=tmp_path, host="127.0.0.1", port=0, pool="friends")

        def announce(_: Announcement) -> None:
            ready.set()

        running = asyncio.create_task(run_with_page(options, page, announce=announce, stop=stop, notice=lambda _: None))
        await ready.wait()
        async with httpx.AsyncClient(base_url=url, headers={"Origin": url.rstrip("/")}) as http:
            assert (await http.post("/session", json={"secret": key})).status_code == 200
            async with http.stream("GET", "/events") as events:
                first = await anext(aiter(events.aiter_lines()))
            assert '"pool":"friends"' in first
            made = (await http.post("/actions", json={"do": "invite"})).json()["command"]
            await enrol(made.removeprefix("fusion join "), tmp_path / "member", "provider")
        stop.set()
        await running

    asyncio.run(run())
    assert closed == ["page"]


def test_a_broker_that_can_not_start_ends_its_page(tmp_path: Path):
    page = open_page(LOCAL, tmp_path)

    async def run() -> None:
        options = BrokerOptions(home=tmp_path, host="127.0.0.1", port=0, losses_before_rest=99)
        await run_with_page(options, page, announce=lambda _: None, stop=asyncio.Event(), notice=lambda _: None)

    with pytest.raises(ExceptionGroup) as refusal:
        asyncio.run(run())
    assert isinstance(refusal.value.exceptions[0], UsageError)
    assert page.listener.fileno() == -1


def test_a_broker_that_waits_for_another_ends_with_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    authority = load_authority(tmp_path / "broker", "home", now_wall_s=1.0)
    engine, said = MemoryEngine(), list[str]()
    EngineJournal.open(engine, "home", PeerId("other"), lambda _: authority.public_key)
    monkeypatch.setattr(opening, "engine_at", lambda _: MemoryEngine(engine.store))
    options = BrokerOptions(home=tmp_path, pool="home", host="127.0.0.1", port=0, journal="etcd://one")
    page = open_page(LOCAL, tmp_path)

    async def run() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(
            run_with_page(options, page, announce=lambda _: None, stop=stop, notice=said.append)
        )
        await until(lambda: said)
        stop.set()
        async with asyncio.timeout(CEILING_S):
            await running

    asyncio.run(run())
    assert "waits to take over" in said[0]
