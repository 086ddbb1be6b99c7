"""Addresses of the tcp transport, `tcp://host:port`: their spelling, and which ones a listening machine can offer."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Final

import psutil

from fusionai.primitives.errors import UsageError

SCHEME: Final = "tcp"
_ADDRESS: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})"
)


def parse_address(address: str) -> tuple[str, int] | None:
    """Host and port of a `tcp://` address; None for another transport's. Raises `UsageError` on anything else."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise UsageError(
            f"expected an address such as tcp://192.168.1.7:4711 or tcp://[::1]:4711, got {address[:256]!r}."
        )
    if match["scheme"] != SCHEME:
        return None
    return match["six"] or match["host"], int(match["port"])


def format_address(host: str, port: int) -> str:
    return f"{SCHEME}://[{host}]:{port}" if ":" in host else f"{SCHEME}://{host}:{port}"


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
