"""The transport interface: framed messages with tensors between identified machines. Decides nothing about jobs.

Implementations: `transport.tcp` (mutual TLS 1.3) and `transport.quic`. One conformance suite runs on all. Neighbours:
`wire` gives frames and messages; `execution`, `broker`, `client`, `peer` use channels.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Message, Stream, Way

Role = Literal["broker", "member", "stranger"]
"""Who a certificate says the other side is; a stranger showed none (it may only ask to join)."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The authenticated other side. `peer` is None for a stranger."""

    peer: PeerId | None
    role: Role
    host: str = field(default="", compare=False)
    """Where the connection comes from or goes to, as this side sees it; empty where the transport has no such thing.
    Whoever is identified by it is not."""
    port: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and the tensors named in its `tensors` field, by name, in order. Their memory is the receiver's."""

    message: Message
    tensors: dict[str, HostTensor]


@dataclass(slots=True)
class ChannelStats:
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_frames: int = 0
    received_frames: int = 0
    arrived_bytes: int = 0
    """Everything read from the network so far, frames not yet whole included: a sign of life."""


class Channel(Protocol):
    """An ordered, reliable, encrypted connection. After a loss every call raises `ChannelClosed`."""

    remote: Remote
    stream: Stream
    stats: ChannelStats
    way: Way
    """Which way it goes."""

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Queue a frame; returns when the buffers may be reused and the sending side is below its high-water mark.

        `message.tensors` must describe `tensors`. Whole frames never interleave."""
        ...

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:
        """What `send` does, where nothing has to be waited for; False, with nothing sent, where something has. Raises
        what `send` raises."""
        ...

    async def receive(self) -> Envelope:
        """Next frame. Raises `ChannelClosed` at the end, `WireError` (and closes) on anything malformed."""
        ...

    async def close(self) -> None:
        """Flush and close; idempotent."""
        ...

    def abort(self) -> None:
        """Drop the connection at once: nothing is flushed, nobody is waited for. Idempotent."""
        ...

    @property
    def closed(self) -> bool: ...

    @property
    def acknowledges(self) -> bool | None:
        """Whether the other machine acknowledges what was sent to it, by the kernel's account; None: nobody can tell.

        It does so for a process that is starved or stopped, too."""
        ...


class Listener(Protocol):
    """An open door. `addresses` are candidates others may dial, e.g. `tcp://192.168.1.7:4711`."""

    addresses: tuple[str, ...]

    async def close(self) -> None: ...


Accept = Callable[[Channel], Awaitable[None]]
"""Called once per accepted channel, in its own task; the channel is closed when it returns."""


class Transport(Protocol):
    """Makes channels. A transport holds this machine's identity."""

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> Listener:
        """`port` 0 picks a free one. With `strangers`, connections without a client certificate are let in as such."""
        ...

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> Channel:
        """Try the candidates, first success wins. `expect` None means "the broker of my pool".

        Raises `TransportError` (nobody answered), `TrustError` (somebody else answered), `RefusedError`."""
        ...
