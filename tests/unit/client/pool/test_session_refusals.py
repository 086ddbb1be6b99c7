"""A broker that can't journal anything, e.g. because another one has taken over, is away for a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import RefusedError, TransportError
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.enrolment import Membership
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpListener, TcpTransport
from fusionai.wire.messages import Invited, Message, Refused, RevocationQuery, Revocations
from harness.credentials import CertifiedPool
from harness.in_a_loop import in_a_loop


async def broker_of(pool: CertifiedPool, answer: Message) -> TcpListener:
    async def accept(channel: Channel) -> None:
        while True:
            message = (await channel.receive()).message
            await channel.send(
                Revocations(signed=b"", brokers=("tcp://second:1",)) if isinstance(message, RevocationQuery) else answer
            )

    return await TcpTransport(pool.credentials("broker", "broker")).listen(accept, host="127.0.0.1", port=0)


@pytest.fixture
def pool(tmp_path: Path) -> CertifiedPool:
    return CertifiedPool(tmp_path)


@in_a_loop
async def test_the_next_broker_is_asked(pool: CertifiedPool, tmp_path: Path):
    first = await broker_of(pool, Refused(code="failed", reason="the journal is out of reach"))
    second = await broker_of(pool, Invited(invitation="fusion1-x"))
    known = BrokerAddresses((*first.addresses, *second.addresses))
    membership = Membership("pool", "owner", known, pool.credentials("member"), tmp_path)
    async with PoolSession(membership, trust=None) as session:
        with pytest.raises(TransportError, match="can't do that now: the journal is out of reach"):
            await session.invite(uses=1, lifetime_s=1.0)
        assert await session.invite(uses=1, lifetime_s=1.0) == "fusion1-x"
    assert membership.broker.known == (*first.addresses, *second.addresses, "tcp://second:1")
    await first.close()
    await second.close()


@in_a_loop
async def test_other_refusals_are_answers(pool: CertifiedPool, tmp_path: Path):
    door = await broker_of(pool, Refused(code="not_authorised", reason="no."))
    membership = Membership("pool", "owner", BrokerAddresses(door.addresses), pool.credentials("member"), tmp_path)
    async with PoolSession(membership, trust=None) as session:
        for _ in range(2):
            with pytest.raises(RefusedError):
                await session.invite(uses=1, lifetime_s=1.0)
    await door.close()
