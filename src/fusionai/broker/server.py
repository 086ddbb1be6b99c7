"""The broker's connections and its timer around `BrokerService`.

Each connection is a conversation: one answer to every message, in order, with notices in between. Every connection has
a number, by which the broker state refers to members and drivers. The timer sleeps until the next lease ends. If the
process itself was suspended (a laptop asleep), all members get a new lease. `transport` accepts the connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Final

from fusionai.broker.journal import JournalTaken
from fusionai.broker.reachability import Observer
from fusionai.broker.service import BrokerService, Replies
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ChannelClosed, StorageError, TransportError, WireError
from fusionai.transport.channels.link import answer_probe
from fusionai.transport.interface import Channel
from fusionai.wire.messages import Message, Observe, Observed, Ping, Probe, Refused

NOTICE_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class BrokerServer:
    """Pass `accept` to a transport's `listen`, and run `keep` at the same time."""

    def __init__(self, service: BrokerService, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self.observer: Observer | None = None
        """Answers `Observe` requests."""
        self._channels: dict[int, Channel] = {}
        self._numbers = itertools.count(1)
        self._sending: set[asyncio.Task[None]] = set()
        self._earlier = asyncio.Event()
        self._waiting_for_s: float | None = None
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stall_s = service.desk.rules.lease_s / 2

    async def accept(self, channel: Channel) -> None:
        """Serve one connection until it ends. Strangers and senders of tensors get one answer only."""
        if channel.stream == "tensors" and channel.remote.role != "stranger":
            await _measured(channel)
            return
        number = next(self._numbers)
        self._channels[number] = channel
        try:
            while True:
                envelope = await channel.receive()
                message, stranger = envelope.message, channel.remote.role == "stranger"
                if not stranger and isinstance(message, Ping | Probe) and await answer_probe(channel, envelope):
                    # A member measures its link; probes carry no content of a job.
                    continue
                if isinstance(message, Observe) and (seen := await self._observed(channel, message)) is not None:
                    await channel.send(seen)
                    continue
                outcome = self._receive(channel, number, message, carries=bool(envelope.tensors))
                if outcome.answer is not None:
                    await _answer(channel, outcome.answer)
                self._dispatch(outcome)
                if stranger or envelope.tensors:
                    return
        finally:
            del self._channels[number]
            self._dispatch(self._service.disconnected(number))

    async def _observed(self, channel: Channel, message: Observe) -> Observed | None:
        """Return how a member is seen from here; None for strangers."""
        peer = channel.remote.peer
        if self.observer is None or peer is None or not self._service.desk.knows(peer):
            return None
        return await self.observer.answer(channel.remote, message)

    async def keep(self, stop: asyncio.Event) -> None:
        """Watch over leases until `stop`. Raises `JournalTaken` when another broker has taken the journal over."""
        timer = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({timer, stopping, self._superseded}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            tasks = [timer, stopping, *self._sending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _receive(self, channel: Channel, number: int, message: Message, *, carries: bool) -> Replies:
        if channel.stream != "control":
            return Replies(answer=Refused(code="bad_message", reason="A broker listens on the control stream only."))
        if carries:
            return Replies(answer=Refused(code="bad_message", reason="No tensor passes through a broker."))
        try:
            return self._service.receive(channel.remote, number, message)
        except JournalTaken as error:
            if not self._superseded.done():
                self._superseded.set_exception(error)
            return Replies(answer=Refused(code="failed", reason="This broker has been replaced by another."))

    def _dispatch(self, outcome: Replies) -> None:
        """Send notices without waiting: a member that does not read must not hold up the others."""
        for notice in outcome.notices:
            channel = self._channels.get(notice.connection)
            if channel is not None:
                task = asyncio.create_task(_notify(channel, notice.message))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
        deadline_s = self._service.next_deadline_s
        if deadline_s is not None and (self._waiting_for_s is None or deadline_s < self._waiting_for_s):
            self._earlier.set()

    async def _watch(self) -> None:
        while True:
            self._earlier.clear()
            deadline_s = self._waiting_for_s = self._service.next_deadline_s
            try:
                async with asyncio.timeout(None if deadline_s is None else deadline_s - self._clock.now_s()):
                    await self._earlier.wait()
                continue
            except TimeoutError:
                pass
            try:
                self._dispatch(self._pass(deadline_s))
            except JournalTaken:
                raise
            except StorageError as error:
                _LOG.error("a loss could not be journalled, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    def _pass(self, deadline_s: float | None) -> Replies:
        """Handle `deadline_s`, which may have passed while this process was suspended."""
        if deadline_s is not None and self._clock.now_s() - deadline_s > self._stall_s:
            _LOG.warning("this process was suspended; all members get a new lease")
            return self._service.stalled()
        return self._service.tick()


async def _measured(channel: Channel) -> None:
    """Answer the probes with which a member measures its link to the broker. They carry no content of a job."""
    while await answer_probe(channel, await channel.receive()):
        pass
    await channel.send(Refused(code="bad_message", reason="A broker only measures links on this stream."))


async def _answer(channel: Channel, answer: Message) -> None:
    try:
        if not channel.send_at_once(answer):
            await channel.send(answer)
    except WireError as error:
        await channel.send(Refused(code="failed", reason=f"The answer does not fit into a frame: {error}"))


async def _notify(channel: Channel, message: Message) -> None:
    try:
        async with asyncio.timeout(NOTICE_TIMEOUT_S):
            await channel.send(message)
    except TimeoutError:
        _LOG.info("a connection does not take a notice; closing it")
        await channel.close()
    except (ChannelClosed, TransportError) as error:
        _LOG.info("a notice could not be sent: %s", error)
