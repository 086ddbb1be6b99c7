"""Joining a pool against a broker's door on loopback: the good way, and every way it must fail."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fusionai.primitives.errors import (
    RefusedError,
    StorageError,
    TransportError,
    TrustError,
    UsageError,
    WireError,
)
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.enrolment import (
    MEMBERSHIP_FILE,
    InvitationContent,
    Membership,
    enrol,
    enrol_second_key,
    format_invitation,
    load_membership,
)
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.identity import load_identity, peer_of
from fusionai.wire.messages import Done, JoinGranted, JoinRequest, Message, Refused

TOKEN = bytes(range(16))
Answer = Callable[[JoinRequest], Message]


def join(
    pool, answer: Answer, home: Path, *, key: bytes | None = None, role: str = "broker"
) -> Callable[[], Awaitable]:
    """A broker that answers as told, and one machine that enrols with it."""
    seen: list[Message] = []

    async def accept(channel: Channel) -> None:
        assert channel.remote.role == "stranger"
        message = (await channel.receive()).message
        seen.append(message)
        assert isinstance(message, JoinRequest)
        await channel.send(answer(message))
        await channel.receive()

    async def main():
        door = await TcpTransport(pool.credentials("broker", role)).listen(
            accept, host="127.0.0.1", port=0, strangers=True
        )
        invitation = InvitationContent("friends", door.addresses, key or pool.authority.public_key, TOKEN)
        try:
            return await enrol(format_invitation(invitation), home, "provider", timeout_s=5.0), seen
        finally:
            await door.close()

    return main


def granted(pool, *, authority=None, certificate: Callable[[JoinRequest], bytes] | None = None) -> Answer:
    def answer(request: JoinRequest) -> Message:
        issue = certificate or (lambda asked: pool.issue(asked.public_key))
        return JoinGranted(
            peer=peer_of(request.public_key),
            certificate=issue(request),
            authority=(authority or pool.authority).certificate,
        )

    return answer


def test_an_invitation_makes_a_member(pool, tmp_path: Path):
    home = tmp_path / "home"
    membership, seen = asyncio.run(join(pool, granted(pool), home)())
    assert seen == [JoinRequest(token=TOKEN, public_key=load_identity(home).public_key, purpose="provider")]
    assert membership.pool == "friends"
    assert membership.peer == load_identity(home).peer
    assert membership.credentials.role == "member"
    assert membership.credentials.authority_key == pool.authority.public_key
    assert load_membership(home) == membership
    assert stat.S_IMODE((home / MEMBERSHIP_FILE).stat().st_mode) == 0o600


def test_a_member_reaches_the_broker_with_what_it_kept(pool, tmp_path: Path):
    home = tmp_path / "home"
    asyncio.run(join(pool, granted(pool), home)())

    async def main() -> None:
        remotes = []

        async def accept(channel: Channel) -> None:
            remotes.append(channel.remote)

        door = await TcpTransport(pool.credentials("broker", "broker")).listen(accept, host="127.0.0.1", port=0)
        channel = await TcpTransport(load_membership(home).credentials).dial(
            door.addresses, expect=None, stream="control"
        )
        await channel.close()
        await door.close()
        assert [remote.peer for remote in remotes] == [load_identity(home).peer]

    asyncio.run(main())


def test_a_refusal_says_why(pool, tmp_path: Path):
    with pytest.raises(RefusedError, match="used up or expired") as refused:
        asyncio.run(join(pool, lambda _: Refused(code="bad_invitation"), tmp_path / "home")())
    assert refused.value.code == "bad_invitation"
    assert not (tmp_path / "home" / MEMBERSHIP_FILE).exists()


def test_the_token_goes_to_nobody_but_the_pools_broker(pool, make_pool, tmp_path: Path):
    def never(request: JoinRequest) -> Message:
        raise AssertionError("the token was sent")

    other = make_pool("others")
    with pytest.raises(TrustError, match="signed by this pool's authority"):
        asyncio.run(join(pool, never, tmp_path / "home", key=other.authority.public_key)())
    with pytest.raises(TrustError, match="expected the pool's broker, got a member"):
        asyncio.run(join(pool, never, tmp_path / "home", role="member")())


def test_what_the_broker_gives_is_checked(pool, make_pool, tmp_path: Path):
    other, home = make_pool("others"), tmp_path / "home"
    stranger = load_identity(tmp_path / "stranger")
    for answer, said in (
        (granted(pool, authority=other.authority), "another authority's"),
        (granted(pool, certificate=lambda asked: other.issue(asked.public_key)), "signed by this pool's"),
        (granted(pool, certificate=lambda _: pool.issue(stranger.public_key)), "another key or role"),
        (granted(pool, certificate=lambda _: b"nonsense"), "as DER"),
    ):
        with pytest.raises(TrustError, match=said):
            asyncio.run(join(pool, answer, home)())
        assert not (home / MEMBERSHIP_FILE).exists()
    with pytest.raises(WireError, match="answer to a join request, got done"):
        asyncio.run(join(pool, lambda _: Done(), home)())


def test_no_broker_and_no_invitation(pool, tmp_path: Path):
    invitation = InvitationContent("friends", ("tcp://127.0.0.1:1",), pool.authority.public_key, TOKEN)
    with pytest.raises(TransportError, match=r"no answer from tcp://127\.0\.0\.1:1"):
        asyncio.run(enrol(invitation, tmp_path, "owner"))
    with pytest.raises(UsageError, match="fusion1-"):
        asyncio.run(enrol("please", tmp_path, "owner"))


@pytest.mark.slow
def test_a_broker_that_never_answers_is_waited_for_only_so_long(pool, tmp_path: Path):
    async def main() -> None:
        async def silent(channel: Channel) -> None:
            await channel.receive()
            await channel.receive()

        door = await TcpTransport(pool.credentials("broker", "broker")).listen(
            silent, host="127.0.0.1", port=0, strangers=True
        )
        invitation = InvitationContent("friends", door.addresses, pool.authority.public_key, TOKEN)
        with pytest.raises(TransportError, match=r"did not answer within 0\.3 s"):
            await enrol(invitation, tmp_path / "home", "owner", timeout_s=0.3)
        await door.close()

    asyncio.run(main())


def test_a_member_gets_a_second_key_without_an_invitation(pool, tmp_path: Path):
    home, second_home = tmp_path / "home", tmp_path / "second"
    asyncio.run(join(pool, granted(pool), home)())

    async def main() -> None:
        async def accept(channel: Channel) -> None:
            assert channel.remote.peer == load_identity(home).peer
            message = (await channel.receive()).message
            assert isinstance(message, JoinRequest)
            assert message.token == b""
            await channel.send(granted(pool)(message))
            await channel.receive()

        door = await TcpTransport(pool.credentials("broker", "broker")).listen(accept, host="127.0.0.1", port=0)
        machine = load_membership(home)
        machine = Membership(machine.pool, machine.purpose, BrokerAddresses(door.addresses), machine.credentials)
        second = await enrol_second_key(machine, second_home, "owner")
        assert second.peer == load_identity(second_home).peer != machine.peer
        assert load_membership(second_home) == second
        await door.close()

    asyncio.run(main())


def test_a_machine_that_has_not_joined_is_told_how(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has not joined a pool.*invitation"):
        load_membership(tmp_path)


def test_a_damaged_or_foreign_membership_is_found(pool, tmp_path: Path):
    home = tmp_path / "home"
    asyncio.run(join(pool, granted(pool), home)())
    path = home / MEMBERSHIP_FILE
    kept = path.read_text()
    for damaged in ("", "{", kept[:-10], json.dumps({**json.loads(kept), "more": 1}), kept.replace("fusionai.", "x.")):
        path.write_text(damaged)
        with pytest.raises(StorageError, match=r"membership\.json"):
            load_membership(home)
    path.write_text(kept)
    load_membership(home)
    (home / "identity.pem").unlink()
    with pytest.raises(TrustError, match="another key than this machine's"):
        load_membership(home)


def test_an_expired_membership_says_what_to_do(pool, tmp_path: Path):
    home = tmp_path / "home"
    asyncio.run(join(pool, granted(pool), home)())
    old = pool.authority.issue(load_identity(home).public_key, "member", now_wall_s=1_000_000_000.0)
    kept = json.loads((home / MEMBERSHIP_FILE).read_text())
    kept["certificate"] = base64.b64encode(old).decode()
    (home / MEMBERSHIP_FILE).write_text(json.dumps(kept))
    with pytest.raises(TrustError, match="join the pool again"):
        load_membership(home)
