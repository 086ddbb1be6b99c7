"""A broker that is started while another one keeps the pool: it waits, says so once, and goes on when it may."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusionai.broker import home as homes
from fusionai.broker.engines import opening
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import EngineUnreachable
from fusionai.broker.home import BrokerHome, open_when_free
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import run_broker
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.certificates import load_authority
from harness.memory_engine import MemoryEngine
from harness.patience import CEILING_S, until
from harness.virtual_clock import VirtualClock


class Waiting:
    """A home whose pool another broker keeps."""

    def __init__(self, home: Path) -> None:
        self.engine = MemoryEngine()
        self.clock = VirtualClock()
        self.options = BrokerOptions(home=home, pool="home", host="127.0.0.1", port=0, journal="etcd://one")
        self.authority = load_authority(home / "broker", "home", now_wall_s=self.clock.wall_s())
        self.other = EngineJournal.open(self.engine, "home", PeerId("other"), lambda _: self.authority.public_key)
        self.said: list[str] = []
        self.stop = asyncio.Event()

    async def open(self) -> BrokerHome | None:
        return await open_when_free(self.options, self.clock, self.stop, self.said.append)


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    found = Waiting(tmp_path)
    monkeypatch.setattr(homes, "TAKEOVER_CHECK_S", 0.01)
    monkeypatch.setattr(opening, "engine_at", lambda _: MemoryEngine(found.engine.store))
    return found


def test_it_takes_over_when_the_lease_ends(waiting: Waiting, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with asyncio.timeout(CEILING_S):
            opened = asyncio.create_task(waiting.open())
            await until(lambda: waiting.said)
            # The engine is away for a while.
            tries: list[str] = []

            def away(url: str) -> MemoryEngine:
                tries.append(url)
                raise EngineUnreachable("one can't be reached.")

            with monkeypatch.context() as patched:
                patched.setattr(opening, "engine_at", away)
                await until(lambda: len(tries) > 2)
            assert not opened.done()
            waiting.other.close()
            home = await opened
            assert home is not None
            assert home.journal.term == 2
            home.close()

    asyncio.run(main())
    [said] = waiting.said
    assert said.startswith("Another broker (other) keeps pool 'home' in memory; its lease ends in 5.0 s")
    assert said.endswith("This broker waits to take over.")


def test_it_can_be_stopped_while_it_waits(waiting: Waiting):
    async def main() -> None:
        running = asyncio.create_task(
            run_broker(waiting.options, announce=lambda _: None, stop=waiting.stop, notice=waiting.said.append)
        )
        await until(lambda: waiting.said)
        waiting.stop.set()
        async with asyncio.timeout(CEILING_S):
            await running

    asyncio.run(main())
    waiting.other.renew()


def test_an_engine_that_can_not_be_reached_at_the_start_is_an_error(waiting: Waiting, monkeypatch: pytest.MonkeyPatch):
    def away(url: str) -> MemoryEngine:
        engine = MemoryEngine(waiting.engine.store)
        engine.down = True
        return engine

    monkeypatch.setattr(opening, "engine_at", away)
    with pytest.raises(EngineUnreachable, match="can't be reached"):
        asyncio.run(waiting.open())
