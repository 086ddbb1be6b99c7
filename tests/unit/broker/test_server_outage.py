"""A broker whose journal is in an engine, while the engine is away: nothing is acknowledged that was not written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService, remembered
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.errors import StorageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.enrolment import parse_invitation
from fusionai.transport.interface import Channel
from fusionai.transport.security.certificates import load_authority
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.wire.messages import (
    Invited,
    InviteRequest,
    JoinGranted,
    JoinRequest,
    Message,
    PoolQuery,
    PoolView,
    Refused,
)
from harness.memory_engine import MemoryEngine
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S, until
from harness.virtual_clock import VirtualClock

BROKER = PeerId("broker")
KEY = public_bytes(Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())
ADDRESS = "memory://broker:1"


class Bench:
    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock()
        self.engine = MemoryEngine()
        self.network = MemoryNetwork()
        authority = load_authority(directory, "home", now_wall_s=self.clock.wall_s())
        self.journal = EngineJournal.open(self.engine, "home", BROKER, lambda _: authority.public_key)
        rules = BrokerRules(pool="home", broker=BROKER)
        self.service = BrokerService(rules=rules, journal=self.journal, authority=authority, clock=self.clock)
        self.service.addresses = (ADDRESS,)
        self.server = BrokerServer(self.service, self.clock)

    def cut_off(self, loss: str) -> None:
        """The next append is done or not, and then the engine is away."""
        self.engine.lose(loss)  # pyright: ignore[reportArgumentType]
        self.engine.on_append = lambda: setattr(self.engine, "down", True)

    def back(self) -> None:
        self.engine.down = False
        self.engine.on_append = lambda: None
        self.server.resume(self.journal.recover())

    async def owner(self) -> Channel:
        return await self.network.transport(BROKER, "broker").dial([ADDRESS], expect=None, stream="control")

    async def stranger(self) -> Channel:
        return await self.network.transport(None, "stranger").dial([ADDRESS], expect=None, stream="control")

    def written(self):
        """The pool as another broker would find it."""
        return remembered(self.journal)[1]


async def ask(channel: Channel, message: Message) -> Message:
    await channel.send(message)
    return (await channel.receive()).message


@asynccontextmanager
async def open_bench(directory: Path) -> AsyncIterator[Bench]:
    bench = Bench(directory)
    listener = await bench.network.transport(BROKER, "broker").listen(
        bench.server.accept, host="broker", port=1, strangers=True
    )
    try:
        yield bench
    finally:
        await listener.close()
        bench.journal.close()


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Bench], Coroutine[None, None, None]]], None]:
    def run(scene: Callable[[Bench], Coroutine[None, None, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(CEILING_S), open_bench(tmp_path) as bench:
                await scene(bench)

        asyncio.run(main())

    return run


def test_without_the_engine_requests_are_refused_and_questions_answered(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.owner()
        bench.engine.down = True
        with pytest.raises(StorageError):
            bench.journal.renew()
        answer = await ask(owner, InviteRequest())
        assert isinstance(answer, Refused)
        assert (answer.code, "the pool's journal can't be used now" in answer.reason) == ("failed", True)
        assert isinstance(await ask(owner, PoolQuery()), PoolView)
        assert not bench.service.state.pool.invitations
        bench.back()
        assert isinstance(await ask(owner, InviteRequest()), Invited)
        assert bench.written() == bench.service.state.pool

    play(scene)


def test_what_is_refused_during_an_outage_is_no_line_of_the_log(play, caplog: pytest.LogCaptureFixture):
    async def scene(bench: Bench) -> None:
        owner = await bench.owner()
        bench.engine.down = True
        with pytest.raises(StorageError):
            bench.journal.renew()
        caplog.clear()
        for _ in range(3):
            assert isinstance(await ask(owner, InviteRequest()), Refused)
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]

    play(scene)


@pytest.mark.parametrize("loss", ["done", "not done"])
def test_the_answer_to_a_request_in_doubt_waits_for_the_truth(play, loss: str):
    async def scene(bench: Bench) -> None:
        token = parse_invitation(bench.service.invite(uses=2, lifetime_s=60.0)).token
        stranger, owner = await bench.stranger(), await bench.owner()
        bench.cut_off(loss)
        request = JoinRequest(token=token, public_key=KEY, purpose="provider")
        asked = asyncio.create_task(ask(stranger, request))
        await until(lambda: bench.journal.outage)
        for question in (InviteRequest(), PoolQuery()):
            answer = await ask(owner, question)
            assert isinstance(answer, Refused), "the next decision depends on the one in doubt"
        assert bench.server.ask(PoolQuery()) == answer
        with pytest.raises(StorageError, match="out of reach"):
            bench.service.tick()
        assert not asked.done()
        bench.back()
        answer = await asked
        if loss == "done":
            assert isinstance(answer, JoinGranted)
            assert answer.peer == peer_of(KEY)
        else:
            assert isinstance(answer, Refused)
            assert "has not been done" in answer.reason
        assert (peer_of(KEY) in bench.service.state.pool.members) is (loss == "done")
        assert bench.written() == bench.service.state.pool
        assert isinstance(await ask(owner, InviteRequest()), Invited)

    play(scene)


def test_a_request_of_the_brokers_own_program_learns_that_it_is_in_doubt(play):
    async def scene(bench: Bench) -> None:
        bench.cut_off("done")
        answer = bench.server.ask(InviteRequest())
        assert isinstance(answer, Refused)
        assert "it is not known yet" in answer.reason
        bench.back()
        assert len(bench.service.state.pool.invitations) == 1
        assert bench.written() == bench.service.state.pool

    play(scene)


def test_a_broker_replaced_during_an_outage_says_that_it_does_not_know(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.owner()
        keeping = asyncio.create_task(bench.server.keep(asyncio.Event()))
        bench.cut_off("done")
        asked = asyncio.create_task(ask(owner, InviteRequest()))
        await until(lambda: bench.journal.outage)
        bench.engine.store.lease = ""
        authority = bench.service.authority.public_key
        EngineJournal.open(MemoryEngine(bench.engine.store), "home", PeerId("other"), lambda _: authority)
        with pytest.raises(StorageError, match="another broker has taken over") as taken:
            bench.back()
        bench.server.superseded(taken.value)  # pyright: ignore[reportArgumentType]
        answer = await asked
        assert isinstance(answer, Refused)
        assert "it is not known whether this was done" in answer.reason
        with pytest.raises(StorageError, match="another broker has taken over"):
            await keeping

    play(scene)


def test_once_its_lease_has_ended_a_broker_answers_nothing(play, monkeypatch: pytest.MonkeyPatch):
    """Another one may keep the pool, and members must look for it."""

    async def scene(bench: Bench) -> None:
        owner = await bench.owner()
        with monkeypatch.context() as patched:
            patched.setattr(EngineJournal, "lapsed", True)
            answer = await ask(owner, PoolQuery())
            assert isinstance(answer, Refused)
            assert answer.code == "failed"
            with pytest.raises(StorageError):
                bench.service.tick()
        bench.server.resume(None)
        assert isinstance(await ask(owner, PoolQuery()), PoolView)

    play(scene)
