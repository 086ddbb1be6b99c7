"""Connections of one job member to other members: tensor links, state connections, and what keeps a connection alive.

`Outbox` lets computing and sending overlap. Messages are sent in the order of `post`. A lost channel is reported once,
and later posts are dropped: the poster learns of the loss from that event instead of an exception in the middle of
other work. A message that can't be sent at all (a frame that is too large) also ends the channel, because the other
side must not wait for it.

`KeepaliveConnection` adds pings and pongs. Part of a frame counts as a sign of life too, so a large tensor on a slow
link is never mistaken for a dead peer.

`Links` keeps one tensor connection per other peer, used in both directions. `StateConnections` dials one connection per
receiver of snapshots or of a recheck's inputs, when it is first needed, and keeps it open. Sending on it waits for the
network, so a snapshot never accumulates in memory.

This module decides which side dials: always the job owner (its machine may be unreachable from outside), otherwise the
peer with the smaller id. It decides when a link is lost: closed, refused, or silent for too long
(`coordination.round.liveness`). It never inspects payloads and never redials a tensor link by itself; the next round
does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Final

from fusionai.coordination.round.liveness import DEADLINE_S, PING_S, Silence
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.primitives.errors import ExecutionError, FusionError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope, Transport
from fusionai.wire import messages as wire
from fusionai.wire.messages import Message

FLUSH_TIMEOUT_S: Final = 5.0
"""Seconds that closing waits for a peer that does not read (chosen)."""


class Outbox:
    """Sends messages in order. `post` never blocks; the poster's credit bounds the queue, and `Links` what its tensors
    take."""

    def __init__(self, channel: Channel, on_lost: Callable[[str], None]) -> None:
        self.channel = channel
        self.ended = False
        """Whether nothing more will be sent."""
        self.posted = False
        """Whether anything but pings and pongs was posted since the flag was last cleared."""
        self._on_lost = on_lost
        self._queue: asyncio.Queue[tuple[Message, Sequence[HostTensor]] | None] = asyncio.Queue()
        self._behind = 0
        """Messages posted and not yet sent; the next message must wait for them."""
        self.nbytes = 0
        """Bytes of their tensors."""
        self._task = asyncio.create_task(self._run(), name="outbox")

    @property
    def waiting(self) -> int:
        """Messages not yet handed to the channel."""
        return self._queue.qsize()

    def post(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        self.posted = self.posted or not isinstance(message, wire.Ping | wire.Pong)
        if self.ended:
            return
        if not self._behind:
            with suppress(FusionError):  # `_run` reports the failure
                if self.channel.send_at_once(message, tensors):  # without a turn of the event loop
                    return
        self._behind += 1
        self.nbytes += sum(tensor.nbytes for tensor in tensors)
        self._queue.put_nowait((message, tensors))

    async def _run(self) -> None:
        try:
            while (item := await self._queue.get()) is not None:
                try:
                    await self.channel.send(*item)
                    self._behind -= 1
                    self.nbytes -= sum(tensor.nbytes for tensor in item[1])
                except FusionError as error:
                    self._on_lost(str(error))
                    with suppress(TransportError):
                        await self.channel.close()
                    return
                finally:
                    self._queue.task_done()
            self._queue.task_done()
        finally:
            self.ended = True

    async def flush(self) -> None:
        """Wait until everything posted so far was handed to the channel, or the channel is lost."""
        waiting = asyncio.create_task(self._queue.join())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def close(self) -> None:
        """Send what is queued, for at most `FLUSH_TIMEOUT_S`, then close the channel."""
        if not self._task.done():
            self._queue.put_nowait(None)
            await asyncio.wait({self._task}, timeout=FLUSH_TIMEOUT_S)
            self._task.cancel()
        self.ended = True
        with suppress(TransportError):
            await self.channel.close()

    def abandon(self) -> None:
        """Drop what is queued. The caller closes the channel."""
        self.ended = True
        self._task.cancel()


MAX_UNSENT_ANSWERS: Final = 16
"""Pongs that may wait unsent. A peer that does not read gets no more of them, since liveness needs only one."""


class KeepaliveConnection(Outbox):
    """One connection. `on_lost` is called at most once, with the reason, and never after `drop`."""

    def __init__(self, channel: Channel, on_lost: Callable[[KeepaliveConnection, str], None] | None = None) -> None:
        super().__init__(channel, self.lost)
        self._loss_reported = False
        self._report = on_lost
        self._arrived_bytes = -1

    @property
    def usable(self) -> bool:
        return not (self.ended or self.channel.closed)

    async def receive(self) -> Envelope:
        """Return the next message other than a ping or pong. Raises what `Channel.receive` raises."""
        while True:
            envelope = await self.channel.receive()
            match envelope.message:
                case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                    if self.waiting < MAX_UNSENT_ANSWERS:
                        self.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                case wire.Pong():
                    pass
                case _:
                    return envelope

    def beat(self, now_s: float, *, pings: bool = True) -> bool:
        """Send a ping unless other messages already wait. Return whether anything arrived since the last call."""
        if pings and self.waiting == 0:
            self.post(wire.Ping(sequence=0, sent_at_s=now_s))
        before, self._arrived_bytes = self._arrived_bytes, self.channel.stats.arrived_bytes
        return self._arrived_bytes != before

    def lost(self, reason: str) -> None:
        """End the connection and report the reason, unless it has ended already."""
        if not self._loss_reported:
            self.drop()
            if self._report is not None:
                self._report(self, reason)

    def drop(self) -> None:
        """End the connection without a report and discard what is queued."""
        self._loss_reported = True
        self.abandon()
        self.channel.abort()


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


async def open_link(
    transport: Transport, addresses: Sequence[str], peer: PeerId, stream: wire.Stream, opening: wire.OpenJob
) -> Channel:
    """Like `open_job`, between two members. The error has the other member's reason for a refusal, but not what this
    machine's network answered: the job's owner reads it, and could map the network of the provider."""
    try:
        return await open_job(transport, addresses, peer, stream, opening)
    except RefusedError:
        raise
    except FusionError as error:
        log.info("peer %s could not be reached: %s", short(peer), error)
        raise TransportError(f"peer {short(peer)} could not be reached from there.") from None


@dataclass(frozen=True, slots=True)
class _Dialling:
    """An attempt to open a link."""

    opening: wire.OpenJob
    task: asyncio.Task[None]


class _Connected:
    """Connections to other members, one per peer, kept alive and watched for silence."""

    def __init__(self, transport: Transport, now_s: Callable[[], float], silence: Silence) -> None:
        self._transport = transport
        self._now_s = now_s
        self._silence = silence
        self._pinged_s = -inf
        self._connections: dict[PeerId, KeepaliveConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that dial or read. The event loop alone would not keep them alive."""
        self._closing = False

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def beat(self) -> None:
        """Call every `PING_S`: ping all peers if it is time, and end connections that were silent for too long."""
        now_s, connections = self._now_s(), self._connections
        pings = now_s - self._pinged_s >= self._silence.ping_s - PING_S / 2
        if pings:
            self._pinged_s = now_s
        for peer, connection in connections.items():
            if connection.usable and connection.beat(now_s, pings=pings):
                self._silence.heard(peer, now_s)
        taking = [peer for peer, connection in connections.items() if connection.channel.acknowledges is not False]
        for peer, deadline_s in self._silence.tick(now_s, taking).items():
            if (connection := connections.get(PeerId(peer))) is not None:
                connection.lost(f"it has been silent for {deadline_s:.3g} s")

    async def close(self) -> None:
        """End all connections. Queued messages are discarded, since no peer waits for them any more."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for connection in self._connections.values():
            connection.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Links(_Connected):
    """Links to all other members. `on_message` gets every message except pings and pongs; `on_lost` is called once per
    lost link. `memory`: what tensors that wait to be sent draw on; the link to a member that does not read is lost when
    it is used up."""

    def __init__(
        self,
        transport: Transport,
        *,
        memory: MemoryBudget,
        on_message: Callable[[PeerId, Envelope], Awaitable[None]],
        on_lost: Callable[[PeerId, str], None],
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(transport, now_s, Silence())
        self._memory = memory
        self._on_message = on_message
        self._on_lost = on_lost
        memory.join(self)
        self._waiting: dict[PeerId, asyncio.Future[None]] = {}
        """Futures that are resolved when a link to the peer is up."""
        self._dialling: dict[PeerId, _Dialling] = {}

    def post(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """Queue a message for `peer`. Raises `TransportError` if there is no usable link (`up` waits for one)."""
        connection = self._connections.get(peer)
        if connection is None or not connection.usable:
            raise TransportError(f"there is no link to peer {short(peer)}.")
        if connection.nbytes:
            try:
                self._memory.require(sum(tensor.nbytes for tensor in tensors), "what waits for a peer to read it")
            except ExecutionError as error:
                connection.lost(str(error))
                return
        connection.post(message, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that wait to be sent."""
        return sum(connection.nbytes for connection in self._connections.values() if not connection.ended)

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
        self._dialling[peer] = _Dialling(opening, self._start(self._dial(peer, addresses, opening)))

    async def _dial(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> None:
        try:
            channel = await open_link(self._transport, addresses, peer, "tensors", opening)
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

    def _lost(self, peer: PeerId, connection: KeepaliveConnection, reason: str) -> None:
        if self._connections.get(peer) is connection:
            del self._connections[peer]
            self._silence.forget(peer)
        if not self._closing:
            self._on_lost(peer, reason)

    async def close(self) -> None:
        for waiting in self._waiting.values():
            waiting.cancel()
        await super().close()


RARE_PING_S: Final = 1.0
"""Interval at which connections for state and for exchanges are pinged (chosen: a quarter of `DEADLINE_S`; among 64
replicas each machine sends 63 pings a second)."""


class StateConnections(_Connected):
    """Sends messages to other members. `send` delivers the message or raises; it never retries. A replica's machine has
    one to a machine of each other replica. They are pinged rarely, because drivers notice the loss of a machine."""

    def __init__(self, transport: Transport, *, now_s: Callable[[], float]) -> None:
        silence = Silence(ping_s=RARE_PING_S, shortest_s=DEADLINE_S, stall_s=RARE_PING_S)
        super().__init__(transport, now_s, silence)
        self._opening: dict[PeerId, asyncio.Lock] = {}

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
        channel = await open_link(self._transport, addresses, peer, "state", opening)
        if self._closing:
            channel.abort()
            raise TransportError(f"the connection to peer {short(peer)} is not needed: this member is closing.")
        connection = self._connections[peer] = KeepaliveConnection(channel)
        self._silence.watch(peer, self._now_s())
        self._start(self._read(connection))
        return connection

    async def _read(self, connection: KeepaliveConnection) -> None:
        """Read until the connection ends. The other side may send only pings and pongs."""
        try:
            message = (await connection.receive()).message
            connection.lost(f"it sent a {type(message).__name__}")
        except FusionError as error:
            connection.lost(str(error))
