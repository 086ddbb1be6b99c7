"""What all channels share: the handshake, the inbox, the frame limits of the current phase and the counters.

Decides when a channel is open and how it ends. Knows nothing of sockets: the subclasses in `memory`, `tcp_channel` and
`quic_channel` move the bytes. `handshake` defines the first messages.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fusionai.primitives.errors import ChannelClosed, FusionError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.transport import handshake
from fusionai.transport.inbox import Inbox
from fusionai.transport.interface import ChannelStats, Envelope, Remote, Role
from fusionai.transport.link_figures import UNKNOWN, LinkFigures
from fusionai.wire.frame import GREETING_LIMITS, encode_frame_head
from fusionai.wire.messages import Message, Refused, Stream, Way
from fusionai.wire.reader import Allocate, Frame, FrameReader


@dataclass(frozen=True, slots=True)
class Dialling:
    """Request of the dialling side: the peer it expects and the stream it wants."""

    expect: PeerId | None
    stream: Stream


class FramedChannel(ABC):
    """A `Channel` without the network part. `dialling` is None on the listening side."""

    def __init__(self, *, own_role: Role, dialling: Dialling | None, allocate: Allocate) -> None:
        self.remote = Remote(None, "stranger")
        self.stream: Stream = dialling.stream if dialling is not None else "control"
        self.stats = ChannelStats()
        self.way: Way = "lan"
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when the handshake is over, or failed with the reason why it can't succeed."""
        # The waiting task may have given up. Reading the exception avoids asyncio's warning about an unread failure.
        self.opened.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._own_role: Role = own_role
        self._dialling = dialling
        self._reader = FrameReader(GREETING_LIMITS, allocate)
        self._outbound = GREETING_LIMITS
        self._inbox = Inbox(self._pause_reading, self._resume_reading)
        self._closing = False

    @property
    def closed(self) -> bool:
        return self._closing or self._inbox.ended

    @property
    def figures(self) -> LinkFigures:
        """Kernel or library statistics of the network path, as far as this transport measures it."""
        return UNKNOWN

    @property
    def acknowledges(self) -> bool | None:
        return None

    @abstractmethod
    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:  # noqa: ARG002
        """Return False: this default can't know whether sending would wait."""
        self._check_open()
        return False

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    async def receive(self) -> Envelope:
        return await self._inbox.get()

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Send a small, complete handshake frame at once."""

    @abstractmethod
    def _abort(self) -> None:
        """Drop the connection without flushing. Leads to a later call of `_lost`, or does nothing more."""

    @abstractmethod
    def _finish(self) -> None:
        """End the connection once everything written has been sent. Returns at once."""

    @abstractmethod
    def _pause_reading(self) -> None: ...

    @abstractmethod
    def _resume_reading(self) -> None: ...

    def _connected(self, remote: Remote) -> None:
        """The connection is up and the other side's identity is proven. The dialling side sends the first message."""
        self.remote = remote
        if self._dialling is None:
            return
        try:
            handshake.check_remote(remote, self._dialling.expect)
        except FusionError as error:
            self._fail(error)
            return
        self._write(encode_frame_head(handshake.hello(self.stream), (), GREETING_LIMITS))

    def _arrived(self, frame: Frame) -> None:
        """Handle a complete incoming frame."""
        if self.opened.done():
            self.stats.received_frames += 1
            self.stats.received_bytes += frame.nbytes
            self._inbox.put(Envelope(frame.message, frame.tensors), frame.nbytes)
        elif self._dialling is not None:
            handshake.check_answer(frame.message)
            self._open()
        else:
            self.stream, reply = handshake.answer(frame.message, self.remote)
            self._write(encode_frame_head(reply, (), GREETING_LIMITS))
            if isinstance(reply, Refused):
                self._settle(handshake.refusal(reply))
                self._finish()
            else:
                self._open()

    def _open(self) -> None:
        self._reader.limits = handshake.limits_from(self.remote.role, self.stream)
        self._outbound = handshake.limits_from(self._own_role, self.stream)
        self.opened.set_result(None)

    def _drain_reader(self) -> None:
        """Take every complete frame out of the reader. Malformed data ends the channel."""
        try:
            while not self._inbox.ended and (frame := self._reader.next()) is not None:
                self._arrived(frame)
        except FusionError as error:
            self._fail(error)

    def _fail(self, error: FusionError) -> None:
        """End the channel with an error that this side detected."""
        self._settle(error)
        self._abort()

    def _lost(self, reason: str) -> None:
        """The connection ended, closed by either side or broken."""
        if self._reader.midway:
            reason = f"{reason}, in the middle of a frame"
        self._settle(ChannelClosed(f"{reason}."))

    def _settle(self, error: FusionError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
        self._inbox.end(error)

    def _check_open(self) -> None:
        """Raises `ChannelClosed` if nothing can be sent any more, `WireError` before the end of the handshake."""
        if self.closed:
            raise ChannelClosed(f"the channel on stream {self.stream} is closed.")
        if not self.opened.done():
            raise WireError("expected the handshake to be over before anything is sent.")
