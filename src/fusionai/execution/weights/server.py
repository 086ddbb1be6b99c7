"""Serves pieces of weights to other members of a job.

Only tensors of the job's manifest are served, from a store or a model's files. At most one answer per connection is in
memory, and answers get smaller as connections increase, so that all get an equal share. Connections are admitted by
ticket before they get here (`peer.acceptor`).

    desk = WeightDesk(store)                         # at a member; at the owner: WeightDesk(model_weights)
    desk.allow(spec.digest for spec in load.weights)
    await desk.answer(peer, channel)                 # once per state connection; returns when it ends
    desk.sent_bytes                                  # by peer

`execution.weights.fetching` requests; `storage.weight_store` and `storage.weight_manifest` have the bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

from fusionai.execution.links import KeepaliveConnection
from fusionai.primitives.errors import ChannelClosed, ExecutionError, FusionError, StorageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.frame import describe

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
"""Connections served at the same time (chosen)."""
MAX_ASKS: Final = 16
"""Unanswered requests on one connection."""
PIECES_AT_ONCE: Final = 4
"""Largest number of pieces in one answer."""
PIECES_FOR_ALL: Final = 32
"""Pieces in memory for all answers together, as long as there are fewer connections than that."""
PATIENCE_S: Final = 60.0
"""Seconds that a peer may take to read an answer (chosen)."""


class Pieces(Protocol):
    """Source of the bytes, with the method of `WeightStore.pieces`."""

    def pieces(self, digest: bytes, first: int, count: int) -> bytes: ...


class WeightServer:
    """Serves weights of one job at one member, on all its connections."""

    def __init__(self, pieces: Pieces, digests: Iterable[bytes] = (), *, patience_s: float = PATIENCE_S) -> None:
        self.sent_bytes: Counter[PeerId] = Counter()
        """Bytes of pieces sent, by peer."""
        self._pieces = pieces
        self._digests = set(digests)
        self._patience_s = patience_s
        self._connections: set[KeepaliveConnection] = set()

    def allow(self, digests: Iterable[bytes]) -> None:
        """Serve these tensors: they belong to the job."""
        self._digests.update(digests)

    async def answer(self, peer: PeerId, channel: Channel) -> None:
        """Serve one connection until it ends. A peer that breaks the protocol or does not read is disconnected."""
        if len(self._connections) >= MAX_CONNECTIONS:
            await channel.send(
                wire.Refused(
                    code="busy", reason=f"{MAX_CONNECTIONS} other members fetch weights here; try again later."
                )
            )
            return
        connection = KeepaliveConnection(channel)
        self._connections.add(connection)
        asks: asyncio.Queue[wire.WeightAsk] = asyncio.Queue(MAX_ASKS)
        answering = asyncio.create_task(self._answer_all(peer, connection, asks))
        try:
            while True:
                message = (await connection.receive()).message
                if not isinstance(message, wire.WeightAsk):
                    raise ExecutionError(f"expected a WeightAsk, got a {type(message).__name__}.")
                if asks.full():
                    raise ExecutionError(f"more than {MAX_ASKS} requests for weights are unanswered.")
                asks.put_nowait(message)
        except ChannelClosed:
            return
        except FusionError as error:
            log.warning("closing the connection on which peer %s fetches weights: %s", short(peer), error)
        finally:
            # Cleanup that does not wait comes first: this task may be cancelled while it waits and must not leave the
            # connection.
            self._connections.discard(connection)
            connection.drop()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer_all(
        self, peer: PeerId, connection: KeepaliveConnection, asks: asyncio.Queue[wire.WeightAsk]
    ) -> None:
        try:
            while True:
                ask = await asks.get()
                data = await self._read(ask)
                async with asyncio.timeout(self._patience_s):
                    await self._send(peer, connection, ask, data)
        except TimeoutError:
            connection.lost(f"it has not read its weights for {self._patience_s:g} s")
        except FusionError as error:
            connection.lost(str(error))

    async def _read(self, ask: wire.WeightAsk) -> bytes:
        if ask.digest not in self._digests:
            return b""
        most = max(1, min(PIECES_AT_ONCE, PIECES_FOR_ALL // len(self._connections)))
        try:
            return await asyncio.to_thread(self._pieces.pieces, ask.digest, ask.first, min(ask.count, most))
        except StorageError as error:
            log.warning("weights that should be here can't be read: %s", error)
            return b""

    async def _send(self, peer: PeerId, connection: KeepaliveConnection, ask: wire.WeightAsk, data: bytes) -> None:
        if not data:
            await connection.channel.send(wire.WeightPieces(digest=ask.digest, first=ask.first))
            return
        tensor = host_tensor("uint8", (len(data),), data)
        headers = (describe("bytes", tensor),)
        await connection.channel.send(wire.WeightPieces(digest=ask.digest, first=ask.first, tensors=headers), (tensor,))
        self.sent_bytes[peer] += len(data)

    def close(self) -> None:
        for connection in list(self._connections):
            connection.drop()
