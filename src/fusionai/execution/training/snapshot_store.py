"""A member's handling of snapshots: stores them for the stages it guards, passes them on, and waits for ones it needs.

It decides which peers may send a snapshot: the peer that runs the stage, if this member guards it, and any named
member, if the stage runs (or is checked) here. A problem with snapshots never counts as a stage's failure.

Owned by `execution.training.member`; `execution.training.snapshots` stores, `execution.links.carrier` sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fusionai.execution.links.carrier import Carrier
from fusionai.execution.links.keepalive import Line
from fusionai.execution.placement import Placement
from fusionai.execution.retained import Sent
from fusionai.execution.state import chunks, headers
from fusionai.execution.training.snapshots import SnapshotStore
from fusionai.primitives.errors import ChannelClosed, ExecutionError, FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Transport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)


class Keeper:
    """Snapshots of one member.

    `on_kept(stage, step)`: a guarded stage's snapshot is complete. `on_refused(stage, code, reason)`: a snapshot did
    not fit in memory or is missing.
    """

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        *,
        room_bytes: Callable[[], int],
        now_s: Callable[[], float],
        on_kept: Callable[[int, int], None],
        on_refused: Callable[[int, wire.RefusalCode, str], None],
        on_testimony: Callable[[PeerId, Sent, Mapping[str, HostTensor]], None],
    ) -> None:
        self.store = SnapshotStore(room_bytes)
        self.stale_dropped = 0
        self._placement = placement
        self._carrier = Carrier(transport, now_s=now_s)
        self._now_s = now_s
        self._on_kept = on_kept
        self._on_refused = on_refused
        self._on_testimony = on_testimony
        self.judged: set[int] = set()
        """Stages of other members that are being rechecked here; any member may send snapshots of them."""
        self._accepted: set[Line] = set()
        self._awaited: dict[tuple[int, int], asyncio.Future[Mapping[str, HostTensor]]] = {}

    def begin_round(self, placement: Placement, partition: str) -> None:
        self._placement = placement
        self.judged.clear()
        self.store.begin_round(partition)

    # -------------------------------------------------------------------------------------------------------- taking

    async def serve(self, peer: PeerId, channel: Channel) -> None:
        """Read a state connection that another member opened, until it ends."""
        line = Line(channel)
        self._accepted.add(line)
        try:
            while True:
                envelope = await line.receive()
                match envelope.message:
                    case wire.Snapshot() as message:
                        self.take(peer, message, envelope.tensors)
                    case wire.Forward() | wire.Backward() | wire.SharedGradient() as message:
                        self._on_testimony(peer, message, envelope.tensors)
                    case other:
                        raise ExecutionError(f"expected a Snapshot, got a {type(other).__name__}.")
        except ChannelClosed:
            return
        except FusionError as error:
            log.warning("the state connection from peer %s ended: %s", short(peer), error)
        finally:
            self._accepted.discard(line)
            line.drop()
            self.store.drop_from(peer)

    def take(self, peer: PeerId, message: wire.Snapshot, tensors: Mapping[str, HostTensor]) -> None:
        """Store one part of a snapshot. Raises `ExecutionError` if the snapshot is not for this member."""
        placement, stage, step = self._placement, message.stage, message.step
        if message.fence != placement.fence:
            self.stale_dropped += 1
            return
        if peer not in placement.named:
            raise ExecutionError(f"peer {short(peer)} sent a snapshot; the job's signed placement does not name it.")
        home, guarded = placement.peer_of(stage), stage in placement.guards
        if home != placement.me and not (guarded and home == peer) and stage not in self.judged:
            raise ExecutionError(f"peer {short(peer)} sent a snapshot of stage {stage}, which is not for this member.")
        try:
            if not self.store.take(peer, message, tensors):
                return
        except ExecutionError as error:
            log.warning("%s", error)
            self._on_refused(stage, "out_of_memory", str(error))
            return
        if guarded:
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
        self, peer: PeerId, addresses: Sequence[str], message: wire.Snapshot | Sent, tensors: Sequence[HostTensor]
    ) -> None:
        """Send one message to another member. Raises `RefusedError`, `TransportError`, `TrustError`."""
        await self._carrier.send(peer, addresses, self._placement.opening, message, tensors)

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
                line=0,
                last=part == len(parts),
                tensors=headers(named),
            )
            await send(message, tuple(named.values()))

    # ---------------------------------------------------------------------------------------------------- life, ends

    def beat(self) -> None:
        self._carrier.beat()
        for line in self._accepted:
            line.beat(self._now_s())

    async def close(self) -> None:
        self.store.clear()
        for waiting in self._awaited.values():
            waiting.cancel()
        for line in self._accepted:
            line.drop()
        await self._carrier.close()
