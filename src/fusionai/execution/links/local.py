"""An in-process channel between the driver and the job owner's own stages. Nothing is encoded.

`execution.links.connections` makes a pair; the interface is `transport.interface.Channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fusionai.primitives.errors import ChannelClosed
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import ChannelStats, Envelope, Remote
from fusionai.wire.messages import Message, Stream, Way


class LocalChannel:
    """One end of an in-process channel. `pair` makes both ends."""

    def __init__(self, peer: PeerId, stream: Stream) -> None:
        self.remote = Remote(peer, "member")
        self.stream: Stream = stream
        self.way: Way = "lan"
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
        headers = getattr(message, "tensors", ())
        named: dict[str, HostTensor] = {h.name: tensor for h, tensor in zip(headers, tensors, strict=True)}
        self.stats.sent_frames += 1
        self._other.stats.received_frames += 1
        self._other.stats.arrived_bytes += 1  # nothing is encoded, but it counts as a sign of life
        self._other._inbox.put_nowait(Envelope(message, named))

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:  # noqa: ARG002
        """Send nothing and return False: messages on this channel are never urgent."""
        return False

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
