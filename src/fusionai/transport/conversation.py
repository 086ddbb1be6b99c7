"""Questions to the pool's broker and their answers, and introductions to peers that can't be dialled.

A conversation takes over a channel: answers arrive in the order of the questions, and messages of the notice types go
to a callback. Peers and job owners talk to the broker through it; the broker sends on its channel directly.

The routes of one attempt to reach a peer share one introduction: the first route that needs it asks. QUIC gets a head
start before the relay, unless the relay is what worked last time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from fusionai.primitives.errors import ChannelClosed, FusionError, RefusedError, TransportError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.channels.framed import refusal
from fusionai.transport.interface import Channel, Remote, Transport
from fusionai.wire.messages import Introduced, Meet, Message, Observe, Observed, Refused

_LOG = logging.getLogger(__name__)


class Conversation:
    """Takes over `channel`: no other task may receive from it. Needs a running event loop."""

    def __init__(
        self,
        channel: Channel,
        notices: tuple[type[Message], ...] = (),
        on_notice: Callable[[Message], None] | None = None,
    ) -> None:
        self.channel = channel
        self._notices = notices
        self._on_notice = on_notice
        self._asked: deque[asyncio.Future[Message]] = deque()
        self._order = asyncio.Lock()
        self._end: FusionError | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, message: Message) -> Message:
        """Return the answer to `message`. Raises `RefusedError` on a refusal, `ChannelClosed` if the channel ends
        first. A cancelled call still takes its answer off the channel, so that later answers match their questions."""
        async with self._order:
            if self._end is not None:
                raise ChannelClosed(f"the conversation is over: {self._end.message}")
            answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            self._asked.append(answer)
            try:
                await self.channel.send(message)
            except BaseException:
                # It is unknown whether the question was sent, so later answers could not be matched to their questions.
                await self._over(ChannelClosed("a question could not be sent."))
                raise
        received = await answer
        if isinstance(received, Refused):
            raise refusal(received)
        return received

    async def close(self) -> None:
        """End the conversation. Idempotent. Open questions fail with `ChannelClosed`."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._over(ChannelClosed("this side closed the channel."))

    async def _read(self) -> None:
        try:
            while True:
                message = (await self.channel.receive()).message
                if isinstance(message, self._notices):
                    self._notify(message)
                elif self._asked:
                    answer = self._asked.popleft()
                    if not answer.done():
                        answer.set_result(message)
                elif isinstance(message, Refused):
                    raise refusal(message)
                else:
                    raise WireError(
                        f"expected an answer or a notice, got {message.__struct_config__.tag} without a question."
                    )
        except FusionError as error:
            await self._over(error)

    def _notify(self, message: Message) -> None:
        if self._on_notice is None:
            return
        try:
            self._on_notice(message)
        except Exception:  # noqa: BLE001 - an error in a callback must not end the conversation
            _LOG.exception("the handler of a notice failed")

    async def _over(self, reason: FusionError) -> None:
        if self._end is None:
            self._end = reason
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(ChannelClosed(f"the conversation is over: {reason.message}"))
                # The asking task may be gone. Reading the exception avoids asyncio's warning about an unread failure.
                answer.exception()
        await self.channel.close()


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
    """Asks the broker questions. `transport` dials it."""

    def __init__(self, transport: Transport, broker: BrokerAddresses) -> None:
        self._transport = transport
        self._broker = broker
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

    async def observed(self, port: int) -> tuple[Observed, Remote]:
        """Return how the broker sees this machine, whether it can dial this machine's `port`, and the broker that
        answered. Raises the errors of `ask`."""
        return await self._ask(Observe(port=port), Observed)

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
                channel = await self._broker.dial(self._transport)
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
