"""A peer is reached whichever way works, the next connection by the best one, and it is known which way links go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport import peer_transport
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.interface import Channel
from fusionai.transport.peer_transport import PeerTransport
from fusionai.transport.routes.relay import Relay
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.signed import LIFETIME_S, PairingToken, sign_pairing
from fusionai.wire.messages import Introduced, Meet, MeetNotice, Message, Observe, Observed, Refused
from harness.patience import CEILING_S

RELAY = "relay://127.0.0.1:1"
"""Callers ask their own broker; the place is for people."""


def nowhere() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{unused.getsockname()[1]}"


class Stand:
    """Peers `a`, which dials, and `b`, which is told by the broker when somebody can't dial it."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.relay = Relay(pool.authority.public_key, SystemClock())
        self.asked: list[Message] = []
        self.introduces = True
        self.came: asyncio.Queue[Channel] = asyncio.Queue()

    def peer(self, name: str) -> PeerId:
        return self.pool.credentials(name).identity.peer

    async def broker(self, channel: Channel) -> None:
        while True:
            message = (await channel.receive()).message
            self.asked.append(message)
            await channel.send(self.answer(message, channel.remote.peer))

    def answer(self, message: Message, asking: PeerId | None) -> Message:
        match message:
            case Meet() if self.introduces and asking is not None:
                until_s = self.pool.now_s() + LIFETIME_S
                number = len(self.asked).to_bytes(16, "little")
                key = self.pool.authority.key
                dials = sign_pairing(PairingToken(number, asking, message.peer, "dials", until_s), key)
                answers = sign_pairing(PairingToken(number, message.peer, asking, "answers", until_s), key)
                self.b.answer(MeetNotice(peer=asking, token=answers), self.place)
                return Introduced(token=dials)
            case Observe(port=port):
                return Observed(host="127.0.0.1", port=1, reachable=port == self.place[1])
            case _:
                return Refused(code="unknown_peer", reason="It is not there.")

    async def accept(self, channel: Channel) -> None:
        self.came.put_nowait(channel)
        await asyncio.Event().wait()

    async def reach(self, addresses: list[str], **more: Any) -> Channel:
        return await self.a.dial(addresses, expect=self.peer("b"), stream="tensors", **more)


@pytest.fixture
def play(pool: Any) -> Callable[[Callable[[Stand], Coroutine[Any, Any, None]]], None]:
    import time

    pool.now_s = time.time

    @asynccontextmanager
    async def opened() -> AsyncIterator[Stand]:
        stand = Stand(pool)
        door = await TcpTransport(pool.credentials("broker", "broker")).listen(
            stand.broker, host="127.0.0.1", port=0, strangers=True, relay=stand.relay
        )
        stand.place = ("127.0.0.1", int(door.addresses[0].rpartition(":")[2]))
        stand.a = PeerTransport(pool.credentials("a"), BrokerAddresses(door.addresses))
        stand.b = PeerTransport(pool.credentials("b"), BrokerAddresses(door.addresses))
        stand.listener = await stand.b.listen(stand.accept, host="127.0.0.1", port=0)
        try:
            yield stand
        finally:
            await stand.a.close()
            await stand.b.close()
            await stand.listener.close()
            await door.close()

    def run(scene: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(CEILING_S), opened() as stand:
                await scene(stand)

        asyncio.run(main())

    return run


def test_who_can_be_dialled_is_dialled(play):
    async def scene(stand: Stand) -> None:
        channel = await stand.reach([nowhere(), *stand.listener.addresses, RELAY])
        assert channel.route == "lan"
        assert stand.asked == []
        theirs = await stand.came.get()
        (link,), (back,) = stand.a.links, stand.b.links
        assert (link.peer, link.route, link.channels) == (stand.peer("b"), "lan", 1)
        assert (back.peer, back.route, back.channels) == (stand.peer("a"), "lan", 1)
        assert 0 <= link.round_trip_s < 1
        assert link.loss <= 1
        await channel.close()
        await theirs.close()
        assert (stand.a.links, stand.b.links) == ((), ())

    play(scene)


def test_who_can_not_is_met_at_the_relay(play):
    async def scene(stand: Stand) -> None:
        channel = await stand.reach([nowhere(), RELAY])
        theirs = await stand.came.get()
        assert (channel.route, theirs.route) == ("relay", "relay")
        assert (channel.remote.peer, theirs.remote.peer) == (stand.peer("b"), stand.peer("a"))
        (link,) = stand.a.links
        assert (link.peer, link.route, link.channels) == (stand.peer("b"), "relay", 1)
        assert link.round_trip_s == 0.0, "the kernel knows that to the relay only"
        # A second one goes over the relay at once, in the conversation that is still open.
        again = await stand.reach([nowhere(), RELAY])
        assert again.route == "relay"
        assert [type(message) for message in stand.asked] == [Meet, Meet]
        await channel.close()
        await again.close()

    play(scene)


def test_a_better_way_is_found_in_the_background_and_the_next_connection_takes_it(play, monkeypatch):
    monkeypatch.setattr(peer_transport, "FIRST_RETRY_S", 0.05)

    async def scene(stand: Stand) -> None:
        closed = nowhere()
        relayed = await stand.reach([closed, RELAY])
        assert relayed.route == "relay"
        assert (await stand.came.get()).route == "relay"
        # The port gets forwarded.
        second = await stand.b.listen(stand.accept, host="127.0.0.1", port=int(closed.rpartition(":")[2]))
        assert (await stand.came.get()).route == "lan", "tried in the background"
        while any(task for task in stand.a._seeking.values()):
            await asyncio.wait(stand.a._seeking.values())
        channel = await stand.reach([closed, RELAY])
        assert channel.route == "lan"
        assert sum(isinstance(message, Meet) for message in stand.asked) == 1
        assert not relayed.closed
        assert [link.route for link in stand.a.links] == ["lan", "relay"]
        await channel.close()
        await relayed.close()
        await second.close()

    play(scene)


def test_nobody_looks_for_better_ways_once_no_link_goes_over_the_relay(play, monkeypatch):
    monkeypatch.setattr(peer_transport, "FIRST_RETRY_S", 0.01)

    async def scene(stand: Stand) -> None:
        channel = await stand.reach([nowhere(), RELAY])
        await channel.close()
        while stand.a._seeking:
            await asyncio.wait(stand.a._seeking.values())

    play(scene)


def test_what_the_broker_does_not_introduce_is_not_reached(play):
    async def scene(stand: Stand) -> None:
        stand.introduces = False
        with pytest.raises(TransportError, match="could not introduce"):
            await stand.reach([nowhere(), RELAY])
        # Its refusal says nothing about other ways.
        assert (await stand.reach([RELAY, *stand.listener.addresses])).route == "lan"

    play(scene)


def test_somebody_else_at_an_address_does_not_end_the_search(play):
    async def scene(stand: Stand) -> None:
        async def accept(channel: Channel) -> None:
            await channel.receive()

        other = await TcpTransport(stand.pool.credentials("c")).listen(accept, host="127.0.0.1", port=0)
        assert (await stand.reach([*other.addresses, RELAY])).route == "relay"
        stand.introduces = False
        with pytest.raises(TrustError):
            await stand.reach([*other.addresses])
        await other.close()

    play(scene)


def test_addresses_that_lead_nowhere(play):
    async def scene(stand: Stand) -> None:
        with pytest.raises(UsageError):
            await stand.reach([])
        with pytest.raises(UsageError):
            await stand.reach(["carrier-pigeon://home:1"])
        assert await stand.a.seen_at(stand.listener) == ()

    play(scene)


def test_nobody_is_met_before_there_is_a_door(play):
    async def scene(stand: Stand) -> None:
        stand.a.answer(MeetNotice(peer=stand.peer("b"), token=b"x"), stand.place)
        assert not stand.a._answering

    play(scene)
