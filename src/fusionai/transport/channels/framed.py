"""What all channels share: the version handshake, the queue of received envelopes, and the limits of frames.

The dialling side sends `Hello` and gets `Welcome` or `Refused`. The handshake decides which protocol versions are
compatible, which streams a stranger may open, and which frame limits hold afterwards. The dialling side has little to
say until the listening side calls `admit`: small frames, and one of them in the queue. A full queue pauses reading from
the network. `channels.accepting` runs the channels of a listener.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fusionai import __version__
from fusionai.primitives.errors import ChannelClosed, FusionError, RefusedError, TrustError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.channels.link import UNKNOWN, LinkFigures
from fusionai.transport.channels.pace import WINDOW_S, Arrived, FramePace
from fusionai.transport.interface import ChannelStats, Envelope, Remote, Role
from fusionai.wire.frame import (
    DOOR_LIMITS,
    GREETING_LIMITS,
    STRANGER_LIMITS,
    STREAM_LIMITS,
    Frame,
    FrameLimits,
    FrameReader,
    encode_frame_head,
)
from fusionai.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REFUSAL_SENTENCES,
    Hello,
    Message,
    Refused,
    RouteKind,
    Stream,
    Welcome,
)

EXPIRY_CHECK_S: Final = 5.0
"""Longest time between two looks at the clock: it may be set, and timers stand still while a machine sleeps."""
log = logging.getLogger(__name__)
SOFTWARE: Final = f"fusionai/{__version__}"


def hello(stream: Stream) -> Hello:
    return Hello(stream=stream, software=SOFTWARE)


def answer(message: Message, remote: Remote) -> tuple[Stream, Welcome | Refused]:
    """Return the listening side's answer to the first message. Raises `WireError` if that is no `Hello`."""
    if not isinstance(message, Hello):
        raise WireError(f"expected hello as the first message, got {message.__struct_config__.tag}.")
    version = min(message.newest_version, PROTOCOL_VERSION)
    if version < max(message.oldest_version, OLDEST_PROTOCOL_VERSION):
        reason = (
            f"This side speaks protocol versions {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
            f"the other {message.oldest_version} to {message.newest_version}."
        )
        return message.stream, Refused(code="protocol_version", reason=reason)
    if remote.role == "stranger" and message.stream != "control":
        return message.stream, Refused(code="not_authorised", reason="A stranger may only ask to join.")
    return message.stream, Welcome(version=version, software=SOFTWARE)


def check_answer(message: Message) -> None:
    """Check the answer to `Hello`. Raises `RefusedError` on a refusal, `WireError` on anything but a valid welcome."""
    match message:
        case Welcome(version=version):
            if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
                raise WireError(f"expected a protocol version that this side offered, got {version}.")
        case Refused():
            raise refusal(message)
        case _:
            raise WireError(f"expected welcome, got {message.__struct_config__.tag}.")


def refusal(message: Refused) -> RefusedError:
    """The refusal as an error: the code's sentence, with the other side's reason as hint."""
    return RefusedError(REFUSAL_SENTENCES[message.code], code=message.code, hint=message.reason or None)


def check_remote(remote: Remote, expect: PeerId | None) -> None:
    """Raises `TrustError` unless the other side is `expect`, or the pool's broker if `expect` is None."""
    if expect is None and remote.role != "broker":
        raise TrustError(f"expected the pool's broker, got a {remote.role} of the pool at that address.")
    if expect is not None and remote.peer != expect:
        got = "a stranger" if remote.peer is None else f"peer {short(remote.peer)}"
        raise TrustError(f"expected peer {short(expect)}, got {got} at that address.")


def limits_from(sender: Role, stream: Stream) -> FrameLimits:
    """Return the limits of frames that a side with this role may send after the handshake."""
    return STRANGER_LIMITS if sender == "stranger" else STREAM_LIMITS[stream]


HIGH_WATER_BYTES: Final = 8 * 2**20
"""Queued bytes above which reading pauses. One frame may be larger; a second frame is then not read before it is
taken."""
LARGE_ALLOCATION_BYTES: Final = 2**20
"""Size in bytes from which receive buffers are allocated by numpy."""
HIGH_WATER_FRAMES: Final = 256
"""Queued frames above which reading pauses, because small frames cost more memory than their bytes."""


class ReceiveBuffers:
    """Memory for the large frames that arrive on all connections of a machine. A buffer counts from the moment a frame
    begins until the last tensor in it is dropped. `limit_bytes`: most of them together; None: no limit."""

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._held_bytes = 0
        self._freed: deque[int] = deque()
        """Sizes of dropped buffers, which may be dropped on any thread."""

    @property
    def nbytes(self) -> int:
        while self._freed:
            self._held_bytes -= self._freed.popleft()
        return self._held_bytes

    def allocate(self, count: int) -> memoryview:
        """Return a buffer. Raises `MemoryError` beyond the limit."""
        if count < LARGE_ALLOCATION_BYTES:
            return memoryview(bytearray(count))
        if self.limit_bytes is not None and self.nbytes + count > self.limit_bytes:
            raise MemoryError(
                f"what this machine has received and still keeps takes {self.nbytes} bytes of at most "
                f"{self.limit_bytes}"
            )
        # numpy neither clears a large buffer (a second pass over its memory) nor touches it before data arrives.
        buffer = np.empty(count, np.uint8)
        self._held_bytes += count
        weakref.finalize(buffer, self._freed.append, count).atexit = False
        return buffer.data


class Inbox:
    """Incoming queue of one channel. `pause` and `resume` are called when the high-water mark is crossed."""

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause = pause
        self._resume = resume
        self._high_water_bytes = HIGH_WATER_BYTES
        self._waiting: deque[tuple[Envelope, int]] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._end: FusionError | None = None
        self._getters: deque[asyncio.Future[None]] = deque()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def limit(self, high_water_bytes: int) -> None:
        """Change the high-water mark. 0: reading pauses while one frame waits."""
        self._high_water_bytes = high_water_bytes
        if self._paused and not self._above():
            self._paused = False
            self._resume()

    def put(self, envelope: Envelope, nbytes: int) -> None:
        """Add an arrived frame. Ignored after the end."""
        if self._end is not None:
            return
        self._waiting.append((envelope, nbytes))
        self._waiting_bytes += nbytes
        if not self._paused and self._above():
            self._paused = True
            self._pause()
        self._wake_one()

    def end(self, error: FusionError, *, discard: bool = False) -> None:
        """End the queue: queued envelopes are still delivered (unless `discard`), then `error` is raised."""
        if discard:
            self._waiting.clear()
            self._waiting_bytes = 0
        if self._end is None or discard:
            self._end = error
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)

    async def get(self) -> Envelope:
        """Return the next envelope. After the end raises the end's error: a `WireError` once, then always
        `ChannelClosed`."""
        while not self._waiting:
            if self._end is not None:
                error = self._end
                if isinstance(error, ChannelClosed):
                    raise ChannelClosed(error.message, hint=error.hint)
                self._end = ChannelClosed(f"the channel is closed: {error.message}")
                raise error
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # The getter was woken and cancelled at the same time: wake another one, which would otherwise wait for
                # ever.
                if getter.done() and not getter.cancelled():
                    self._wake_one()
                raise
            finally:
                self._getters.remove(getter)
        envelope, nbytes = self._waiting.popleft()
        self._waiting_bytes -= nbytes
        if self._paused and not self._above():
            self._paused = False
            self._resume()
        return envelope

    def _above(self) -> bool:
        return self._waiting_bytes > self._high_water_bytes or len(self._waiting) > HIGH_WATER_FRAMES

    def _wake_one(self) -> None:
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)
                return


@dataclass(frozen=True, slots=True)
class Dialling:
    """Request of the dialling side: the peer it expects and the stream it wants. `beside`: the peer may be on this
    machine, so that a name may stand for a loopback address."""

    expect: PeerId | None
    stream: Stream
    beside: bool = True


class FramedChannel(ABC):
    """A `Channel` without the network part. `dialling` is None on the listening side."""

    def __init__(self, *, own_role: Role, dialling: Dialling | None, buffers: ReceiveBuffers | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.remote = Remote(None, "stranger")
        self.stream: Stream = dialling.stream if dialling is not None else "control"
        self.stats = ChannelStats()
        self.route: RouteKind = "lan"
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """Resolved when the handshake is over, or failed with the reason why it can't succeed."""
        # The waiting task may have given up. Reading the exception avoids asyncio's warning about an unread failure.
        self.opened.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._own_role: Role = own_role
        self._dialling = dialling
        self._reader = FrameReader(GREETING_LIMITS, (buffers or ReceiveBuffers()).allocate)
        self._outbound = GREETING_LIMITS
        self._inbox = Inbox(self._pause_reading, self._resume_reading)
        self._closing = False
        self.on_admitted: Callable[[], None] | None = None
        """Called when the listening side admits the other side."""
        self._pace = FramePace()
        self._last_arrival_s = self._loop.time()
        """When something arrived last, on the event loop's clock."""

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

    def admit(self, limits: FrameLimits | None = None) -> None:
        if self._dialling is not None or self.remote.role == "stranger" or self.closed:
            return
        self._reader.limits = limits or limits_from(self.remote.role, self.stream)
        self._inbox.limit(HIGH_WATER_BYTES)
        self._pace.window_s = WINDOW_S
        if self.on_admitted is not None:
            self.on_admitted()

    @abstractmethod
    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:  # noqa: ARG002
        """Return False: this default can't know whether sending would wait."""
        self._check_open()
        return False

    @abstractmethod
    async def close(self) -> None: ...

    def abort(self) -> None:
        self._closing = True
        dropped = ChannelClosed("this side dropped the connection.")
        self._settle(dropped)
        self._inbox.end(dropped, discard=True)
        self._abort()

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

    @abstractmethod
    def reads(self) -> bool:
        """Return whether this side reads from the network now."""

    def _connected(self, remote: Remote) -> None:
        """The connection is up and the other side's identity is proven. The dialling side sends the first message."""
        self.remote = remote
        _end_when_expired(weakref.ref(self), remote.expires_at_s)
        if self._dialling is None:
            return
        try:
            check_remote(remote, self._dialling.expect)
        except FusionError as error:
            self._fail(error)
            return
        self._write(encode_frame_head(hello(self.stream), (), GREETING_LIMITS))

    def _arrived(self, frame: Frame) -> None:
        """Handle a complete incoming frame."""
        if self.opened.done():
            self.stats.received_frames += 1
            self.stats.received_bytes += frame.nbytes
            self._inbox.put(Envelope(frame.message, frame.tensors), frame.nbytes)
        elif self._dialling is not None:
            check_answer(frame.message)
            self._open()
        else:
            self.stream, reply = answer(frame.message, self.remote)
            self._write(encode_frame_head(reply, (), GREETING_LIMITS))
            if isinstance(reply, Refused):
                self._settle(refusal(reply))
                self._finish()
            else:
                self._open()

    def _open(self) -> None:
        known = limits_from(self.remote.role, self.stream)
        if self._dialling is not None:
            self._reader.limits = known
            self._pace.window_s = WINDOW_S
        else:
            self._reader.limits = known if self.remote.role == "stranger" else DOOR_LIMITS
            self._inbox.limit(0)
        self._outbound = limits_from(self._own_role, self.stream)
        self.opened.set_result(None)

    def _drain_reader(self) -> None:
        """Take every complete frame out of the reader. Malformed data ends the channel."""
        try:
            while not self._inbox.ended and (frame := self._reader.next()) is not None:
                self._arrived(frame)
        except FusionError as error:
            self._fail(error)
        self._watch_pace()

    def _watch_pace(self) -> None:
        """Give an incomplete frame its deadline."""
        if not self._pace.watching and self._reader.midway and self.opened.done() and not self.closed:
            self._pace.watch(self)

    def incomplete(self) -> Arrived | None:
        return Arrived(self.stats.received_frames, self.stats.arrived_bytes) if self._reader.midway else None

    def fall_behind(self, reason: str) -> None:
        self._fail(ChannelClosed(reason))

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
        self._pace.end()
        self._reader.end()
        self._inbox.end(error)

    def _count_sent(self, nbytes: int) -> None:
        self.stats.sent_frames += 1
        self.stats.sent_bytes += nbytes

    def _check_open(self) -> None:
        """Raises `ChannelClosed` if nothing can be sent any more, `WireError` before the end of the handshake."""
        if self.closed:
            raise ChannelClosed(f"the channel on stream {self.stream} is closed.")
        if not self.opened.done():
            raise WireError("expected the handshake to be over before anything is sent.")


def joined(head: bytes, tensors: Sequence[HostTensor]) -> bytes:
    """Return a small frame as one buffer."""
    return b"".join([head, *(tensor.data for tensor in tensors)]) if tensors else head


def _end_when_expired(channel: weakref.ref[FramedChannel], expires_at_s: float) -> None:
    """End a connection when the certificate that it was opened with has expired, now or later."""
    one = channel()
    if one is None or one.closed or expires_at_s == math.inf:
        return
    left_s = expires_at_s - time.time()
    if left_s > 0:
        loop = asyncio.get_running_loop()
        loop.call_later(min(left_s, EXPIRY_CHECK_S), _end_when_expired, channel, expires_at_s)
        return
    log.warning("a connection ends: the other side's certificate has expired")
    one.abort()
