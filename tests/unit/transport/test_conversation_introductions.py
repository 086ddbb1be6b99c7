"""Questions to the broker about reaching others: one conversation for all of them, opened at need."""

from __future__ import annotations

import asyncio

import pytest

from fusionai.primitives.errors import RefusedError, TransportError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.transport import conversation as introductions
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.conversation import Introductions
from fusionai.transport.interface import Channel, Listener
from fusionai.wire.messages import Done, Introduced, Meet, Message, Observe, Observed, Refused
from harness.memory_transport import MemoryNetwork

ME, OTHER, BROKER = (PeerId(letter * 52) for letter in "aby")


class Broker:
    def __init__(self, *answers: Message) -> None:
        self.answers = list(answers)
        self.asked: list[Message] = []
        self.connections = 0

    async def accept(self, channel: Channel) -> None:
        self.connections += 1
        while True:
            self.asked.append((await channel.receive()).message)
            await channel.send(self.answers.pop(0))


async def opened(broker: Broker) -> tuple[Introductions, Listener]:
    network = MemoryNetwork()
    listener = await network.transport(BROKER, "broker").listen(broker.accept, host="broker", port=1)
    return Introductions(network.transport(ME), BrokerAddresses(listener.addresses)), listener


def test_one_conversation_for_all_questions():
    async def main() -> None:
        broker = Broker(Introduced(token=b"t", addresses=("relay://x:1",)), Observed(host="203.0.113.7", port=5))
        asking, listener = await opened(broker)
        assert broker.connections == 0, "most never need it"
        introduction = await asking.ask(OTHER, ("quic://x@y:1",))
        # In memory nobody is anywhere, so there is no relay to go to.
        assert (introduction.token, introduction.relays, introduction.addresses) == (b"t", (), ("relay://x:1",))
        assert (await asking.observed(4711))[0] == Observed(host="203.0.113.7", port=5)
        assert broker.asked == [Meet(peer=OTHER, addresses=("quic://x@y:1",)), Observe(port=4711)]
        assert broker.connections == 1
        await asking.close()
        await listener.close()

    asyncio.run(main())


def test_it_ends_when_nobody_asks_and_begins_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(introductions, "IDLE_S", 0.0)

    async def main() -> None:
        broker = Broker(*[Introduced(token=b"t")] * 2)
        asking, listener = await opened(broker)
        for connections in (1, 2):
            await asking.ask(OTHER)
            assert broker.connections == connections
            for _ in range(20):
                await asyncio.sleep(0)
        await asking.close()
        await listener.close()

    asyncio.run(main())


def test_what_is_no_answer_is_said():
    async def main() -> None:
        broker = Broker(Refused(code="unknown_peer"), Done(), Introduced(token=b"t"))
        asking, listener = await opened(broker)
        with pytest.raises(RefusedError):
            await asking.ask(OTHER)
        with pytest.raises(WireError, match="expected the broker to answer introduced, got done"):
            await asking.ask(OTHER)
        assert (await asking.ask(OTHER)).token == b"t"
        await listener.close()
        with pytest.raises(TransportError):
            await asking.ask(OTHER)
        await asking.close()

    asyncio.run(main())


def test_a_broker_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(introductions, "_ANSWER_S", 0.05)

    async def main() -> None:
        async def silent(channel: Channel) -> None:
            await channel.receive()
            await asyncio.Event().wait()

        network = MemoryNetwork()
        listener = await network.transport(BROKER, "broker").listen(silent, host="broker", port=1)
        asking = Introductions(network.transport(ME), BrokerAddresses(listener.addresses))
        with pytest.raises(TransportError, match="did not answer"):
            await asking.ask(OTHER)
        await asking.close()
        await listener.close()

    asyncio.run(main())
