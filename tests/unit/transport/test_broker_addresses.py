"""Finding a broker that has moved: where it is looked for, whom an announcement can mislead, and what is remembered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusionai.primitives.errors import TransportError, TrustError
from fusionai.transport import broker_addresses
from fusionai.transport.broker_addresses import MAX_KNOWN, BrokerAddresses
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, keep_membership, load_membership
from fusionai.transport.interface import Accept, Channel
from fusionai.transport.routes.tcp import TcpListener, TcpTransport
from harness.credentials import CertifiedPool
from harness.in_a_loop import in_a_loop

GONE = "tcp://gone.invalid:4711"
"""A name that stands for no address."""


async def until_closed(channel: Channel) -> None:
    await channel.receive()


async def broker_of(pool: CertifiedPool, accept: Accept = until_closed) -> TcpListener:
    return await TcpTransport(pool.credentials("broker", "broker")).listen(accept, host="127.0.0.1", port=0)


def member_of(pool: CertifiedPool, home: Path, known: Sequence[str], announced: Sequence[str]) -> Membership:
    """A member that knows the broker at `known`, in a network where its pool is announced at `announced`."""
    asked: list[bytes] = []

    async def find(key: bytes) -> tuple[NearbyPool, ...]:
        asked.append(key)
        assert key == pool.authority.public_key
        return (NearbyPool("pool", key, tuple(announced)),) if announced else ()

    own = pool.credentials("member")
    membership = Membership("pool", "provider", BrokerAddresses(tuple(known), find=find), own, own.identity.path.parent)
    keep_membership(own.identity.path.parent, membership)
    return membership


async def dialled(membership: Membership) -> Channel:
    channel = await membership.broker.dial(TcpTransport(membership.credentials), timeout_s=5.0)
    assert channel.remote.role == "broker"
    await channel.close()
    return channel


def test_addresses_of_further_brokers_are_learned_once_and_kept(pool: CertifiedPool, tmp_path: Path):
    membership = member_of(pool, tmp_path, [GONE], [])
    home = membership.home
    assert home is not None
    membership.broker.learn(["tcp://second:1", GONE, "tcp://second:1"])
    assert load_membership(home).broker.known == (GONE, "tcp://second:1")
    before = (home / MEMBERSHIP_FILE).stat().st_ino
    membership.broker.learn(["tcp://second:1"])
    assert (home / MEMBERSHIP_FILE).stat().st_ino == before, "nothing new is no reason to write"
    membership.broker.learn([f"tcp://more:{number}" for number in range(MAX_KNOWN)])
    assert len(membership.broker.known) == MAX_KNOWN


@in_a_loop
async def test_a_broker_that_moved_is_found_and_its_address_kept(pool: CertifiedPool, tmp_path: Path):
    door = await broker_of(pool)
    membership = member_of(pool, tmp_path, [GONE], door.addresses)
    await dialled(membership)
    assert membership.broker.known == (*door.addresses, GONE)
    assert membership.home is not None
    assert load_membership(membership.home).broker.known == (*door.addresses, GONE)
    await door.close()


@in_a_loop
async def test_a_false_announcement_beside_the_true_one_does_no_harm(pool: CertifiedPool, make_pool, tmp_path: Path):
    door, other = await broker_of(pool), await broker_of(make_pool("others"))
    membership = member_of(pool, tmp_path, [GONE], [*other.addresses, *door.addresses])
    await dialled(membership)
    assert membership.broker.known == (*door.addresses, GONE)
    await door.close()
    await other.close()


@in_a_loop
async def test_a_false_announcement_alone_is_no_answer_and_is_not_kept(pool: CertifiedPool, make_pool, tmp_path: Path):
    heard: list[Channel] = []

    async def accept(channel: Channel) -> None:
        heard.append(channel)

    other = await broker_of(make_pool("others"), accept)
    # A member of the pool itself announces that it is the broker.
    insider = await TcpTransport(pool.credentials("insider")).listen(accept, host="127.0.0.1", port=0)
    for places in (other.addresses, insider.addresses):
        membership = member_of(pool, tmp_path, [GONE], places)
        with pytest.raises(TransportError, match=r"gone\.invalid"):
            await dialled(membership)
        assert membership.broker.known == (GONE,)
    assert not [channel for channel in heard if channel.remote.role == "stranger"]
    await other.close()
    await insider.close()


@in_a_loop
async def test_another_machine_at_the_old_address_does_not_hide_the_broker(
    pool: CertifiedPool, make_pool, tmp_path: Path
):
    door, other = await broker_of(pool), await broker_of(make_pool("others"))
    membership = member_of(pool, tmp_path, [*other.addresses, GONE], door.addresses)
    await dialled(membership)
    lost = member_of(pool, tmp_path, [*other.addresses, GONE], [])
    with pytest.raises(TrustError):
        await dialled(lost)
    await door.close()
    await other.close()


@in_a_loop
async def test_a_broker_that_can_not_serve_is_passed_over(pool: CertifiedPool, tmp_path: Path):
    doors = [await broker_of(pool), await broker_of(pool)]
    membership = member_of(pool, tmp_path, [address for door in doors for address in door.addresses], [])
    known = membership.broker.known
    for expected in (known[0], known[1], known[0]):
        channel = await dialled(membership)
        assert expected.endswith(f":{channel.remote.port}")
        membership.broker.pass_over()
    assert membership.broker.known == known
    for door in doors:
        await door.close()


@in_a_loop
async def test_a_silent_address_costs_a_head_start(
    pool: CertifiedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(broker_addresses, "HEAD_START_S", 0.05)
    door = await broker_of(pool)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        membership = member_of(pool, tmp_path, [place, GONE], door.addresses)
        async with asyncio.timeout(4.0):
            await dialled(membership)
    await door.close()


@pytest.mark.parametrize("known", [["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1"]])
@in_a_loop
async def test_a_broker_on_this_machine_alone_is_not_looked_for(pool: CertifiedPool, tmp_path: Path, known: list[str]):
    async def find(key: bytes) -> tuple[NearbyPool, ...]:
        raise AssertionError("the network was asked")

    broker = BrokerAddresses(tuple(known), pool.authority.public_key, find=find)
    with pytest.raises(TransportError):
        await broker.dial(TcpTransport(pool.credentials("member")), timeout_s=2.0)


@in_a_loop
async def test_the_addresses_that_are_kept_are_limited(pool: CertifiedPool, tmp_path: Path):
    door = await broker_of(pool)
    membership = member_of(pool, tmp_path, [f"tcp://gone{n}.invalid:1" for n in range(MAX_KNOWN)], door.addresses)
    await dialled(membership)
    assert len(membership.broker.known) == MAX_KNOWN
    assert membership.broker.known[0] == door.addresses[0]
    await door.close()
