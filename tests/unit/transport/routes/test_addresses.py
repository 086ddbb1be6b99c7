"""Spelling of addresses, and which ones a listening machine offers."""

from __future__ import annotations

import pytest

from fusionai.primitives.errors import UsageError
from fusionai.transport.routes.addresses import candidates, dialable, format_address, parse_address, vouched


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://192.168.1.7:4711", "192.168.1.7", 4711),
        ("tcp://[::1]:1", "::1", 1),
        ("tcp://my-box.lan:65535", "my-box.lan", 65535),
    ],
)
def test_an_address_survives(address: str, host: str, port: int):
    assert parse_address(address) == (host, port)
    assert format_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "192.168.1.7:4711",
        "tcp://",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://::1:80",
        "tcp://a b:1",
        "tcp://h:1/",
        "tcp://h:1\n",
    ],
)
def test_anything_else_is_the_users_mistake(address: str):
    with pytest.raises(UsageError, match="expected an address such as"):
        parse_address(address)


def test_another_transports_address_is_not_ours():
    assert parse_address("quic://host:1") is None


def test_a_wildcard_offers_the_machines_addresses_loopback_last():
    assert candidates("127.0.0.1", 5) == ("tcp://127.0.0.1:5",)
    assert candidates("::1", 5) == ("tcp://[::1]:5",)
    offered = candidates("0.0.0.0", 5)
    assert offered[-1].startswith("tcp://127.")
    assert not any("0.0.0.0" in address or "[" in address for address in offered)
    assert all(parse_address(address) for address in candidates("::", 5))


LAN = ("tcp://192.168.1.7:4711", "tcp://[2001:db8::7]:4711", "quic://a@203.0.113.9:5", "tcp://home.example:4711")
RELAY = "relay://127.0.0.1:4711"
OWN = (
    "tcp://127.0.0.1:22",
    "tcp://127.8.8.8:80",
    "tcp://[::1]:22",
    "tcp://[::ffff:127.0.0.1]:22",
    "quic://a@127.0.0.1:5",
)
NOBODY = (
    *("tcp://0.0.0.0:22", "tcp://[::]:22", "tcp://169.254.169.254:80", "tcp://[fe80::1%eth0]:80"),
    *("tcp://224.0.0.251:5353", "tcp://[ff02::1]:80", "tcp://255.255.255.255:9"),
)


def test_a_broker_passes_on_no_address_that_is_another_machine_at_whoever_dials_it():
    """A metadata service, a router, a program of the dialling machine."""
    announced = (*OWN, *LAN, *NOBODY, RELAY)
    assert vouched(announced, "192.168.1.7") == (*LAN, RELAY)
    assert vouched(announced, "home.example") == (*LAN, RELAY)
    assert vouched(announced, "127.0.0.1") == (*OWN, *LAN, RELAY)


def test_a_machine_dials_loopback_only_beside_its_broker():
    assert dialable((*OWN, *LAN, *NOBODY), beside=False) == LAN
    assert dialable((*OWN, *LAN, *NOBODY), beside=True) == (*OWN, *LAN)
