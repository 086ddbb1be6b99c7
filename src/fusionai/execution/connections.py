"""The driver's side of a job: the deployed plan, a control and a state connection to every member, and tasks.

This module decides when a member counts as lost: its control or state connection closed, could not be opened within
`OPENING_S`, or was silent for too long (`coordination.round.liveness`). Every message goes to the driver's callbacks
with the peer that sent it. State is always read, even if nothing needs it, because a member could otherwise wait for
ever to send it. Tensors go through the driver's own member. The owner's own stages are reached over in-process channels
(`LocalChannel`).

`client` gets deployments from the broker; `training.driver` and `serving.driver` use this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from fusionai.coordination.round.liveness import Silence
from fusionai.execution.host import Host
from fusionai.execution.links import Outbox, open_job
from fusionai.execution.member import RoundMember
from fusionai.primitives.errors import ChannelClosed, FusionError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import Plan
from fusionai.transport.interface import Channel, ChannelStats, Envelope, Remote
from fusionai.wire import messages as wire
from fusionai.wire.frame import FrameLimits, by_name
from fusionai.wire.messages import Message, RouteKind, Stream

log = logging.getLogger(__name__)

MessageSink = Callable[[PeerId, wire.Message], None]
StateServer = Callable[[PeerId, Channel], Awaitable[None]]
"""Reads a member's state connection. Returns or raises `FusionError` when the connection has ended."""
LostSink = Callable[[PeerId, str], None]

LINK_GRACE_S: Final = 0.2
"""Seconds to wait after a lost link. It is often the first sign of a lost peer, whose own connection fails a moment
later."""
OPENING_S: Final = 3.0
"""Seconds to open both connections to a member, handshakes included (chosen)."""


@dataclass(slots=True, eq=False)
class _MemberConnection:
    """The control and state connections to one member, and the tasks that read them."""

    peer: PeerId
    control: Outbox
    state: Channel
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    answers: int = 0
    """Pings that the member answered on the control connection."""
    seen: tuple[int, int] = (0, 0)
    over: bool = False

    @property
    def alive(self) -> bool:
        return not (self.over or self.control.ended or self.control.channel.closed or self.state.closed)

    def sign_of_life(self) -> bool:
        """Return whether a ping was answered or part of a state arrived since the last call. Other messages do not
        count: they prove only the direction from the member to the driver. A member that the driver can't reach still
        reports lost links and would be taken for healthy."""
        now = (self.answers, self.state.stats.arrived_bytes)
        known, self.seen = self.seen, now
        return now != known


class Connections:
    """Connections to all members of a job. `open` connects to members as plans need them, `send_to` sends to one,
    `dismiss` detaches members that are left out, `close` detaches all."""

    def __init__(
        self,
        job: str,
        host: Host,
        member: RoundMember,
        *,
        on_message: MessageSink,
        serve_state: StateServer,
        on_lost: LostSink,
    ) -> None:
        self._job = job
        self._host = host
        self._member = member
        self._on_message = on_message
        self._serve_state = serve_state
        self._on_lost = on_lost
        self._connections: dict[PeerId, _MemberConnection] = {}
        self._own: list[asyncio.Task[bool] | asyncio.Task[None]] = []
        self._silence = Silence()
        self._watching = asyncio.create_task(self._watch(), name="silence of members")
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self._pings = 0

    def is_open(self, peer: PeerId) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and connection.alive

    async def open(self, peer: PeerId, deployment: Deployment, fence: wire.Fence) -> bool:
        """Connect to `peer` unless connected already. On failure, call `on_lost` with the reason and return False."""
        if self.is_open(peer):
            return True
        former = self._connections.pop(peer, None)
        if former is not None:
            self._end(former)
        if peer == self._host.peer:
            self._adopt(peer, *self._local())
            return True
        opening = wire.OpenJob(
            job=self._job, fence=fence, ticket=deployment.tickets.get(self._host.peer, b""), task=self._member.task
        )
        addresses = deployment.members.get(peer, ())
        opened: list[Channel] = []
        adopted = False
        try:
            async with asyncio.timeout(OPENING_S):
                for stream in ("control", "state"):
                    opened.append(await open_job(self._host.transport, addresses, peer, stream, opening))
        except (FusionError, TimeoutError) as error:
            reason = str(error) or f"it did not open the job within {OPENING_S:g} s"
            self._on_lost(peer, reason)
            return False
        else:
            control, state = opened
            self._adopt(peer, control, state)
            adopted = True
            return True
        finally:
            if not adopted:
                for channel in opened:
                    channel.abort()

    def _local(self) -> tuple[Channel, Channel]:
        control, theirs = LocalChannel.pair(self._host.peer, "control")
        state, their_state = LocalChannel.pair(self._host.peer, "state")
        self._own += [
            asyncio.create_task(self._member.serve_control(theirs)),
            asyncio.create_task(self._member.serve_state(their_state)),
        ]
        return control, state

    def _adopt(self, peer: PeerId, control: Channel, state: Channel) -> None:
        def failed(reason: str) -> None:
            self._lose(connection, reason)

        connection = self._connections[peer] = _MemberConnection(peer, Outbox(control, failed), state)
        connection.tasks = [
            asyncio.create_task(self._read(connection, self._hear(connection, control))),
            asyncio.create_task(self._read(connection, self._serve_state(peer, state))),
        ]
        if peer != self._host.peer:
            self._silence.watch(peer, self._host.clock.now_s())

    async def _hear(self, connection: _MemberConnection, control: Channel) -> None:
        while True:
            message = (await control.receive()).message
            connection.answers += isinstance(message, wire.Pong)
            self._on_message(connection.peer, message)

    async def _read(self, connection: _MemberConnection, reading: Awaitable[None]) -> None:
        try:
            await reading
        except FusionError as error:
            self._lose(connection, str(error))
        except Exception as error:  # whatever arrived, the job must not wait for a connection that is no longer read
            log.exception("a connection to peer %s failed", short(connection.peer))
            self._lose(connection, f"{type(error).__name__}: {error}")
        else:
            self._lose(connection, "it ended a connection")

    # -------------------------------------------------------------------------------------------------- silence

    async def _watch(self) -> None:
        while True:
            now_s = self._host.clock.now_s()
            for connection in list(self._connections.values()):
                if connection.peer == self._host.peer:
                    continue
                if connection.sign_of_life():
                    self._silence.heard(connection.peer, now_s)
                self._pings += 1
                connection.control.post(wire.Ping(sequence=self._pings, sent_at_s=now_s))
            taking = [
                p for p, connection in self._connections.items() if connection.control.channel.acknowledges is not False
            ]
            for peer, deadline_s in self._silence.tick(now_s, taking).items():
                connection = self._connections.get(PeerId(peer))
                if connection is not None:
                    self._lose(connection, f"it has been silent for {deadline_s:.3g} s")
            await asyncio.sleep(self._silence.ping_s)

    def is_doubtful(self, peer: PeerId) -> bool:
        """Return whether a connected member has not answered for longer than a healthy one takes."""
        silent = peer in self._silence.watched and self._silence.silent_s(peer) > 2 * self._silence.ping_s
        return silent and self.is_open(peer)

    async def both_remain(self, one: PeerId, other: PeerId) -> bool:
        """Return whether both members of a lost link are still connected, once neither is doubtful any more."""
        while True:
            await asyncio.sleep(LINK_GRACE_S)
            if not (self.is_doubtful(one) or self.is_doubtful(other)):
                return self.is_open(one) and self.is_open(other)

    # --------------------------------------------------------------------------------------------------- the ends

    def send_to(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Send on the control connection. Dropped if the member has none: its loss was reported already."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.control.post(message, tensors)

    async def send_state(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """Send on the state connection. Raises `TransportError` if the member has none."""
        connection = self._connections.get(peer)
        if connection is None:
            raise TransportError(f"there is no connection to peer {short(peer)}.")
        await connection.state.send(message, tensors)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Count a member that broke the protocol as lost."""
        connection = self._connections.get(peer)
        if connection is not None:
            self._lose(connection, reason)

    def dismiss(self, keep: Iterable[str], fence: wire.Fence) -> None:
        """Detach all members that the plan no longer needs; `keep` names those it does."""
        kept = {*keep, self._host.peer}
        for peer in [peer for peer in self._connections if peer not in kept]:
            self.part_with(peer, fence, "the plan continues without this peer")

    def part_with(self, peer: PeerId, fence: wire.Fence, reason: str) -> None:
        """Detach one member. Does nothing if it is not connected."""
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._silence.forget(peer)
        connection.over = True
        connection.control.post(wire.Detach(fence=fence, reason=reason[:4000]))
        task = asyncio.create_task(self._see_off(connection))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _see_off(self, connection: _MemberConnection) -> None:
        await connection.control.close()
        self._end(connection)

    def _lose(self, connection: _MemberConnection, reason: str) -> None:
        if self._closing or connection.over:
            return
        self._end(connection)
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._silence.forget(connection.peer)
        self._on_lost(connection.peer, reason)

    def _end(self, connection: _MemberConnection) -> None:
        connection.over = True
        connection.control.abandon()
        connection.control.channel.abort()
        connection.state.abort()
        for task in connection.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def close(self, fence: wire.Fence, reason: str) -> None:
        """Detach all members, flush what is queued, close."""
        self._closing = True
        self._watching.cancel()
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.control.post(wire.Detach(fence=fence, reason=reason))
        await asyncio.gather(*(self._see_off(connection) for connection in connections))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for task in self._own:
            task.cancel()
        tasks = [self._watching, *self._own, *(task for connection in connections for task in connection.tasks)]
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(FusionError):
            await self._member.close()


class LocalChannel:
    """One end of an in-process channel. `pair` makes both ends."""

    def __init__(self, peer: PeerId, stream: Stream) -> None:
        self.remote = Remote(peer, "member")
        self.stream: Stream = stream
        self.route: RouteKind = "lan"
        self.stats = ChannelStats()
        self._inbox: asyncio.Queue[Envelope | None] = asyncio.Queue()
        self._other: LocalChannel | None = None
        self._closed = False

    @classmethod
    def pair(cls, peer: PeerId, stream: Stream) -> tuple[LocalChannel, LocalChannel]:
        one, other = cls(peer, stream), cls(peer, stream)
        one._other, other._other = other, one
        return one, other

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        if self._closed or self._other is None or self._other.closed:
            raise ChannelClosed("the local channel is closed.")
        named = by_name(message, tensors)
        self.stats.sent_frames += 1
        self._other.stats.received_frames += 1
        self._other.stats.arrived_bytes += 1  # nothing is encoded, but it counts as a sign of life
        self._other._inbox.put_nowait(Envelope(message, named))

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:  # noqa: ARG002
        """Send nothing and return False: messages on this channel are never urgent."""
        return False

    def admit(self, limits: FrameLimits | None = None) -> None:
        """Do nothing: both ends are in one process."""

    async def receive(self) -> Envelope:
        envelope = await self._inbox.get()
        if envelope is None:
            self._inbox.put_nowait(None)
            raise ChannelClosed("the local channel was closed.")
        return envelope

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.put_nowait(None)
        if self._other is not None:
            self._other._inbox.put_nowait(None)

    @property
    def acknowledges(self) -> bool | None:
        return None

    @property
    def closed(self) -> bool:
        return self._closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A plan with everything needed to reach its members. `plan` carries the broker's version. `members`: addresses of
    each peer of the plan (none for the owner). `tickets`: by peer id; the owner's is the driver's ticket.
    `clock_ahead_s`: seconds by which the owner's clock is ahead of the broker's, on which ticket expiry is based."""

    plan: Plan
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tickets: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    clock_ahead_s: float = 0.0

    @property
    def contacts(self) -> dict[str, bytes]:
        """Ticket of each peer that others may dial. It says where the peer listens. It admits that peer alone."""
        return {peer: self.tickets[peer] for peer in self.members if peer in self.tickets}

    def neighbours(self) -> tuple[wire.Neighbour, ...]:
        contacts = self.contacts
        return tuple(
            wire.Neighbour(stage=p.stage, peer=p.peer, ticket=contacts.get(p.peer, b"")) for p in self.plan.stages
        )


class PlanSource(Protocol):
    """Gets the driver a new plan when a stage has no peer; `client.pool.replanning` asks the broker."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """Return `present` with replacements for the peers in `lost`, recorded as the plan in force. There is no time
        limit; `waiting` is called with a text that says what is being waited for. Raises `FusionError` if the job can't
        continue."""
        ...

    def distrust(self, peer: str, reason: str) -> None:
        """Exclude `peer` from all later plans of this job."""
        ...


class JobTasks:
    """Tasks of one job that end together. `failed` gets the reason why a task failed, because the job must end with a
    reason instead of waiting for that task."""

    def __init__(self, job: str, failed: Callable[[str], None]) -> None:
        self._job = job
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        async def reported() -> None:
            try:
                await work
            except TransportError as error:  # the connection's owner reports the loss as an event
                log.info("a connection of %s: %s", self._job, error)
            except FusionError as error:
                self._failed(str(error))
            except Exception as error:
                log.exception("a command of %s failed", self._job)
                self._failed(f"{type(error).__name__}: {error}")

        task = asyncio.create_task(reported())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # for a task that was cancelled before it began
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
