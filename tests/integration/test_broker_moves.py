"""The broker gets another address while members and a job's owner are in the pool: they find it and go on.

The local network is played: `find` answers what would be announced in it. Two brokers on the same home, one after the
other, are one broker that has moved; its machine's other address is another port here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import Announcement, run_broker
from fusionai.client.pool.session import PoolSession
from fusionai.peer import registration
from fusionai.peer.registration import Registration
from fusionai.primitives.errors import TransportError
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import Membership, enrol, load_membership, parse_invitation
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from harness.credentials import CertifiedPool
from harness.in_a_loop import in_a_loop
from harness.patience import CEILING_S

ELSEWHERE = "tcp://gone.invalid:4711"
"""An address in which a broker is not known to be on this machine, so that it is looked for."""


@asynccontextmanager
async def broker(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Announcement]:
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)
    announced: asyncio.Future[Announcement] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    options = BrokerOptions(home=home, host="127.0.0.1", port=0, lease_s=3.0, heartbeat_s=0.05, invites=True)
    running = asyncio.create_task(run_broker(options, announce=announced.set_result, stop=stop))
    try:
        yield await announced
    finally:
        stop.set()
        await running


def registering(member: Membership, registered: asyncio.Event) -> asyncio.Task[None]:
    peer = Registration(
        TcpTransport(member.credentials),
        member.broker,
        boot=1,
        profile=PeerProfile(peer=member.peer, flops_per_s=1e9, memory_bytes=1),
        addresses=(),
        jobs=tuple,
        on_registered=lambda _: registered.set(),
        on_leave=lambda _: None,
        on_lost=lambda: None,
        on_meet=lambda notice, broker: None,
        membership=member,
    )
    return asyncio.create_task(peer.run())


@in_a_loop
async def test_members_and_owners_find_a_broker_that_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "FIRST_RETRY_S", 0.05)
    around: list[NearbyPool] = []

    async def find(key: bytes) -> tuple[NearbyPool, ...]:
        return tuple(pool for pool in around if pool.authority_key == key)

    def joined(membership: Membership) -> Membership:
        membership.broker.known = (*membership.broker.known, ELSEWHERE)
        membership.broker.find = find
        return membership

    evil, heard = CertifiedPool(tmp_path / "evil", "pool"), []

    async def accept(channel: Channel) -> None:
        heard.append(channel)

    async with broker(tmp_path / "broker", monkeypatch) as first:
        invitation = parse_invitation(first.invitation)
        member = joined(await enrol(invitation, tmp_path / "member", "provider"))
        owner = joined(await enrol(invitation, tmp_path / "owner", "owner"))
        registered = asyncio.Event()
        running = registering(member, registered)
        session = PoolSession(owner, trust=None)
        async with asyncio.timeout(CEILING_S):
            await registered.wait()
        assert [one.view.peer for one in await session.pool()] == [member.peer]

    # Another pool's broker gets the old address, and announces that it is this pool.
    port = int(first.addresses[0].rpartition(":")[2])
    liar = await TcpTransport(evil.credentials("broker", "broker")).listen(accept, host="127.0.0.1", port=port)
    around.append(NearbyPool("pool", invitation.authority_key, liar.addresses))
    with pytest.raises(TransportError, match="another machine answers where the broker was"):
        await session.pool()

    async with broker(tmp_path / "broker", monkeypatch) as second:
        assert second.addresses != first.addresses
        around.append(NearbyPool("pool", invitation.authority_key, second.addresses))
        registered.clear()
        async with asyncio.timeout(CEILING_S):
            await registered.wait()
        assert [one.view.state for one in await session.pool()] == ["idle"]
        assert not running.done()
        for membership in (member, owner):
            assert membership.home is not None
            assert load_membership(membership.home).broker.known[0] == second.addresses[0]
        running.cancel()
        await session.__aexit__(None, None, None)
    assert not heard, "the other broker heard of none of them"
    await liar.close()
