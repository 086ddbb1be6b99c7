"""Asks the pool's broker for introductions to peers that can't be dialled, and for how it sees this machine.

All questions share one connection, opened at the first question and closed after `IDLE_S` without one, because most
machines never need it. The broker answers `Meet` and `Observe`; `peer_transport` dials what an introduction names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from fusionai.primitives.errors import TransportError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Conversation
from fusionai.transport.interface import Remote, Transport
from fusionai.wire.messages import Introduced, Meet, Message, Observe, Observed

M = TypeVar("M", bound=Message)

IDLE_S: Final = 30.0
"""Seconds without a question after which the connection to the broker is closed."""
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """The broker's answer.

    `relays`: host and port of the broker that issued `token`, which is also the relay. `addresses`: current addresses
    of the other side.
    """

    token: bytes
    relays: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]


class Introductions:
    """Asks the broker questions. `transport` dials the broker at one of `brokers`."""

    def __init__(self, transport: Transport, brokers: Sequence[str]) -> None:
        self._transport = transport
        self._brokers = tuple(brokers)
        self._conversation: Conversation | None = None
        self._connecting = asyncio.Lock()
        self._asking = 0
        self._idle: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def ask(self, peer: PeerId, addresses: tuple[str, ...] = ()) -> Introduction:
        """Return an introduction to `peer`.

        Raises `TransportError` (no broker, no answer), `TrustError`, `RefusedError` (the peer is absent).
        """
        answer, broker = await self._ask(Meet(peer=peer, addresses=addresses), Introduced)
        return Introduction(answer.token, ((broker.host, broker.port),) if broker.host else (), answer.addresses)

    async def observed(self, port: int) -> Observed:
        """Return how the broker sees this machine, and whether it can dial this machine's `port`.

        Raises the errors of `ask`.
        """
        return (await self._ask(Observe(port=port), Observed))[0]

    async def observed_by(self, port: int) -> tuple[Remote, Observed]:
        """Return the broker that answered, and its observation."""
        answer, broker = await self._ask(Observe(port=port), Observed)
        return broker, answer

    async def _ask(self, question: Message, expected: type[M]) -> tuple[M, Remote]:
        """Return the answer and the broker that gave it."""
        self._asking += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            async with asyncio.timeout(_ANSWER_S):
                conversation = await self._connected()
                answer = await conversation.ask(question)
        except TimeoutError:
            raise TransportError(f"the broker did not answer within {_ANSWER_S:g} s.") from None
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)
        if not isinstance(answer, expected):
            tags = expected.__struct_config__.tag, answer.__struct_config__.tag
            raise WireError(f"expected the broker to answer {tags[0]}, got {tags[1]}.")
        return answer, conversation.channel.remote

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
