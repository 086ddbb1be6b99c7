"""Where there is no way by UDP it is said, and nothing else comes of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fusionai.primitives.errors import TransportError
from fusionai.transport import peer_transport as peer_transport
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.conversation import Introductions
from fusionai.transport.interface import Channel, Remote
from fusionai.transport.peer_transport import UdpAcceptor, opened_or_none
from fusionai.transport.routes import quic as quic_binding
from fusionai.transport.routes.quic import QuicTransport, parse_quic
from fusionai.transport.security.identity import peer_of
from fusionai.wire.messages import Observe, Observed

BROKER_ID = peer_of(bytes(32))
BROKER = Remote(BROKER_ID, "broker", "203.0.113.1", 4711)
needs_quic = pytest.mark.skipif(
    not quic_binding.available(), reason="iroh, the library for QUIC, is not installed here"
)


class Broker:
    """As far as a door asks it."""

    def __init__(self, udp_port: int, remote: Remote = BROKER) -> None:
        self.udp_port = udp_port
        self.remote = remote
        self.asked = 0

    async def observed(self, port: int) -> tuple[Observed, Remote]:
        self.asked += 1
        return Observed(host="203.0.113.7", port=5, udp_port=self.udp_port), self.remote


def door(pool: Any, broker: Broker) -> UdpAcceptor:
    return UdpAcceptor(pool.credentials("a"), cast("Introductions", broker), TransferLimits())


async def accept(channel: Channel) -> None:
    await channel.receive()


def test_without_the_library_the_broker_is_not_even_asked(pool: Any, monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object, **__: object) -> None:
        raise TransportError("QUIC needs the package iroh.", hint="Install it.")

    monkeypatch.setattr(peer_transport, "QuicTransport", missing)

    async def main() -> None:
        broker = Broker(4711)
        closed = door(pool, broker)
        assert await opened_or_none(closed, accept) is None
        with pytest.raises(TransportError, match="Install it"):
            await closed.opened()
        assert broker.asked == 0
        await closed.knock(BROKER_ID, (f"quic://{BROKER_ID}@203.0.113.9:9", "quic://nobody@203.0.113.9:9", "?"))
        await closed.close()

    asyncio.run(main())


@needs_quic
def test_a_broker_that_observes_nothing(pool: Any):
    async def main() -> None:
        closed = door(pool, Broker(0))
        with pytest.raises(TransportError, match="observes no UDP port"):
            await closed.opened()
        assert not closed.lost
        await closed.close()

    asyncio.run(main())


@needs_quic
def test_the_address_is_where_the_broker_sees_the_port_and_forgotten_when_told(pool: Any):
    async def main() -> None:
        async def answers(channel: Channel) -> None:
            while isinstance((await channel.receive()).message, Observe):
                await channel.send(Observed(host=channel.remote.host, port=channel.remote.port))

        credentials = pool.credentials("broker", "broker")
        listener = await QuicTransport(credentials).listen(answers, host="127.0.0.1", port=0)
        remote = Remote(credentials.identity.peer, "broker", "127.0.0.1", 4711)
        broker = Broker(listener.port, remote)
        opened = door(pool, broker)
        address = await opened.opened(accept)
        found = parse_quic(address)
        assert found is not None
        assert found[:2] == (pool.credentials("a").identity.peer, "127.0.0.1")
        assert await opened.opened(accept) == address
        assert broker.asked == 1
        await opened.forget()
        assert await opened.opened(accept) == address, "the same port, observed again"
        assert broker.asked == 2
        await listener.close()
        for _ in range(500):
            await asyncio.sleep(0 if opened.lost else 0.01)
        assert opened.lost
        await opened.close()

    asyncio.run(main())
