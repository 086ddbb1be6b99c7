"""In which order candidates are tried, which way each leads, and what is said of links."""

from __future__ import annotations

import ipaddress

import pytest

from fusionai.primitives.ids import PeerId
from fusionai.transport.routes import addresses as ways
from fusionai.transport.routes.addresses import route_to

PEER = PeerId("a" * 52)
LOOPBACK, OWN, OTHER, PUBLIC, NAME, RELAY = (
    "tcp://127.0.0.1:1",
    "tcp://192.168.7.9:1",
    "tcp://192.168.1.9:1",
    "tcp://203.0.113.5:1",
    "tcp://home.example:1",
    "relay://203.0.113.1:4711",
)


@pytest.fixture(autouse=True)
def _one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "own_networks", lambda: (ipaddress.ip_network("192.168.7.0/24"),))


def test_near_ones_first_and_the_relay_last():
    given = [RELAY, LOOPBACK, PUBLIC, OTHER, NAME, OWN]
    assert ways.RouteTable().in_order(PEER, given, 0.0) == [OWN, PUBLIC, OTHER, NAME, LOOPBACK, RELAY]


def test_what_worked_last_goes_first_for_that_peer_only():
    known = ways.RouteTable()
    known.worked(PEER, RELAY, [PUBLIC, RELAY], 0.0)
    assert known.in_order(PEER, [PUBLIC, RELAY], 1.0) == [RELAY, PUBLIC]
    assert known.in_order(PEER, [PUBLIC], 1.0) == [PUBLIC]
    assert known.in_order(PeerId("b" * 52), [PUBLIC, RELAY], 1.0) == [PUBLIC, RELAY]


def test_a_relay_is_tried_first_for_a_while_only_and_not_when_there_is_something_new():
    known = ways.RouteTable()
    known.worked(PEER, RELAY, [PUBLIC, RELAY], 0.0)
    assert known.in_order(PEER, [PUBLIC, RELAY], ways.RELAY_REMEMBERED_S + 1) == [PUBLIC, RELAY]
    assert known.in_order(PEER, [PUBLIC, RELAY, OWN], 1.0) == [OWN, PUBLIC, RELAY]
    known.worked(PEER, NAME, [PUBLIC, NAME], 0.0)
    assert known.in_order(PEER, [PUBLIC, NAME, OWN], 1e6) == [NAME, OWN, PUBLIC]


def test_only_the_relay_is_not_better_than_the_relay():
    assert ways.better_than_relay([PUBLIC, RELAY, OWN]) == [PUBLIC, OWN]


@pytest.mark.parametrize(
    ("host", "way"),
    [
        ("127.0.0.1", "lan"),
        ("10.1.2.3", "lan"),
        ("172.31.0.1", "lan"),
        ("172.32.0.1", "direct"),
        ("192.168.1.1", "lan"),
        ("100.100.0.1", "lan"),
        ("203.0.113.1", "direct"),
        ("fe80::1%eth0", "lan"),
        ("fd00::1", "lan"),
        ("2001:db8::1", "direct"),
        ("::ffff:192.168.1.1", "lan"),
        ("home.example", "direct"),
    ],
)
def test_which_way_an_address_leads(host: str, way: str):
    assert route_to(host) == way


def test_own_networks_leave_loopback_out():
    assert not any(network.is_loopback for network in ways.own_networks())
