"""Questions and answers over one channel: order, refusals, notices, and the end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from fusionai.primitives.errors import ChannelClosed, RefusedError
from fusionai.primitives.ids import PeerId
from fusionai.transport.conversation import Conversation
from fusionai.transport.interface import Channel
from fusionai.wire.messages import REFUSAL_SENTENCES, Done, LeaveNotice, Message, Ping, Pong, Refused, StopNotice
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S


def converse(
    serve: Callable[[Channel], Awaitable[None]],
    talk: Callable[[Conversation], Coroutine[Any, Any, None]],
    on_notice: Callable[[Message], None] | None = None,
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        listener = await network.transport(PeerId("b" * 52), "broker").listen(serve, host="broker", port=1)
        channel = await network.transport(PeerId("a" * 52)).dial(listener.addresses, expect=None, stream="control")
        conversation = Conversation(channel, (LeaveNotice, StopNotice), on_notice)
        await talk(conversation)
        await conversation.close()
        await conversation.close()
        await listener.close()

    async def bounded() -> None:
        async with asyncio.timeout(CEILING_S):
            await main()

    asyncio.run(bounded())


async def pongs(channel: Channel) -> None:
    while isinstance(message := (await channel.receive()).message, Ping):
        await channel.send(Pong(sequence=message.sequence, sent_at_s=0.0))


def ping(sequence: int) -> Ping:
    return Ping(sequence=sequence, sent_at_s=0.0)


def test_answers_belong_to_their_questions():
    async def talk(conversation: Conversation) -> None:
        answers = await asyncio.gather(*(conversation.ask(ping(number)) for number in range(50)))
        assert [answer.sequence for answer in answers if isinstance(answer, Pong)] == list(range(50))

    converse(pongs, talk)


def test_a_refusal_is_raised_and_the_conversation_goes_on():
    async def serve(channel: Channel) -> None:
        await channel.receive()
        await channel.send(Refused(code="unknown_job", reason="There is no x-1."))
        await channel.receive()
        await channel.send(Done())
        await channel.receive()

    async def talk(conversation: Conversation) -> None:
        with pytest.raises(RefusedError, match=r"No such job in this pool\. There is no x-1\.") as refused:
            await conversation.ask(ping(1))
        assert refused.value.code == "unknown_job"
        assert await conversation.ask(ping(2)) == Done()

    converse(serve, talk)


def test_notices_come_between_and_a_failing_callback_ends_nothing(caplog: pytest.LogCaptureFixture):
    got: list[Message] = []

    def on_notice(message: Message) -> None:
        got.append(message)
        if isinstance(message, LeaveNotice):
            raise ValueError("callback")

    async def serve(channel: Channel) -> None:
        await channel.receive()
        for message in (LeaveNotice(drain=True), StopNotice(job="x-1"), Done()):
            await channel.send(message)
        await channel.receive()

    async def talk(conversation: Conversation) -> None:
        assert await conversation.ask(ping(1)) == Done()
        assert got == [LeaveNotice(drain=True), StopNotice(job="x-1")]

    converse(serve, talk, on_notice)
    assert "the handler of a notice failed" in caplog.text


def test_a_cancelled_question_keeps_its_place():
    release = asyncio.Event()

    async def serve(channel: Channel) -> None:
        first = (await channel.receive()).message
        second = (await channel.receive()).message
        await release.wait()
        for message in (first, second):
            assert isinstance(message, Ping)
            await channel.send(Pong(sequence=message.sequence, sent_at_s=0.0))
        await channel.receive()

    async def talk(conversation: Conversation) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(conversation.ask(ping(1)), 0.01)
        second = asyncio.create_task(conversation.ask(ping(2)))
        release.set()
        assert await second == Pong(sequence=2, sent_at_s=0.0)

    converse(serve, talk)


def test_the_end_of_the_channel_ends_every_question():
    async def serve(channel: Channel) -> None:
        for _ in range(3):
            await channel.receive()

    async def talk(conversation: Conversation) -> None:
        asked = [asyncio.create_task(conversation.ask(ping(number))) for number in range(3)]
        for task in asked:
            with pytest.raises(ChannelClosed, match="the conversation is over"):
                await task
        with pytest.raises(ChannelClosed):
            await conversation.ask(ping(9))

    converse(serve, talk)


def test_closing_here_ends_open_questions():
    async def serve(channel: Channel) -> None:
        await channel.receive()
        await channel.receive()

    async def talk(conversation: Conversation) -> None:
        asked = asyncio.create_task(conversation.ask(ping(1)))
        await asyncio.sleep(0)
        await conversation.close()
        with pytest.raises(ChannelClosed):
            await asked

    converse(serve, talk)


@pytest.mark.parametrize(
    ("unasked", "said"),
    [(Done(), "got done without a question"), (Refused(code="unknown_peer"), REFUSAL_SENTENCES["unknown_peer"])],
)
def test_an_answer_nobody_asked_for_ends_the_conversation_and_is_named(unasked: Message, said: str):
    async def serve(channel: Channel) -> None:
        await channel.send(unasked)
        with pytest.raises(ChannelClosed):
            await channel.receive()
        over.set()

    async def talk(conversation: Conversation) -> None:
        await over.wait()
        with pytest.raises(ChannelClosed, match=f"the conversation is over: .*{re.escape(said)}"):
            await conversation.ask(ping(9))

    over = asyncio.Event()
    converse(serve, talk)
