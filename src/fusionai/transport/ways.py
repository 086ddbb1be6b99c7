"""Records each link's route and which one worked last. Decides in which order candidates are tried.

The order is: addresses in this machine's own networks, other TCP addresses, QUIC, the relay. The address that worked
last time goes first; a relay only for `RELAY_REMEMBERED_S`, and only while no new address is known. The order is a
hint: any candidate may fail.

`peer_transport` asks for the order and reports results; `peer` reports the links to the broker.
"""

from __future__ import annotations

import ipaddress
import socket
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from fusionai.primitives.ids import PeerId
from fusionai.transport.addresses import RELAY_SCHEME, parse_address
from fusionai.transport.framed import FramedChannel
from fusionai.transport.link_figures import LinkFigures
from fusionai.wire.messages import MAX_LINKS, LinkView, Way

_BEST_FIRST: Final[tuple[Way, ...]] = ("lan", "direct", "quic", "relay")
RELAY_REMEMBERED_S: Final = 120.0
"""Seconds for which a relay that worked last is tried first."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class _Worked:
    address: str
    among: frozenset[str]
    at_s: float

    def is_stale(self, addresses: Sequence[str], now_s: float) -> bool:
        """Whether this is a relay that worked too long ago, or an address has become known since."""
        if parse_address(self.address, RELAY_SCHEME) is None:
            return False
        return now_s - self.at_s > RELAY_REMEMBERED_S or not self.among.issuperset(addresses)


class Ways:
    """Routes of one machine's links, in this process."""

    def __init__(self) -> None:
        self._worked: dict[PeerId, _Worked] = {}
        self._fastest: dict[tuple[str, Way], float] = {}
        """Highest delivery rate ever sampled for each open link, by peer and route."""
        self._channels: weakref.WeakSet[FramedChannel] = weakref.WeakSet()

    def worked(self, peer: PeerId, address: str, among: Sequence[str], now_s: float) -> None:
        """Record that `address` answered, out of `among`, all addresses known at that time."""
        self._worked[peer] = _Worked(address, frozenset(among), now_s)

    def opened(self, channel: FramedChannel) -> None:
        self._channels.add(channel)

    def in_order(self, peer: PeerId, addresses: Sequence[str], now_s: float) -> list[str]:
        """Return the candidates in the order in which they should be tried."""
        networks = own_networks()
        ordered = sorted(addresses, key=lambda address: _rank(address, networks))
        last = self._worked.get(peer)
        if last is None or last.is_stale(addresses, now_s):
            return ordered
        return sorted(ordered, key=lambda address: address != last.address)

    def links(self) -> tuple[LinkView, ...]:
        """Return one view per peer and route of the open connections to members, best route first within a peer."""
        count: Counter[tuple[str, Way]] = Counter()
        seen: dict[tuple[str, Way], list[LinkFigures]] = {}
        for channel in self._channels:
            if not channel.closed and channel.remote.role == "member" and channel.remote.peer is not None:
                key = (channel.remote.peer, channel.way)
                count[key] += 1
                seen.setdefault(key, []).append(channel.figures)
        self._fastest = {key: max(self._fastest.get(key, 0.0), _fastest(found)) for key, found in seen.items()}
        views = [
            LinkView(
                *key,
                channels,
                round_trip_s=min((one.round_trip_s for one in seen[key] if one.round_trip_s), default=0.0),
                bandwidth_bytes_per_s=self._fastest[key],
                loss=max(one.loss for one in seen[key]),
            )
            for key, channels in count.items()
        ]
        return tuple(sorted(views, key=lambda view: (view.peer, _BEST_FIRST.index(view.way))))[:MAX_LINKS]


def _fastest(figures: Iterable[LinkFigures]) -> float:
    return max(one.bandwidth_bytes_per_s for one in figures)


def best_links(links: Iterable[LinkView]) -> dict[PeerId, LinkView]:
    """Return the link with the best route to each peer."""
    ordered = sorted(links, key=lambda link: -_BEST_FIRST.index(link.way))
    return {PeerId(link.peer): link for link in ordered}


def better_than_relay(addresses: Iterable[str]) -> list[str]:
    return [address for address in addresses if parse_address(address, RELAY_SCHEME) is None]


def own_networks() -> tuple[Network, ...]:
    """Networks of this machine's interfaces, without loopback, which every machine has."""
    networks = {
        ipaddress.ip_network(f"{entry.address.partition('%')[0]}/{entry.netmask}", strict=False)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask
    }
    return tuple(network for network in networks if not network.is_loopback)


def _rank(address: str, networks: Sequence[Network]) -> int:
    """Priority of an address; lower is tried first."""
    if parse_address(address, RELAY_SCHEME) is not None:
        return 4
    target = parse_address(address)
    if target is None:
        return 3
    try:
        host = ipaddress.ip_address(target[0])
    except ValueError:
        return 1
    if host.is_loopback:
        return 2
    return 0 if any(host in network for network in networks) else 1
