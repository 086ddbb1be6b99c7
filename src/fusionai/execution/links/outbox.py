"""An ordered send queue in front of a channel, so that computing and sending overlap.

Messages are sent in the order of `post`. A lost channel is reported once through `on_lost`, and later posts are
dropped: the poster learns of the loss from that event instead of an exception in the middle of other work. A message
that can't be sent at all (a frame that is too large) also ends the channel, because the other side must not wait for
it.

`execution.training.member` and `training.driver` post; `transport` sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel
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
