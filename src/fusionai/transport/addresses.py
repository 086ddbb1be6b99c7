"""Addresses, `scheme://host:port`: their spelling, which way each leads, and which ones a listening machine can offer.

A machine's address is a list of candidates, each typed by its scheme: `tcp://` can be dialled; `relay://` says that the
broker at that place introduces callers and relays for them. Unknown schemes are left alone: they are a newer side's.
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
"""Addresses that mean something within one network only (100.64.0.0/10 is also what meshes of VPNs use)."""


def parse_address(address: str, scheme: str = SCHEME) -> tuple[str, int] | None:
    """Host and port of a `tcp://` address (or of `scheme`); None for another scheme's. Raises `UsageError` on anything
    else."""
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
    """The host of an address of any scheme, without a name in front of it; empty for what is no address."""
    match = _ADDRESS.fullmatch(address)
    return "" if match is None else match["six"] or match["host"].rpartition("@")[2]


def port_of(addresses: Sequence[str]) -> int:
    """The port of the first `tcp://` address; 0 where there is none."""
    return next((target[1] for address in addresses if (target := parse_address(address)) is not None), 0)


def relay_candidates(brokers: Sequence[str]) -> tuple[str, ...]:
    """What a machine announces that can be met at its broker: one candidate, whichever broker address a caller uses."""
    targets = [target for address in brokers if (target := parse_address(address)) is not None]
    return tuple(format_address(*target, RELAY_SCHEME) for target in targets[:1])


def way_to(host: str) -> Way:
    """Which way a connection straight to this address goes; a name counts as far away."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "direct"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "lan" if any(address in network for network in _NEAR) else "direct"


def candidates(host: str, port: int) -> tuple[str, ...]:
    """What others may dial when this machine listens on `host`: all its addresses, loopback last, for a wildcard."""
    if not ipaddress.ip_address(host).is_unspecified:
        return (format_address(host, port),)
    found = sorted(_interface_addresses(), key=lambda address: (address.is_loopback, address.version, address))
    return tuple(format_address(str(address), port) for address in found if address.version == 4 or ":" in host)


def _interface_addresses() -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                parsed = ipaddress.ip_address(address.address.partition("%")[0])
                # A link-local address means nothing without the interface it belongs to.
                if not parsed.is_link_local:
                    yield parsed
