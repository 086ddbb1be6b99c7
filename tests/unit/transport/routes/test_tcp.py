"""The TCP door against those who should not get in, and connections that break: on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import ssl
import sys
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fusionai.cli import running
from fusionai.coordination.doorkeeping import CrowdCaps
from fusionai.primitives.errors import ChannelClosed, TransportError, TrustError, UsageError, WireError
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.channels import uplink
from fusionai.transport.channels.accepting import AcceptLimits
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Channel, Listener
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials, StrangerCredentials
from fusionai.wire.frame import GREETING_LIMITS, encode_frame_head, encode_header
from fusionai.wire.messages import Fence, Hello, Ping, StateChunk, TensorHeader
from harness.admission import admitting
from harness.patience import CEILING_S

MIB = 2**20
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Run:
    factory = running.loop_factory() if request.param == "uvloop" else None
    if request.param == "uvloop" and factory is None:
        pytest.skip("uvloop is not installed here")

    def runner(main: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(CEILING_S):
                await main

        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(bounded())
        # Whatever others do to us is no error of ours.
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text

    return runner


class Door:
    """A listener of the pool's broker that notes whom it let in."""

    def __init__(self, credentials: MemberCredentials, limits: AcceptLimits | None = None) -> None:
        self.transport = TcpTransport(credentials, accept_limits=limits)
        self.let_in: asyncio.Queue[Channel] = asyncio.Queue()
        self.ends: asyncio.Queue[BaseException] = asyncio.Queue()

    async def open(self, *, strangers: bool = False) -> Listener:
        return await self.transport.listen(self._accept, host="127.0.0.1", port=0, strangers=strangers)

    async def _accept(self, channel: Channel) -> None:
        channel.admit()
        self.let_in.put_nowait(channel)
        try:
            while True:
                await channel.receive()
        except BaseException as error:
            self.ends.put_nowait(error)
            raise


def target(listener: Listener) -> tuple[str, int]:
    found = parse_address(listener.addresses[0])
    assert found is not None
    return found


async def until_closed(reader: asyncio.StreamReader) -> None:
    """Returns when the other side has hung up, however it did."""
    try:
        while await reader.read(4096):
            pass
    except (OSError, ssl.SSLError):
        pass


def test_a_closed_connection_keeps_no_buffers_until_the_collector_comes(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open()
        mine = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        theirs = await door.let_in.get()
        layers = [weakref.ref(one.get_extra_info("ssl_object")) for one in map(tls_transport, (mine, theirs))]
        assert all(layer() is not None for layer in layers)
        gc.disable()  # what refers to itself in a circle would stay
        try:
            await mine.close()
            assert isinstance(await door.ends.get(), ChannelClosed)
            await theirs.close()
            for _ in range(5):
                await asyncio.sleep(0)
            assert [layer() for layer in layers] == [None, None]
        finally:
            gc.enable()
        assert mine.closed
        assert theirs.closed
        await listener.close()

    run(main())


def tls_transport(channel: Channel) -> asyncio.Transport:
    assert isinstance(channel, TcpChannel)
    transport = channel._transport
    assert transport is not None
    return transport


@pytest.mark.slow
def test_silent_connections_are_closed_and_keep_no_member_out(pool, run: Run):
    async def main() -> None:
        door = Door(
            pool.credentials("broker", "broker"),
            AcceptLimits(greeting_s=0.5, half_open=CrowdCaps(total=8, prefix=8, key=8)),
        )
        listener = await door.open()
        silent = [await asyncio.open_connection(*target(listener)) for _ in range(40)]
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        assert (await door.let_in.get()).remote.peer == pool.credentials("a").identity.peer
        # Some were dropped at once to make room, the rest at the deadline.
        await asyncio.gather(*(until_closed(reader) for reader, _ in silent))
        for _, writer in silent:
            writer.close()
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_a_member_that_never_finishes_its_hello_is_closed(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(greeting_s=0.3))
        listener = await door.open()

        async def send_only(sent: bytes) -> None:
            context = pool.credentials("a").dialling_context()
            reader, writer = await asyncio.open_connection(*target(listener), ssl=context)
            writer.write(sent)
            await until_closed(reader)
            writer.close()

        hello = encode_frame_head(Hello(), (), GREETING_LIMITS)
        await asyncio.gather(*(send_only(sent) for sent in (b"", b"F", hello[:-1])))
        assert door.let_in.empty()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_dripping_bytes_do_not_move_the_deadline(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(greeting_s=0.3))
        listener = await door.open()
        reader, writer = await asyncio.open_connection(*target(listener), ssl=pool.credentials("a").dialling_context())
        hello = encode_frame_head(Hello(software="x" * 400), (), GREETING_LIMITS)
        closed = asyncio.create_task(until_closed(reader))
        dripped = 0
        while not closed.done() and dripped < len(hello):
            writer.write(hello[dripped : dripped + 1])
            dripped += 1
            await asyncio.wait([closed], timeout=0.02)
        assert closed.done()
        assert dripped < len(hello)
        writer.close()
        await listener.close()

    run(main())


def test_a_stranger_may_not_stay(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(stranger_s=0.2))
        listener = await door.open(strangers=True)
        stranger = TcpTransport(StrangerCredentials(pool.authority.public_key))
        channel = await stranger.dial(listener.addresses, expect=None, stream="control")
        with pytest.raises(ChannelClosed):
            await channel.receive()
        await channel.close()
        await listener.close()

    run(main())


def test_strangers_cannot_keep_members_out(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(half_open=CrowdCaps(total=4, prefix=4, key=4)))
        listener = await door.open(strangers=True)
        stranger = TcpTransport(StrangerCredentials(pool.authority.public_key))
        strangers = [await stranger.dial(listener.addresses, expect=None, stream="control") for _ in range(12)]
        member = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        assert not member.closed
        assert sum(not channel.closed for channel in strangers) <= 4
        for channel in (*strangers, member):
            await channel.close()
        await listener.close()

    run(main())


def test_a_stranger_may_announce_little(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open(strangers=True)
        context = StrangerCredentials(pool.authority.public_key).dialling_context()
        reader, writer = await asyncio.open_connection(*target(listener), ssl=context)
        writer.write(encode_frame_head(Hello(), (), GREETING_LIMITS) + encode_header(4097, 0))
        await until_closed(reader)
        assert isinstance(await door.ends.get(), WireError)
        writer.close()
        await listener.close()

    run(main())


def test_nobody_of_another_pool_gets_in(pool, make_pool, run: Run):
    async def main() -> None:
        door, other = Door(pool.credentials("broker", "broker")), make_pool("others")
        foreign_door = Door(other.credentials("broker", "broker"))
        listener, foreign = await door.open(), await foreign_door.open()
        # We recognise a foreign broker ...
        with pytest.raises(TrustError, match="is not of this pool"):
            await TcpTransport(pool.credentials("a")).dial(foreign.addresses, expect=None, stream="control")
        # ... and a foreigner who ignores who we are is recognised here.
        intruder = other.credentials("a")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        chain = pool.home / "intruder.pem"
        chain.write_text(ssl.DER_cert_to_PEM_cert(intruder.certificate))
        context.load_cert_chain(chain, intruder.identity.path)
        reader, writer = await asyncio.open_connection(*target(listener), ssl=context)
        writer.write(encode_frame_head(Hello(), (), GREETING_LIMITS))
        await until_closed(reader)
        writer.close()
        assert door.let_in.empty()
        assert foreign_door.let_in.empty()
        await listener.close()
        await foreign.close()

    run(main())


def test_an_expired_certificate_opens_nothing(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open(strangers=True)
        expired = TcpTransport(pool.credentials("a", issued_at_s=1_000_000_000.0))
        with pytest.raises((TrustError, ChannelClosed), match="certificate"):
            await expired.dial(listener.addresses, expect=None, stream="control")
        assert door.let_in.empty()
        await listener.close()
        old_door = Door(pool.credentials("old", "broker", issued_at_s=1_000_000_000.0))
        listener = await old_door.open()
        with pytest.raises(TrustError, match="expired"):
            await TcpTransport(pool.credentials("b")).dial(listener.addresses, expect=None, stream="control")
        await listener.close()

    run(main())


def test_older_tls_is_not_spoken(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open(strangers=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection(*target(listener), ssl=context)
        await listener.close()

    run(main())


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\x01" * 5000]
)
def test_garbage_before_tls_is_hung_up_on(garbage: bytes, pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(greeting_s=0.5))
        listener = await door.open()
        reader, writer = await asyncio.open_connection(*target(listener))
        writer.write(garbage)
        await until_closed(reader)
        writer.close()
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_failed_connections_leave_no_descriptor_behind(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"), AcceptLimits(greeting_s=0.2))
        listener = await door.open()
        stranger = TcpTransport(StrangerCredentials(pool.authority.public_key))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            _, writer = await asyncio.open_connection(*target(listener))
            writer.close()
            await writer.wait_closed()
            with pytest.raises(ChannelClosed):
                await stranger.dial(listener.addresses, expect=None, stream="control")
        member, channel = TcpTransport(pool.credentials("a")), None
        while channel is None:
            with suppress(TransportError):  # a busy machine may greet later than this door waits
                channel = await member.dial(listener.addresses, expect=None, stream="control")
        await channel.close()
        await listener.close()
        await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before

    run(main())


def big() -> tuple[StateChunk, Any]:
    tensor = host_tensor("uint8", (64 * MIB,), bytes(64 * MIB))
    headers = (TensorHeader("t", "uint8", (64 * MIB,)),)
    return StateChunk(fence=Fence(1, 0, 0), stage=0, step=0, last=True, tensors=headers), tensor


async def send_for_ever(channel: Channel) -> None:
    message, tensor = big()
    while True:
        await channel.send(message, [tensor])


async def receive_for_ever(channel: Channel) -> None:
    while True:
        assert (await channel.receive()).tensors["t"].nbytes == 64 * MIB


def test_a_send_cut_short_ends_the_channel(pool, run: Run):
    async def main() -> None:
        may_read = asyncio.Event()
        ended = asyncio.Event()

        async def reads_late(channel: Channel) -> None:
            await may_read.wait()
            with pytest.raises(ChannelClosed):
                await receive_for_ever(channel)
            ended.set()

        listener = await TcpTransport(pool.credentials("broker", "broker")).listen(
            admitting(reads_late), host="127.0.0.1", port=0
        )
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="state")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send_for_ever(channel), 0.1)
        # Half a frame is out: anything after it would be taken for the rest of the tensor.
        with pytest.raises(ChannelClosed):
            await send_for_ever(channel)
        may_read.set()
        await ended.wait()
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_closing_does_not_wait_for_ever_for_one_who_does_not_read(pool, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.transport.channels.tcp.STALLED_S", 0.2)
    monkeypatch.setattr("fusionai.transport.channels.tcp.GOODBYE_TIMEOUT_S", 0.2)

    async def main() -> None:
        released = asyncio.Event()

        async def never_reads(channel: Channel) -> None:
            await released.wait()

        listener = await TcpTransport(pool.credentials("broker", "broker")).listen(
            admitting(never_reads), host="127.0.0.1", port=0
        )
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="state")
        sending = asyncio.create_task(send_for_ever(channel))
        await asyncio.wait([sending], timeout=0.2)
        async with asyncio.timeout(CEILING_S):
            await channel.close()
        with pytest.raises(ChannelClosed):
            await sending
        released.set()
        await listener.close()

    run(main())


@pytest.mark.slow
def test_closing_sends_everything_to_a_slow_reader(pool, run: Run, monkeypatch: pytest.MonkeyPatch):
    # Each pause of the reader is shorter than the patience of the closing side, all of them together are longer.
    monkeypatch.setattr("fusionai.transport.channels.tcp.STALLED_S", 0.5)

    async def main() -> None:
        received: asyncio.Queue[int] = asyncio.Queue()

        async def reads_slowly(channel: Channel) -> None:
            for _ in range(24):
                await asyncio.sleep(0.03)
                received.put_nowait((await channel.receive()).tensors["t"].nbytes)

        listener = await TcpTransport(pool.credentials("broker", "broker")).listen(
            admitting(reads_slowly), host="127.0.0.1", port=0
        )
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="state")
        tensor = host_tensor("uint8", (2 * MIB,), bytes(2 * MIB))
        message = StateChunk(
            fence=Fence(1, 0, 0), stage=0, step=0, last=True, tensors=(TensorHeader("t", "uint8", (2 * MIB,)),)
        )
        sending = [asyncio.create_task(channel.send(message, [tensor])) for _ in range(8)]
        await asyncio.wait(sending)
        sending = [asyncio.create_task(channel.send(message, [tensor])) for _ in range(16)]
        await sending[0]
        # The frame that is under way is finished; those that have not begun are told.
        await channel.close()
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        sent = 8 + sum(outcome is None for outcome in outcomes)
        assert all(outcome is None or isinstance(outcome, ChannelClosed) for outcome in outcomes)
        assert [await received.get() for _ in range(sent)] == [2 * MIB] * sent
        await listener.close()

    run(main())


@pytest.mark.slow
def test_a_side_that_does_not_read_for_a_while_is_not_taken_for_dead(pool, run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.transport.channels.tcp.DEAD_AFTER_S", 0.1)
    monkeypatch.setattr("fusionai.transport.channels.tcp.CHECK_EVERY_S", 0.05)

    async def main() -> None:
        may_read = asyncio.Event()

        async def reads_late(channel: Channel) -> None:
            await may_read.wait()
            await receive_for_ever(channel)

        listener = await TcpTransport(pool.credentials("broker", "broker")).listen(
            admitting(reads_late), host="127.0.0.1", port=0
        )
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="state")
        message, tensor = big()

        async def send_two() -> None:
            for _ in range(2):
                await channel.send(message, [tensor])

        sending = asyncio.create_task(send_two())
        # The window closes after the first and the kernel asks after 0.2 s, then after 0.4 s, whether it has opened.
        done, _ = await asyncio.wait([sending], timeout=0.8)
        assert not done
        may_read.set()
        await sending
        await channel.close()
        await listener.close()

    run(main())


def test_a_connection_that_breaks_ends_every_call(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open()
        channel = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        waiting = asyncio.create_task(channel.receive())
        far = await door.let_in.get()
        assert isinstance(far, TcpChannel)
        far.abort()
        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await channel.send(Ping(sequence=1, sent_at_s=0.0))
        await channel.close()
        await listener.close()

    run(main())


@pytest.mark.parametrize("by_us", [True, False])
def test_a_frame_whose_connection_goes_while_others_have_their_turn_is_not_taken_for_sent(
    by_us: bool, pool, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uplink, "NEARBY_S", 0.0)  # loopback, too, is a line that is shared

    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open()
        limits = TransferLimits()
        limits.uplink.measured(1e6)
        someone = object()
        await limits.uplink.take(someone, None)
        transport = TcpTransport(pool.credentials("a"), rates=limits)
        channel = await transport.dial(listener.addresses, expect=None, stream="state")
        far = await door.let_in.get()
        assert isinstance(channel, TcpChannel)
        assert isinstance(far, TcpChannel)
        message, tensor = big()
        sending = asyncio.create_task(channel.send(message, [tensor]))
        for _ in range(1000):
            await asyncio.sleep(0)
            if limits.uplink.has_waiting:
                break
        (channel if by_us else far).abort()
        with pytest.raises(ChannelClosed):
            await sending
        assert channel.stats.sent_frames == 0
        assert not limits.uplink.has_waiting
        await channel.close()
        await listener.close()

    run(main())


def test_listening_errors_are_sentences(pool, run: Run):
    async def main() -> None:
        transport = TcpTransport(pool.credentials("a"))

        async def accept(channel: Channel) -> None: ...

        with pytest.raises(UsageError, match=r"192\.0\.2\.1 port 0.*0\.0\.0\.0 for all"):
            await transport.listen(accept, host="192.0.2.1", port=0)
        with pytest.raises(UsageError, match=r"address of this machine .* 'no\.such\.host\.invalid'"):
            await transport.listen(accept, host="no.such.host.invalid", port=0)
        with pytest.raises(TrustError, match="outside any pool"):
            await TcpTransport(StrangerCredentials(pool.authority.public_key)).listen(accept, host="127.0.0.1", port=0)

    run(main())


def test_dialling_errors_are_sentences(pool, run: Run):
    async def main() -> None:
        transport = TcpTransport(pool.credentials("a"))
        with pytest.raises(UsageError, match="at least one tcp:// address"):
            await transport.dial([], expect=None, stream="control")
        with pytest.raises(UsageError, match="expected an address such as"):
            await transport.dial(["localhost"], expect=None, stream="control")
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
            with pytest.raises(TransportError, match=r"no answer from .* within 0\.2 s"):
                await transport.dial([address], expect=None, stream="control", timeout_s=0.2)

        async def speak_something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example.org ESMTP\r\n" * 10)
            await until_closed(reader)
            writer.close()

        server = await asyncio.start_server(speak_something_else, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TransportError, match=r"does not speak this protocol.*port number"):
            await transport.dial([address], expect=None, stream="control")
        server.close()
        await server.wait_closed()

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the options Linux has")
def test_sockets_are_set_for_small_frames_and_dead_paths(pool, run: Run):
    async def main() -> None:
        door = Door(pool.credentials("broker", "broker"))
        listener = await door.open()
        near = await TcpTransport(pool.credentials("a")).dial(listener.addresses, expect=None, stream="control")
        far = await door.let_in.get()
        for channel in (near, far):
            assert isinstance(channel, TcpChannel)
            sock = channel._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            # It would end connections to a living side that does not read for a while.
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert channel._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        await near.close()
        await listener.close()

    run(main())


def test_run_uses_the_fast_loop_where_there_is_one():
    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert running.run(name()) == ("asyncio" if running.loop_factory() is None else "uvloop")
