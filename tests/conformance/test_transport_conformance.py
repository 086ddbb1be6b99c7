"""What every transport promises, on every transport: in memory, over TCP, over QUIC, these two on uvloop too."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from fusionai.cli.running import loop_factory
from fusionai.primitives.errors import ChannelClosed, RefusedError, TransportError, TrustError, UsageError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.channels import framed as handshake
from fusionai.transport.interface import Channel, Listener, Remote, Role, Transport
from fusionai.transport.routes import quic as quic_binding
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.quic import QuicTransport
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials, StrangerCredentials
from fusionai.transport.security.identity import peer_of
from fusionai.wire.base import PROTOCOL_VERSION
from fusionai.wire.frame import (
    GREETING_LIMITS,
    HEADER_BYTES,
    STREAM_LIMITS,
    describe,
    encode_frame_head,
    encode_header,
)
from fusionai.wire.messages import Fence, Hello, Invited, Message, Ping, Probe, StateChunk, TensorHeader, encode
from harness.admission import admitting
from harness.credentials import CertifiedPool
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S

DEADLINE_S = CEILING_S
MIB = 2**20


class World(Protocol):
    """Machines by name on one network; what is sent raw comes from a member that has shaken hands on `state`."""

    def peer(self, name: str) -> PeerId: ...
    def member(self, name: str, role: Role = "member") -> Transport: ...
    def stranger(self) -> Transport: ...
    async def send_raw(self, listener: Listener, data: bytes) -> None: ...


class MemoryWorld:
    def __init__(self, home: Path) -> None:
        self._network = MemoryNetwork()

    def peer(self, name: str) -> PeerId:
        return peer_of(name.encode().ljust(32))

    def member(self, name: str, role: Role = "member") -> Transport:
        return self._network.transport(self.peer(name), role)

    def stranger(self) -> Transport:
        return self._network.transport(None, "stranger")

    async def send_raw(self, listener: Listener, data: bytes) -> None:
        channel = await self._network.transport(self.peer("raw")).dial(
            listener.addresses, expect=self.peer("server"), stream="state"
        )
        await channel.send_raw(data)
        await channel.close()


class TcpWorld:
    def __init__(self, home: Path) -> None:
        self._pool = CertifiedPool(home)
        self.peer = self._pool.peer

    def credentials(self, name: str, role: Role = "member") -> MemberCredentials:
        assert role != "stranger"
        return self._pool.credentials(name, role)

    def member(self, name: str, role: Role = "member") -> Transport:
        return TcpTransport(self.credentials(name, role))

    def stranger(self) -> Transport:
        return TcpTransport(StrangerCredentials(self._pool.authority.public_key))

    async def send_raw(self, listener: Listener, data: bytes) -> None:
        target = parse_address(listener.addresses[0])
        assert target is not None
        context = self.credentials("raw").dialling_context()
        reader, writer = await asyncio.open_connection(*target, ssl=context)
        try:
            writer.write(encode_frame_head(Hello(stream="state"), (), GREETING_LIMITS))
            welcome = await reader.readexactly(HEADER_BYTES)
            await reader.readexactly(struct.unpack("<2sBBIQ", welcome)[3])
            writer.write(data)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (OSError, ssl.SSLError):
            pass  # The listener has hung up already, as it should.


class QuicWorld(TcpWorld):
    def member(self, name: str, role: Role = "member") -> Transport:
        return QuicTransport(self.credentials(name, role))

    def stranger(self) -> Transport:
        return QuicTransport(StrangerCredentials(self._pool.authority.public_key))

    async def send_raw(self, listener: Listener, data: bytes) -> None:
        channel = await QuicTransport(self.credentials("raw")).dial(
            listener.addresses, expect=self.peer("server"), stream="state"
        )
        channel._write(data)
        await channel.close()


@pytest.fixture(
    params=[
        *("memory", "tcp", "tcp-uvloop"),
        pytest.param("quic", marks=pytest.mark.slow),
        pytest.param("quic-uvloop", marks=pytest.mark.long),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(kind: str, tmp_path: Path) -> World:
    if kind.startswith("quic") and not quic_binding.available():
        pytest.skip("the library for QUIC, iroh, is not installed here")
    worlds = {"memory": MemoryWorld, "tcp": TcpWorld, "quic": QuicWorld}
    return worlds[kind.partition("-")[0]](tmp_path)


@pytest.fixture
def run(kind: str) -> Callable[[Coroutine[Any, Any, None]], None]:
    factory = loop_factory() if kind.endswith("-uvloop") else None
    if kind.endswith("-uvloop") and factory is None:
        pytest.skip("uvloop is not installed here")

    async def bounded(main: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main
        # Nothing may be left running behind a test's back.
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            await asyncio.wait(left, timeout=8.0)
        assert not [task for task in left if not task.done()]

    def runner(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(bounded(main))

    return runner


async def listen(
    world: World, accept: Callable[[Channel], Awaitable[None]], *, role: Role = "member", strangers: bool = False
) -> Listener:
    return await world.member("server", role).listen(admitting(accept), host="127.0.0.1", port=0, strangers=strangers)


async def echo(channel: Channel) -> None:
    while True:
        envelope = await channel.receive()
        await channel.send(envelope.message, list(envelope.tensors.values()))


def chunk(*tensors: HostTensor, step: int = 0) -> StateChunk:
    headers = tuple(describe(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    return StateChunk(fence=Fence(1, 0, 0), stage=0, step=step, last=False, tensors=headers)


def ping(sequence: int) -> Ping:
    return Ping(sequence=sequence, sent_at_s=0.0)


def noise(count: int, seed: int = 0) -> HostTensor:
    return host_tensor("uint8", (count,), np.random.default_rng(seed).integers(0, 256, count, np.uint8).data)


def test_both_sides_know_each_other(world: World, run: Callable[..., None]):
    async def main() -> None:
        seen: list[tuple[Remote, str]] = []

        async def accept(channel: Channel) -> None:
            seen.append((channel.remote, channel.stream))
            await echo(channel)

        listener = await listen(world, accept, role="broker")
        channel = await world.member("a").dial(listener.addresses, expect=None, stream="state")
        await channel.send(ping(1))
        await channel.receive()
        assert channel.remote == Remote(world.peer("server"), "broker")
        assert channel.stream == "state"
        assert seen == [(Remote(world.peer("a"), "member"), "state")]
        await channel.close()
        await listener.close()

    run(main())


def test_messages_arrive_in_order_and_are_counted(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")

        async def send_all() -> None:
            for sequence in range(2000):
                await channel.send(ping(sequence))

        sending = asyncio.create_task(send_all())
        assert [(await channel.receive()).message for _ in range(2000)] == [ping(number) for number in range(2000)]
        await sending
        assert channel.stats.sent_frames == channel.stats.received_frames == 2000
        assert channel.stats.sent_bytes == channel.stats.received_bytes
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_tensors_of_every_size_come_back_equal(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")
        empty, scalar = host_tensor("float32", (0, 7), b""), host_tensor("bfloat16", (), b"\x01\x02")
        for tensors in (
            [empty],
            [empty, scalar, empty],
            [noise(1), noise(65_535), noise(65_537), empty],
            [noise(3 * MIB), scalar, noise(2 * MIB, 1)],
            [noise(32 * MIB)],
        ):
            await channel.send(chunk(*tensors), tensors)
            envelope = await channel.receive()
            assert envelope.message == chunk(*tensors)
            assert list(envelope.tensors) == [f"t{number}" for number in range(len(tensors))]
            for got, sent in zip(envelope.tensors.values(), tensors, strict=True):
                assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
                assert got.data == sent.data
        await channel.close()
        await listener.close()

    run(main())


def test_frames_of_concurrent_senders_never_interleave(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")

        async def send(number: int) -> None:
            tensor = host_tensor("uint8", (MIB,), bytes([number]) * MIB)
            await channel.send(chunk(tensor, step=number), [tensor])
            await channel.send(ping(number))

        senders = [asyncio.create_task(send(number)) for number in range(12)]
        steps: set[int] = set()
        for _ in range(24):
            envelope = await channel.receive()
            if isinstance(envelope.message, StateChunk):
                steps.add(envelope.message.step)
                assert bytes(envelope.tensors["t0"].data) == bytes([envelope.message.step]) * MIB
        assert steps == set(range(12))
        await asyncio.gather(*senders)
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_what_is_sent_at_once_never_lands_within_another_frame(world: World, run: Callable[..., None]):
    async def main() -> None:
        may_read = asyncio.Event()
        arrived: asyncio.Queue[Message] = asyncio.Queue()

        async def slow(channel: Channel) -> None:
            await may_read.wait()
            while True:
                arrived.put_nowait((await channel.receive()).message)

        listener = await listen(world, slow)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")
        small, large = noise(100), noise(MIB)
        at_once = [0] if channel.send_at_once(chunk(small, step=0), [small]) else []
        assert len(at_once) == channel.stats.sent_frames

        async def send() -> None:
            for step in range(1, 101):
                await channel.send(chunk(large, step=step), [large])

        sending = asyncio.create_task(send())
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done
        assert not channel.send_at_once(ping(200)), "half a frame is out"
        may_read.set()
        await sending
        await channel.send(ping(300))
        expected = [*at_once, *range(1, 101), 300]
        messages = [await arrived.get() for _ in expected]
        assert [
            m.step if isinstance(m, StateChunk) else m.sequence for m in messages if isinstance(m, StateChunk | Ping)
        ] == expected
        await channel.close()
        with pytest.raises(ChannelClosed):
            channel.send_at_once(ping(6))
        await listener.close()

    run(main())


def test_a_buffer_may_be_reused_once_send_has_returned(world: World, run: Callable[..., None]):
    async def main() -> None:
        may_read = asyncio.Event()
        received: asyncio.Queue[bytes] = asyncio.Queue()

        async def slow(channel: Channel) -> None:
            await may_read.wait()
            for _ in range(3):
                received.put_nowait(bytes((await channel.receive()).tensors["t0"].data))

        listener = await listen(world, slow)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")
        buffer = bytearray(3 * MIB)
        tensor = host_tensor("uint8", (3 * MIB,), buffer)

        async def send() -> None:
            for number in range(1, 4):
                buffer[:] = bytes([number]) * len(buffer)
                await channel.send(chunk(tensor), [tensor])
                buffer[:] = bytes(len(buffer))

        sending = asyncio.create_task(send())
        await asyncio.wait([sending], timeout=0.1)
        may_read.set()
        for number in range(1, 4):
            assert await received.get() == bytes([number]) * len(buffer)
        await sending
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_many_channels_at_once(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        transport = world.member("a")

        async def one(number: int) -> None:
            channel = await transport.dial(listener.addresses, expect=world.peer("server"), stream="control")
            for turn in range(3):
                await channel.send(ping(number * 10 + turn))
                assert (await channel.receive()).message == ping(number * 10 + turn)
            await channel.close()

        await asyncio.gather(*(one(number) for number in range(40)))
        await listener.close()

    run(main())


@pytest.mark.slow
def test_a_slow_reader_holds_the_sender_back(world: World, run: Callable[..., None]):
    async def main() -> None:
        may_read = asyncio.Event()
        read: asyncio.Queue[int] = asyncio.Queue()

        async def slow(channel: Channel) -> None:
            await may_read.wait()
            while True:
                read.put_nowait((await channel.receive()).tensors["t0"].nbytes)

        listener = await listen(world, slow)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")
        tensor = noise(MIB)

        async def send() -> None:
            for _ in range(100):
                await channel.send(chunk(tensor), [tensor])

        sending = asyncio.create_task(send())
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done
        # The receiver's and sender's marks and the kernel's socket buffers, not the hundred that are to be sent.
        assert channel.stats.sent_bytes < 40 * MIB
        may_read.set()
        assert sum([await read.get() for _ in range(100)]) == 100 * MIB
        await sending
        await channel.close()
        await listener.close()

    run(main())


def test_what_was_sent_before_a_close_arrives_then_the_end(world: World, run: Callable[..., None]):
    async def main() -> None:
        outcome: asyncio.Queue[object] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            try:
                while True:
                    outcome.put_nowait((await channel.receive()).message)
            except ChannelClosed as error:
                outcome.put_nowait(error)
            with pytest.raises(ChannelClosed):
                await channel.send(ping(0))
            with pytest.raises(ChannelClosed):
                await channel.receive()
            assert channel.closed
            outcome.put_nowait("end")

        listener = await listen(world, accept)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="tensors")
        big = noise(5 * MIB)
        await channel.send(ping(1))
        await channel.send(chunk(big), [big])
        await channel.send(ping(2))
        await channel.close()
        assert [await outcome.get() for _ in range(3)] == [ping(1), chunk(big), ping(2)]
        assert isinstance(await outcome.get(), ChannelClosed)
        assert await outcome.get() == "end"
        await listener.close()

    run(main())


def test_close_is_idempotent_and_ends_every_call(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")
        waiting = [asyncio.create_task(channel.receive()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not channel.closed
        await asyncio.gather(channel.close(), channel.close())
        await channel.close()
        assert channel.closed
        for task in waiting:
            with pytest.raises(ChannelClosed):
                await task
        with pytest.raises(ChannelClosed):
            await channel.send(ping(1))
        await listener.close()

    run(main())


def test_an_abort_ends_both_sides_and_waits_for_nobody(world: World, run: Callable[..., None]):
    async def main() -> None:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        over = asyncio.Event()

        async def accept(channel: Channel) -> None:
            accepted.put_nowait(channel)
            await over.wait()

        listener = await listen(world, accept)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")
        other = await accepted.get()
        channel.abort()
        channel.abort()
        assert channel.closed
        for end in (channel, other):
            with pytest.raises(ChannelClosed):
                await end.receive()
        with pytest.raises(ChannelClosed):
            await channel.send(ping(0))
        await channel.close()
        over.set()
        await listener.close()

    run(main())


def test_half_a_frame_counts_as_a_sign_of_life(world: World, run: Callable[..., None]):
    async def main() -> None:
        arrived: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            before = channel.stats.arrived_bytes
            with pytest.raises(TransportError):
                await channel.receive()
            arrived.put_nowait((channel.stats.arrived_bytes - before, channel.stats.received_frames))

        listener = await listen(world, accept)
        header = TensorHeader("x", "uint8", (1000,))
        message = StateChunk(fence=Fence(1, 1, 0), stage=0, step=0, last=True, tensors=(header,))
        value = host_tensor("uint8", (1000,), bytes(1000))
        data = encode_frame_head(message, (value,), STREAM_LIMITS["state"])
        await world.send_raw(listener, data + bytes(500))
        nbytes, frames = await arrived.get()
        assert (nbytes >= 500, frames) == (True, 0)
        await listener.close()

    run(main())


def test_a_channel_ends_when_its_accept_returns(world: World, run: Callable[..., None]):
    async def main() -> None:
        async def greet(channel: Channel) -> None:
            await channel.send(ping(7))

        listener = await listen(world, greet)
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")
        assert (await channel.receive()).message == ping(7)
        with pytest.raises(ChannelClosed):
            await channel.receive()
        await channel.close()
        await listener.close()

    run(main())


def test_a_closed_listener_lets_nobody_in_and_ends_its_channels(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        transport = world.member("a")
        channel = await transport.dial(listener.addresses, expect=world.peer("server"), stream="control")
        await listener.close()
        with pytest.raises(ChannelClosed):
            await channel.receive()
        await channel.close()
        with pytest.raises(TransportError, match="no answer from"):
            await transport.dial(listener.addresses, expect=world.peer("server"), stream="control", timeout_s=2.0)

    run(main())


def test_an_address_in_use_is_the_users_mistake(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        port = int(listener.addresses[0].rpartition(":")[2])
        with pytest.raises(UsageError, match=f"port {port} .* already in use"):
            await world.member("other").listen(echo, host="127.0.0.1", port=port)
        await listener.close()

    run(main())


def test_the_first_good_candidate_wins(world: World, run: Callable[..., None]):
    async def main() -> None:
        gone = await world.member("gone").listen(echo, host="127.0.0.1", port=0)
        await gone.close()
        wrong = await world.member("wrong").listen(echo, host="127.0.0.1", port=0)
        right = await listen(world, echo)
        candidates = [*gone.addresses, *wrong.addresses, *right.addresses]
        channel = await world.member("a").dial(candidates, expect=world.peer("server"), stream="control")
        assert channel.remote.peer == world.peer("server")
        await channel.close()
        with pytest.raises(TrustError, match="expected peer"):
            await world.member("a").dial(candidates[:2], expect=world.peer("server"), stream="control")
        await wrong.close()
        await right.close()

    run(main())


def test_another_version_is_refused(world: World, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        listener = await listen(world, echo)
        newer = {"oldest_version": PROTOCOL_VERSION + 1, "newest_version": PROTOCOL_VERSION + 3}
        monkeypatch.setattr(handshake, "hello", lambda stream: Hello(**newer, stream=stream))
        with pytest.raises(RefusedError, match="update the older one") as refused:
            await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")
        assert refused.value.code == "protocol_version"
        await listener.close()

    run(main())


def test_a_member_is_not_the_broker(world: World, run: Callable[..., None]):
    async def main() -> None:
        listener = await listen(world, echo)
        with pytest.raises(TrustError, match="expected the pool's broker, got a member"):
            await world.member("a").dial(listener.addresses, expect=None, stream="control")
        await listener.close()

    run(main())


def test_a_stranger_may_ask_for_little_and_only_where_strangers_are_let_in(world: World, run: Callable[..., None]):
    async def main() -> None:
        let_in: list[Remote] = []

        async def accept(channel: Channel) -> None:
            let_in.append(channel.remote)
            await echo(channel)

        members_only = await listen(world, accept, role="broker")
        open_door = await world.member("server", "broker").listen(accept, host="127.0.0.1", port=0, strangers=True)
        stranger = world.stranger()
        with pytest.raises((TrustError, TransportError)):
            await stranger.dial(members_only.addresses, expect=None, stream="control")
        for stream in ("tensors", "state"):
            with pytest.raises(RefusedError, match="may not do that") as refused:
                await stranger.dial(open_door.addresses, expect=None, stream=stream)
            assert refused.value.code == "not_authorised"
        assert not let_in
        channel = await stranger.dial(open_door.addresses, expect=None, stream="control")
        await channel.send(ping(1))
        assert (await channel.receive()).message == ping(1)
        assert let_in == [Remote(None, "stranger")]
        with pytest.raises(WireError, match="fit 4096 bytes"):
            await channel.send(Invited(invitation="x" * 4096))
        tensor = noise(10)
        probe = Probe(sequence=1, sent_at_s=0.0, tensors=(describe("x", tensor),))
        with pytest.raises(WireError, match="body 0 bytes"):
            await channel.send(probe, [tensor])
        await channel.close()
        await members_only.close()
        await open_door.close()

    run(main())


def valid(message: Message) -> bytes:
    data = encode(message)
    return encode_header(len(data), 0) + data


LYING = encode(chunk(host_tensor("float32", (4,), bytes(16))))
UNKNOWN_DTYPE = encode(
    StateChunk(fence=Fence(1, 0, 0), stage=0, step=0, last=True, tensors=(TensorHeader("x", "object", (1,)),))
)
MALFORMED = {
    "garbage": b"\x00" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n",
    "oversized message": encode_header(2**32 - 1, 0),
    "oversized body": encode_header(10, 2**64 - 1),
    "unknown flags": b"FA\x01\x07" + bytes(12),
    "not msgpack": encode_header(8, 0) + b"\xc1" * 8,
    "shapes and body disagree": encode_header(len(LYING), 17) + LYING + bytes(17),
    "body without tensors": encode_header(len(encode(ping(1))), 4) + encode(ping(1)) + bytes(4),
    "unknown dtype": encode_header(len(UNKNOWN_DTYPE), 8) + UNKNOWN_DTYPE + bytes(8),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_anything_malformed_ends_the_channel_and_nothing_else(name: str, world: World, run: Callable[..., None]):
    async def main() -> None:
        outcome: asyncio.Queue[object] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            assert (await channel.receive()).message == ping(5)
            try:
                outcome.put_nowait(await channel.receive())
            except WireError as error:
                outcome.put_nowait(error)
            with pytest.raises(ChannelClosed):
                await channel.receive()
            with pytest.raises(ChannelClosed):
                await channel.send(ping(1))
            outcome.put_nowait("end")

        listener = await listen(world, accept)
        await world.send_raw(listener, valid(ping(5)) + MALFORMED[name] + valid(ping(6)))
        assert isinstance(await outcome.get(), WireError)
        assert await outcome.get() == "end"
        # The listener goes on.
        channel = await world.member("a").dial(listener.addresses, expect=world.peer("server"), stream="control")
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("cut", [3, 16, 20, len(LYING) + 16, len(LYING) + 16 + 15])
def test_a_truncated_frame_is_a_loss(cut: int, world: World, run: Callable[..., None]):
    async def main() -> None:
        outcome: asyncio.Queue[object] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            try:
                outcome.put_nowait(await channel.receive())
            except ChannelClosed as error:
                outcome.put_nowait(error)

        listener = await listen(world, accept)
        await world.send_raw(listener, (encode_header(len(LYING), 16) + LYING + bytes(16))[:cut])
        error = await outcome.get()
        assert isinstance(error, ChannelClosed)
        assert "in the middle of a frame" in str(error)
        await listener.close()

    run(main())
