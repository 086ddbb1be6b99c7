"""The broker follows its machine's addresses; what goes wrong in the network is a line in the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fusionai.broker import announcing
from fusionai.broker.announcing import AddressWatch
from fusionai.primitives.errors import StorageError, TransportError
from fusionai.transport.discovery import NearbyPool

LOOPBACK, OLD, NEW = "tcp://127.0.0.1:4711", "tcp://192.168.1.7:4711", "tcp://192.168.1.99:4711"


class Network:
    """Plays the announcer and this machine's interfaces. `script`: addresses at each look, the last one stays."""

    def __init__(self, *script: tuple[str, ...], fails: bool = False) -> None:
        self.script = list(script)
        self.fails = fails
        self.announced: list[tuple[str, ...]] = []
        self.closed = False

    def addresses(self) -> tuple[str, ...]:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    async def announce(self, pool: NearbyPool, hosts: list[str]) -> None:
        self.announced.append(pool.addresses)
        if self.fails:
            raise TransportError("no multicast here.")

    async def close(self) -> None:
        self.closed = True


def watched(network: Network, monkeypatch: pytest.MonkeyPatch, *, announces: bool = True, full: bool = False):
    """Run a watch for some looks and return the addresses that it said were new."""
    monkeypatch.setattr(announcing, "CHECK_S", 0.0)
    monkeypatch.setattr(announcing, "own_hosts", lambda: ["192.168.1.7"])
    moved: list[tuple[str, ...]] = []

    def move(addresses: tuple[str, ...]) -> None:
        moved.append(addresses)
        if full:
            raise StorageError("the disk is full.")

    async def main() -> None:
        watch = AddressWatch(
            network.addresses,
            move,
            lambda addresses: NearbyPool("home", bytes(32), addresses),
            network if announces else None,  # pyright: ignore[reportArgumentType]
        )
        running = asyncio.create_task(watch.run())
        for _ in range(30):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    return moved


def test_a_new_address_is_said_and_announced_once(monkeypatch: pytest.MonkeyPatch):
    network = Network((OLD, LOOPBACK), (OLD, LOOPBACK), (OLD, LOOPBACK), (NEW, LOOPBACK))
    assert watched(network, monkeypatch) == [(NEW, LOOPBACK)]
    assert network.announced == [(OLD,), (NEW,)]
    assert network.closed


def test_without_announcing_addresses_are_followed_all_the_same(monkeypatch: pytest.MonkeyPatch):
    network = Network((OLD,), (OLD,), (NEW,))
    assert watched(network, monkeypatch, announces=False) == [(NEW,)]
    assert network.announced == []


def test_a_network_without_multicast_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    network = Network((OLD,), fails=True)
    with caplog.at_level(logging.WARNING):
        watched(network, monkeypatch)
    assert len(network.announced) > 3
    assert [record.message for record in caplog.records] == [
        "machines nearby can't find this broker by themselves: no multicast here."
    ]


def test_a_full_disk_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    network = Network((OLD,), (OLD,), (NEW,))
    watched(network, monkeypatch, full=True)
    assert network.announced == [(OLD,), (NEW,)]
    assert "may not find the broker" in caplog.text
