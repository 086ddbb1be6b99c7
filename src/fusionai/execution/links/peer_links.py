"""Connections of one job member to other members: tensor links, and state connections for snapshots.

`Links` keeps one tensor connection per other peer, used in both directions. `StateConnections` dials one connection per
receiver of snapshots or of a recheck's inputs, when it is first needed, and keeps it open. Sending on it waits for the
network, so a snapshot never accumulates in memory.

This module decides which side dials: always the job owner (its machine may be unreachable from outside), otherwise the
peer with the smaller id. It decides when a link is lost: closed, refused, or silent for too long. It never inspects
payloads and never redials a tensor link by itself; the next round does.

The members post and receive, `execution.training.snapshots` sends snapshots, `transport` connects,
`coordination.round.liveness` measures silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.coordination.round.liveness import Silence
from fusionai.execution.links.outbox import KeepaliveConnection
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope, Transport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

LINK_TIMEOUT_S: Final = 3.5
"""Seconds to dial, show the ticket and be admitted, all together; also the time to wait for being dialled (chosen)."""


def dials(me: PeerId, other: PeerId, owner: PeerId) -> bool:
    """Return whether `me` is the side that opens the connection to `other`."""
    if owner in (me, other):
        return me == owner
    return me < other


async def open_job(
    transport: Transport, addresses: Sequence[str], peer: PeerId, stream: wire.Stream, opening: wire.OpenJob
) -> Channel:
    """Dial a member of a job and show the ticket, within `LINK_TIMEOUT_S`. Raises `RefusedError`, `TransportError`,
    `TrustError`."""
    channel: Channel | None = None
    try:
        async with asyncio.timeout(LINK_TIMEOUT_S):
            channel = await transport.dial(addresses, expect=peer, stream=stream, timeout_s=LINK_TIMEOUT_S)
            await channel.send(opening)
            answer = (await channel.receive()).message
    except BaseException as error:
        if channel is not None:
            channel.abort()
        if isinstance(error, TimeoutError):
            message = f"peer {short(peer)} did not open job {opening.job} in {LINK_TIMEOUT_S:g} s."
            raise TransportError(message) from None
        raise
    if isinstance(answer, wire.Done):
        return channel
    channel.abort()
    if isinstance(answer, wire.Refused):
        sentence = wire.REFUSAL_SENTENCES[answer.code]
        raise RefusedError(f"peer {short(peer)} refused: {sentence} {answer.reason}".strip(), code=answer.code)
    raise TransportError(f"peer {short(peer)} answered {type(answer).__name__} instead of opening job {opening.job}.")


@dataclass(frozen=True, slots=True)
class _Dialling:
    """An attempt to open a link."""

    opening: wire.OpenJob
    task: asyncio.Task[None]


class Links:
    """Links to all other members. `on_message` gets every message except pings and pongs; `on_lost` is called once per
    lost link."""

    def __init__(
        self,
        transport: Transport,
        *,
        on_message: Callable[[PeerId, Envelope], Awaitable[None]],
        on_lost: Callable[[PeerId, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._on_message = on_message
        self._on_lost = on_lost
        self._now_s = now_s
        self._silence = Silence()
        self._connections: dict[PeerId, KeepaliveConnection] = {}
        self._waiting: dict[PeerId, asyncio.Future[None]] = {}
        """Futures that are resolved when a link to the peer is up."""
        self._dialling: dict[PeerId, _Dialling] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that dial and then read. The event loop alone would not keep them alive."""
        self._closing = False

    def post(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """Queue a message for `peer`. Raises `TransportError` if there is no usable link (`up` waits for one)."""
        connection = self._connections.get(peer)
        if connection is None or not connection.usable:
            raise TransportError(f"there is no link to peer {short(peer)}.")
        connection.post(message, tensors)

    async def up(self, peer: PeerId) -> None:
        """Wait for a usable link. Raises `TransportError` after `LINK_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                while (connection := self._connections.get(peer)) is None or not connection.usable:
                    await asyncio.shield(self._waiting.setdefault(peer, asyncio.get_running_loop().create_future()))
        except TimeoutError:
            raise TransportError(f"no link to peer {short(peer)} within {LINK_TIMEOUT_S:g} s.") from None

    def begin_round(self, peers: Collection[PeerId]) -> None:
        """Close links to all other peers. Broken links may be dialled again."""
        for peer in [peer for peer in self._connections if peer not in peers]:
            self._connections.pop(peer).drop()
            self._silence.forget(peer)
        for connection in self._connections.values():
            connection.posted = False

    def dial(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> None:
        """Open the link unless it exists. An attempt with an opening of an earlier round is cancelled."""
        connection = self._connections.get(peer)
        if self._closing or (connection is not None and connection.usable):
            return
        under_way = self._dialling.get(peer)
        if under_way is not None:
            if under_way.opening == opening:
                return
            under_way.task.cancel()
        task = asyncio.create_task(self._dial(peer, addresses, opening))
        self._dialling[peer] = _Dialling(opening, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> None:
        try:
            channel = await open_job(self._transport, addresses, peer, "tensors", opening)
        except FusionError as error:
            if not self._closing:
                self._on_lost(peer, str(error))
            return
        finally:
            present = self._dialling.get(peer)
            if present is not None and present.task is asyncio.current_task():
                del self._dialling[peer]
        await self.serve(peer, channel)

    async def serve(self, peer: PeerId, channel: Channel) -> None:
        """Adopt an open channel as the link to `peer` and read it until it ends."""
        if self._closing:
            return
        connection = KeepaliveConnection(channel, lambda connection, reason: self._lost(peer, connection, reason))
        former = self._connections.get(peer)
        self._connections[peer] = connection
        self._silence.watch(peer, self._now_s())
        if (waiting := self._waiting.pop(peer, None)) is not None and not waiting.done():
            waiting.set_result(None)
        if former is not None:
            # One link per peer. The other side noticed a loss first; it matters here only if something was on the way.
            if former.posted:
                former.lost("another connection took its place")
            former.drop()
        try:
            while True:
                await self._on_message(peer, await connection.receive())
        except FusionError as error:
            reason = str(error)
        except Exception as error:
            # A link that is no longer read must be reported as lost.
            log.exception("the link to peer %s failed", short(peer))
            reason = f"{type(error).__name__}: {error}"
        connection.lost(reason)

    def beat(self) -> None:
        """Call every `Silence.ping_s`: ping all peers and end links that were silent for too long."""
        _beat(self._connections, self._silence, self._now_s())

    def _lost(self, peer: PeerId, connection: KeepaliveConnection, reason: str) -> None:
        if self._connections.get(peer) is connection:
            del self._connections[peer]
            self._silence.forget(peer)
        if not self._closing:
            self._on_lost(peer, reason)

    async def close(self) -> None:
        """End all links. Queued messages are discarded, since no peer waits for them any more."""
        self._closing = True
        for waiting in self._waiting.values():
            waiting.cancel()
        for task in self._tasks:
            task.cancel()
        for connection in self._connections.values():
            connection.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class StateConnections:
    """Sends messages to other members. `send` delivers the message or raises; it never retries."""

    def __init__(self, transport: Transport, *, now_s: Callable[[], float]) -> None:
        self._transport = transport
        self._now_s = now_s
        self._silence = Silence()
        self._connections: dict[PeerId, KeepaliveConnection] = {}
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._closing = False

    async def send(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        opening: wire.OpenJob,
        message: wire.Message,
        tensors: Sequence[HostTensor],
    ) -> None:
        """Send one message and return when the network has taken it. Raises `RefusedError`, `TransportError`,
        `TrustError`."""
        async with self._opening.setdefault(peer, asyncio.Lock()):
            connection = self._connections.get(peer)
            if connection is None or not connection.usable:
                if isinstance(message, wire.Snapshot) and message.part:
                    raise TransportError(f"the connection to peer {short(peer)} ended within a snapshot.")
                connection = await self._open(peer, addresses, opening)
        await connection.channel.send(message, tensors)

    async def _open(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> KeepaliveConnection:
        channel = await open_job(self._transport, addresses, peer, "state", opening)
        if self._closing:
            channel.abort()
            raise TransportError(f"the connection to peer {short(peer)} is not needed: this member is closing.")
        connection = self._connections[peer] = KeepaliveConnection(channel)
        self._silence.watch(peer, self._now_s())
        reader = asyncio.create_task(self._read(connection))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return connection

    async def _read(self, connection: KeepaliveConnection) -> None:
        """Read until the connection ends. The other side may send only pings and pongs."""
        try:
            message = (await connection.receive()).message
            connection.lost(f"it sent a {type(message).__name__}")
        except FusionError as error:
            connection.lost(str(error))

    def beat(self) -> None:
        """Like `Links.beat`: ping all peers and end silent connections, so that the next `send` fails or opens a new
        one."""
        _beat(self._connections, self._silence, self._now_s())

    async def close(self) -> None:
        self._closing = True
        for connection in self._connections.values():
            connection.drop()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


def _beat(connections: Mapping[PeerId, KeepaliveConnection], silence: Silence, now_s: float) -> None:
    """Ping all peers and end the connections that were silent for too long."""
    for peer, connection in connections.items():
        if connection.usable and connection.beat(now_s):
            silence.heard(peer, now_s)
    taking = [peer for peer, connection in connections.items() if connection.channel.acknowledges is not False]
    for peer, deadline_s in silence.tick(now_s, taking).items():
        if (connection := connections.get(PeerId(peer))) is not None:
            connection.lost(f"it has been silent for {deadline_s:.3g} s")
