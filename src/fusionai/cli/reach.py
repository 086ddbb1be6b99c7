"""Tests this machine's connectivity: whether the broker answers, whether others can dial in, the routes of its links.

Contacts only the broker, which dials back to one port of this machine. `cli.doctor` words the result for
`fusion doctor`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import RefusedError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Introductions
from fusionai.transport.enrolment import Membership
from fusionai.transport.interface import Channel
from fusionai.transport.routes.addresses import best_links
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.messages import LinkView, Observed


@dataclass(frozen=True, slots=True)
class Reach:
    """Result of the test. `answered_s`: from dialling the broker until it is authenticated. `port`: the one the broker
    tried to dial. `observed`: None if the broker is too old to report it. `links`: the best current link of this
    machine's peer to each other peer."""

    answered_s: float
    port: int
    observed: Observed | None
    links: Mapping[PeerId, LinkView]


async def look(membership: Membership, port: int, *, timeout_s: float) -> Reach:
    """Run the test. `port` 0: any free one. Raises `FusionError` if the broker can't be reached."""
    transport = TcpTransport(membership.credentials)
    started_s = time.monotonic()
    channel = await membership.broker.dial(transport, timeout_s=timeout_s)
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
    """Listen on `port` while the broker tries to dial it. If the port is taken, as by this machine's peer, the broker
    tries the existing listener."""

    async def accept(channel: Channel) -> None:
        await channel.receive()

    introductions = Introductions(transport, membership.broker)
    try:
        listener = await transport.listen(accept, host="0.0.0.0", port=port)
    except UsageError:
        listener = None
    try:
        if listener is not None:
            port = int(listener.addresses[0].rpartition(":")[2])
        return (await introductions.observed(port))[0], port
    finally:
        await introductions.close()
        if listener is not None:
            await listener.close()
