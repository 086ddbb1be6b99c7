"""Where others may try to reach this peer. Decides which candidates are announced, at the start and after a move.

What the provider named wins over what is found. Found are this machine's own addresses, where the broker could dial it
back, and where it sees its UDP port. The relay is offered unless the provider said where this machine can be dialled.
Neighbours: `daemon` announces them, `registration` again when they change, `transport.peer_transport` finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionai.transport.addresses import relay_candidates
from fusionai.transport.peer_transport import PeerTransport
from fusionai.transport.tcp_listener import TcpListener


async def candidates(
    transport: PeerTransport,
    listener: TcpListener,
    brokers: Sequence[str],
    *,
    advertise: tuple[str, ...] = (),
    relay: bool | None = None,
) -> tuple[str, ...]:
    """In order of preference. `relay` None: unless `advertise` says where this machine can be dialled."""
    found = advertise or (*listener.candidates_now(), *await transport.seen_at(listener))
    offers_relay = not advertise if relay is None else relay
    return (*found, *relay_candidates(brokers)) if offers_relay else found
