"""Asks the pool's broker for an introduction to a peer that can't be dialled, once per attempt to reach the peer.

The routes of one attempt share the introduction: the first route that needs it asks. QUIC gets a head start before the
relay, unless the relay is what worked last time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from fusionai.primitives.errors import RefusedError, TransportError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.conversation import Conversation
from fusionai.transport.interface import Remote, Transport
from fusionai.wire.messages import Introduced, Meet, Message, Observe, Observed

M = TypeVar("M", bound=Message)

IDLE_S: Final = 30.0
"""Seconds without a question after which the connection to the broker is closed."""
_ANSWER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """The broker's answer. `relays`: host and port of the broker that issued `token`, which is also the relay.
    `addresses`: current addresses of the other side."""

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
        """Return an introduction to `peer`. Raises `TransportError` (no broker, no answer), `TrustError`,
        `RefusedError` (the peer is absent)."""
        answer, broker = await self._ask(Meet(peer=peer, addresses=addresses), Introduced)
        return Introduction(answer.token, ((broker.host, broker.port),) if broker.host else (), answer.addresses)

    async def observed(self, port: int) -> Observed:
        """Return how the broker sees this machine, and whether it can dial this machine's `port`. Raises the errors of
        `ask`."""
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


class Meeting:
    """Shared state of the routes of one dial. Must be created inside an event loop."""

    def __init__(self, introductions: Introductions, peer: PeerId) -> None:
        self.peer = peer
        self._introductions = introductions
        self._asking: asyncio.Lock = asyncio.Lock()
        self._introduction: Introduction | None = None
        self._quic_over = asyncio.Event()
        self._quic_over.set()
        self._waived = False

    async def introduction(self, addresses: tuple[str, ...] = ()) -> Introduction:
        """Return the broker's introduction, asked for at the first call. `addresses`: where this side can be reached by
        UDP, for the other side to send to. Raises `TransportError`, `TrustError`."""
        async with self._asking:
            if self._introduction is None:
                try:
                    self._introduction = await self._introductions.ask(self.peer, addresses)
                except RefusedError as error:
                    # The broker's refusal to introduce says nothing about the routes that need no introduction.
                    raise TransportError(f"the broker could not introduce {short(self.peer)}: {error}") from error
            return self._introduction

    async def head_start(self, seconds: float) -> None:
        """Wait until the QUIC attempt is over, at most `seconds`."""
        if not self._waived:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._quic_over.wait()

    def waive_head_start(self) -> None:
        self._waived = True

    def quic_is_tried(self) -> None:
        self._quic_over.clear()

    def quic_is_over(self) -> None:
        self._quic_over.set()
