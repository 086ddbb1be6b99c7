"""QUIC where it differs from TCP: who is believed, a side that is gone without a word, one UDP port for everything."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionai.primitives.errors import ChannelClosed, TransportError, TrustError, UsageError
from fusionai.transport.interface import Channel
from fusionai.transport.routes import quic as quic_binding
from fusionai.transport.routes.quic import QuicTransport, format_quic, parse_quic
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.wire.messages import Ping
from harness.patience import CEILING_S

pytestmark = pytest.mark.skipif(
    not quic_binding.available(), reason="the library for QUIC, iroh, is not installed here"
)


async def waits(channel: Channel) -> None:
    await channel.receive()


def play(scene: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(CEILING_S):
            await scene()

    asyncio.run(bounded())


def test_an_address_names_the_key(pool: Any):
    peer = pool.credentials("a").identity.peer
    assert parse_quic(format_quic(peer, "203.0.113.7", 4711)) == (peer, "203.0.113.7", 4711)
    assert parse_quic("tcp://203.0.113.7:4711") is None
    assert parse_quic("quic://nobody@203.0.113.7:4711") is None
    with pytest.raises(UsageError):
        parse_quic("203.0.113.7:4711")


def test_both_sides_know_where_the_other_is_and_which_way_it_goes(pool: Any):
    async def scene() -> None:
        came: asyncio.Queue[Channel] = asyncio.Queue()

        async def accept(channel: Channel) -> None:
            came.put_nowait(channel)
            await channel.receive()

        listener = await QuicTransport(pool.credentials("b")).listen(accept, host="127.0.0.1", port=0)
        dialler = QuicTransport(pool.credentials("a"))
        peer = pool.credentials("b").identity.peer
        channel = await dialler.dial(listener.addresses, expect=peer, stream="state")
        theirs = await came.get()
        assert (channel.route, theirs.route) == ("quic", "quic")
        assert (channel.remote.host, channel.remote.port) == ("127.0.0.1", listener.port)
        assert theirs.remote.host == "127.0.0.1"
        assert theirs.remote.peer == pool.credentials("a").identity.peer
        # The next one leaves by the same port: routers would take another for somebody else.
        second = await dialler.dial(listener.addresses, expect=peer, stream="control")
        assert (await came.get()).remote.port == theirs.remote.port
        await channel.close()
        await second.close()
        await listener.close()

    play(scene)


def test_a_member_of_another_pool_is_not_believed_on_either_side(pool: Any, make_pool: Any):
    async def scene() -> None:
        foreign = make_pool("strangers")
        let_in: list[Channel] = []

        async def accept(channel: Channel) -> None:
            let_in.append(channel)

        listener = await QuicTransport(pool.credentials("b")).listen(accept, host="127.0.0.1", port=0)
        with pytest.raises((TrustError, TransportError)):
            await QuicTransport(foreign.credentials("a")).dial(
                listener.addresses, expect=pool.credentials("b").identity.peer, stream="control"
            )
        assert not let_in
        await listener.close()

    play(scene)


def test_a_certificate_of_another_key_is_not_believed(pool: Any):
    async def scene() -> None:
        listener = await QuicTransport(pool.credentials("b")).listen(waits, host="127.0.0.1", port=0)
        thief = pool.credentials("thief")
        stolen = MemberCredentials(thief.identity, pool.credentials("a").certificate, thief.authority)
        with pytest.raises(TransportError):
            await QuicTransport(stolen).dial(
                listener.addresses, expect=pool.credentials("b").identity.peer, stream="control", timeout_s=3.0
            )
        await listener.close()

    play(scene)


SERVES = """
import asyncio, sys
from pathlib import Path
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.transport.security.identity import load_identity
from fusionai.transport.routes.quic import QuicTransport

async def echo(channel):
    while True:
        await channel.send((await channel.receive()).message)

async def main(home, certificate, authority):
    identity = load_identity(Path(home))
    credentials = MemberCredentials(identity, bytes.fromhex(certificate), bytes.fromhex(authority))
    listener = await QuicTransport(credentials).listen(echo, host="127.0.0.1", port=0)
    sys.stdout.write(listener.addresses[0] + "\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_process_is_missed_within_seconds(pool: Any, tmp_path: Path):
    credentials = pool.credentials("b")
    arguments = [str(credentials.identity.path.parent), credentials.certificate.hex(), credentials.authority.hex()]
    with subprocess.Popen([sys.executable, "-c", SERVES, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        async def scene() -> None:
            channel = await QuicTransport(pool.credentials("a")).dial(
                [address], expect=credentials.identity.peer, stream="control"
            )
            await channel.send(Ping(sequence=1, sent_at_s=0.0))
            await channel.receive()
            process.kill()
            killed_s = time.monotonic()
            with pytest.raises(ChannelClosed, match="sent nothing"):
                await channel.receive()
            assert time.monotonic() - killed_s < 6.0
            await channel.close()

        play(scene)
