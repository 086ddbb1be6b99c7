"""Joining with a six-digit code, over TLS on loopback: the good way, and machines that guess, lie or stand between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import Announcement, run_broker
from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import enrol, invitation_by_code, load_membership
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import StrangerCredentials
from fusionai.transport.security.code_exchange import NewcomerExchange
from fusionai.wire.frame import FrameLimits
from fusionai.wire.messages import CodeAccepted, CodeAnswer, CodeOffer, CodeProof, Refused
from harness.credentials import CertifiedPool
from harness.in_a_loop import in_a_loop


@dataclass
class OpenPool:
    """A broker that runs in this process."""

    home: Path
    announced: asyncio.Future[Announcement]
    notices: list[str] = field(default_factory=list)

    @property
    def nearby(self) -> NearbyPool:
        own = load_membership(self.home)
        return NearbyPool("pool", own.credentials.authority_key, self.announced.result().addresses)

    async def make_code(self) -> str:
        async with PoolSession(load_membership(self.home), trust=None) as session:
            return (await session.make_code()).code


@asynccontextmanager
async def open_pool(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenPool]:
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)
    stop = asyncio.Event()
    pool = OpenPool(home, asyncio.get_running_loop().create_future())
    options = BrokerOptions(home=home, host="127.0.0.1", port=0)
    running = asyncio.create_task(
        run_broker(options, announce=pool.announced.set_result, stop=stop, notice=pool.notices.append)
    )
    try:
        await asyncio.wait({running, pool.announced}, return_when=asyncio.FIRST_COMPLETED)
        yield pool
    finally:
        stop.set()
        await running


def other_than(code: str) -> str:
    return f"{(int(code) + 1) % 10**6:06}"


@in_a_loop
async def test_a_code_gives_an_invitation_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        assert pool.announced.result().code == "", "no machine can find a broker that only this machine can reach"
        code = await pool.make_code()
        invitation = await invitation_by_code(pool.nearby, code)
        assert invitation.addresses[0] in pool.nearby.addresses
        membership = await enrol(invitation, tmp_path / "home", "owner")
        assert membership.credentials.authority_key == pool.nearby.authority_key
        with pytest.raises(RefusedError) as again:
            await enrol(invitation, tmp_path / "other", "owner")
        assert again.value.code == "bad_invitation", "it is for one machine"
        with pytest.raises(RefusedError) as used:
            await invitation_by_code(pool.nearby, code)
        assert used.value.code == "bad_code"
        async with PoolSession(membership, trust=None) as session:
            with pytest.raises(RefusedError) as denied:
                await session.make_code()
        assert denied.value.code == "not_authorised"


@in_a_loop
async def test_after_three_wrong_codes_the_right_one_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        code = await pool.make_code()
        for _ in range(3):
            with pytest.raises(RefusedError):
                await invitation_by_code(pool.nearby, other_than(code))
        with pytest.raises(RefusedError, match="no longer valid"):
            await invitation_by_code(pool.nearby, code)
        assert "is dead" in pool.notices[0]


class Middle:
    """A machine with a pool of its own that announces itself and passes on to the real broker what it gets."""

    def __init__(self, real: NearbyPool) -> None:
        self.real = real
        self.heard: list[object] = []

    async def accept(self, channel: Channel) -> None:
        transport = TcpTransport(StrangerCredentials(self.real.authority_key))
        broker = await transport.dial(self.real.addresses, expect=None, stream="control")
        try:
            while True:
                message = (await channel.receive()).message
                self.heard.append(message)
                await broker.send(message)
                answer = (await broker.receive()).message
                self.heard.append(answer)
                await channel.send(answer)
        finally:
            await broker.close()


@in_a_loop
async def test_a_machine_in_the_middle_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        code = await pool.make_code()
        middle, evil = Middle(pool.nearby), CertifiedPool(tmp_path / "evil", "pool")
        listener = await TcpTransport(evil.credentials("broker", "broker")).listen(
            middle.accept, host="127.0.0.1", port=0, strangers=True
        )
        with pytest.raises(RefusedError, match="no longer valid") as refused:
            await invitation_by_code(NearbyPool("pool", evil.authority.public_key, listener.addresses), code)
        assert "another machine is between" in str(refused.value.hint)
        await listener.close()
        kinds = [type(message) for message in middle.heard]
        assert kinds == [CodeOffer, CodeAnswer, CodeProof, Refused], "it was one try, and no invitation passed"
        assert await invitation_by_code(pool.nearby, code)


@in_a_loop
async def test_a_machine_in_the_middle_that_guesses_wrong_can_give_nothing(tmp_path: Path):
    evil = CertifiedPool(tmp_path / "evil", "pool")

    async def accept(channel: Channel) -> None:
        # What it can compute without the code: a share of its own, and a text under a key of its own.
        offer = (await channel.receive()).message
        assert isinstance(offer, CodeOffer)
        share = NewcomerExchange("000000", evil.authority.public_key, evil.peer("broker")).share
        await channel.send(CodeAnswer(share=b"B" + share[1:]))
        await channel.receive()
        await channel.send(CodeAccepted(sealed=bytes(200)))

    listener = await TcpTransport(evil.credentials("broker", "broker")).listen(
        accept, host="127.0.0.1", port=0, strangers=True
    )
    with pytest.raises(TrustError, match="does not know the code"):
        await invitation_by_code(NearbyPool("pool", evil.authority.public_key, listener.addresses), "123456")
    await listener.close()


@in_a_loop
async def test_an_announcement_that_points_to_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The announced key is the pool's, the address is the attacker's: TLS ends it before anything is said."""
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        code = await pool.make_code()
        evil, heard = CertifiedPool(tmp_path / "evil", "pool"), []

        async def accept(channel: Channel) -> None:
            heard.append((await channel.receive()).message)

        listener = await TcpTransport(evil.credentials("broker", "broker")).listen(
            accept, host="127.0.0.1", port=0, strangers=True
        )
        lie = NearbyPool("pool", pool.nearby.authority_key, listener.addresses)
        with pytest.raises(TrustError, match="signed by another key"):
            await invitation_by_code(lie, code)
        assert not heard
        both = NearbyPool("pool", pool.nearby.authority_key, (*listener.addresses, *pool.nearby.addresses))
        assert await invitation_by_code(both, code), "beside the true address a false one does no harm"
        await listener.close()


async def stranger_at(pool: NearbyPool) -> Channel:
    return await TcpTransport(StrangerCredentials(pool.authority_key)).dial(
        pool.addresses, expect=None, stream="control"
    )


@pytest.mark.parametrize("nbytes", [34, 5_000_000])
@in_a_loop
async def test_messages_of_other_sizes_end_the_connection_and_cost_no_try(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        code = await pool.make_code()
        for message in (CodeOffer(share=bytes(nbytes)), CodeProof(proof=bytes(nbytes or 31))):
            channel = await stranger_at(pool.nearby)
            monkeypatch.setattr(channel, "_outbound", FrameLimits(2**30, 0))
            with suppress(TransportError):
                await channel.send(message)
            with pytest.raises(FusionError):
                await channel.receive()
            channel.abort()
        assert await invitation_by_code(pool.nearby, code)


@in_a_loop
async def test_a_stranger_with_a_share_may_say_one_thing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_pool(tmp_path / "broker", monkeypatch) as pool:
        await pool.make_code()
        channel = await stranger_at(pool.nearby)
        assert channel.remote.peer is not None
        share = NewcomerExchange("000000", pool.nearby.authority_key, channel.remote.peer).share
        for expected in (CodeAnswer, Refused):
            await channel.send(CodeOffer(share=share))
            assert isinstance((await channel.receive()).message, expected)
        with pytest.raises(TransportError):
            await channel.receive()
