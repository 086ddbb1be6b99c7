"""What a listener takes from members that have shown a certificate and nothing else, over real TLS on loopback."""

from __future__ import annotations

import asyncio

import pytest

from fusionai.coordination.doorkeeping import CrowdCaps
from fusionai.primitives.errors import ChannelClosed, WireError
from fusionai.transport.channels import pace
from fusionai.transport.channels.accepting import AcceptLimits
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.interface import Channel, Listener
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.frame import DOOR_LIMITS, encode_header
from fusionai.wire.messages import Ping, Probe, TensorHeader, encode
from harness.admission import admitting
from harness.credentials import CertifiedPool
from harness.in_a_loop import in_a_loop


class Door:
    """A listener whose guests are admitted by `admits`."""

    def __init__(self, pool: CertifiedPool, limits: AcceptLimits | None = None, *, admits: bool = False) -> None:
        self._pool = pool
        self._transport = TcpTransport(pool.credentials("b"), accept_limits=limits)
        self._admits = admits
        self.ends: asyncio.Queue[BaseException] = asyncio.Queue()
        self.listener: Listener | None = None

    async def __aenter__(self) -> Door:
        accept = admitting(self._accept) if self._admits else self._accept
        self.listener = await self._transport.listen(accept, host="127.0.0.1", port=0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.listener is not None
        await self.listener.close()

    async def dial(self, name: str = "a") -> TcpChannel:
        assert self.listener is not None
        transport = TcpTransport(self._pool.credentials(name))
        expect = self._pool.credentials("b").identity.peer
        return await transport.dial(self.listener.addresses, expect=expect, stream="tensors")

    async def _accept(self, channel: Channel) -> None:
        try:
            while True:
                await channel.send((await channel.receive()).message)
        except BaseException as error:
            self.ends.put_nowait(error)
            raise


def announced(nbytes: int) -> bytes:
    message = encode(Probe(sequence=1, sent_at_s=0.0, tensors=(TensorHeader("probe", "uint8", (nbytes,)),)))
    return encode_header(len(message), nbytes) + message


@pytest.mark.parametrize(
    "sent",
    [encode_header(DOOR_LIMITS.message_bytes + 1, 0), announced(DOOR_LIMITS.body_bytes + 1)],
    ids=["message", "body"],
)
@in_a_loop
async def test_a_guest_announces_no_more_than_a_probe(sent: bytes, pool: CertifiedPool):
    async with Door(pool) as door:
        channel = await door.dial()
        channel._write(sent)
        assert isinstance(await door.ends.get(), WireError)
        await channel.close()


@in_a_loop
async def test_who_is_admitted_may_send_what_the_stream_allows(pool: CertifiedPool):
    async with Door(pool, admits=True) as door:
        channel = await door.dial()
        channel._write(announced(DOOR_LIMITS.body_bytes + 1) + bytes(DOOR_LIMITS.body_bytes))
        channel._write(b"\0")
        with pytest.raises(WireError, match="announces"):
            # The answer of this door announces the tensor again and carries none: the whole frame had arrived.
            raise await door.ends.get()
        await channel.close()


@in_a_loop
async def test_one_key_has_few_connections_without_a_ticket_and_keeps_nobody_out(pool: CertifiedPool):
    limits = AcceptLimits(guests=CrowdCaps(total=64, prefix=64, key=3))
    async with Door(pool, limits) as door:
        honest = await door.dial("c")
        greedy = [await door.dial() for _ in range(12)]
        for _ in range(9):
            assert isinstance(await door.ends.get(), asyncio.CancelledError)
        await honest.send(Ping(sequence=1, sent_at_s=0.0))
        assert (await honest.receive()).message == Ping(sequence=1, sent_at_s=0.0)
        for channel in (*greedy, honest):
            channel.abort()


@in_a_loop
async def test_one_key_has_a_bounded_number_of_connections_also_with_tickets(pool: CertifiedPool):
    async with Door(pool, AcceptLimits(of_key=3), admits=True) as door:
        kept = [await door.dial() for _ in range(3)]
        surplus = await door.dial()
        with pytest.raises(ChannelClosed):
            await surplus.receive()
        honest = await door.dial("c")
        for channel in (*kept, honest):
            await channel.send(Ping(sequence=1, sent_at_s=0.0))
            await channel.receive()
            channel.abort()


@in_a_loop
async def test_a_guest_that_shows_no_ticket_in_time_is_shown_out(pool: CertifiedPool):
    async with Door(pool, AcceptLimits(guest_s=0.2)) as door:
        channel = await door.dial()
        with pytest.raises(ChannelClosed):
            await channel.receive()


@in_a_loop
async def test_who_is_admitted_may_stay_silent(pool: CertifiedPool):
    async with Door(pool, AcceptLimits(guest_s=0.1), admits=True) as door:
        channel = await door.dial()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.5)
        channel.abort()


@pytest.mark.parametrize("admits", [False, True], ids=["guest", "member"])
@in_a_loop
async def test_a_frame_that_stops_arriving_ends_its_connection(
    admits: bool, pool: CertifiedPool, monkeypatch: pytest.MonkeyPatch
):
    """Sent after the deadlines of guests are out of the way."""
    for name in ("WINDOW_S", "DOOR_WINDOW_S"):
        monkeypatch.setattr(pace, name, 0.2)
    monkeypatch.setattr("fusionai.transport.channels.framed.WINDOW_S", 0.2)
    async with Door(pool, admits=admits) as door:
        channel = await door.dial()
        channel._write(announced(2**20))
        ended = await door.ends.get()
        assert isinstance(ended, ChannelClosed)
        assert "of a frame within" in ended.message
        channel.abort()
