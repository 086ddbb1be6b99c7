"""The tensor connections of one job member: one per other peer, both directions, dialled by one fixed side.

Decides who dials: the job owner always (its machine may listen to nobody), else the peer with the smaller id. Never
looks into what is sent.

Neighbours: `execution.member` posts and receives; `transport` connects; `transport.tickets` prove the right to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fusionai.execution.outbox import Outbox
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope, Transport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 30.0


def dials(me: PeerId, other: PeerId, owner: PeerId) -> bool:
    """Whether this side opens the connection between `me` and `other`."""
    if owner in (me, other):
        return me == owner
    return me < other


async def open_job(
    transport: Transport, addresses: Sequence[str], peer: PeerId, stream: wire.Stream, opening: wire.OpenJob
) -> Channel:
    """Dial a member of a job and show the ticket. Raises `RefusedError`, `TransportError`, `TrustError`."""
    channel = await transport.dial(addresses, expect=peer, stream=stream)
    try:
        async with asyncio.timeout(LINK_TIMEOUT_S):
            await channel.send(opening)
            answer = (await channel.receive()).message
    except TimeoutError:
        await channel.close()
        raise TransportError(f"peer {short(peer)} did not open job {opening.job} in {LINK_TIMEOUT_S:.0f} s.") from None
    if isinstance(answer, wire.Done):
        return channel
    await channel.close()
    if isinstance(answer, wire.Refused):
        sentence = wire.REFUSAL_SENTENCES[answer.code]
        raise RefusedError(f"peer {short(peer)} refused: {sentence} {answer.reason}".strip(), code=answer.code)
    raise TransportError(f"peer {short(peer)} answered {type(answer).__name__} instead of opening job {opening.job}.")


class Links:
    """`on_message` gets every envelope from any link; `on_lost` is told of a lost link, at least once."""

    def __init__(
        self,
        transport: Transport,
        *,
        on_message: Callable[[PeerId, Envelope], Awaitable[None]],
        on_lost: Callable[[PeerId, str], None],
    ) -> None:
        self._transport = transport
        self._on_message = on_message
        self._on_lost = on_lost
        self._outboxes: dict[PeerId, asyncio.Future[Outbox]] = {}
        self._dialling: set[PeerId] = set()
        self._dialled: set[asyncio.Task[None]] = set()
        """Tasks that dial and then read; the event loop alone would not keep them alive."""
        self._closing = False

    def post(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """Queue for `peer`; its link must be up (`up`)."""
        future = self._outboxes.get(peer)
        if future is None or not future.done():
            raise TransportError(f"there is no link to peer {short(peer)} yet.")
        future.result().post(message, tensors)

    async def up(self, peer: PeerId) -> None:
        """Wait for the link. Raises `TransportError` after `LINK_TIMEOUT_S`."""
        try:
            await asyncio.wait_for(asyncio.shield(self._slot(peer)), LINK_TIMEOUT_S)
        except TimeoutError:
            raise TransportError(f"no link to peer {short(peer)} within {LINK_TIMEOUT_S:.0f} s.") from None

    def dial(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> None:
        """Open the link unless it is there or under way."""
        slot = self._slot(peer)
        usable = slot.done() and not slot.result().lost
        if not usable and peer not in self._dialling:
            self._dialling.add(peer)
            task = asyncio.create_task(self._dial(peer, addresses, opening))
            self._dialled.add(task)
            task.add_done_callback(self._dialled.discard)

    async def _dial(self, peer: PeerId, addresses: Sequence[str], opening: wire.OpenJob) -> None:
        try:
            channel = await open_job(self._transport, addresses, peer, "tensors", opening)
        except FusionError as error:
            self._on_lost(peer, str(error))
            return
        finally:
            self._dialling.discard(peer)
        await self.serve(peer, channel)

    async def serve(self, peer: PeerId, channel: Channel) -> None:
        """Adopt an open channel as the link to `peer` and read it until it ends."""
        if self._closing:
            return
        slot = self._slot(peer)
        outbox = Outbox(channel, lambda reason: self._lost(peer, reason))
        former = slot.result() if slot.done() else None
        if former is not None:
            self._outboxes[peer] = slot = asyncio.get_running_loop().create_future()
        slot.set_result(outbox)
        if former is not None:
            # One link per peer. What was queued on the former is lost, and its reader will say so.
            former.abandon()
            await former.channel.close()
        try:
            while True:
                await self._on_message(peer, await channel.receive())
        except FusionError as error:
            reason = str(error)
        except Exception as error:
            # A link that nobody reads any more must be known as lost.
            log.exception("the link to peer %s failed", short(peer))
            reason = f"{type(error).__name__}: {error}"
        finally:
            outbox.abandon()
        await channel.close()
        self._lost(peer, reason)

    def _lost(self, peer: PeerId, reason: str) -> None:
        if not self._closing:
            self._on_lost(peer, reason)

    def _slot(self, peer: PeerId) -> asyncio.Future[Outbox]:
        if peer not in self._outboxes:
            self._outboxes[peer] = asyncio.get_running_loop().create_future()
        return self._outboxes[peer]

    async def close(self) -> None:
        """What is queued is for nobody any more: nothing is flushed."""
        self._closing = True
        for task in list(self._dialled):
            task.cancel()
        for slot in self._outboxes.values():
            if not slot.done():
                slot.cancel()
            elif not slot.cancelled():
                slot.result().abandon()
                with suppress(TransportError):
                    await slot.result().channel.close()
        await asyncio.gather(*self._dialled, return_exceptions=True)
