"""How many passes of a served model can be computed at the same time, derived from which peers share a computer.

Several passes in flight keep all machines of a pipeline busy. Processes on one computer share its cores: more passes
than cores would only mean smaller passes, and on a CPU a small pass takes as long as a somewhat larger one.

Neighbours: `serving.engine` asks once, `coordination.serving.batching` spreads sessions over that many passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address

from fusionai.primitives.ids import PeerId
from fusionai.transport.routes import parse_address


def stations(peers: Collection[PeerId], owner: PeerId, addresses: Mapping[str, Sequence[str]], cores: int) -> int:
    """Return the number of passes that can be computed at the same time, at least 1. `peers` run the stages, `owner` is
    this process, `cores` counts this computer's cores. Peers at loopback addresses run on this computer. Each other
    peer counts as a computer of its own, because one public address may hide many."""
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
