"""Neighbours are probed once, in the background, and only what stays within the network counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusionai.peer import profile as module
from fusionai.peer.profile import NearLinks
from fusionai.primitives.errors import TransportError
from fusionai.transport.channels.link import LinkMeasurement
from fusionai.transport.peer_transport import PeerTransport
from fusionai.wire.messages import LinkView, Near
from harness.virtual_clock import VirtualClock

A, B, C = (Near(letter * 52, (f"tcp://{letter}:1",)) for letter in "abc")
FOUND = LinkMeasurement(round_trip_s=0.002, latency_s=0.001, bandwidth_bytes_per_s=1e8, probed_bytes=1)


class Network:
    """Answers at once; `ways`: peer -> which way it is reached, None where it is not."""

    def __init__(self, **ways: str | None) -> None:
        self.ways = {letter * 52: way for letter, way in ways.items()}
        self.dialled: list[str] = []
        self.closed = 0

    async def dial(self, addresses: Sequence[str], *, expect: str, stream: str, timeout_s: float) -> Any:
        self.dialled.append(expect[0])
        way = self.ways[expect]
        if way is None:
            raise TransportError("nobody answers.")
        return SimpleNamespace(route=way, close=self.close)

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: object, **__: object) -> LinkMeasurement:
        return FOUND

    monkeypatch.setattr(module, "measure_link", measure)
    monkeypatch.setattr(module, "SETTLING_S", 0.0)


def looked(network: Network, *calls: tuple[Near, ...], busy: bool = False) -> NearLinks:
    async def main() -> NearLinks:
        links = NearLinks(transport=cast(PeerTransport, network), clock=VirtualClock(), is_busy=lambda: busy)
        for near in calls:
            links.look(near)
            if links._looking is not None:
                await links._looking
        await links.close()
        return links

    return asyncio.run(main())


def test_only_ways_within_the_network_count() -> None:
    network = Network(a="lan", b="direct", c=None)
    links = looked(network, (C, B, A))
    assert network.dialled == ["c", "b", "a"]
    assert network.closed == 2
    (view,) = links.among(())
    assert (view.peer, view.route, view.channels, view.probed_bytes_per_s) == (A.peer, "lan", 0, 1e8)
    assert view.round_trip_s == 0.002


def test_who_is_known_is_not_probed_again() -> None:
    network = Network(a="lan", b="lan")
    looked(network, (A,), (A, B), (A, B))
    assert network.dialled == ["a", "b"]


def test_a_machine_at_work_is_not_disturbed() -> None:
    network = Network(a="lan")
    assert looked(network, (A,), busy=True).among(()) == ()
    assert network.dialled == []


def test_links_there_are_keep_their_figures() -> None:
    links = looked(Network(a="lan", b="lan"), (A, B))
    now = (
        LinkView(A.peer, "lan", 2, 0.001, 5e7),
        LinkView(A.peer, "relay", 1, 0.05),
        LinkView(C.peer, "quic", 1, 0.01),
    )
    merged = links.among(now)
    assert [(one.peer[0], one.route, one.channels, one.probed_bytes_per_s) for one in merged] == [
        ("a", "lan", 2, 1e8),
        ("a", "relay", 1, 0.0),
        ("c", "quic", 1, 0.0),
        ("b", "lan", 0, 1e8),
    ]
    assert merged[0].bandwidth_bytes_per_s == 5e7
