"""How members are seen from the broker, and whom it dials back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusionai.broker.reachability import Observer
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel, Remote
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.messages import Observe, Observed
from harness.credentials import CertifiedPool


@pytest.fixture
def pool(tmp_path: Path) -> CertifiedPool:
    return CertifiedPool(tmp_path)


def test_a_port_is_reachable_where_the_asking_peer_itself_answers(pool: CertifiedPool):
    async def main() -> None:
        came: list[Remote] = []

        async def accept(channel: Channel) -> None:
            came.append(channel.remote)
            await channel.receive()

        listener = await TcpTransport(pool.credentials("peer")).listen(accept, host="127.0.0.1", port=0)
        target = parse_address(listener.addresses[0])
        assert target is not None
        host, port = target
        observer = Observer(TcpTransport(pool.credentials("broker", "broker")))
        peer = pool.peer("peer")

        async def asked(by: PeerId, host: str, port: int) -> Observed:
            return await observer.answer(Remote(by, "member", host, 5555), Observe(port=port))

        assert await asked(peer, host, port) == Observed(host=host, port=5555, reachable=True)
        assert [remote.role for remote in came] == ["broker"]
        # Somebody else's port is not the asking peer's, and a closed one is nobody's.
        assert not (await asked(pool.peer("other"), host, port)).reachable
        await listener.close()
        assert not (await asked(peer, host, port)).reachable
        assert await asked(peer, host, 0) == Observed(host=host, port=5555)
        assert await asked(peer, "", port) == Observed(host="", port=5555)

    asyncio.run(main())
