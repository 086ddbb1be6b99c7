"""One introduction for all ways of a dial, and how long the relay waits for the way by UDP."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fusionai.primitives.errors import RefusedError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Introduction, Meeting

PEER = PeerId("a" * 52)


class Broker:
    def __init__(self, *, refuses: bool = False) -> None:
        self.asked: list[tuple[PeerId, tuple[str, ...]]] = []
        self.refuses = refuses

    async def ask(self, peer: PeerId, addresses: tuple[str, ...] = ()) -> Introduction:
        self.asked.append((peer, addresses))
        await asyncio.sleep(0)
        if self.refuses:
            raise RefusedError("No such peer in this pool.", code="unknown_peer")
        return Introduction(b"token", (), ())


def meeting(broker: Broker) -> Meeting:
    return Meeting(cast("Any", broker), PEER)


def test_the_broker_is_asked_once_whichever_way_asks_first():
    async def main() -> None:
        broker = Broker()
        shared = meeting(broker)
        answers = await asyncio.gather(shared.introduction(("quic://x@203.0.113.7:1",)), shared.introduction())
        assert answers[0] is answers[1]
        assert broker.asked == [(PEER, ("quic://x@203.0.113.7:1",))]

    asyncio.run(main())


def test_a_refusal_to_introduce_is_no_refusal_of_the_peer():
    async def main() -> None:
        with pytest.raises(TransportError, match="could not introduce"):
            await meeting(Broker(refuses=True)).introduction()

    asyncio.run(main())


def test_the_relay_waits_for_the_way_by_udp_and_no_longer_than_that_lasts():
    async def main() -> None:
        nothing_tried = meeting(Broker())
        await nothing_tried.head_start(1000.0)
        tried = meeting(Broker())
        tried.quic_is_tried()
        waiting = asyncio.create_task(tried.head_start(1000.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        tried.quic_is_over()
        await waiting
        slow = meeting(Broker())
        slow.quic_is_tried()
        await slow.head_start(0.0)
        relay_is_known_to_work = meeting(Broker())
        relay_is_known_to_work.quic_is_tried()
        relay_is_known_to_work.waive_head_start()
        await relay_is_known_to_work.head_start(1000.0)

    asyncio.run(main())
