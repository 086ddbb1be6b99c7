"""Questions and answers over a channel, with notices in between. Decides which message answers which question.

Answers arrive in the order of the questions. Messages of the notice types are unsolicited and go to a callback. Peers
and job owners talk to the broker through this; the broker sends on its channel directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from fusionai.primitives.errors import ChannelClosed, FusionError, WireError
from fusionai.transport.channels.framed import refusal
from fusionai.transport.interface import Channel
from fusionai.wire.messages import Message, Refused

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
