"""What lies between the processes of a live pool: every peer behind a fault proxy, paths cut by who speaks to whom.

A proxy sees connections, not names; the system says which process dialled one. So a path between two processes can be a
black hole, in both directions or in one, for the connections there are and for those to come, while everybody else
reaches both.

    with Wires() as wires:
        pool.start("one", pool.invite(), *wires.options("one"))
        wires.watch(lambda: {"one": pid, "driver": another})
        wires.block("driver", "one")

Neighbours: `harness.fault_proxy` does the work, `harness.siege` has the processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType

import psutil

from harness.fault_proxy import TO_CLIENT, TO_TARGET, Direction, FaultProxy, Link, free_port


class Wires:
    """`watch` tells it the pids of those who dial, by name."""

    def __init__(self) -> None:
        self.proxies: dict[str, FaultProxy] = {}
        self._pids: Callable[[], Mapping[str, int]] = dict
        self._blocked: set[tuple[str, str]] = set()
        """(sender, receiver): nothing of what it says arrives."""
        self._dialled: list[tuple[str, str, Link]] = []
        """(who dialled, whom, the connection)."""
        self._turn = threading.RLock()

    def __enter__(self) -> Wires:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self.proxies.values():
            proxy.__exit__(kind, problem, trace)

    def options(self, name: str) -> tuple[object, ...]:
        """For `fusion join`: this peer stands behind a proxy."""
        proxy = self.proxies[name] = FaultProxy()
        proxy.__enter__()
        proxy.aim(port := free_port())
        proxy.on_link = lambda link: self._came(name, link)
        return ("--port", port, "--address", proxy.address)

    def watch(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids

    def block(self, sender: str, receiver: str) -> None:
        """From now on nothing that `sender` sends reaches `receiver`; the other way stays open."""
        with self._turn:
            self._blocked.add((sender, receiver))
            links = list(self._dialled)
        for client, target, link in links:
            if link in self.proxies[target].links:
                for direction in _directions(client, target, sender, receiver):
                    link.hold(direction)

    def heal(self) -> None:
        """Everything goes on, also what was held."""
        with self._turn:
            self._blocked.clear()
        for proxy in self.proxies.values():
            for link in proxy.links:
                link.heal()

    def _came(self, target: str, link: Link) -> None:
        """In the proxy's thread."""
        client = self._dialler(target, link)
        with self._turn:
            self._dialled.append((client, target, link))
            for sender, receiver in self._blocked:
                for direction in _directions(client, target, sender, receiver):
                    link.lanes[direction].blow(lambda weather: replace(weather, flow="hold"))

    def _dialler(self, target: str, link: Link) -> str:
        for name, pid in self._pids().items():
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            for one in connections:
                if one.laddr.port == link.client_port and one.raddr and one.raddr.port == self.proxies[target].port:
                    return name
        return ""


def _directions(client: str, target: str, sender: str, receiver: str) -> tuple[Direction, ...]:
    """Of this connection, those that carry what `sender` says to `receiver`."""
    if (client, target) == (sender, receiver):
        return (TO_TARGET,)
    return (TO_CLIENT,) if (target, client) == (sender, receiver) else ()
