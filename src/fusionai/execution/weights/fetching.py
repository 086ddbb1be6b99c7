"""Fetches a stage's weights from other members of the job.

It decides which source to ask, when to ask another one, and when to give up. Every piece is checked on arrival; a
source that sends a wrong one is not asked again. A connection that ends is reopened a few times. What has arrived is
kept, also across restarts. `execution.weights.board` decides the order.

    def reach(source):                                     # a new state connection for each source ...
        return dialled(host, source, placement.opening)
    # ... except the owner, which can't be dialled: use the connection it made (`WeightInlet`)
    counted = await fetch(load.weights, load.sources, store, reach=reach, now_s=clock.now_s, me=host.peer,
                          on_progress=tell, on_refused=lambda peer, key: to_driver(WeightRefused(...)))
    with store.holding([spec.digest for spec in load.weights]):
        program.import_weights((spec.key, store.read(spec)) for spec in load.weights)

Call it in a task of its own; cancelling the task keeps what has arrived. `execution.weights.server` answers the
requests, `storage.weight_store` keeps the bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fusionai.execution.host import Host
from fusionai.execution.links import KeepaliveConnection, open_link
from fusionai.execution.weights.board import LEAST_REST, Board, Share, ring, start
from fusionai.primitives.errors import (
    ChannelClosed,
    ExecutionError,
    FusionError,
    StorageError,
    TransportError,
    TrustError,
)
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.primitives.units import format_bytes
from fusionai.storage.weight_part import piece_bytes, pieces_of, spec_bytes
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.job import PIECE_BYTES, WeightSource, WeightSpec

log = logging.getLogger(__name__)

Reach = Callable[[WeightSource], AbstractAsyncContextManager["Channel | WeightInlet"]]
"""Opens a state connection to the source, admitted for this job, for the duration of the context. Raises
`FusionError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of one fetch (chosen). Per source at most `asks` requests of `ask_pieces` pieces each are unanswered,
    which bounds the memory of arriving pieces."""

    ask_pieces: int = 4
    asks: int = 3
    silence_s: float = 6.0
    """Seconds without a byte, pongs included, after which a connection is given up."""
    slow_s: float = 5.0
    """Seconds for an answer. A slower source is still asked, but the owner helps, and at the end others are asked for
    the same pieces."""
    grace_s: float = 1.0
    """Seconds for peers to be reached before the owner is asked for the pieces they have."""
    retry_s: float = 3.0
    """Longest time in seconds before a source that did not have a piece is asked for it again."""
    redials: int = 3
    """Consecutive connections to one source that may bring nothing before the source is given up."""
    redial_s: float = 0.3
    """Seconds before the first reconnection, doubled each time."""
    give_up_s: float = 60.0
    """Seconds without a piece from any source before the fetch fails."""


@asynccontextmanager
async def dialled(host: Host, source: WeightSource, opening: wire.OpenJob) -> AsyncIterator[Channel]:
    """Open a state connection to a source. Raises `RefusedError`, `TransportError`, `TrustError`."""
    peer = PeerId(source.peer)
    addresses = host.addresses_of(peer, opening.job, source.ticket)
    channel = await open_link(host.transport, addresses, peer, "state", opening)
    try:
        yield channel
    finally:
        channel.abort()


async def fetch(
    specs: Sequence[WeightSpec],
    sources: Sequence[WeightSource],
    store: WeightStore,
    *,
    reach: Reach,
    now_s: Callable[[], float],
    me: str = "",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_refused: Callable[[PeerId, str], None] = lambda _source, _key: None,
    limits: FetchLimits | None = None,
) -> dict[PeerId, int]:
    """Fetch all tensors of `specs` into `store` and return the bytes that arrived, by source.

    `sources` are in order of preference: all but the last share the work, and the last (the owner) sends what the
    others lack. `me`: members that fetch at the same time start at different places and get the rest from each other.
    `on_refused(source, key)`: the source sent wrong bytes of this tensor. Raises `ExecutionError` naming what is
    missing and which sources were asked, `StorageError` if the disk is full or the list of weights is wrong.
    """
    with store.holding([spec.digest for spec in specs]):
        work = _Fetch(specs, sources, store, reach, now_s, on_progress, on_refused, limits or FetchLimits())
        await work.run(me)
        return dict(work.fetched_bytes)


class _WrongPieceError(ExecutionError):
    """A source sent bytes that do not match the tensor's hash."""


class _Fetch:
    """One fetch in progress: sources, board and counters."""

    def __init__(
        self,
        specs: Sequence[WeightSpec],
        sources: Sequence[WeightSource],
        store: WeightStore,
        reach: Reach,
        now_s: Callable[[], float],
        on_progress: Callable[[int, int], None],
        on_refused: Callable[[PeerId, str], None],
        limits: FetchLimits,
    ) -> None:
        self.fetched_bytes: Counter[PeerId] = Counter()
        self._specs = {spec.digest: spec for spec in specs}
        self._sources = sources
        self._store = store
        self._reach = reach
        self._now_s = now_s
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._limits = limits
        self._total_bytes = sum(spec_bytes(spec) for spec in self._specs.values())
        self._done_bytes = 0
        self._board = Board({}, (), starts=(), ask_pieces=1, retry_s=0, slow_s=0, grace_s=0, now_s=0)
        self._changed = asyncio.Event()
        self._arrived_s = now_s()
        self._finishing: set[asyncio.Task[None]] = set()
        self._reasons: dict[int, str] = {}
        """Source -> why it is not asked any more, or why its last connection ended."""

    async def run(self, me: str) -> None:
        missing = await asyncio.to_thread(self._missing)
        self._done_bytes = self._total_bytes - sum(
            piece_bytes(spec_bytes(self._specs[digest]), piece)
            for digest, pieces in missing.items()
            for piece in pieces
        )
        for digest, pieces in missing.items():
            if not pieces:
                self._finish(digest)
        self._on_progress(self._done_bytes, self._total_bytes)
        pieces = {digest: pieces_of(spec_bytes(spec)) for digest, spec in self._specs.items()}
        peers = [source.peer for source in self._sources[:-1]]
        members = {me, *peers}
        self._board = Board(
            {digest: missing.get(digest, ()) for digest in ring(pieces)},
            [source.digests for source in self._sources],
            starts=[start(pieces, member, members) for member in (*peers, me)],
            ask_pieces=self._limits.ask_pieces,
            retry_s=self._limits.retry_s,
            slow_s=self._limits.slow_s,
            grace_s=self._limits.grace_s,
            now_s=self._now_s(),
        )
        self._arrived_s = self._now_s()
        await self._ask_all()
        if not self._board.done:
            raise self._failure()

    def _missing(self) -> dict[bytes, tuple[int, ...]]:
        """Return missing pieces by incomplete tensor. Empty only for tensors of zero bytes."""
        missing = {spec.digest: self._store.missing(spec) for spec in self._specs.values() if not self._store.has(spec)}
        parts = {digest for digest in missing if self._store.begun(digest)}
        self._store.make_room(sum(spec_bytes(self._specs[digest]) for digest in missing.keys() - parts))
        return missing

    async def _ask_all(self) -> None:
        asking = {asyncio.create_task(self._use(number)) for number in range(len(self._sources))}
        try:
            pending = asking
            while pending and not self._board.done:
                quiet_s = self._now_s() - self._arrived_s
                if quiet_s >= self._limits.give_up_s:
                    break
                done, pending = await asyncio.wait(
                    pending, timeout=self._limits.give_up_s - quiet_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            for task in asking:
                task.cancel()
            await asyncio.gather(*self._finishing)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, *self._finishing, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- one source

    async def _use(self, number: int) -> None:
        """Request from one source until nothing is left to request or it is of no use. Raises `StorageError`."""
        source, failures = self._sources[number], 0
        peer = PeerId(source.peer)
        while not self._board.done:
            before = self.fetched_bytes[peer]
            try:
                async with self._reach(source) as channel:
                    self._board.reached(number)
                    await self._draw(number, channel)
                return
            except StorageError:
                raise
            except (_WrongPieceError, TrustError) as error:
                failures, reason = self._limits.redials + 1, str(error)
            except FusionError as error:
                failures, reason = (1 if self.fetched_bytes[peer] > before else failures + 1), str(error)
            log.info("fetching weights from peer %s: %s", short(peer), reason)
            self._reasons[number] = reason
            if failures > self._limits.redials:
                self._board.drop(number)
                self._tell_change()
                return
            self._board.lost(number)
            self._tell_change()
            await asyncio.sleep(self._limits.redial_s * 2 ** (failures - 1))

    async def _draw(self, number: int, channel: Channel | WeightInlet) -> None:
        asked: dict[tuple[bytes, int], Share] = {}
        while not self._board.done:
            while len(asked) < self._limits.asks and (share := self._board.take(number, self._now_s())) is not None:
                asked[share.digest, share.first] = share
                await self._send(channel, wire.WeightAsk(digest=share.digest, first=share.first, count=share.count))
            if asked:
                await self._take(number, asked, await self._next(channel))
            elif channel.closed:
                raise TransportError("the connection was lost.")
            else:
                await self._wait_for_change()

    async def _send(self, channel: Channel | WeightInlet, message: wire.WeightAsk | wire.Ping | wire.Pong) -> None:
        try:
            async with asyncio.timeout(self._limits.silence_s):
                await channel.send(message)
        except TimeoutError:
            raise TransportError("it does not read the requests sent to it.") from None

    async def _next(self, channel: Channel | WeightInlet) -> Envelope:
        """Return the next message. Raises `TransportError` if no byte arrives for `silence_s`."""
        quiet_from_s, arrived = self._now_s(), channel.stats.arrived_bytes
        while True:
            try:
                async with asyncio.timeout(self._limits.silence_s / 4):
                    envelope = await channel.receive()
            except TimeoutError:
                now_s = self._now_s()
                if channel.stats.arrived_bytes != arrived:
                    quiet_from_s, arrived = now_s, channel.stats.arrived_bytes
                elif now_s - quiet_from_s >= self._limits.silence_s:
                    raise TransportError(f"it has been silent for {self._limits.silence_s:g} s.") from None
                await self._send(channel, wire.Ping(sequence=0, sent_at_s=now_s))
            else:
                match envelope.message:
                    case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                        await self._send(channel, wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                    case wire.Pong():
                        pass
                    case _:
                        return envelope

    async def _take(self, number: int, asked: dict[tuple[bytes, int], Share], envelope: Envelope) -> None:
        match envelope.message:
            case wire.WeightPieces(digest=digest, first=first):
                share = asked.pop((digest, first), None)
            case wire.Refused(code=code, reason=reason):
                raise TransportError(f"it refused: {wire.REFUSAL_SENTENCES[code]} {reason}".strip())
            case other:
                raise ExecutionError(f"it sent a {type(other).__name__} where weights were expected.")
        if share is None:
            return  # an answer to an earlier fetch on this connection
        tensor = next(iter(envelope.tensors.values()), None)
        if tensor is None:
            self._board.declined(number, share, self._now_s())
            self._tell_change()
            if self._board.live == {number} and number == len(self._sources) - 1:
                raise TransportError(f"it does not have {self._specs[digest].key}.")
            return
        spec, came = self._specs[digest], pieces_of(tensor.nbytes)
        # An answer to an earlier fetch on this connection, which asked for more pieces, is just as valid.
        fits = came > 0 and tensor.nbytes == _span_bytes(spec, first, came)
        good = await asyncio.to_thread(self._store.put, spec, first, tensor.data) if fits else 0
        wanted = min(good, share.count)
        if self._board.arrived(number, share, wanted, self._now_s()) and wanted:
            self._count(number, spec, _span_bytes(spec, first, wanted))
        self._tell_change()
        if not fits or good < came:
            peer = PeerId(self._sources[number].peer)
            self._on_refused(peer, spec.key)
            raise _WrongPieceError(f"peer {short(peer)} sent wrong bytes of {spec.key}.")

    def _count(self, number: int, spec: WeightSpec, nbytes: int) -> None:
        self.fetched_bytes[PeerId(self._sources[number].peer)] += nbytes
        self._done_bytes += nbytes
        self._arrived_s = self._now_s()
        if spec.digest not in self._board.missing:
            self._finish(spec.digest)
        self._on_progress(self._done_bytes, self._total_bytes)

    def _finish(self, digest: bytes) -> None:
        """Check a complete tensor in a thread: hashing a large one takes a while, and other pieces keep arriving."""
        self._finishing.add(asyncio.create_task(asyncio.to_thread(self._store.finish, self._specs[digest])))

    # ----------------------------------------------------------------------------------------------------- changes

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Wait until this source may have a new share, or a declined one is due again."""
        try:
            async with asyncio.timeout(self._limits.retry_s * LEAST_REST):
                await self._changed.wait()
        except TimeoutError:
            return

    def _failure(self) -> ExecutionError:
        missing = [self._specs[digest] for digest in self._specs if digest in self._board.missing]
        asked = [
            f"peer {short(PeerId(source.peer))} ({self._reasons.get(number, 'it does not have it').rstrip('.')})"
            for number, source in enumerate(self._sources)
        ]
        return ExecutionError(
            f"{len(missing)} of {len(self._specs)} tensors could not be fetched, the first is {missing[0].key}: "
            f"{format_bytes(self._total_bytes - self._done_bytes)} are missing; "
            f"sources asked: {', '.join(asked) or 'none'}.",
            hint="What has arrived is kept; the next attempt continues from there.",
        )


def _span_bytes(spec: WeightSpec, first: int, count: int) -> int:
    return min((first + count) * PIECE_BYTES, spec_bytes(spec)) - first * PIECE_BYTES


MAX_UNREAD: Final = 64
"""Answers that may wait unread: those in flight, and those whose request was given up."""


class WeightInlet:
    """The connection that the job's owner made, for one fetch after the other."""

    def __init__(self, channel: Channel) -> None:
        self.stats = channel.stats
        self._connection = KeepaliveConnection(channel)
        self._answers: asyncio.Queue[Envelope | None] = asyncio.Queue()

    async def serve(self) -> None:
        """Read until the connection ends. Raises `ExecutionError` if anything but weights arrives."""
        try:
            while True:
                envelope = await self._connection.receive()
                if not isinstance(envelope.message, wire.WeightPieces | wire.Refused):
                    raise ExecutionError(f"expected WeightPieces, got a {type(envelope.message).__name__}.")
                if self._answers.qsize() >= MAX_UNREAD:
                    raise ExecutionError("more answers arrived than were requested.")
                self._answers.put_nowait(envelope)
        except ChannelClosed:
            return
        finally:
            self._connection.drop()
            self._answers.put_nowait(None)

    async def send(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        await self._connection.channel.send(message, tensors)

    async def receive(self) -> Envelope:
        envelope = await self._answers.get()
        if envelope is None:
            self._answers.put_nowait(None)
            raise ChannelClosed("the connection that the job's owner made has ended.")
        return envelope

    @property
    def closed(self) -> bool:
        return self._connection.channel.closed
