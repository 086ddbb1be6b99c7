"""The relay between peers that can't dial each other: who gets in, what it sees, and how a pair ends."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.cli.running import loop_factory
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import ChannelClosed, TransportError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.channels.framed import Dialling
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.interface import Channel
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.relay import BAD_GREETING, BAD_TOKEN, Relay, RelayLimits, greeting, through_relay
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.transport.security.signed import PairingToken, Side, prove_holding, sign_pairing
from fusionai.wire.frame import describe
from fusionai.wire.messages import Fence, Ping, StateChunk
from harness.admission import admitting
from harness.patience import CEILING_S

MIB = 2**20
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = loop_factory() if request.param == "uvloop" else None
    if request.param == "uvloop" and factory is None:
        pytest.skip("uvloop is not installed here")

    def runner(main: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(CEILING_S):
                await main

        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(bounded())

    return runner


class Stand:
    """A broker's door with a relay behind it, and peers `a` and `b` of its pool."""

    def __init__(self, pool: Any, limits: RelayLimits | None) -> None:
        self.pool = pool
        self.relay = Relay(pool.authority.public_key, SystemClock(), limits)
        self.meetings = 0

    def token(
        self, name: str, other: str, side: Side, *, meeting: int | None = None, expires_in_s: float = 30.0
    ) -> bytes:
        number = self.meetings if meeting is None else meeting
        peers = [self.credentials(one).identity.peer for one in (name, other)]
        token = PairingToken(number.to_bytes(16, "little"), peers[0], peers[1], side, time.time() + expires_in_s)
        return sign_pairing(token, self.pool.authority.key)

    def credentials(self, name: str) -> MemberCredentials:
        return self.pool.credentials(name)

    def peer(self, name: str) -> PeerId:
        return self.credentials(name).identity.peer

    async def go(self, name: str, token: bytes, *, proven_by: str | None = None) -> socket.socket:
        return await through_relay((self.place,), token, self.credentials(proven_by or name).identity)

    async def say(self, data: bytes) -> bytes:
        """What the door answers to raw bytes, all of it."""
        reader, writer = await asyncio.open_connection(*self.place)
        writer.write(data)
        answer = await reader.read(100)
        writer.close()
        return answer

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[tuple[TcpChannel, Channel]]:
        """A channel over the relay, both ends: a dials b."""
        self.meetings += 1
        came: asyncio.Queue[Channel] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            came.put_nowait(channel)
            await asyncio.Event().wait()

        listener = await TcpTransport(self.credentials("b")).listen(admitting(accept), host="127.0.0.1", port=0)
        near, far = await asyncio.gather(
            self.go("a", self.token("a", "b", "dials")), self.go("b", self.token("b", "a", "answers"))
        )
        listener.admit_relayed(far, PeerId("a" * 52))
        dialling = Dialling(self.peer("b"), "state")
        channel = await TcpTransport(self.credentials("a")).dial_over(near, dialling, 5.0, where="the relay")
        try:
            yield channel, await came.get()
        finally:
            await channel.close()
            await listener.close()

    @property
    def place(self) -> tuple[str, int]:
        found = parse_address(self.listener.addresses[0])
        assert found is not None
        return found

    async def __aenter__(self) -> Stand:
        async def accept(channel: Channel) -> None:
            await channel.receive()

        door = TcpTransport(self.pool.credentials("broker", "broker"))
        self.listener = await door.listen(admitting(accept), host="127.0.0.1", port=0, strangers=True, relay=self.relay)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()


@pytest.fixture
def stand(pool: Any) -> Callable[..., Stand]:
    return lambda limits=None: Stand(pool, limits)


def test_two_peers_meet_and_the_relay_sees_no_plaintext(stand, run: Run, monkeypatch: pytest.MonkeyPatch):
    secret = b"the weights of this model are nobody's business " * 4096
    copied = bytearray()

    async def main() -> None:
        async with stand() as door:
            record(copied, monkeypatch)
            async with door.joined() as (near, far):
                assert (near.route, far.route) == ("relay", "relay")
                assert near.remote.peer == door.peer("b")
                assert far.remote.peer == door.peer("a")
                tensor = host_tensor("uint8", (len(secret),), secret)
                chunk = StateChunk(
                    fence=Fence(1, 0, 0), stage=0, step=7, last=False, tensors=(describe("plainname", tensor),)
                )
                await near.send(chunk, [tensor])
                came = await far.receive()
                assert bytes(came.tensors["plainname"].data) == secret
                await far.send(Ping(sequence=3, sent_at_s=0.0))
                assert (await near.receive()).message == Ping(sequence=3, sent_at_s=0.0)
                assert door.relay.stats.copied_bytes == 0
                assert door.relay.copied_bytes == len(copied), "open connections count"
        assert len(copied) > len(secret), "the recorder saw what went through"
        for known in (secret[:16], b"plainname", b"ping", b"state", b"fusionai", door.peer("a").encode()):
            assert known not in copied
        # Certificates would name the peers: TLS 1.3 encrypts them too.
        assert door.credentials("a").certificate[:64] not in copied
        assert door.relay.stats.copied_bytes == door.relay.copied_bytes == len(copied)

    run(main())


def record(copied: bytearray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything the relay's sockets take in to copy, from both sides."""
    loop = asyncio.get_running_loop()
    read = loop.sock_recv_into

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        async def sock_recv_into(self, sock: socket.socket, buffer: memoryview) -> int:
            count = await read(sock, buffer)
            copied.extend(buffer[:count])
            return count

    recording = Recording()
    from fusionai.transport.routes import relay as splice

    class Asyncio:
        def __getattr__(self, name: str) -> Any:
            return (lambda: recording) if name == "get_running_loop" else getattr(asyncio, name)

    monkeypatch.setattr(splice, "asyncio", Asyncio())


def test_who_may_not_use_it(stand, run: Run):
    async def main() -> None:
        async with stand() as door:
            assert await door.say(b"FR\x07\x00" + bytes(100)) == bytes([BAD_GREETING])
            assert await door.say(b"FR\x01\x00\xff\xff" + bytes(100)) == bytes([BAD_GREETING])
            assert await door.say(b"FR\x01\x00\x80\x00" + bytes(128 + 64)) == bytes([BAD_TOKEN])
            good = door.token("a", "b", "dials")
            forged = good[:-1] + bytes([good[-1] ^ 1])
            for token, holder in [
                (forged, "a"),
                (good, "c"),
                (door.token("a", "b", "dials", expires_in_s=-1.0), "a"),
                (door.token("a", "a", "dials"), "a"),
            ]:
                with pytest.raises(TransportError, match="token is invalid"):
                    await door.go("a", token, proven_by=holder)
            assert door.relay.stats.joined == 0

    run(main())


def test_a_token_is_good_once(stand, run: Run):
    async def main() -> None:
        async with stand() as door, door.joined():
            for name, other, side in (("a", "b", "dials"), ("b", "a", "answers")):
                with pytest.raises(TransportError, match="used before"):
                    await door.go(name, door.token(name, other, side))

    run(main())


def test_a_third_peer_finds_nobody(stand, run: Run):
    async def main() -> None:
        async with stand(RelayLimits(waiting_s=0.2)) as door:
            waits = asyncio.create_task(door.go("a", door.token("a", "b", "dials")))
            for _ in range(1000):
                await asyncio.sleep(0 if door.relay._waiting else 0.001)
            with pytest.raises(TransportError, match="token is invalid"):
                await door.go("c", door.token("c", "a", "answers"))
            with pytest.raises(TransportError, match="did not connect in time"):
                await waits
            assert door.relay.stats.joined == 0

    run(main())


def test_somebody_else_at_the_other_end_is_not_believed(stand, run: Run):
    async def main() -> None:
        async with stand() as door:
            near, far = await asyncio.gather(
                door.go("a", door.token("a", "c", "dials")), door.go("c", door.token("c", "a", "answers"))
            )

            async def accept(channel: Channel) -> None:
                await channel.receive()

            listener = await TcpTransport(door.credentials("c")).listen(admitting(accept), host="127.0.0.1", port=0)
            listener.admit_relayed(far, PeerId("a" * 52))
            with pytest.raises(TrustError):
                await TcpTransport(door.credentials("a")).dial_over(
                    near, Dialling(door.peer("b"), "state"), 5.0, where="the relay"
                )
            await listener.close()

    run(main())


def test_there_is_room_for_so_many(stand, run: Run):
    async def main() -> None:
        async with stand(RelayLimits(peer_connections=1)) as door:
            async with door.joined():
                with pytest.raises(TransportError, match="no room"):
                    await door.go("a", door.token("a", "c", "dials", meeting=99))
            # What has ended makes room again.
            async with door.joined():
                pass

    run(main())


@pytest.mark.parametrize("broken", ["a", "b"])
def test_what_one_side_breaks_is_broken_for_the_other(stand, run: Run, broken: str):
    async def main() -> None:
        async with stand() as door, door.joined() as (near, far):
            (near if broken == "a" else far).abort()
            with pytest.raises(ChannelClosed):
                await (far if broken == "a" else near).receive()

    run(main())


def test_closing_flushes_through_the_relay(stand, run: Run):
    async def main() -> None:
        async with stand() as door, door.joined() as (near, far):
            for sequence in range(50):
                await near.send(Ping(sequence=sequence, sent_at_s=0.0))
            closing = asyncio.create_task(near.close())
            for sequence in range(50):
                assert (await far.receive()).message == Ping(sequence=sequence, sent_at_s=0.0)
            with pytest.raises(ChannelClosed):
                await far.receive()
            await closing

    run(main())


@pytest.mark.slow
def test_a_pair_that_says_nothing_ends(stand, run: Run):
    async def main() -> None:
        async with stand(RelayLimits(idle_s=0.1)) as door, door.joined() as (near, far):
            with pytest.raises(ChannelClosed):
                await near.receive()
            with pytest.raises(ChannelClosed):
                await far.receive()

    run(main())


@pytest.mark.slow
def test_a_silent_connection_stays_while_the_two_talk_over_another(stand, run: Run):
    """A job's connection for states says nothing between two checkpoints."""

    async def main() -> None:
        async with stand(RelayLimits(idle_s=0.6)) as door, door.joined() as (silent, _), door.joined() as (near, far):
            for sequence in range(20):
                await near.send(Ping(sequence=sequence, sent_at_s=0.0))
                await far.receive()
                await asyncio.sleep(0.1)
            assert not silent.closed
        assert not door.relay._pairs
        assert not door.relay._connections

    run(main())


@pytest.mark.slow
def test_a_side_that_does_not_read_holds_the_other_back(stand, run: Run):
    async def main() -> None:
        async with stand(RelayLimits(pair_bytes_per_s=1e12)) as door:
            door.meetings += 1
            near, far = await asyncio.gather(
                door.go("a", door.token("a", "b", "dials")), door.go("b", door.token("b", "a", "answers"))
            )
            loop = asyncio.get_running_loop()
            sent = 0

            async def pour() -> None:
                nonlocal sent
                for _ in range(40):
                    await loop.sock_sendall(near, bytes(MIB))
                    sent += 1

            pouring = asyncio.create_task(pour())
            done, _ = await asyncio.wait([pouring], timeout=0.2)
            # Only what kernels and one buffer hold has left.
            assert not done
            assert sent < 32
            taken = 0
            while taken < 40 * MIB:
                taken += len(await loop.sock_recv(far, MIB))
            await pouring
            near.close()
            far.close()

    run(main())


@pytest.mark.slow
def test_a_pair_keeps_to_its_rate(stand, run: Run):
    async def main() -> None:
        async with stand(RelayLimits(pair_bytes_per_s=2 * MIB)) as door, door.joined() as (near, far):
            payload = np.random.default_rng(1).integers(0, 256, MIB, np.uint8).data
            tensor = host_tensor("uint8", (MIB,), payload)
            chunk = StateChunk(fence=Fence(1, 0, 0), stage=0, step=7, last=False, tensors=(describe("x", tensor),))
            started_s = time.monotonic()
            sending = asyncio.create_task(near.send(chunk, [tensor]))
            await far.receive()
            await sending
            # A burst is free; the rest is paid for at the rate.
            assert time.monotonic() - started_s > 0.4

    run(main())


def test_members_still_come_to_the_same_door(stand, run: Run):
    async def main() -> None:
        async with stand() as door:
            transport = TcpTransport(door.credentials("a"))
            channel = await transport.dial(door.listener.addresses, expect=None, stream="control")
            assert channel.remote.role == "broker"
            assert channel.remote.host == "127.0.0.1"
            await channel.close()

    run(main())


def test_a_relay_that_is_not_there(stand, run: Run, tmp_path: Path):
    async def main() -> None:
        async with stand() as door:
            token, identity = door.token("a", "b", "dials"), door.credentials("a").identity
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                port = unused.getsockname()[1]
            with pytest.raises(TransportError, match="did not answer"):
                await through_relay((("127.0.0.1", port),), token, identity)
            with pytest.raises(TransportError, match="none"):
                await through_relay((), token, identity)

    run(main())


def test_a_greeting_is_what_the_relay_reads(stand):
    door = stand()
    token = door.token("a", "b", "dials")
    data = greeting(token, prove_holding(token, door.credentials("a").identity.key))
    assert data[:2] == b"FR"
    assert len(data) == 6 + len(token) + 64
