"""Starting and stopping a broker in this process: what it announces, which options it refuses, what it leaves open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import Announcement, run_broker
from fusionai.primitives.errors import RefusedError, StorageError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Conversation
from fusionai.transport.discovery import NearbyPool
from fusionai.transport.enrolment import enrol, load_membership, parse_invitation
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.messages import Invited, InviteRequest


@pytest.fixture(autouse=True)
def nothing_to_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the objects of all tests, looked at twice by every broker; what it does is tested by itself."""
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)


def options_for(home: Path, changes: dict[str, object]) -> BrokerOptions:
    given: dict[str, object] = {"host": "127.0.0.1", "port": 0, **changes}
    return BrokerOptions(home=home, **given)  # pyright: ignore[reportArgumentType]


def run_once(given: BrokerOptions) -> Announcement:
    """Start, stop at the announcement."""
    announced: list[Announcement] = []

    async def main() -> None:
        stop = asyncio.Event()

        def announce(announcement: Announcement) -> None:
            announced.append(announcement)
            stop.set()

        await run_broker(given, announce=announce, stop=stop)

    asyncio.run(main())
    return announced[0]


def test_it_announces_where_it_is_and_how_to_come_in(tmp_path: Path):
    first = run_once(options_for(tmp_path, {"pool": "friends"}))
    invitation = parse_invitation(first.invitation)
    assert (first.pool, invitation.pool, invitation.addresses) == ("friends", "friends", first.addresses)
    assert first.addresses[0].startswith("tcp://127.0.0.1:")
    again = run_once(options_for(tmp_path, {}))
    assert (again.pool, again.peer, again.members, again.jobs) == ("friends", first.peer, 0, 0)
    assert again.invitation == "", "an invitation is said once"
    asked = run_once(options_for(tmp_path, {"invites": True}))
    assert parse_invitation(asked.invitation).token != invitation.token
    assert run_once(options_for(tmp_path / "new", {"invites": False})).invitation == ""


class PlayedAnnouncer:
    """Stands for mDNS."""

    announced: tuple[NearbyPool, ...] = ()

    async def announce(self, pool: NearbyPool, hosts: list[str]) -> None:
        PlayedAnnouncer.announced += (pool,)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "addresses", "announces"),
    [
        ({}, ("tcp://192.168.1.7:4711", "tcp://127.0.0.1:4711"), True),
        ({"announces": False}, ("tcp://192.168.1.7:4711", "tcp://127.0.0.1:4711"), False),
        ({}, ("tcp://127.0.0.1:4711",), False),
    ],
)
def test_a_broker_that_others_can_reach_announces_itself_and_shows_a_code(
    changes: dict[str, object],
    addresses: tuple[str, ...],
    announces: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("fusionai.broker.server.Announcer", PlayedAnnouncer)
    monkeypatch.setattr("fusionai.transport.routes.tcp.candidates", lambda *_: addresses)
    monkeypatch.setattr(PlayedAnnouncer, "announced", ())
    first: list[Announcement] = []

    async def main() -> None:
        stop = asyncio.Event()
        options = options_for(tmp_path, {"pool": "friends", **changes})
        opened = asyncio.Event()

        def announce(announcement: Announcement) -> None:
            first.append(announcement)
            opened.set()

        running = asyncio.create_task(run_broker(options, announce=announce, stop=stop))
        await opened.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        stop.set()
        await running

    asyncio.run(main())
    assert bool(first[0].code) is announces
    assert load_membership(tmp_path).broker.known[0] == addresses[0]
    key = parse_invitation(first[0].invitation).authority_key
    expected = (NearbyPool("friends", key, addresses[:1], 0),) if announces else ()
    assert PlayedAnnouncer.announced == expected


def test_advertised_addresses_replace_its_own_for_others_but_not_for_this_machine(tmp_path: Path):
    announced = run_once(options_for(tmp_path, {"advertise": ("tcp://pool.example:4711",)}))
    assert parse_invitation(announced.invitation).addresses == ("tcp://pool.example:4711",)
    own = load_membership(tmp_path).broker.known
    assert own[0].startswith("tcp://127.0.0.1:")
    assert own[-1] == "tcp://pool.example:4711"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lease_s": 0.5}, "a lease of at least 1.5 s"),
        ({"heartbeat_s": 7.0}, "at most half the lease"),
        ({"heartbeat_s": 0.0}, "at most half the lease"),
        ({"unattended_s": 1.0}, "durations"),
        ({"ticket_lifetime_s": 0.0}, "durations"),
        ({"invitation_lifetime_s": -1.0}, "durations"),
        ({"invitation_uses": 0}, "1 to 100000 machines"),
        ({"losses_before_rest": 17}, "0 to 16 losses"),
        ({"advertise": ("pool.example",)}, "an address such as"),
        ({"host": "no such host"}, "an address of this machine"),
        ({"pool": ""}, "pool name"),
    ],
)
def test_options_that_cannot_work_are_the_users_mistake(tmp_path: Path, changes: dict[str, object], text: str):
    with pytest.raises(UsageError, match=text):
        run_once(options_for(tmp_path / "home", changes))
    assert not (tmp_path / "home" / "membership.json").exists()


def test_a_journal_damaged_in_one_copy_is_mended_and_said(tmp_path: Path):
    assert run_once(options_for(tmp_path, {})).healed == ()
    for name in ("journal.sqlite", "journal.mirror"):
        file = tmp_path / "broker" / name
        file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])
        [line] = run_once(options_for(tmp_path, {})).healed
        assert line.startswith(f"{name} was damaged")
        assert run_once(options_for(tmp_path, {})).healed == ()


def test_a_journal_damaged_in_both_copies_stops_the_start(tmp_path: Path):
    run_once(options_for(tmp_path, {}))
    for name in ("journal.sqlite", "journal.mirror"):
        file = tmp_path / "broker" / name
        file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])
    with pytest.raises(StorageError, match="damaged"):
        run_once(options_for(tmp_path, {}))


def test_a_named_member_may_invite(tmp_path: Path):
    async def scene(inviters: frozenset[PeerId]) -> str:
        outcome: list[str] = []
        stop, ready = asyncio.Event(), asyncio.Event()
        announced: list[Announcement] = []

        def announce(announcement: Announcement) -> None:
            announced.append(announcement)
            ready.set()

        given = options_for(tmp_path / "broker", {"inviters": inviters, "invites": True})
        running = asyncio.create_task(run_broker(given, announce=announce, stop=stop))
        await ready.wait()
        member = await enrol(announced[0].invitation, tmp_path / "member", "owner")
        channel = await TcpTransport(member.credentials).dial(member.broker.known, expect=None, stream="control")
        talk = Conversation(channel)
        try:
            answer = await talk.ask(InviteRequest())
            assert isinstance(answer, Invited)
            outcome.append("invited")
        except RefusedError as error:
            outcome.append(error.code)
        finally:
            await talk.close()
            stop.set()
            await running
        return f"{outcome[0]} {member.peer}"

    refused, peer = asyncio.run(scene(frozenset())).split()
    assert refused == "not_authorised"
    assert asyncio.run(scene(frozenset({PeerId(peer)}))).split()[0] == "invited"


def test_a_policy_file_is_read_before_the_port_is_open(tmp_path: Path):
    policy = tmp_path / "policy.toml"
    policy.write_text("[quota]\nmachines = 2\n", encoding="utf-8")
    assert run_once(options_for(tmp_path / "home", {"policy_file": policy})).addresses
    policy.write_text("[quotas]\nmachines = 2\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"unknown .* 'quotas'"):
        run_once(options_for(tmp_path / "home", {"policy_file": policy}))
