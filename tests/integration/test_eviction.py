"""Members that were sent away, or whose certificates have expired, can do nothing in a live pool, with the broker up
and with it gone.

Broker, peers and job owners are processes of their own; the members that are sent away act from this one.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import ChannelClosed, FusionError, RefusedError
from fusionai.primitives.ids import PeerId
from fusionai.transport.channels.tcp import TcpChannel
from fusionai.transport.enrolment import Membership, keep_membership, load_membership
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import (
    CERTIFICATE_LIFETIME_S,
    RENEWED_BEFORE_S,
    MemberCredentials,
    load_authority,
    read_certificate,
)
from fusionai.wire import messages as wire
from harness.in_a_loop import in_a_loop
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LivePool]:
    with LivePool(tmp_path, peers=("one", "two")) as live:
        yield live


def membership(pool: LivePool, who: str) -> Membership:
    return load_membership(pool.directory / who / "owner")


def joined(pool: LivePool, who: str) -> Membership:
    entered = fusion("join", pool.invite(), "--owner", "--home", pool.directory / who)
    assert entered.code == 0, entered.err
    return membership(pool, who)


def on_broker(pool: LivePool, *command: object) -> str:
    said = fusion(*command, "--home", pool.directory / "broker")
    assert said.code == 0, said.err
    return said.out


async def peers(pool: LivePool) -> dict[PeerId, tuple[str, ...]]:
    async with PoolSession(membership(pool, "owner"), trust=None) as session:
        return {
            PeerId(one.view.peer): tuple(place for place in one.view.addresses if place.startswith("tcp://"))
            for one in await session.pool()
            if one.view.state == "idle"
        }


async def opened(who: Membership, places: dict[PeerId, tuple[str, ...]]) -> list[TcpChannel]:
    """A connection with each of the peers, which answers."""
    transport = TcpTransport(who.credentials)
    channels = [await transport.dial(place, expect=peer, stream="tensors") for peer, place in places.items()]
    for channel in channels:
        await channel.send(wire.Ping(sequence=1, sent_at_s=0.0))
        assert isinstance((await channel.receive()).message, wire.Pong)
    return channels


async def ended(channels: list[TcpChannel]) -> None:
    async with asyncio.timeout(CEILING_S):
        for channel in channels:
            with pytest.raises(ChannelClosed):
                await channel.receive()


async def shut_out(pool: LivePool, who: Membership, places: dict[PeerId, tuple[str, ...]]) -> None:
    """The peers refuse this member, and serve an honest one all the same."""
    for peer, place in places.items():
        with pytest.raises(FusionError):
            await opened(who, {peer: place})
    for channel in await opened(membership(pool, "owner"), places):
        await channel.close()


@in_a_loop
async def test_an_evicted_member_can_do_nothing_with_the_broker_up_and_with_it_gone(pool: LivePool, tmp_path: Path):
    attacker, places = await asyncio.to_thread(joined, pool, "attacker"), await peers(pool)
    assert len(places) == 2
    channels = await opened(attacker, places)
    file = tmp_path / "evicted.json"
    said = await asyncio.to_thread(on_broker, pool, "evict", attacker.peer, "--json", file)
    assert "Evicted: " in said
    assert json.loads(file.read_text())["evicted"] == [attacker.peer]
    await ended(channels)
    await shut_out(pool, attacker, places)
    async with PoolSession(attacker, trust=None) as session:
        with pytest.raises(RefusedError, match="sent this machine away"):
            await session.pool()
    invitation = await asyncio.to_thread(pool.invite)
    again = await asyncio.to_thread(fusion, "join", invitation, "--owner", "--home", pool.directory / "attacker")
    assert again.code != 0
    assert "sent this machine away" in again.err

    pool.broker.end()
    await shut_out(pool, attacker, places)

    for name in ("one", "two"):  # and after a restart, from the list on the disk
        pool.kill(name)
    pool.open_broker()
    for name in ("one", "two"):
        pool.start(name).wait_for("In pool")
    places = await peers(pool)
    pool.broker.end()
    await shut_out(pool, attacker, places)


@in_a_loop
async def test_a_peer_that_lends_is_evicted_and_ends(pool: LivePool):
    member = pool.members["two"]
    said = await asyncio.to_thread(on_broker, pool, "evict", "two")
    assert "Evicted: " in said
    assert await asyncio.to_thread(member.ended) != 0
    assert "sent this machine away" in member.text
    assert len(await peers(pool)) == 1


def test_a_member_evicted_in_the_middle_of_a_job_is_replaced_with_equal_bits(tmp_path: Path):
    """Its stage goes to a machine of the backup pool, and the job's losses are those of an undisturbed run."""

    def command(run: str) -> tuple[object, ...]:
        (tmp_path / run).mkdir()
        write_text(tmp_path / run / "text.txt")
        recipe = write_recipe(tmp_path / run / "r.toml", job__steps=30, placement={"stages": 2})
        return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", tmp_path / f"{run}.json")

    with LivePool(tmp_path / "pool", peers=("one", "two", "three")) as pool:
        undisturbed = fusion(*command("undisturbed"))
        assert undisturbed.code == 0, undisturbed.err
        job = Process(*command("disturbed"))
        job.wait_for("step 4/")
        (name,) = re.findall(r"^  stage 1: (\w+),", job.text, re.MULTILINE)[:1]
        on_broker(pool, "evict", name)
        job.wait_for("takes over")
        assert job.ended() == 0, job.text
        assert pool.members[name].ended() != 0
        assert "sent this machine away" in pool.members[name].text
    losses = [json.loads((tmp_path / f"{run}.json").read_text())["losses"] for run in ("undisturbed", "disturbed")]
    assert losses[0] == losses[1]


def test_a_revoked_invitation_admits_no_further_machine(pool: LivePool, tmp_path: Path):
    invitation = pool.invite("--uses", "5")
    file = tmp_path / "invitations.json"
    on_broker(pool, "invite", "--list", "--json", file)
    (found,) = [one for one in json.loads(file.read_text())["invitations"] if one["uses_left"] == 5]
    assert fusion("join", invitation, "--owner", "--home", tmp_path / "early").code == 0
    assert "withdrawn" in on_broker(pool, "invite", "--revoke", found["id"])
    late = fusion("join", invitation, "--owner", "--home", tmp_path / "late")
    assert late.code != 0
    assert "unknown, used up or expired" in late.err
    unknown = fusion("invite", "--revoke", "zz", "--home", pool.directory / "broker")
    assert unknown.code != 0
    assert "'zz' is unknown or over" in unknown.err
    listed = fusion("pool", "--home", tmp_path / "early")
    assert listed.code == 0, "those that joined with it stay"


def issued(pool: LivePool, member: Membership, *, left_s: float) -> MemberCredentials:
    """Credentials of this member that end in `left_s`."""
    authority = load_authority(pool.directory / "broker" / "broker", "pool", now_wall_s=time.time())
    issued_s = time.time() - CERTIFICATE_LIFETIME_S + left_s
    key = member.credentials.identity.public_key
    return replace(member.credentials, certificate=authority.issue(key, "member", now_wall_s=issued_s))


def left_s(home: Path) -> float:
    return read_certificate(load_membership(home).credentials.certificate).expires_at_s - time.time()


def test_certificates_near_their_end_are_renewed_by_owners_and_by_peers(pool: LivePool) -> None:
    """And what is open shows the new one at the next connection: the pool serves both all the same."""
    owner, peer = pool.owner / "owner", pool.directory / "one"
    pool.kill("one")
    for home in (owner, peer):
        member = load_membership(home)
        keep_membership(home, replace(member, credentials=issued(pool, member, left_s=RENEWED_BEFORE_S - 60.0)))
        assert left_s(home) < RENEWED_BEFORE_S
    assert fusion("pool", "--home", pool.owner).code == 0
    pool.start("one").wait_for("In pool")
    deadline_s = time.monotonic() + CEILING_S
    while left_s(peer) < RENEWED_BEFORE_S and time.monotonic() < deadline_s:
        pool.members["one"].wait_until(lambda: None, 0.5)
    for home in (owner, peer):
        assert CERTIFICATE_LIFETIME_S - 600.0 < left_s(home) <= CERTIFICATE_LIFETIME_S
    assert fusion("pool", "--home", pool.owner).code == 0


@in_a_loop
async def test_an_expired_member_loses_what_is_open_and_opens_nothing_more(pool: LivePool):
    """Its certificate ends in a moment, as that of a machine that did not renew it."""
    member, places = membership(pool, "owner"), await peers(pool)
    ends_s = time.time() + 6.0
    expiring = replace(member, credentials=issued(pool, member, left_s=6.0))
    channels = await opened(expiring, places)
    pool.broker.end()
    await ended(channels)
    assert time.time() >= ends_s - 1.0, "not before its time"
    await shut_out(pool, expiring, places)


def test_an_evicted_name_must_be_one_members(pool: LivePool) -> None:
    for text, reason in (("three", "no member is named 'three'"), ("", "no member is named ''")):
        said = fusion("evict", text, "--home", pool.directory / "broker")
        assert said.code == 2
        assert reason in said.err
    said = fusion("evict", "one", "--home", pool.directory / "owner")
    assert said.code != 0
    assert "Only the broker's owner may evict members" in said.err
