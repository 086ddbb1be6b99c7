"""One stream of one QUIC connection, as a channel.

QUIC proves that the other side holds its key. The certificate proves that the key belongs to this pool, so both sides
send theirs ahead of the first frame: a length of four bytes, then DER; a stranger sends length 0. UDP does not report
a dead process, so both sides send a datagram twice a second.

Decides how bytes move and when the other side counts as gone. `framed` defines what frames mean, `routes.quic`
loads the library, dials and accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from fusionai.primitives.errors import ChannelClosed, FusionError, TrustError
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.channels.framed import Dialling, FramedChannel, joined
from fusionai.transport.channels.link import DEAD_AFTER_S, UNKNOWN, LinkFigures, part
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Remote, Role
from fusionai.transport.security.certificates import Credentials, MemberCredentials, verify_certificate
from fusionai.transport.security.identity import peer_of
from fusionai.wire.frame import encode_frame_head
from fusionai.wire.messages import Message, RouteKind

_LOG: Final = logging.getLogger(__name__)
BEAT_S: Final = 0.5
"""Time between datagrams that show that this side is alive, in seconds."""
SLICE_BYTES: Final = 256 * 2**10
READ_BYTES: Final = 256 * 2**10
MAX_CERTIFICATE_BYTES: Final = 8192
GOODBYE_TIMEOUT_S: Final = 5.0
"""Seconds that closing waits until the other side has acknowledged everything."""
_LENGTH: Final = struct.Struct("<I")


class QuicChannel(FramedChannel):
    """Implements `Channel`. `errors` is the exception type that the library raises when a connection ends."""

    def __init__(
        self,
        connection: Any,
        credentials: Credentials,
        own_role: Role,
        dialling: Dialling | None,
        limits: TransferLimits,
        errors: type[Exception],
        remote_host: str,
        remote_port: int,
        *,
        strangers: bool,
    ) -> None:
        super().__init__(own_role=own_role, dialling=dialling, buffers=limits.received)
        self.route: RouteKind = "quic"
        self._connection = connection
        self._credentials = credentials
        self._limits = limits
        self._errors = errors
        self._place = (remote_host, remote_port)
        self._strangers = strangers
        self._send: Any = None
        self._sending = asyncio.Lock()
        self._waiting: deque[bytes] = deque()
        self._readable = asyncio.Event()
        self._readable.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing_task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        """Set when all tasks of this channel have ended or been cancelled."""

    def start(self, stream: Any) -> None:
        """The stream is open: send this side's certificate and start reading until the end."""
        self._send = stream.send()
        self._last_arrival_s = self._loop.time()
        own = self._credentials.certificate if isinstance(self._credentials, MemberCredentials) else b""
        self._write(_LENGTH.pack(len(own)) + own)
        for work in (self._read(stream.recv()), self._send_datagrams(), self._receive_datagrams()):
            self._start(work)

    @property
    def figures(self) -> LinkFigures:
        """QUIC's own statistics. QUIC reports no rate, so the bandwidth is 0."""
        if self.closed:
            return UNKNOWN
        stats = self._connection.stats()
        return LinkFigures((self._connection.rtt() or 0) / 1000, 0.0, part(stats.lost_packets, stats.udp_tx_datagrams))

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        self._check_open()
        head = encode_frame_head(message, tensors, self._outbound)
        body_bytes = sum(tensor.nbytes for tensor in tensors)
        async with self._sending:
            self._check_open()
            try:
                await self._put_waiting()
                if body_bytes <= SLICE_BYTES:
                    await self._put(joined(head, tensors))
                else:
                    await self._put(head)
                    for tensor in tensors:
                        for start in range(0, tensor.nbytes, SLICE_BYTES):
                            await self._put(bytes(tensor.data[start : start + SLICE_BYTES]))
            except self._errors as error:
                raise ChannelClosed(f"the connection was lost while sending ({error.message()}).") from error  # pyright: ignore[reportAttributeAccessIssue]
            except BaseException:
                # Half a frame may have been sent, so nothing sensible can follow it.
                self.abort()
                raise
        self._count_sent(len(head) + body_bytes)

    async def close(self) -> None:
        self._finish()
        if self._closing_task is not None:
            await asyncio.shield(self._closing_task)

    async def gone(self) -> None:
        """Return when the channel has ended, whichever side ended it."""
        await self._gone.wait()

    # Internals.

    async def _read(self, stream: Any) -> None:
        try:
            if not self.opened.done():
                self._connected(await self._verified_remote(stream))
            while not self._inbox.ended:
                await self._readable.wait()
                data = await stream.read(READ_BYTES)
                if not data:
                    break
                await self._feed(data)
            self._lost("the other side closed the channel")
        except self._errors as error:
            self._lost(_reason(error))
        except FusionError as error:
            self._settle(error)
        if self._closing_task is None:
            self._abort()

    async def _verified_remote(self, stream: Any) -> Remote:
        """Return the peer that the other side's certificate names. Raises `TrustError`."""
        (length,) = _LENGTH.unpack(await stream.read_exact(_LENGTH.size))
        if length > MAX_CERTIFICATE_BYTES:
            raise TrustError(f"expected a certificate of at most {MAX_CERTIFICATE_BYTES} bytes, got {length}.")
        host, port = self._place
        if not length:
            if not self._strangers:
                raise TrustError("the other side showed no certificate, and only members are let in here.")
            return Remote(None, "stranger", host, port)
        certificate = await stream.read_exact(length)
        certified = verify_certificate(certificate, self._credentials.authority_key, now_wall_s=time.time())
        if certified.peer != peer_of(self._connection.remote_id().to_bytes()):
            raise TrustError("expected a certificate for the key the connection was made with, got another's.")
        remote = self._credentials.admitted(certified, self.abort)
        return dataclasses.replace(remote, host=host, port=port)

    async def _feed(self, data: bytes) -> None:
        self._last_arrival_s = self._loop.time()
        self.stats.arrived_bytes += len(data)
        for frame in self._reader.feed(data):
            self._arrived(frame)
        self._watch_pace()
        if self._limits.download is not None:
            due_s = self._limits.download.take(len(data), self._loop.time())
            if due_s > 0:
                self._pace.excuse()
                await asyncio.sleep(due_s)

    async def _put(self, data: bytes) -> None:
        upload = self._limits.upload
        if upload is not None:
            due_s = upload.take(len(data), self._loop.time())
            if due_s > 0:
                await asyncio.sleep(due_s)
        await self._send.write_all(data)

    async def _send_datagrams(self) -> None:
        """Send a datagram twice a second. End the channel if nothing has arrived for too long while this side was
        running."""
        loop = self._loop
        while not self._gone.is_set():
            before_s = loop.time()
            with contextlib.suppress(self._errors):
                # Refused if too much waits to be sent or if the connection has ended; the reading task finds out which.
                self._connection.send_datagram(b"\x00")
            await asyncio.sleep(BEAT_S)
            if loop.time() - before_s > 2 * BEAT_S:
                # This side was suspended, so data that arrived meanwhile is still unread.
                self._last_arrival_s = loop.time()
            elif self._readable.is_set() and loop.time() - self._last_arrival_s > DEAD_AFTER_S:
                self._fail(ChannelClosed(f"the other side has sent nothing for {DEAD_AFTER_S:g} s."))
                return

    async def _receive_datagrams(self) -> None:
        try:
            while True:
                await self._connection.read_datagram()
                self._last_arrival_s = self._loop.time()
        except self._errors:
            # The connection has ended; reading the stream says why.
            return

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_gracefully(self) -> None:
        self._closing = True
        self._inbox.end(ChannelClosed("this side closed the channel."), discard=True)
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S), self._sending:
                if self._send is not None:
                    await self._put_waiting()
                    await self._send.finish()
                    # Waits until the other side has acknowledged everything.
                    await self._send.stopped()
        except (TimeoutError, self._errors) as error:
            _LOG.debug("the other side did not acknowledge everything before the end: %r", error)
        finally:
            self._connection.close(0, b"")
            self._end_tasks()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_tasks(self) -> None:
        self._pace.end()
        self._gone.set()
        self._readable.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._start(self._write_queued())

    async def _put_waiting(self) -> None:
        """Send what `_write` has queued, before the caller's own data."""
        while self._waiting:
            await self._put(self._waiting.popleft())

    async def _write_queued(self) -> None:
        try:
            async with self._sending:
                await self._put_waiting()
        except self._errors as error:
            self._lost(_reason(error))

    def _abort(self) -> None:
        self._connection.close(1, b"")
        self._end_tasks()

    def _finish(self) -> None:
        if self._closing_task is None:
            self._closing_task = self._loop.create_task(self._close_gracefully())

    def _pause_reading(self) -> None:
        self._pace.excuse()
        self._readable.clear()

    def reads(self) -> bool:
        return self._readable.is_set()

    def _resume_reading(self) -> None:
        self._last_arrival_s = self._loop.time()
        self._readable.set()


def _reason(error: Any) -> str:
    text = str(error.message()).splitlines()[0]
    return f"the connection was lost ({text})"
