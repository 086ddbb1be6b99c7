"""The driver's connections: a control and a state connection to every member; tensors go through its own member.

This module decides when a member counts as lost: its control or state connection closed, could not be opened within
`OPENING_S`, or was silent longer than the silence detector allows. Every message goes to the driver's callbacks with
the peer that sent it. State is always read, even if nothing needs it, because a member could otherwise wait for ever to
send it.

Used by `training.driver` and `serving.driver`. `coordination.round.liveness` detects silent members. The owner's own
stages are reached over in-process channels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.round.liveness import Silence
from fusionai.execution.deployment import Deployment
from fusionai.execution.host import Host
from fusionai.execution.links.local import LocalChannel
from fusionai.execution.links.outbox import Outbox
from fusionai.execution.links.peer_links import open_job
from fusionai.execution.part import Part
from fusionai.execution.retained import Sent
from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

MessageSink = Callable[[PeerId, wire.Message], None]
StateServer = Callable[[PeerId, Channel], Awaitable[None]]
"""Reads a member's state connection. Returns or raises `FusionError` when the connection has ended."""
LostSink = Callable[[PeerId, str], None]

OPENING_S: Final = 3.0
"""Seconds to open both connections to a member, handshakes included (chosen)."""


@dataclass(slots=True, eq=False)
class _Line:
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
        return not (self.over or self.control.lost or self.control.channel.closed or self.state.closed)

    def sign_of_life(self) -> bool:
        """Return whether a ping was answered or part of a state arrived since the last call.

        Other messages do not count: they prove only the direction from the member to the driver. A member that the
        driver can't reach still reports lost links and would be taken for healthy.
        """
        now = (self.answers, self.state.stats.arrived_bytes)
        known, self.seen = self.seen, now
        return now != known


class Connections:
    """Connections to all members of a job.

    `open` connects to members as plans need them, `tell` sends to one, `dismiss` detaches members that are left out,
    `close` detaches all.
    """

    def __init__(
        self,
        job: str,
        host: Host,
        member: Part,
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
        self._lines: dict[PeerId, _Line] = {}
        self._own: list[asyncio.Task[bool] | asyncio.Task[None]] = []
        self._silence = Silence()
        self._watching = asyncio.create_task(self._watch(), name="silence of members")
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self._pings = 0

    def is_open(self, peer: PeerId) -> bool:
        line = self._lines.get(peer)
        return line is not None and line.alive

    async def open(self, peer: PeerId, deployment: Deployment, fence: wire.Fence) -> bool:
        """Connect to `peer` unless connected already. On failure, call `on_lost` with the reason and return False."""
        if self.is_open(peer):
            return True
        former = self._lines.pop(peer, None)
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
            self._lose(line, reason)

        line = self._lines[peer] = _Line(peer, Outbox(control, failed), state)
        line.tasks = [
            asyncio.create_task(self._read(line, self._hear(line, control))),
            asyncio.create_task(self._read(line, self._serve_state(peer, state))),
        ]
        if peer != self._host.peer:
            self._silence.watch(peer, self._host.clock.now_s())

    async def _hear(self, line: _Line, control: Channel) -> None:
        while True:
            message = (await control.receive()).message
            line.answers += isinstance(message, wire.Pong)
            self._on_message(line.peer, message)

    async def _read(self, line: _Line, reading: Awaitable[None]) -> None:
        try:
            await reading
        except FusionError as error:
            self._lose(line, str(error))
        except Exception as error:  # whatever arrived, the job must not wait for a connection that is no longer read
            log.exception("a connection to peer %s failed", short(line.peer))
            self._lose(line, f"{type(error).__name__}: {error}")
        else:
            self._lose(line, "it ended a connection")

    # -------------------------------------------------------------------------------------------------- silence

    async def _watch(self) -> None:
        while True:
            now_s = self._host.clock.now_s()
            for line in list(self._lines.values()):
                if line.peer == self._host.peer:
                    continue
                if line.sign_of_life():
                    self._silence.heard(line.peer, now_s)
                self._pings += 1
                line.control.post(wire.Ping(sequence=self._pings, sent_at_s=now_s))
            taking = [p for p, line in self._lines.items() if line.control.channel.acknowledges is not False]
            for peer, deadline_s in self._silence.tick(now_s, taking).items():
                line = self._lines.get(PeerId(peer))
                if line is not None:
                    self._lose(line, f"it has been silent for {deadline_s:.3g} s")
            await asyncio.sleep(self._silence.ping_s)

    def is_doubtful(self, peer: PeerId) -> bool:
        """Return whether a connected member has not answered for longer than a healthy one takes."""
        silent = peer in self._silence.watched and self._silence.silent_s(peer) > 2 * self._silence.ping_s
        return silent and self.is_open(peer)

    # --------------------------------------------------------------------------------------------------- the ends

    def tell(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Send on the control connection. Dropped if the member has none: its loss was reported already."""
        line = self._lines.get(peer)
        if line is not None:
            line.control.post(message, tensors)

    async def send_state(
        self, peer: PeerId, message: wire.StateChunk | wire.Agreement | Sent, tensors: Sequence[HostTensor]
    ) -> None:
        """Send on the state connection. Raises `TransportError` if the member has none."""
        line = self._lines.get(peer)
        if line is None:
            raise TransportError(f"there is no connection to peer {short(peer)}.")
        await line.state.send(message, tensors)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Count a member that broke the protocol as lost."""
        line = self._lines.get(peer)
        if line is not None:
            self._lose(line, reason)

    def dismiss(self, keep: Iterable[str], fence: wire.Fence) -> None:
        """Detach all members that the plan no longer needs; `keep` names those it does."""
        kept = {*keep, self._host.peer}
        for peer in [peer for peer in self._lines if peer not in kept]:
            self.part_with(peer, fence, "the plan continues without this peer")

    def part_with(self, peer: PeerId, fence: wire.Fence, reason: str) -> None:
        """Detach one member. Does nothing if it is not connected."""
        line = self._lines.pop(peer, None)
        if line is None:
            return
        self._silence.forget(peer)
        line.over = True
        line.control.post(wire.Detach(fence=fence, reason=reason[:4000]))
        task = asyncio.create_task(self._see_off(line))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _see_off(self, line: _Line) -> None:
        await line.control.close()
        self._end(line)

    def _lose(self, line: _Line, reason: str) -> None:
        if self._closing or line.over:
            return
        self._end(line)
        if self._lines.get(line.peer) is line:
            del self._lines[line.peer]
            self._silence.forget(line.peer)
        self._on_lost(line.peer, reason)

    def _end(self, line: _Line) -> None:
        line.over = True
        line.control.abandon()
        line.control.channel.abort()
        line.state.abort()
        for task in line.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def close(self, fence: wire.Fence, reason: str) -> None:
        """Detach all members, flush what is queued, close."""
        self._closing = True
        self._watching.cancel()
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.control.post(wire.Detach(fence=fence, reason=reason))
        await asyncio.gather(*(self._see_off(line) for line in lines))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for task in self._own:
            task.cancel()
        tasks = [self._watching, *self._own, *(task for line in lines for task in line.tasks)]
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(FusionError):
            await self._member.close()
