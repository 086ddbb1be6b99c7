"""Machines of another replica at a peer's door: only those that the job's driver named, and only for an exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fusionai.primitives.errors import TransportError
from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from harness.pool import peer_id
from harness.stand import FENCE, Running, Stand, receive

TWIN, OTHER, THEIRS = peer_id(6), peer_id(7), "job-2"


def with_stand(body: Callable[[Stand, Running], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Stand() as stand:
            await body(stand, await stand.running())

    asyncio.run(run())


async def opened(
    stand: Stand, stream: wire.Stream = "state", *, peer: PeerId = TWIN, driver: bool = False
) -> tuple[Channel, wire.Message]:
    """What the peer answers to a machine that shows a ticket of another replica's job."""
    ticket = stand.pool.ticket(peer, job=THEIRS, version=9, driver=driver)
    channel = await stand.dial(stream, as_peer=peer)
    await channel.send(wire.OpenJob(job=stand.pool.job, fence=FENCE, ticket=ticket, twin_of=THEIRS))
    return channel, (await receive(channel)).message


async def named(stand: Stand, running: Running) -> None:
    """The driver names `TWIN` in a round, and the peer has heard of it."""
    twin = wire.TwinStage(member=1, job=THEIRS, stage=0, peer=TWIN, fence=FENCE, wants=True, keys=((0, 1),))
    await running.control.send(
        wire.ExchangeRound(
            fence=FENCE, stage=0, step=4, number=1, place=0, weights=(1.0, 1.0), twins=(twin,), kept_from=1
        )
    )
    await running.control.send(wire.Ping(sequence=1, sent_at_s=0.0))
    assert isinstance((await receive(running.control)).message, wire.Pong)


async def until_closed(channel: Channel) -> None:
    while True:
        await receive(channel)


def test_a_machine_that_the_driver_did_not_name_is_refused():
    async def body(stand: Stand, running: Running) -> None:
        _, answer = await opened(stand)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "bad_placement"
        await named(stand, running)
        _, answer = await opened(stand, peer=OTHER)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "bad_placement"

    with_stand(body)


def test_a_named_machine_is_let_in_for_an_exchange_only():
    async def body(stand: Stand, running: Running) -> None:
        await named(stand, running)
        channel, answer = await opened(stand)
        assert isinstance(answer, wire.Done)
        await channel.send(wire.Snapshot(fence=FENCE, stage=0, step=0, part=0, watermark=0, last=True))
        with pytest.raises(TransportError):
            await until_closed(channel)
        assert not stand.member.kept.store.held

    with_stand(body)


@pytest.mark.parametrize(("stream", "driver"), [("tensors", False), ("control", False), ("state", True)])
def test_no_other_connection_is_open_to_it(stream: wire.Stream, driver: bool):
    async def body(stand: Stand, running: Running) -> None:
        await named(stand, running)
        _, answer = await opened(stand, stream, driver=driver)
        assert isinstance(answer, wire.Refused)
        assert answer.code == "bad_ticket"

    with_stand(body)
