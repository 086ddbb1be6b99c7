"""Attacks on the doors of a live pool: a broker and a peer in processes of their own, attacked over loopback.

The attacker has a valid certificate at most. Whatever it does, an honest member is served, and neither process grows.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId
from fusionai.transport.channels.framed import Dialling
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.enrolment import Membership, load_membership
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire import messages as wire
from fusionai.wire.frame import encode_header
from harness.in_a_loop import in_a_loop
from harness.live_pool import LivePool, Process, fusion
from harness.patience import CEILING_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="calls from several addresses of 127.0.0.0/8"),
]

MIB = 2**20
CONNECTIONS = 150
HONEST_HOST = "127.0.77.1"
"""Loopback address in another /24 than the attacker's."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("doors"), peers=("victim",)) as live:
        attacker = fusion("join", live.invite(), "--owner", "--home", live.directory / "attacker")
        assert attacker.code == 0, attacker.err
        yield live


def membership(pool: LivePool, who: str) -> Membership:
    return load_membership(pool.directory / who / "owner")


def process_of(one: Process) -> psutil.Process:
    return psutil.Process(one.process.pid)


async def victim(pool: LivePool) -> tuple[PeerId, tuple[str, ...]]:
    async with PoolSession(membership(pool, "owner"), trust=None) as session:
        (member,) = await session.pool()
    return PeerId(member.view.peer), tuple(one for one in member.view.addresses if one.startswith("tcp://"))


def unfinished_probe(nbytes: int, sent: int) -> bytes:
    """A frame that announces a body of `nbytes` and brings `sent` of them."""
    tensor = wire.TensorHeader("probe", "uint8", (nbytes,))
    message = wire.encode(wire.Probe(sequence=1, sent_at_s=0.0, tensors=(tensor,)))
    return encode_header(len(message), nbytes) + message + bytes(sent)


async def pinged(channel: TcpChannel) -> bool:
    await channel.send(wire.Ping(sequence=7, sent_at_s=0.0))
    return isinstance((await channel.receive()).message, wire.Pong)


async def attack(pool: LivePool, nbytes: int, sent: int) -> list[TcpChannel]:
    """Ping, then an unfinished probe, on each of many connections."""
    peer, addresses = await victim(pool)
    transport = TcpTransport(membership(pool, "attacker").credentials)
    channels: list[TcpChannel] = []
    for _ in range(CONNECTIONS):
        channel = await transport.dial(addresses, expect=peer, stream="tensors")
        assert await pinged(channel)
        channel._write(unfinished_probe(nbytes, sent))
        channels.append(channel)
    return channels


async def an_honest_member_is_served(pool: LivePool) -> None:
    peer, addresses = await victim(pool)
    channel = await TcpTransport(membership(pool, "owner").credentials).dial(addresses, expect=peer, stream="tensors")
    assert await pinged(channel)
    await channel.close()


async def until_at_most(channels: list[TcpChannel], count: int) -> None:
    """The victim sends nothing more, so that what is received is the end of a channel."""
    ends = {asyncio.ensure_future(channel.receive()) for channel in channels}
    try:
        async with asyncio.timeout(CEILING_S):
            while len(ends) > count:
                done, ends = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                assert all(isinstance(one.exception(), FusionError) for one in done)
    finally:
        for one in ends:
            one.cancel()


@in_a_loop
async def test_a_member_without_a_ticket_announces_no_more_than_a_probe(pool: LivePool):
    channels = await attack(pool, 4 * 2**30, 2 * MIB)
    try:
        await until_at_most(channels, 0)
        await an_honest_member_is_served(pool)
    finally:
        for channel in channels:
            channel.abort()


@in_a_loop
async def test_unfinished_probes_of_one_key_take_the_memory_of_a_few(pool: LivePool):
    process = process_of(pool.members["victim"])
    before = process.memory_info().rss
    channels = await attack(pool, 4 * MIB, 4 * MIB - 1)
    try:
        await until_at_most(channels, 8)
        await an_honest_member_is_served(pool)
        assert process.memory_info().rss - before < 100 * MIB, "eight probes of 4 MiB, not 150"
    finally:
        for channel in channels:
            channel.abort()


@asynccontextmanager
async def flood(host: str, port: int, count: int) -> AsyncIterator[None]:
    """Connections from the attacker's network that never say a word."""
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((f"127.0.66.{1 + number % 250}", 0))
            await loop.sock_connect(sock, (host, port))
            sockets.append(sock)
        yield
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("door", ["peer", "broker"])
@in_a_loop
async def test_half_open_connections_displace_their_own_network_only(door: str, pool: LivePool):
    """An honest handshake that is on its way when the flood begins is finished after it."""
    peer, addresses = await victim(pool)
    expect = peer if door == "peer" else None
    place = parse_address(addresses[0] if door == "peer" else membership(pool, "owner").broker.known[0])
    assert place is not None
    loop = asyncio.get_running_loop()
    honest = socket.socket()
    honest.setblocking(False)
    honest.bind((HONEST_HOST, 0))
    await loop.sock_connect(honest, place)
    async with flood(*place, 600):
        transport = TcpTransport(membership(pool, "owner").credentials)
        channel = await transport.dial_over(honest, Dialling(expect, "control"), 10.0, where="the attacked door")
        await channel.close()
