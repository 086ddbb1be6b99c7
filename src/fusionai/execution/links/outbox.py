"""Sending on one connection: an ordered queue in front of a channel, and pings that keep a connection alive.

`Outbox` lets computing and sending overlap. Messages are sent in the order of `post`. A lost channel is reported once
through `on_lost`, and later posts are dropped: the poster learns of the loss from that event instead of an exception in
the middle of other work. A message that can't be sent at all (a frame that is too large) also ends the channel, because
the other side must not wait for it.

`KeepaliveConnection` adds pings and pongs. Its owner reports arrivals to `coordination.round.liveness`, which decides
about silence. Part of a frame counts as a sign of life too, so a large tensor on a slow link is never mistaken for a
dead peer.

`execution.links.peer_links` and `execution.links.connections` post; `transport` sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.messages import Message

FLUSH_TIMEOUT_S: Final = 5.0
"""Seconds that closing waits for a peer that does not read (chosen)."""


class Outbox:
    """Sends messages in order. `post` never blocks; the poster's credit bounds the queue."""

    def __init__(self, channel: Channel, on_lost: Callable[[str], None]) -> None:
        self.channel = channel
        self._on_lost = on_lost
        self._queue: asyncio.Queue[tuple[Message, Sequence[HostTensor]] | None] = asyncio.Queue()
        self._behind = 0
        """Messages posted and not yet sent; the next message must wait for them."""
        self._abandoned = False
        self._task = asyncio.create_task(self._run(), name="outbox")

    @property
    def waiting(self) -> int:
        """Messages not yet handed to the channel."""
        return self._queue.qsize()

    @property
    def lost(self) -> bool:
        """Whether nothing more will be sent."""
        return self._abandoned or self._task.done()

    def post(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        if self.lost or (not self._behind and self._sent_at_once(message, tensors)):
            return
        self._behind += 1
        self._queue.put_nowait((message, tensors))

    def _sent_at_once(self, message: Message, tensors: Sequence[HostTensor]) -> bool:
        """Send without a turn of the event loop if no message is queued. A failure is reported by `_run`."""
        try:
            return self.channel.send_at_once(message, tensors)
        except FusionError:
            return False

    async def _run(self) -> None:
        while (item := await self._queue.get()) is not None:
            try:
                await self.channel.send(*item)
                self._behind -= 1
            except FusionError as error:
                self._on_lost(str(error))
                with suppress(TransportError):
                    await self.channel.close()
                return
            finally:
                self._queue.task_done()
        self._queue.task_done()

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
        with suppress(TransportError):
            await self.channel.close()

    def abandon(self) -> None:
        """Drop what is queued. The caller closes the channel."""
        self._abandoned = True
        self._task.cancel()


MAX_UNSENT_ANSWERS: Final = 16
"""Pongs that may wait unsent. A peer that does not read gets no more of them, since liveness needs only one."""


class KeepaliveConnection:
    """One connection. `on_lost` is called at most once, with the reason, and never after `drop`."""

    def __init__(self, channel: Channel, on_lost: Callable[[KeepaliveConnection, str], None] | None = None) -> None:
        self.channel = channel
        self.posted = False
        """Whether anything but pings and pongs was sent since the flag was last cleared."""
        self._loss_reported = False
        self._on_lost = on_lost
        self._outbox = Outbox(channel, self.lost)
        self._arrived_bytes = -1

    @property
    def usable(self) -> bool:
        return not self._loss_reported and not self._outbox.lost and not self.channel.closed

    def post(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        self.posted = True
        self._outbox.post(message, tensors)

    async def receive(self) -> Envelope:
        """Return the next message other than a ping or pong. Raises what `Channel.receive` raises."""
        while True:
            envelope = await self.channel.receive()
            match envelope.message:
                case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                    if self._outbox.waiting < MAX_UNSENT_ANSWERS:
                        self._outbox.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                case wire.Pong():
                    pass
                case _:
                    return envelope

    def beat(self, now_s: float) -> bool:
        """Send a ping unless other messages already wait. Return whether anything arrived since the last call."""
        if self._outbox.waiting == 0:
            self._outbox.post(wire.Ping(sequence=0, sent_at_s=now_s))
        before, self._arrived_bytes = self._arrived_bytes, self.channel.stats.arrived_bytes
        return self._arrived_bytes != before

    def lost(self, reason: str) -> None:
        """End the connection and report the reason, unless it has ended already."""
        if not self._loss_reported:
            self.drop()
            if self._on_lost is not None:
                self._on_lost(self, reason)

    def drop(self) -> None:
        """End the connection without a report and discard what is queued."""
        self._loss_reported = True
        self._outbox.abandon()
        self.channel.abort()
