"""Announcements in the local network: what is taken of what anybody may send, and mDNS over loopback."""

from __future__ import annotations

import asyncio
import base64
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.primitives.errors import TransportError
from fusionai.transport import discovery
from fusionai.transport.discovery import Announcer, NearbyPool, announced, fingerprint, merged, nearby_pools
from fusionai.transport.routes.addresses import host_of, is_near, parse_address

KEY = bytes(range(32))
GOOD: dict[bytes, bytes | None] = {b"pool": b"home", b"key": base64.urlsafe_b64encode(KEY), b"machines": b"3"}


def test_an_announcement_names_a_pool():
    pool = announced(GOOD, ["192.168.1.7", "10.0.0.7"], 4711)
    assert pool == NearbyPool("home", KEY, ("tcp://192.168.1.7:4711", "tcp://10.0.0.7:4711"), 3)
    assert pool.fingerprint == fingerprint(KEY)
    assert len(pool.fingerprint) == 8


@pytest.mark.parametrize(
    "changed",
    [
        {b"pool": b""},
        {b"pool": None},
        {b"pool": b"x" * 65},
        {b"pool": b"\xff"},
        {b"pool": b"red \x1b[31m"},
        {b"pool": b"two\nlines"},
        {b"key": b""},
        {b"key": base64.urlsafe_b64encode(bytes(31))},
        {b"key": b"!" * 44},
        {b"machines": b"many"},
        {b"machines": b"9" * 5000},
    ],
    ids=str,
)
def test_a_malformed_announcement_is_none(changed: dict[bytes, bytes | None]):
    assert announced({**GOOD, **changed}, ["192.168.1.7"], 4711) is None


@pytest.mark.parametrize("machines", [b"-1", b"-7", b"1000001", b""])
def test_an_impossible_number_of_machines_is_left_out(machines: bytes):
    pool = announced({**GOOD, b"machines": machines}, ["192.168.1.7"], 4711)
    assert pool is not None
    assert pool.machines is None


@pytest.mark.parametrize(
    "host",
    ["8.8.8.8", "2001:db8::1", "127.0.0.1", "::1", "169.254.1.1", "fe80::1", "224.0.0.251", "0.0.0.0", "a.b", ""],
)
def test_no_machine_is_made_to_dial_out_of_the_local_network_or_itself(host: str):
    assert announced(GOOD, [host], 4711) is None
    both = announced(GOOD, [host, "192.168.1.7"], 4711)
    assert both is not None
    assert both.addresses == ("tcp://192.168.1.7:4711",)


@given(
    st.dictionaries(
        st.sampled_from([b"pool", b"key", b"machines", b"other"]), st.none() | st.binary(max_size=80), max_size=4
    ),
    st.lists(st.text(max_size=20) | st.ip_addresses().map(str), max_size=40),
    st.integers(-1, 70_000),
)
def test_whatever_comes_gives_a_pool_that_may_be_shown_and_dialled_or_none(properties, hosts: list[str], port: int):
    pool = announced({**GOOD, **properties}, hosts, port)
    if pool is not None:
        assert pool.name.isprintable()
        assert len(pool.authority_key) == 32
        assert 0 < len(pool.addresses) <= discovery.MAX_HOSTS
        assert all(parse_address(address) and is_near(host_of(address)) for address in pool.addresses)


def test_two_announcements_of_one_key_are_one_pool_with_all_addresses():
    a = NearbyPool("home", KEY, ("tcp://10.0.0.1:1",), 2)
    b = NearbyPool("other name", KEY, ("tcp://10.0.0.2:1", "tcp://10.0.0.1:1"), 9)
    c = NearbyPool("home", bytes(32), ("tcp://10.0.0.3:1",))
    found = merged([a, b, c])
    assert {pool.authority_key: pool.addresses for pool in found} == {
        KEY: ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1"),
        bytes(32): c.addresses,
    }
    assert [pool.name for pool in found] == ["home", "home"]


@pytest.fixture
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """mDNS on this machine's loopback interface instead of the others."""
    monkeypatch.setattr(discovery, "own_hosts", lambda: ["127.0.0.1"])
    monkeypatch.setattr(discovery, "is_near", lambda host: host == "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            probe.sendto(b"", ("224.0.0.251", 5353))
        except OSError as error:
            pytest.skip(f"loopback has no multicast here: {error}")


@pytest.mark.slow
@pytest.mark.usefixtures("_on_loopback")
def test_an_announced_pool_is_found_followed_and_withdrawn():
    key = socket.gethostname().encode()[:8].ljust(32, b"k")
    here, moved = (NearbyPool("home", key, (f"tcp://127.0.0.1:{port}",), 1) for port in (4711, 4712))

    async def main() -> None:
        announcer = Announcer()
        await announcer.announce(here, ["127.0.0.1"])
        assert await nearby_pools(10.0, key=key) == (here,)
        await announcer.announce(moved, ["127.0.0.1"])
        assert await nearby_pools(10.0, key=key) == (moved,)
        await announcer.close()
        assert await nearby_pools(1.0, key=key) == ()

    asyncio.run(main())


@pytest.mark.parametrize(("hosts", "said"), [([], "in no local network"), (["10.0.0.1"], "mDNS can't be used")])
def test_without_a_network_announcing_fails_and_looking_finds_nothing(
    hosts: list[str], said: str, monkeypatch: pytest.MonkeyPatch
):
    def refuses(**_: object) -> None:
        raise OSError("no multicast")

    monkeypatch.setattr(discovery, "own_hosts", lambda: hosts)
    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", refuses)

    async def main() -> None:
        with pytest.raises(TransportError, match=said):
            await Announcer().announce(NearbyPool("home", KEY, ("tcp://10.0.0.1:1",)), hosts)
        assert await nearby_pools(0.1) == ()

    asyncio.run(main())
