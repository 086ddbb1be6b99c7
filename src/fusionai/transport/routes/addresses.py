"""Routes to other machines: addresses, the route that worked last for each link, and racing connection attempts.

An address is `scheme://host:port`. `tcp://` can be dialled directly, `quic://` through NATs, `relay://` over the
broker's relay; a machine has a list of them. Attempts start a moment apart; if one fails, the next starts at once. The
first attempt whose other side proves to be the expected machine wins.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

import psutil

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.channels.accepting import AcceptLimits
from fusionai.transport.channels.framed import Dialling, FramedChannel
from fusionai.transport.channels.link import LinkFigures
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Role
from fusionai.transport.security.certificates import Credentials, MemberCredentials, StrangerCredentials
from fusionai.wire.messages import MAX_LINKS, LinkView, RouteKind, Stream

SCHEME: Final = "tcp"
RELAY_SCHEME: Final = "relay"
_ADDRESS: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})"
)


_NEAR: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
            *("::1/128", "fc00::/7", "fe80::/10"),
        ),
    )
)
"""Networks whose addresses are meaningful within one network only (VPN meshes also use 100.64.0.0/10)."""


def parse_address(address: str, scheme: str = SCHEME) -> tuple[str, int] | None:
    """Return host and port of an address of `scheme`; None for another scheme. Raises `UsageError` for malformed
    addresses."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise UsageError(
            f"expected an address such as tcp://192.168.1.7:4711 or tcp://[::1]:4711, got {address[:256]!r}."
        )
    if match["scheme"] != scheme:
        return None
    return match["six"] or match["host"], int(match["port"])


def format_address(host: str, port: int, scheme: str = SCHEME) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_of(address: str) -> str:
    """Host of an address of any scheme, without a peer name in front; empty for malformed addresses."""
    match = _ADDRESS.fullmatch(address)
    return "" if match is None else match["six"] or match["host"].rpartition("@")[2]


def is_dialable(host: str, *, beside: bool) -> bool:
    """Return whether a member of the pool may be dialled at this host. Link-local, multicast and unspecified addresses
    name no machine beyond one cable, and loopback names the machine that dials: it may be dialled only `beside` the
    broker, where the other member is too. A name passes, and what it stands for must be checked."""
    address = ip_of(host)
    if address is None:
        return True
    if address.is_loopback:
        return beside
    return not (address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved)


def dialable(addresses: Iterable[str], *, beside: bool) -> tuple[str, ...]:
    """Return the addresses at which a member may be dialled. A relay's are not dialled but looked up at the broker."""
    return tuple(
        one
        for one in addresses
        if (host := host_of(one)) and (one.startswith(f"{RELAY_SCHEME}://") or is_dialable(host, beside=beside))
    )


def vouched(addresses: Iterable[str], seen_at: str) -> tuple[str, ...]:
    """Return those announced addresses of a member that its broker passes on. `seen_at`: host that the member connects
    from."""
    return dialable(addresses, beside=is_loopback(seen_at))


def is_loopback(host: str) -> bool:
    address = ip_of(host)
    return host == "localhost" if address is None else address.is_loopback


def is_near(host: str) -> bool:
    """Return whether `host` is an address of a network that this machine is in, or of one that is no part of the
    internet. Loopback and link-local addresses are not: they name another machine on every machine."""
    address = ip_of(host)
    if address is None or not is_dialable(host, beside=False):
        return False
    return any(address in network for network in (*_NEAR, *own_networks()))


def port_of(addresses: Sequence[str]) -> int:
    """The port of the first `tcp://` address; 0 if there is none."""
    return next((target[1] for address in addresses if (target := parse_address(address)) is not None), 0)


def relay_candidates(brokers: Sequence[str]) -> tuple[str, ...]:
    """Return the relay candidate that a machine announces if it can be met at its broker: one, for the first broker
    address."""
    targets = [target for address in brokers if (target := parse_address(address)) is not None]
    return tuple(format_address(*target, RELAY_SCHEME) for target in targets[:1])


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `host` is written as; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def route_to(host: str) -> RouteKind:
    """Return the route of a direct connection to this host. A host name counts as not local."""
    address = ip_of(host)
    if address is None:
        return "direct"
    return "lan" if any(address in network for network in _NEAR) else "direct"


def candidates(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses that others may dial if this machine listens on `host`. For a wildcard: all addresses of its
    interfaces, loopback last."""
    if not ipaddress.ip_address(host).is_unspecified:
        return (format_address(host, port),)
    found = sorted(_interface_addresses(), key=lambda address: (address.is_loopback, address.version, address))
    return tuple(format_address(str(address), port) for address in found if address.version == 4 or ":" in host)


def _interface_addresses() -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                parsed = ipaddress.ip_address(address.address.partition("%")[0])
                # A link-local address is meaningless without its interface.
                if not parsed.is_link_local:
                    yield parsed


_BEST_FIRST: Final[tuple[RouteKind, ...]] = ("lan", "direct", "quic", "relay")
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


class RouteTable:
    """Routes of one machine's links, in this process."""

    def __init__(self) -> None:
        self._worked: dict[PeerId, _Worked] = {}
        self._fastest: dict[tuple[str, RouteKind], float] = {}
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
        seen: dict[tuple[str, RouteKind], list[LinkFigures]] = {}
        for channel in self._channels:
            if not channel.closed and channel.remote.role == "member" and channel.remote.peer is not None:
                seen.setdefault((channel.remote.peer, channel.route), []).append(channel.figures)
        self._fastest = {
            key: max(self._fastest.get(key, 0.0), *(one.bandwidth_bytes_per_s for one in found))
            for key, found in seen.items()
        }
        views = [
            LinkView(
                *key,
                channels=len(found),
                round_trip_s=min((one.round_trip_s for one in found if one.round_trip_s), default=0.0),
                bandwidth_bytes_per_s=self._fastest[key],
                loss=max(one.loss for one in found),
            )
            for key, found in seen.items()
        ]
        return tuple(sorted(views, key=lambda view: (view.peer, _BEST_FIRST.index(view.route))))[:MAX_LINKS]


def best_links(links: Iterable[LinkView]) -> dict[PeerId, LinkView]:
    """Return the link with the best route to each peer."""
    ordered = sorted(links, key=lambda link: -_BEST_FIRST.index(link.route))
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


STAGGER_S: Final = 0.25
"""Head start of an attempt over the next one, in seconds."""
ALL_BEGUN_S: Final = 1.0
"""Time in seconds by which all attempts have started, however many there are: the last may be the only one that
works."""

C = TypeVar("C", bound=FramedChannel)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[C]):
    """One way to connect. `name` is shown to people. `start` is called at most once."""

    name: str
    start: Callable[[], Coroutine[Any, Any, C]]


async def first_to_answer(attempts: Sequence[Attempt[C]], *, timeout_s: float) -> C:
    """Return the channel of the first attempt that succeeds. Raises `RefusedError` at once. If all attempts have
    failed, raises `TrustError` (another machine answered) or `TransportError` (no answer)."""
    waiting = list(attempts[::-1])
    stagger_s = min(STAGGER_S, ALL_BEGUN_S / len(waiting)) if waiting else 0.0
    running: set[asyncio.Task[C]] = set()
    failures: list[FusionError] = []
    try:
        async with asyncio.timeout(timeout_s):
            while waiting or running:
                if waiting:
                    running.add(asyncio.create_task(waiting.pop().start()))
                done, running = await asyncio.wait(
                    running, timeout=stagger_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                # Two may succeed at once: the first is used, the others are dropped like those that lost.
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    match task.exception():
                        case None:
                            running |= done - {task}
                            return task.result()
                        case RefusedError() as error:
                            raise error
                        case FusionError() as error:
                            failures.append(error)
                        case error:
                            raise error
    except TimeoutError:
        failures.append(
            TransportError(
                f"no answer from {', '.join(attempt.name for attempt in attempts)} within {timeout_s:g} s.",
                hint="Check that the other machine is on and that its port is reachable.",
            )
        )
    finally:
        await _drop(running)
    # That another machine answered is more important than that others did not answer.
    raise next((error for error in failures if isinstance(error, TrustError)), failures[-1])


class RacingTransport(ABC, Generic[C]):
    """Dials the addresses of one scheme by racing them. May be created outside an event loop. `rates` limit all its
    connections together."""

    scheme: ClassVar[str]

    def __init__(
        self,
        credentials: Credentials,
        *,
        accept_limits: AcceptLimits | None = None,
        rates: TransferLimits | None = None,
    ) -> None:
        self._credentials = credentials
        self._role: Role = credentials.role
        self._rates = rates or TransferLimits()
        self._accept_limits = accept_limits or AcceptLimits()

    @abstractmethod
    def attempts(self, addresses: Sequence[str], dialling: Dialling, timeout_s: float) -> list[Attempt[C]]:
        """Return one attempt per address of this scheme, in order. Raises `UsageError` for malformed addresses."""

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> C:
        attempts = self.attempts(addresses, Dialling(expect, stream), timeout_s)
        if not attempts:
            raise UsageError(f"expected at least one {self.scheme}:// address to dial, got {list(addresses)}.")
        return await first_to_answer(attempts, timeout_s=timeout_s)

    def _member(self) -> MemberCredentials:
        """Credentials to listen with. Raises `TrustError` if this machine has not joined a pool."""
        if isinstance(self._credentials, StrangerCredentials):
            raise TrustError("a machine outside any pool can't listen.", hint="Join with an invitation first.")
        return self._credentials


async def _drop(tasks: set[asyncio.Task[C]]) -> None:
    """Cancel attempts that lost the race and drop the channels of those that succeeded."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, FramedChannel):
            outcome.abort()
