"""The driver's connections: control and state to every member, tensors through its own member.

Decides when a member counts as lost: its control or state connection closed, could not be opened in `OPENING_S`, or it
was silent for the watcher's deadline. Whatever arrives goes to the driver's sinks with the peer it came from; state is
always read, also when nobody wants it, or a member could wait for ever to be rid of it.

Neighbours: `training.driver` and `serving.driver` use it, `coordination.silence` watches; the owner's own stages are
reached over channels within this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.silence import Silence
from fusionai.execution.deployment import Deployment
from fusionai.execution.host import Host
from fusionai.execution.links import open_job
from fusionai.execution.local import LocalChannel
from fusionai.execution.outbox import Outbox
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
"""Reads a member's state connection; returns or raises `FusionError` when it has ended."""
LostSink = Callable[[PeerId, str], None]

OPENING_S: Final = 3.0
"""For both connections to a member, handshakes included."""


@dataclass(slots=True, eq=False)
class _Line:
    """Both connections to one member and the tasks that read them."""

    peer: PeerId
    control: Outbox
    state: Channel
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    answers: int = 0
    """Pings answered on the control connection."""
    seen: tuple[int, int] = (0, 0)
    over: bool = False

    @property
    def alive(self) -> bool:
        return not (self.over or self.control.lost or self.control.channel.closed or self.state.closed)

    def sign_of_life(self) -> bool:
        """Whether a ping was answered, or a part of a state came, since this was asked last.

        Other words of the member prove only its own direction: cut off from the driver it still says that its links
        are lost, and would be taken for healthy for as long again."""
        now = (self.answers, self.state.stats.arrived_bytes)
        known, self.seen = self.seen, now
        return now != known


class Connections:
    """`open` lines as plans need them, `tell` members, `dismiss` who is left out; `close` detaches everybody."""

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
        """A line to `peer`, a new one unless there is one that lives. False, and told to `on_lost`, without success."""
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
        except Exception as error:  # whatever was received, the job must not wait for what nobody reads any more
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
        """Whether it has not answered for longer than a healthy member takes."""
        silent = peer in self._silence.watched and self._silence.silent_s(peer) > 2 * self._silence.ping_s
        return silent and self.is_open(peer)

    # --------------------------------------------------------------------------------------------------- the ends

    def tell(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Dropped for a member without a line: its loss has been told already."""
        line = self._lines.get(peer)
        if line is not None:
            line.control.post(message, tensors)

    async def send_state(
        self, peer: PeerId, message: wire.StateChunk | wire.Agreement | Sent, tensors: Sequence[HostTensor]
    ) -> None:
        """Raises `TransportError` without a line."""
        line = self._lines.get(peer)
        if line is None:
            raise TransportError(f"there is no connection to peer {short(peer)}.")
        await line.state.send(message, tensors)

    def drop(self, peer: PeerId, reason: str) -> None:
        """This member breaks the protocol: it counts as lost."""
        line = self._lines.get(peer)
        if line is not None:
            self._lose(line, reason)

    def dismiss(self, keep: Iterable[str], fence: wire.Fence) -> None:
        """The plan needs only these: the others may forget the job."""
        kept = {*keep, self._host.peer}
        for peer in [peer for peer in self._lines if peer not in kept]:
            self.part_with(peer, fence, "the plan goes on without this peer")

    def part_with(self, peer: PeerId, fence: wire.Fence, reason: str) -> None:
        """This one may forget the job. Harmless for one without a line."""
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
        """Tell everybody to forget the job, flush, close."""
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
