"""Channels within one process, for tests: real frames, real limits, no sockets and no clock.

Identities are what the test says they are. A `delay` hook stands for the link: a frame is delivered when the hook
returns, in order; while it waits, the sender feels the same high-water mark as on a network.
The conformance suite of transports runs on it too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fusionai.coordination.doorkeeping import CrowdCaps
from fusionai.primitives.errors import ChannelClosed, FusionError, TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.channels.accepting import AcceptedTasks, AcceptLimits
from fusionai.transport.channels.framed import Dialling, FramedChannel
from fusionai.transport.interface import Accept, Remote, Role
from fusionai.wire.frame import encode_frame_head
from fusionai.wire.messages import Message, Stream

SCHEME: Final = "memory://"
HIGH_WATER_BYTES: Final = 2**20
_ANY: Final = CrowdCaps(total=10_000, prefix=10_000, key=10_000)
_LIMITS: Final = AcceptLimits(
    greeting_s=3600.0, stranger_s=3600.0, guest_s=3600.0, half_open=_ANY, guests=_ANY, of_key=10_000
)

Delay = Callable[[Remote, Remote, int], Awaitable[None]]
"""(sender, receiver, bytes of the frame) -> returns when the frame may arrive."""


class MemoryNetwork:
    """Every transport of one network reaches every other's listeners."""

    def __init__(self, *, delay: Delay | None = None) -> None:
        self.delay = delay
        self._listeners: dict[str, MemoryListener] = {}
        self._channels: set[MemoryChannel] = set()
        self._ports = itertools.count(1)

    def transport(self, peer: PeerId | None, role: Role = "member") -> MemoryTransport:
        """A machine's access to the network. `peer` None is a stranger."""
        return MemoryTransport(self, Remote(peer, role))

    def disconnect(self, peer: PeerId) -> None:
        """This machine is gone: its channels end abruptly on both sides and nobody answers at its addresses."""
        for listener in [*self._listeners.values()]:
            if listener.owner.peer == peer:
                del self._listeners[listener.addresses[0]]
        for channel in [*self._channels]:
            if channel.owner.peer == peer:
                channel.cut()

    def open_listener(self, owner: Remote, accept: Accept, host: str, port: int, strangers: bool) -> MemoryListener:
        number = port or next(number for number in self._ports if f"{SCHEME}{host}:{number}" not in self._listeners)
        address = f"{SCHEME}{host}:{number}"
        if address in self._listeners:
            raise UsageError(f"port {number} on {host} is already in use.", hint="Choose another port.")
        listener = MemoryListener(self, owner, accept, address, strangers)
        self._listeners[address] = listener
        return listener

    def forget_listener(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.addresses[0]) is listener:
            del self._listeners[listener.addresses[0]]

    def connect(self, caller: Remote, address: str, dialling: Dialling) -> MemoryChannel:
        """Both ends of a new connection; returns the caller's, its handshake under way."""
        listener = self._listeners.get(address)
        if listener is None:
            raise TransportError(f"no answer from {address}.")
        if caller.role == "stranger" and not listener.strangers:
            raise TrustError(f"{address} lets in members of its pool only.")
        near = MemoryChannel(self, caller, dialling)
        far = MemoryChannel(self, listener.owner, None)
        near.other, far.other = far, near
        self._channels |= {near, far}
        listener.greet(far)
        far.start(caller)
        near.start(listener.owner)
        return near

    def forget_channel(self, channel: MemoryChannel) -> None:
        self._channels.discard(channel)


class MemoryTransport:
    """Implements `Transport`."""

    def __init__(self, network: MemoryNetwork, owner: Remote) -> None:
        self._network = network
        self._owner = owner

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> MemoryListener:
        return self._network.open_listener(self._owner, accept, host, port, strangers)

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> MemoryChannel:
        failure: FusionError = TransportError("expected an address to dial, got none.")
        for address in addresses:
            try:
                channel = self._network.connect(self._owner, address, Dialling(expect, stream))
            except FusionError as error:
                failure = error
                continue
            try:
                async with asyncio.timeout(timeout_s):
                    await channel.opened
            except TimeoutError:
                channel.cut()
                failure = TransportError(f"{address} did not answer within {timeout_s:g} s.")
            except TrustError as error:
                failure = error
            else:
                return channel
        raise failure


class MemoryListener:
    """Implements `Listener`."""

    def __init__(self, network: MemoryNetwork, owner: Remote, accept: Accept, address: str, strangers: bool) -> None:
        self.addresses = (address,)
        self.owner = owner
        self.strangers = strangers
        self._network = network
        self._accepted = AcceptedTasks(accept, _LIMITS)

    def greet(self, channel: MemoryChannel) -> None:
        async def connected() -> FramedChannel:
            return channel

        self._accepted.start(self._accepted.serve(connected, ""), "")

    async def close(self) -> None:
        self._network.forget_listener(self)
        await self._accepted.close()


class MemoryChannel(FramedChannel):
    """One end. A task per end carries what this end sends to the other, whole writes in order."""

    other: MemoryChannel

    def __init__(self, network: MemoryNetwork, owner: Remote, dialling: Dialling | None) -> None:
        super().__init__(own_role=owner.role, dialling=dialling)
        self.owner = owner
        self._network = network
        self._transit: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._transit_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._readable = asyncio.Event()
        self._readable.set()
        self._carrier: asyncio.Task[None] | None = None

    def start(self, remote: Remote) -> None:
        """The connection is up, `remote` at its other end."""
        self._carrier = asyncio.get_running_loop().create_task(self._carry())
        self._connected(remote)

    async def send(self, message: Message, tensors: Sequence[HostTensor] = ()) -> None:
        self._check_open()
        head = encode_frame_head(message, tensors, self._outbound)
        await self.send_raw(b"".join([head, *(tensor.data for tensor in tensors)]))
        self.stats.sent_frames += 1

    async def send_raw(self, data: bytes) -> None:
        """Bytes as they are, for tests of what a broken or hostile side may send."""
        self._check_open()
        self._write(data)
        self.stats.sent_bytes += len(data)
        await self._room.wait()
        self._check_open()

    async def close(self) -> None:
        if not self._closing:
            self._inbox.end(ChannelClosed("this side closed the channel."), discard=True)
            self._abort()
        # What is still in transit arrives while the link's delay lets it; nobody waits for that.
        await asyncio.sleep(0)

    def abort(self) -> None:
        self._closing = True
        self.cut()

    def cut(self) -> None:
        """End both sides at once; what is in transit is lost."""
        for end in (self, self.other):
            end._end_of_link("the connection was lost")

    async def _carry(self) -> None:
        """Everything written, then the end: a refusal written just before an abort still arrives."""
        while (data := await self._transit.get()) is not None:
            if self._network.delay is not None:
                await self._network.delay(self.owner, self.other.owner, len(data))
            if not self._closing:
                await self.other._readable.wait()
            self.other._deliver(data)
            self._transit_bytes -= len(data)
            if self._transit_bytes <= HIGH_WATER_BYTES:
                self._room.set()
        self._network.forget_channel(self)
        self.other._end_of_link("the other side closed the channel")

    def _deliver(self, data: bytes) -> None:
        if self.closed:
            return
        self.stats.arrived_bytes += len(data)
        try:
            for frame in self._reader.feed(data):
                self._arrived(frame)
            self._watch_pace()
        except FusionError as error:
            self._fail(error)

    def _end_of_link(self, reason: str) -> None:
        self._lost(reason)
        self._room.set()
        self._network.forget_channel(self)
        if self._carrier is not None:
            self._carrier.cancel()

    def _write(self, data: bytes) -> None:
        self._transit.put_nowait(data)
        self._transit_bytes += len(data)
        if self._transit_bytes > HIGH_WATER_BYTES:
            self._room.clear()

    def _abort(self) -> None:
        self._closing = True
        self._transit.put_nowait(None)
        self._room.set()
        # Flush: the other side's pause must not hold back what was sent before the end.
        self.other._readable.set()

    def _finish(self) -> None:
        self._abort()

    def reads(self) -> bool:
        return self._readable.is_set()

    def _pause_reading(self) -> None:
        self._pace.excuse()
        self._readable.clear()

    def _resume_reading(self) -> None:
        self._readable.set()
