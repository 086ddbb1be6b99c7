"""How this machine stands towards its pool: does the broker answer, can others dial this machine, which way links go.

Asks the broker only, and lets it dial back to one port of this machine. Decides nothing about how it reads.
Neighbours: `cli.findings` words it for `fusion doctor`; the broker observes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.client.pool_session import PoolSession
from fusionai.primitives.errors import RefusedError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.enrolment import Membership
from fusionai.transport.interface import Channel
from fusionai.transport.introductions import Introductions
from fusionai.transport.tcp import TcpTransport
from fusionai.transport.ways import best_links
from fusionai.wire.messages import LinkView, Observed


@dataclass(frozen=True, slots=True)
class Reach:
    """`answered_s`: from dialling the broker until it has proved itself. `port`: the one the broker tried. `observed`
    is None where the broker is too old to say. `links`: those that this machine's peer has now, to each
    other the best."""

    answered_s: float
    port: int
    observed: Observed | None
    links: Mapping[PeerId, LinkView]


async def look(membership: Membership, port: int, *, timeout_s: float) -> Reach:
    """`port` 0: any free one. Raises `FusionError` where the broker can't be reached."""
    transport = TcpTransport(membership.credentials)
    started_s = time.monotonic()
    channel = await transport.dial(membership.broker_addresses, expect=None, stream="control", timeout_s=timeout_s)
    answered_s = time.monotonic() - started_s
    await channel.close()
    try:
        observed, port = await _observed(membership, transport, port)
    except RefusedError:
        observed = None
    async with PoolSession(membership, trust=None) as session:
        views = [member.view for member in await session.pool()]
    own = next((view.links for view in views if view.peer == membership.peer), ())
    return Reach(answered_s, port, observed, best_links(own))


async def _observed(membership: Membership, transport: TcpTransport, port: int) -> tuple[Observed, int]:
    """A door is opened for the question; where that port is taken, by this machine's peer, that one is asked about."""

    async def accept(channel: Channel) -> None:
        await channel.receive()

    introductions = Introductions(transport, membership.broker_addresses)
    try:
        listener = await transport.listen(accept, host="0.0.0.0", port=port)
    except UsageError:
        listener = None
    try:
        if listener is not None:
            port = int(listener.addresses[0].rpartition(":")[2])
        return await introductions.observed(port), port
    finally:
        await introductions.close()
        if listener is not None:
            await listener.close()
