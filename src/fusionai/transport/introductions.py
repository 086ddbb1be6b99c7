"""Asks the pool's broker to introduce this machine to a peer it can't dial. Decides when the connection for it is kept.

One conversation with the broker for all questions, opened at the first and closed when it has been idle for a while:
most machines never need it.
Neighbours: the broker answers `Meet`; `peer_transport` goes where the introduction says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.primitives.errors import TransportError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Conversation
from fusionai.transport.interface import Transport
from fusionai.wire.messages import Introduced, Meet

IDLE_S: Final = 30.0
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """`relays`: where the broker that gave `token` was reached, and so its relay. `addresses`: the other side's now."""

    token: bytes
    relays: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]


class Introductions:
    """`transport` dials the broker at one of `brokers`."""

    def __init__(self, transport: Transport, brokers: Sequence[str]) -> None:
        self._transport = transport
        self._brokers = tuple(brokers)
        self._conversation: Conversation | None = None
        self._connecting = asyncio.Lock()
        self._asking = 0
        self._idle: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def ask(self, peer: PeerId, addresses: tuple[str, ...] = ()) -> Introduction:
        """Raises `TransportError` (no broker, no answer), `TrustError`, `RefusedError` (the peer is not there)."""
        self._asking += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            async with asyncio.timeout(_ANSWER_S):
                conversation = await self._connected()
                answer = await conversation.ask(Meet(peer=peer, addresses=addresses))
        except TimeoutError:
            raise TransportError(f"the broker did not introduce the peer within {_ANSWER_S:g} s.") from None
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)
        if not isinstance(answer, Introduced):
            raise WireError(f"expected an introduction, got {answer.__struct_config__.tag}.")
        remote = conversation.channel.remote
        relays = ((remote.host, remote.port),) if remote.host else ()
        return Introduction(answer.token, relays, answer.addresses)

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._end()
        if self._closing is not None:
            await self._closing

    async def _connected(self) -> Conversation:
        async with self._connecting:
            if self._conversation is None or self._conversation.channel.closed:
                channel = await self._transport.dial(self._brokers, expect=None, stream="control")
                self._conversation = Conversation(channel)
            return self._conversation

    def _end(self) -> None:
        if self._conversation is not None:
            self._closing = asyncio.get_running_loop().create_task(self._conversation.close())
            self._conversation = None
