"""Spelling of addresses, and which ones a listening machine offers."""

from __future__ import annotations

import pytest

from fusionai.primitives.errors import UsageError
from fusionai.transport.routes.addresses import candidates, format_address, parse_address


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
