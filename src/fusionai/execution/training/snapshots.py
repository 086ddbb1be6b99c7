"""Snapshots of stages: copied from a stage to its standby while other work goes on.

`SnapshotCopier` copies the bytes one chunk at a time as the network takes them; whatever remains is copied right before
the state changes (copy on apply). At most two snapshots wait; a third replaces the one that has not begun. A snapshot
that can't be sent is dropped, since the next follows after `snapshot_every` steps. Entries that never change (frozen
weights, constants) are in the first snapshot that a standby gets, and again only after a failure.

`MemberSnapshots` decides which peers may send a snapshot: the peer that runs the stage, if this member stands by for
it, and any named member, if the stage runs (or is rechecked) here. It also passes snapshots on and waits for ones it
needs. `snapshot_store` keeps them. A problem with snapshots never counts as a stage's failure.
Stages of other replicas send parts of an exchange on the same kind of connection; they are only passed on.

`execution.training.member` owns it and answers the driver; `execution.training.runtime` says when to copy and loads;
`execution.links` sends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.backends.interface import StageProgram
from fusionai.execution.host import ComputeThread
from fusionai.execution.links import KeepaliveConnection, StateConnections
from fusionai.execution.member import RoundPlacement
from fusionai.execution.tensors import chunks
from fusionai.execution.training.boundary import Sent
from fusionai.execution.training.snapshot_store import SnapshotStore
from fusionai.primitives.errors import ChannelClosed, ExecutionError, FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Transport
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers

log = logging.getLogger(__name__)

ToMember = wire.Snapshot | wire.ExchangePart | Sent
ByWhom = wire.OpenJob | None


class MemberSnapshots:
    """Snapshots of one member. `on_kept(stage, step)`: a stage's snapshot at its standby is complete.
    `on_refused(stage, code, reason)`: a snapshot did not fit in memory or is missing. `on_twin`: a part of an exchange
    came, or (None) the connection ended."""

    def __init__(
        self,
        transport: Transport,
        placement: RoundPlacement,
        *,
        make_room: Callable[[int], int],
        now_s: Callable[[], float],
        on_kept: Callable[[int, int], None],
        on_refused: Callable[[int, wire.RefusalCode, str], None],
        on_evidence: Callable[[PeerId, Sent, Mapping[str, HostTensor]], None],
        on_twin: Callable[[PeerId, wire.ExchangePart | None, Mapping[str, HostTensor]], None],
    ) -> None:
        self.store = SnapshotStore(make_room)
        self.stale_dropped = 0
        self._placement, self._now_s = placement, now_s
        self._connections = StateConnections(transport, now_s=now_s)
        self._on_kept, self._on_refused = on_kept, on_refused
        self._on_evidence, self._on_twin = on_evidence, on_twin
        self.judged: set[int] = set()
        """Stages of other members that are being rechecked here; any member may send snapshots of them."""
        self._accepted: set[KeepaliveConnection] = set()
        self._awaited: dict[tuple[int, int], asyncio.Future[Mapping[str, HostTensor]]] = {}

    def begin_round(self, placement: RoundPlacement, partition: str) -> None:
        self._placement = placement
        self.judged.clear()
        self.store.begin_round(partition)

    def give_way(self, stage: int, lacking_bytes: int) -> None:
        """Drop snapshots of other stages until this stage, which is to run here, has the memory that it lacks. The
        driver hears of each: it must not count on them."""
        for other in sorted({at.stage for at in self.store.held} - {stage}):
            if lacking_bytes <= 0:
                return
            lacking_bytes -= self.store.nbytes_of(other)
            self.store.drop(other)
            self._on_refused(other, "out_of_memory", f"stage {stage}, which runs here, needs the snapshots' memory")

    # -------------------------------------------------------------------------------------------------------- taking

    async def serve(self, peer: PeerId, channel: Channel) -> None:
        """Read a state connection that another member opened, until it ends."""
        connection = KeepaliveConnection(channel)
        self._accepted.add(connection)
        try:
            while True:
                envelope = await connection.receive()
                match envelope.message:
                    case wire.Snapshot() as message:
                        self.take(peer, message, envelope.tensors)
                    case wire.Forward() | wire.Backward() | wire.SharedGradient() as message:
                        self._on_evidence(peer, message, envelope.tensors)
                    case wire.ExchangePart() as message:
                        self._on_twin(peer, message, envelope.tensors)
                    case other:
                        raise ExecutionError(f"expected a Snapshot, got a {type(other).__name__}.")
        except ChannelClosed:
            return
        except FusionError as error:
            log.warning("the state connection from peer %s ended: %s", short(peer), error)
        finally:
            self._accepted.discard(connection)
            connection.drop()
            self.store.drop_from(peer)
            self._on_twin(peer, None, {})

    def take(self, peer: PeerId, message: wire.Snapshot, tensors: Mapping[str, HostTensor]) -> None:
        """Store one part of a snapshot. Raises `ExecutionError` if the snapshot is not for this member."""
        placement, stage, step = self._placement, message.stage, message.step
        if message.fence != placement.fence:
            self.stale_dropped += 1
            return
        if peer not in placement.named:
            raise ExecutionError(f"peer {short(peer)} sent a snapshot; the job's signed placement does not name it.")
        home, has_standby = placement.peer_of(stage), stage in placement.standbys
        if home != placement.me and not (has_standby and home == peer) and stage not in self.judged:
            raise ExecutionError(f"peer {short(peer)} sent a snapshot of stage {stage}, which is not for this member.")
        try:
            if not self.store.take(peer, message, tensors):
                return
        except ExecutionError as error:
            log.warning("%s", error)
            self._on_refused(stage, "out_of_memory", str(error))
            return
        if has_standby:
            self._on_kept(stage, step)
        waiting = self._awaited.pop((stage, step), None)
        entries = self.store.whole(stage, step)
        if waiting is not None and entries is not None and not waiting.done():
            waiting.set_result(entries)

    async def whole(self, stage: int, step: int) -> Mapping[str, HostTensor]:
        """Wait for the snapshot and return its entries, read-only."""
        entries = self.store.whole(stage, step)
        if entries is not None:
            return entries
        return await asyncio.shield(self._awaited.setdefault((stage, step), asyncio.get_running_loop().create_future()))

    # ------------------------------------------------------------------------------------------------------- sending

    async def send(
        self, peer: PeerId, at: Sequence[str], message: ToMember, tensors: Sequence[HostTensor], by: ByWhom = None
    ) -> None:
        """Send one message to a member, `at` its addresses, opening the connection `by` a message for another job.
        Raises `RefusedError`, `TransportError`, `TrustError`."""
        await self._connections.send(peer, at, by or self._placement.opening, message, tensors)

    async def hand_on(
        self,
        order: wire.PassSnapshot,
        send: Callable[[wire.Snapshot, Sequence[HostTensor]], Awaitable[None]],
    ) -> None:
        """Send a snapshot to the stage's new peer, or to the peer that rechecks it. Raises what `send` raises."""
        entries = self.store.whole(order.stage, order.step)
        if entries is None:
            self._on_refused(order.stage, "failed", f"there is no snapshot of step {order.step} here to hand on")
            return
        parts: list[dict[str, HostTensor]] = [dict(chunk) for chunk in chunks(entries.items())]
        for part, named in enumerate([*parts, {}]):
            if order.fence != self._placement.fence:
                return
            message = wire.Snapshot(
                fence=order.fence,
                stage=order.stage,
                step=order.step,
                part=part,
                watermark=0,
                last=part == len(parts),
                tensors=headers(named),
            )
            await send(message, tuple(named.values()))

    # ---------------------------------------------------------------------------------------------------- life, ends

    def beat(self) -> None:
        self._connections.beat()
        for connection in self._accepted:
            connection.beat(self._now_s())

    async def close(self) -> None:
        self.store.clear()
        for waiting in self._awaited.values():
            waiting.cancel()
        for connection in self._accepted:
            connection.drop()
        await self._connections.close()


Chunk = list[tuple[str, HostTensor]]
MAX_WAITING: Final = 2
"""Snapshots that may wait to be sent, the one being sent included."""
FAILURES_TOLD: Final = 2
"""Consecutive failed snapshots after which `on_failures` is called, because the retention watermark can't advance."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Names of a state's entries. `fixed` ones never change, `moving` ones change with each step."""

    fixed: Sequence[str]
    moving: Sequence[str]


class StateCopy:
    """The state after `step`. `take` and `complete` run in the compute thread, so never while the state changes."""

    def __init__(self, step: int, program: StageProgram, entries: Entries) -> None:
        self.step = step
        self.rest_of: int | None = None
        """Step of the earlier snapshot that has the entries that never change."""
        self._program = program
        self._fixed = tuple(entries.fixed)
        self._pending: Iterator[Chunk] = chunks(self._named(entries.moving))
        self._copied: deque[Chunk] = deque()
        self._failure: str | None = None

    def take(self) -> Chunk | None:
        """Return the next chunk, None at the end. Raises `ExecutionError` if the state changed before it could be
        copied."""
        if self._failure is not None:
            raise ExecutionError(self._failure)
        found = self._copied.popleft() if self._copied else next(self._pending, None)
        if found is None and self.rest_of is None and self._fixed:
            fixed, self._fixed = self._fixed, ()
            self._pending = chunks(self._named(fixed))
            found = next(self._pending, None)
        return found

    def _named(self, names: Sequence[str]) -> Iterator[tuple[str, HostTensor]]:
        return (entry for name in names for entry in self._program.export_entries([name]))

    def complete(self) -> None:
        """Copy everything not yet taken, because the state is about to change. A failure (no memory) must not fail the
        step; `take` reports it instead."""
        try:
            self._copied.extend(self._pending)
        except Exception as error:
            log.exception("the state of step %d could not be copied", self.step)
            self._failure = f"the state of step {self.step} could not be copied: {type(error).__name__}: {error}"
            self._copied.clear()


SendChunk = Callable[[StateCopy, int, Chunk | None], Awaitable[None]]
"""Called with (copy, part, chunk); chunk None marks the end. Raises `FusionError` if the standby can't be reached."""


class SnapshotCopier:
    """Sends a stage's snapshots to its standby. `on_failures` is called with the reason after `FAILURES_TOLD`
    consecutive snapshots failed."""

    def __init__(
        self,
        stage: int,
        program: StageProgram,
        entries: Entries,
        compute: ComputeThread,
        send: SendChunk,
        on_failures: Callable[[str], None],
    ) -> None:
        self._entries = entries
        self._whole: int | None = None
        """Step of the last snapshot that was sent whole under this fence, if none has failed since."""
        self._stage = stage
        self._program = program
        self._compute = compute
        self._send = send
        self._on_failures = on_failures
        self._waiting: deque[StateCopy] = deque()
        self._failures = 0
        self._sender: asyncio.Task[None] | None = None

    def begin(self, step: int) -> None:
        """Queue a snapshot of the present state, which is the state after `step`."""
        while len(self._waiting) >= MAX_WAITING:
            log.warning(
                "stage %d: skipped the snapshot of step %d, earlier ones wait", self._stage, self._waiting.pop().step
            )
        self._waiting.append(StateCopy(step, self._program, self._entries))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._run())

    def complete(self) -> None:
        """Copy what still waits. Runs in the compute thread, before the state changes."""
        for copy in list(self._waiting):
            copy.complete()

    def abandon(self) -> None:
        """Drop the waiting snapshots, because their fence is no longer valid and no member would accept the rest."""
        self._waiting.clear()
        self._failures = 0
        self._whole = None

    async def _run(self) -> None:
        while self._waiting:
            copy = self._waiting[0]
            copy.rest_of, self._whole = self._whole, None
            try:
                if await self._send_all(copy):
                    self._whole = copy.step
                self._failures = 0
            except FusionError as error:
                self._count(copy, str(error))
            except Exception as error:  # not awaited: a failure must be counted to be noticed
                log.exception("stage %d: the snapshot of step %d failed", self._stage, copy.step)
                self._count(copy, f"{type(error).__name__}: {error}")
            if self._waiting and self._waiting[0] is copy:
                self._waiting.popleft()

    def _count(self, copy: StateCopy, reason: str) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures <= FAILURES_TOLD else logging.DEBUG  # known by then
        log.log(level, "stage %d: the snapshot of step %d did not arrive: %s", self._stage, copy.step, reason)
        if self._failures == FAILURES_TOLD:
            self._on_failures(reason)

    async def _send_all(self, copy: StateCopy) -> bool:
        """Return whether the snapshot was sent whole."""
        for part in itertools.count():
            chunk, _ = await self._compute.run(copy.take)
            if not self._waiting or self._waiting[0] is not copy:
                return False
            await self._send(copy, part, chunk)
            if chunk is None:
                return bool(self._waiting) and self._waiting[0] is copy
        return False

    async def close(self) -> None:
        self.abandon()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
