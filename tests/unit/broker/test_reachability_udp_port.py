"""The broker's UDP port: opened once somebody needs it, and nobody's trouble where it can't be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fusionai.broker import reachability as udp_port
from fusionai.broker.reachability import Observer, UdpPort
from fusionai.primitives.errors import TransportError
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel, Remote
from fusionai.transport.routes import quic as quic_binding
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.wire.messages import Observe
from harness.credentials import CertifiedPool
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S


@pytest.fixture
def credentials(tmp_path: Path) -> MemberCredentials:
    return CertifiedPool(tmp_path).credentials("broker", "broker")


async def accept(channel: Channel) -> None:
    await channel.receive()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(CEILING_S):
            await scene()

    asyncio.run(bounded())


@pytest.mark.skipif(not quic_binding.available(), reason="iroh, the library for QUIC, is not installed here")
def test_it_is_opened_at_the_first_need_and_once(credentials: MemberCredentials):
    async def scene() -> None:
        port = UdpPort(credentials, accept, "127.0.0.1", 0)
        first, second = await asyncio.gather(port.opened(), port.opened())
        assert first == second > 0
        taken = UdpPort(credentials, accept, "127.0.0.1", first)
        assert await taken.opened() == 0
        await taken.close()
        await port.close()

    play(scene)


def test_without_the_library_there_is_none(credentials: MemberCredentials, monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> None:
        raise TransportError("QUIC needs the package iroh.")

    monkeypatch.setattr(udp_port, "QuicTransport", missing)

    async def scene() -> None:
        port = UdpPort(credentials, accept, "127.0.0.1", 0)
        assert await port.opened() == 0
        await port.close()

    play(scene)


def test_a_member_that_can_be_dialled_needs_none():
    asked: list[str] = []

    async def opened() -> int:
        asked.append("opened")
        return 4711

    class Reachable(Observer):
        async def _reaches(self, remote: Remote, port: int) -> bool:
            return port == 9

    async def scene() -> None:
        observer = Reachable(MemoryNetwork().transport(PeerId("y" * 52), "broker"), opened)
        remote = Remote(PeerId("a" * 52), "member", "203.0.113.7", 5555)
        assert (await observer.answer(remote, Observe(port=9))).udp_port == 0
        assert asked == []
        assert (await observer.answer(remote, Observe(port=8))).udp_port == 4711

    play(scene)
