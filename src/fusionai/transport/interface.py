"""The transport interface: framed messages with tensors between identified machines.

Implementations: `routes.tcp` (mutual TLS 1.3), `routes.quic` (through NATs) and `peer_transport`, which chooses a
route for each peer. `wire` defines frames and messages; `execution`, `broker`, `client` and `peer` use
channels.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.frame import FrameLimits
from fusionai.wire.messages import Message, RouteKind, Stream

Role = Literal["broker", "member", "stranger"]
"""Role of the other side according to its certificate. A stranger showed no certificate and may only ask to join."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Authenticated other side of a channel. `peer` is None for a stranger."""

    peer: PeerId | None
    role: Role
    host: str = field(default="", compare=False)
    """Network host of the other side as seen from here; empty for transports without hosts. It does not identify the
    peer."""
    port: int = field(default=0, compare=False)
    expires_at_s: float = field(default=math.inf, compare=False)
    """End of its certificate, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and the tensors listed in its `tensors` field, by name, in that order. The receiver owns their
    memory."""

    message: Message
    tensors: dict[str, HostTensor]


@dataclass(slots=True)
class ChannelStats:
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_frames: int = 0
    received_frames: int = 0
    arrived_bytes: int = 0
    """All bytes read from the network so far, including those of incomplete frames. An increase is a sign of life."""


class Channel(Protocol):
    """An ordered, reliable, encrypted connection. After a loss every call raises `ChannelClosed`."""

    remote: Remote
    stream: Stream
    stats: ChannelStats
    route: RouteKind
    """Route of the connection: LAN, direct, QUIC or relay."""

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        """Queue a frame. Returns when the tensors' buffers may be reused and the send queue is below its high-water
        mark. `message.tensors` must describe `tensors`. Frames never interleave."""
        ...

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:
        """Queue a frame if that needs no waiting and return True. Otherwise queue nothing and return False. Raises the
        same errors as `send`."""
        ...

    def admit(self, limits: FrameLimits | None = None) -> None:
        """Let the other side, which dialled, send frames of `limits` (None: all that its stream allows), because it has
        shown what entitles it to them. Until then frames are small, the channel counts as a guest of its listener, and
        it ends after a while. Does nothing on the dialling side
        and for strangers."""
        ...

    async def receive(self) -> Envelope:
        """Return the next frame. Raises `ChannelClosed` at the end of the channel; closes and raises `WireError` on
        malformed data."""
        ...

    async def close(self) -> None:
        """Flush and close. Idempotent."""
        ...

    def abort(self) -> None:
        """Drop the connection at once, without flushing and without waiting for the other side. Idempotent."""
        ...

    @property
    def closed(self) -> bool: ...

    @property
    def acknowledges(self) -> bool | None:
        """Return whether the other machine's kernel acknowledges sent data; None if this is unknown. The kernel also
        acknowledges for a process that is stopped or gets no CPU time."""
        ...


class Listener(Protocol):
    """An open listening address. `addresses` are the candidates that other machines may dial, e.g.
    `tcp://192.168.1.7:4711`."""

    addresses: tuple[str, ...]

    async def close(self) -> None: ...


Accept = Callable[[Channel], Awaitable[None]]
"""Called once per accepted channel, in its own task. The channel is closed when the call returns."""


class Transport(Protocol):
    """Opens channels with this machine's identity."""

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> Listener:
        """Listen on `host`. `port` 0 picks a free port; `strangers` also accepts connections without a client
        certificate."""
        ...

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> Channel:
        """Try the candidate addresses; the first success wins. `expect` None means "the broker of my pool". Raises
        `TransportError` (no answer), `TrustError` (another machine answered), `RefusedError`."""
        ...
