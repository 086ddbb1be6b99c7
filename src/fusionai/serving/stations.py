"""How many passes of a served model can be computed at a time. Decides it from who shares a computer; measures nothing.

Passes under way at the same time keep all machines of a line busy. Processes of one computer share its cores: more
passes than cores would only be smaller ones, and on a CPU a pass of few rows takes as long as one of some more.

Neighbours: `serving.engine` asks once, `coordination.batching` spreads sessions over so many passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address

from fusionai.primitives.ids import PeerId
from fusionai.transport.addresses import parse_address


def stations(peers: Collection[PeerId], owner: PeerId, addresses: Mapping[str, Sequence[str]], cores: int) -> int:
    """`peers` have the stages, `owner` is this process, `cores` are this computer's. At least 1.

    Peers at loopback addresses are this computer's. Others count as computers of their own: behind one public address
    may be a home full of them."""
    here = {peer for peer in peers if peer == owner or _is_here(addresses.get(peer, ()))}
    return max(1, len(set(peers) - here) + min(len(here), cores))


def _is_here(addresses: Sequence[str]) -> bool:
    parsed = [place for address in addresses if (place := parse_address(address)) is not None]
    return bool(parsed) and all(_is_loopback(host) for host, _ in parsed)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
