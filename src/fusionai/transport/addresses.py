"""Addresses, `scheme://host:port`: their syntax, the route each leads to, and the ones a listening machine can offer.

A machine's address is a list of candidates, typed by scheme: `tcp://` can be dialled directly, `quic://` through NATs;
`relay://` means that the broker at that address introduces callers and relays for them. Unknown schemes are ignored:
they belong to newer versions.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import psutil

from fusionai.primitives.errors import UsageError
from fusionai.wire.messages import Way

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
    """Return host and port of an address of `scheme`; None for another scheme.

    Raises `UsageError` for malformed addresses.
    """
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


def port_of(addresses: Sequence[str]) -> int:
    """The port of the first `tcp://` address; 0 if there is none."""
    return next((target[1] for address in addresses if (target := parse_address(address)) is not None), 0)


def relay_candidates(brokers: Sequence[str]) -> tuple[str, ...]:
    """Return the relay candidate that a machine announces if it can be met at its broker: one, for the first broker
    address.
    """
    targets = [target for address in brokers if (target := parse_address(address)) is not None]
    return tuple(format_address(*target, RELAY_SCHEME) for target in targets[:1])


def way_to(host: str) -> Way:
    """Return the route of a direct connection to this host. A host name counts as not local."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "direct"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "lan" if any(address in network for network in _NEAR) else "direct"


def candidates(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses that others may dial if this machine listens on `host`.

    For a wildcard: all addresses of its interfaces, loopback last.
    """
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
