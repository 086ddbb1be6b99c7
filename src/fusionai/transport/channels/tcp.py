"""One connection of mutual TLS 1.3 over TCP, as a channel. Decides buffers, high-water marks and deadlines.

Reading: TLS writes directly into the frame reader's buffers, so a tensor is copied once, by decryption. Writing: a
small frame goes in one write. A large body goes in slices; each waits for a grant of the machine's uplink and until the
connection is below its high-water mark.

`uplink` watches large bodies, `framed` defines what frames mean, `routes.tcp` dials and accepts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Sequence
from typing import Final, cast

from fusionai.primitives.errors import ChannelClosed, FusionError, TrustError
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.channels.framed import Dialling, FramedChannel, joined
from fusionai.transport.channels.link import (
    CHECK_EVERY_S,
    DEAD_AFTER_S,
    UNKNOWN,
    LinkFigures,
    acknowledges,
    set_options,
    tcp_figures,
    unacknowledged_s,
)
from fusionai.transport.channels.uplink import Bulk, RateLimit, TransferLimits
from fusionai.transport.interface import Role
from fusionai.transport.routes.addresses import route_to
from fusionai.transport.security.certificates import Credentials
from fusionai.wire.frame import encode_frame_head
from fusionai.wire.messages import Message, RouteKind

SMALL_BODY_BYTES: Final = 64 * 2**10
"""Largest body in bytes of a frame that is sent in one write, without a grant of the uplink."""
SLICE_BYTES: Final = 256 * 2**10
SMALL_READ_BYTES: Final = 16 * 2**10
"""Reads of at most this size are treated as small frames by the download limit."""
HIGH_WATER_BYTES: Final = 512 * 2**10
"""Unsent bytes in the connection's write buffer above which senders wait."""
STALLED_S: Final = 2.0
"""Time in seconds without progress after which closing gives up sending the rest."""
GOODBYE_TIMEOUT_S: Final = 5.0
"""Seconds that closing then waits for the other side to read everything and to close its end."""
_POLL_S: Final = 0.01
_DISCARDED: Final = bytearray(64 * 2**10)
"""Receives the bytes that still arrive for closed channels. Never read."""


class TcpChannel(FramedChannel, asyncio.BufferedProtocol):
    """Implements `Channel`. An event loop creates it as the protocol of a TLS connection."""

    def __init__(
        self,
        credentials: Credentials,
        own_role: Role,
        dialling: Dialling | None,
        limits: TransferLimits | None = None,
        *,
        relayed: bool = False,
    ) -> None:
        self._limits = limits or TransferLimits()
        super().__init__(own_role=own_role, dialling=dialling, buffers=self._limits.received)
        self.route: RouteKind = "relay" if relayed else "lan"
        self._credentials = credentials
        self._inbox_full = False
        self._over_limit = False
        """Whether reading is paused until the received bytes are within the download limit."""
        self._transport: asyncio.Transport | None = None
        self._sending = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()
        self._slices = 0
        self._bulk: Bulk | None = None
        """Created when the first large frame is sent."""
        self._watch: asyncio.TimerHandle | None = None

    @property
    def figures(self) -> LinkFigures:
        """The kernel's statistics. Over a relay the round trip is omitted, because it would be that to the relay."""
        sock = None if self._transport is None or self.closed else self._transport.get_extra_info("socket")
        if sock is None:
            return UNKNOWN
        found = tcp_figures(sock)
        return dataclasses.replace(found, round_trip_s=0.0) if self.route == "relay" else found

    @property
    def acknowledges(self) -> bool | None:
        """Unknown over a relay, because the relay acknowledges instead of the peer."""
        sock = None if self._transport is None or self.closed else self._transport.get_extra_info("socket")
        return None if sock is None or self.route == "relay" else acknowledges(sock)

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        self._check_open()
        head = encode_frame_head(message, tensors, self._outbound)
        body_bytes = sum(tensor.nbytes for tensor in tensors)
        async with self._sending:
            transport = self._live_transport()
            if body_bytes <= SMALL_BODY_BYTES:
                await self._wait_for_rate(len(head) + body_bytes)
                transport.write(joined(head, tensors))
                self._schedule_check()
            else:
                await self._send_large(transport, head, tensors)
            self._count_sent(len(head) + body_bytes)
            if not self._writable.is_set():
                await self._until_writable()

    def send_at_once(self, message: Message, tensors: Sequence[HostTensor] = ()) -> bool:
        transport = self._live_transport()
        body_bytes = sum(tensor.nbytes for tensor in tensors) if tensors else 0
        if body_bytes > SMALL_BODY_BYTES or self._sending.locked() or not self._writable.is_set():
            return False
        head = encode_frame_head(message, tensors, self._outbound)
        if (upload := self._limits.upload) is not None:
            now_s = self._loop.time()
            if not upload.admits_small(now_s):
                return False
            upload.take(len(head) + body_bytes, now_s)
        transport.write(joined(head, tensors))
        self._schedule_check()
        self._count_sent(len(head) + body_bytes)
        return True

    async def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._inbox.end(ChannelClosed("this side closed the channel."), discard=True)
            try:
                await self._flush()
            finally:
                self._finish()
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._gone.wait()
        except TimeoutError:
            self._abort()

    # Event loop callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        set_options(transport.get_extra_info("socket"))
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        if self.route != "relay":
            self.route = route_to(host)
        self._schedule_check()
        tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
        try:
            remote = self._credentials.remote(tls.getpeercert(binary_form=True), self.abort)
        except FusionError as error:
            self._fail(error)
            return
        self._connected(dataclasses.replace(remote, host=host, port=port))

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:  # noqa: ARG002 - the event loop's signature
        return _DISCARDED if self.closed else self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self.closed:
            self.stats.arrived_bytes += nbytes
            self._last_arrival_s = self._loop.time()
            if self._limits.download is not None:
                self._count_download(nbytes, self._limits.download)
            self._reader.advance(nbytes)
            self._drain_reader()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        match exc:
            case None if self._dialling is not None and not self.opened.done():
                self._settle(
                    ChannelClosed(
                        "the other side closed the connection before it answered.",
                        hint="It does so when this machine's certificate is not of its pool, or when it is overloaded.",
                    )
                )
            case None:
                self._lost("this side closed the channel" if self._closing else "the other side closed the channel")
            case ssl.SSLError() if not self.opened.done():
                self._settle(
                    TrustError(
                        f"the other side did not accept this machine's certificate ({exc.reason or exc}).",
                        hint="Check that both machines belong to the same pool.",
                    )
                )
            case _:
                self._lost(f"the connection was lost ({exc})")
        if self._watch is not None:
            self._watch.cancel()
        if self._bulk is not None:
            self._bulk.end()
        # The TLS layer keeps references to this protocol's methods. Clearing the transport breaks that cycle, which
        # would keep buffers of a quarter of a megabyte alive.
        self._transport = None
        self._gone.set()
        self._writable.set()

    # Internals.

    def _schedule_check(self) -> None:
        """Check that the other side is alive until all data is acknowledged. Keep-alive probes watch idle connections.
        What arrives acknowledges too, so nothing can be found before `DEAD_AFTER_S` have passed in silence."""
        if self._watch is None:
            earliest_s = self._last_arrival_s + DEAD_AFTER_S + CHECK_EVERY_S / 2
            self._watch = self._loop.call_at(max(self._loop.time() + CHECK_EVERY_S, earliest_s), self._check_alive)

    def _check_alive(self) -> None:
        """Drop the connection if the other side has gone silently."""
        self._watch = None
        if self._transport is None or self._gone.is_set():
            return
        if self._loop.time() < self._last_arrival_s + DEAD_AFTER_S:
            self._schedule_check()
            return
        sock = self._transport.get_extra_info("socket")
        if sock is None:  # asyncio has lost it in this iteration of the loop; `connection_lost` comes next
            return
        owed_s = unacknowledged_s(sock)
        if owed_s is not None and owed_s > DEAD_AFTER_S:
            self._fail(ChannelClosed(f"the other side has acknowledged nothing for {DEAD_AFTER_S:g} s."))
            return
        if owed_s is not None or self._transport.get_write_buffer_size() or not self._writable.is_set():
            self._schedule_check()

    async def _wait_for_rate(self, nbytes: int) -> None:
        """Wait until a small frame may be sent."""
        if (upload := self._limits.upload) is None:
            return
        now_s = self._loop.time()
        waits = not upload.admits_small(now_s)
        due_s = upload.take(nbytes, now_s)
        if waits:
            await self._wait(due_s)

    async def _send_large(self, transport: asyncio.Transport, head: bytes, tensors: Sequence[HostTensor]) -> None:
        if self._bulk is None:
            self._bulk = Bulk(transport, self._limits.uplink)
        upload = self._limits.upload
        slice_bytes = SLICE_BYTES if upload is None else upload.slice_bytes(SLICE_BYTES)
        if upload is not None:
            upload.take(len(head), self._loop.time())
        try:
            transport.write(head)
            for tensor in tensors:
                for start in range(0, tensor.nbytes, slice_bytes):
                    piece = tensor.data[start : start + slice_bytes]
                    await self._bulk.slice(piece.nbytes)
                    self._live_transport()  # it may have gone while other connections used the uplink
                    if upload is not None:
                        await self._wait(upload.take(piece.nbytes, self._loop.time()))
                    transport.write(piece)
                    self._schedule_check()
                    self._slices += 1
                    if not self._writable.is_set():
                        await self._until_writable()
        except BaseException:
            # Half a frame has been sent, so nothing sensible can follow it.
            self._abort()
            raise
        finally:
            self._bulk.written()

    async def _flush(self) -> None:
        """Wait until everything has been sent, including frames begun by other tasks. Gives up when nothing moves."""
        loop = self._loop
        seen, seen_at_s = (-1, -1), loop.time()
        while self._transport is not None and not self._gone.is_set():
            left_bytes = self._transport.get_write_buffer_size()
            if left_bytes == 0 and not self._sending.locked():
                return
            if (self._slices, left_bytes) != seen:
                seen, seen_at_s = (self._slices, left_bytes), loop.time()
            elif loop.time() - seen_at_s > STALLED_S:
                self._abort()
                return
            await asyncio.sleep(_POLL_S)

    async def _wait(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)
            if self._gone.is_set():
                raise ChannelClosed("the connection was lost while sending.")

    async def _until_writable(self) -> None:
        await self._writable.wait()
        if self._gone.is_set():
            raise ChannelClosed("the connection was lost while sending.")

    def _live_transport(self) -> asyncio.Transport:
        self._check_open()
        if self._transport is None:
            raise ChannelClosed("the channel was never connected.")
        return self._transport

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            self._schedule_check()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        # A second close would make asyncio's TLS transport forget its connection, and abort could no longer end it.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def _count_download(self, nbytes: int, download: RateLimit) -> None:
        """Count received bytes. If they exceed the limit, pause reading until they are within it."""
        now_s = self._loop.time()
        waits = nbytes > SMALL_READ_BYTES or not download.admits_small(now_s)
        due_s = download.take(nbytes, now_s)
        if waits and due_s > 0 and not self._over_limit:
            self._over_limit = True
            self._apply_pauses()
            self._loop.call_later(due_s, self._resume_after_limit)

    def _resume_after_limit(self) -> None:
        self._over_limit = False
        self._apply_pauses()

    def _pause_reading(self) -> None:
        self._inbox_full = True
        self._apply_pauses()

    def _resume_reading(self) -> None:
        self._inbox_full = False
        self._apply_pauses()

    def reads(self) -> bool:
        return not (self._inbox_full or self._over_limit)

    def _apply_pauses(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if not self.reads():
            self._pace.excuse()
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
