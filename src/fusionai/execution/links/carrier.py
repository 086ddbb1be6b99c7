"""State connections that this member dials to other members, to send snapshots, and to send referees their inputs.

There is one connection per receiver, opened when first needed and kept open. Sending waits for the network, so a
snapshot never accumulates in memory. This module decides when a connection counts as dead. The receiving side is in
`execution.training.member`; `execution.training.snapshot_store` sends through this module; `execution.links.keepalive`
keeps each connection alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fusionai.coordination.round.liveness import Silence
from fusionai.execution.links.keepalive import Line
from fusionai.execution.links.peer_links import open_job
from fusionai.execution.retained import Sent
from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Transport
from fusionai.wire import messages as wire


class Carrier:
    """Sends messages to other members. `send` delivers the message or raises; it never retries."""

    def __init__(self, transport: Transport, *, now_s: Callable[[], float]) -> None:
        self._transport = transport
        self._now_s = now_s
        self._silence = Silence()
        self._lines: dict[PeerId, Line] = {}
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._closing = False

    async def send(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        opening: wire.OpenJob,
        message: wire.Snapshot | Sent,
        tensors: Sequence[HostTensor],
    ) -> None:
        """Send one message and return when the network has taken it. Raises `RefusedError`, `TransportError`,
        `TrustError`."""
        async with self._opening.setdefault(peer, asyncio.Lock()):
            line = self._lines.get(peer)
            if line is None or not line.usable:
                if isinstance(message, wire.Snapshot) and message.part:
                    raise TransportError(f"the connection to peer {short(peer)} ended within a snapshot.")
                line = await self._open(peer, addresses, opening)
        await line.channel.send(message, tensors)

    async def _open(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> Line:
        channel = await open_job(self._transport, addresses, peer, "state", opening)
        if self._closing:
            channel.abort()
            raise TransportError(f"the connection to peer {short(peer)} is not needed: this member is closing.")
        line = self._lines[peer] = Line(channel)
        self._silence.watch(peer, self._now_s())
        reader = asyncio.create_task(self._read(line))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return line

    async def _read(self, line: Line) -> None:
        """Read until the connection ends. The other side may send only pings and pongs."""
        try:
            message = (await line.receive()).message
            line.lost(f"it sent a {type(message).__name__}")
        except FusionError as error:
            line.lost(str(error))

    def beat(self) -> None:
        """Like `Links.beat`: ping all peers and end silent connections, so that the next `send` fails or opens a new
        one."""
        now_s = self._now_s()
        for peer, line in self._lines.items():
            if line.usable and line.beat(now_s):
                self._silence.heard(peer, now_s)
        taking = [peer for peer, line in self._lines.items() if line.channel.acknowledges is not False]
        for peer, deadline_s in self._silence.tick(now_s, taking).items():
            if (line := self._lines.get(PeerId(peer))) is not None:
                line.lost(f"it has been silent for {deadline_s:.3g} s")

    async def close(self) -> None:
        self._closing = True
        for line in self._lines.values():
            line.drop()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
