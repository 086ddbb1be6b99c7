"""The driver's state connection as a source of weights. A member can't dial the owner, whose machine may be
unreachable, so it requests weights on the connection that the owner made.

    inlet = WeightInlet(channel)              # in `serve_state`, when the driver's state connection arrives
    await inlet.serve()                       # reads until it ends, answers pings

    @asynccontextmanager
    async def reach(source):                  # for `weights.fetch`
        if source.peer == owner:
            yield await the_present_inlet()   # the newest; raises `TransportError` if there is none
        else:
            async with dialled(transport, source, placement.opening) as channel:
                yield channel

The owner runs `WeightDesk.answer` on the connection it made. `execution.weights.fetching` requests through this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from fusionai.execution.links.keepalive import Line
from fusionai.primitives.errors import ChannelClosed, ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.messages import Stream, Way

MAX_UNREAD: Final = 64
"""Answers that may wait unread: those in flight, and those whose request was given up."""


class WeightInlet:
    """A `Channel` for one fetch after the other. Closing it ends the fetch, not the connection."""

    def __init__(self, channel: Channel) -> None:
        self.remote = channel.remote
        self.stream: Stream = channel.stream
        self.way: Way = channel.way
        self.stats = channel.stats
        self._line = Line(channel)
        self._answers: asyncio.Queue[Envelope | None] = asyncio.Queue()

    async def serve(self) -> None:
        """Read until the connection ends. Raises `ExecutionError` if anything but weights arrives."""
        try:
            while True:
                envelope = await self._line.receive()
                if not isinstance(envelope.message, wire.WeightPieces | wire.Refused):
                    raise ExecutionError(f"expected WeightPieces, got a {type(envelope.message).__name__}.")
                if self._answers.qsize() >= MAX_UNREAD:
                    raise ExecutionError("more answers arrived than were requested.")
                self._answers.put_nowait(envelope)
        except ChannelClosed:
            return
        finally:
            self._line.drop()
            self._answers.put_nowait(None)

    async def send(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        await self._line.channel.send(message, tensors)

    def send_at_once(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> bool:
        return self._line.channel.send_at_once(message, tensors)

    async def receive(self) -> Envelope:
        envelope = await self._answers.get()
        if envelope is None:
            self._answers.put_nowait(None)
            raise ChannelClosed("the connection that the job's owner made has ended.")
        return envelope

    async def close(self) -> None:
        """Do nothing: the driver ends the connection."""

    def abort(self) -> None:
        """Like `close`."""

    @property
    def closed(self) -> bool:
        return self._line.channel.closed

    @property
    def acknowledges(self) -> bool | None:
        return self._line.channel.acknowledges
