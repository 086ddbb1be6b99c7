"""Streams: what waits for a client is bounded, and however it ends, what produces it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError
from fusionai.gateway.streaming import ABORT_EXTENSION, AnswerStream, EventForm, Streams, comment, event
from harness.gateway_stand import until

LIMITS = RequestLimits(unread_bytes=1000, stalled_s=0.05, keep_alive_s=0.02)


@dataclass
class Client:
    """Reads until `stops_reading` pieces have come; leaves when told."""

    stops_reading: int | None = None
    got: list[bytes] = field(default_factory=list)
    aborted: int = 0
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    reads_again: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[str] = field(default_factory=list)

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        if self.stops_reading is not None and len(self.got) >= self.stops_reading:
            await self.reads_again.wait()
        if message["body"]:
            self.got.append(message["body"])

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def run(self, pieces: AsyncGenerator[bytes, None], limits: RequestLimits = LIMITS) -> None:
        async def ended() -> None:
            self.seen.append("end")

        def abort() -> None:
            self.aborted += 1

        stream = AnswerStream(
            pieces,
            EventForm(),
            limits,
            self.streams,
            on_slow=lambda: self.seen.append("slow"),
            on_gone=lambda: self.seen.append("gone"),
            on_end=ended,
        )
        scope = {"type": "http", "extensions": {ABORT_EXTENSION: abort}}
        await asyncio.wait_for(stream(scope, self.receive, self.send), 5)

    streams: Streams = field(default_factory=Streams)


def test_pieces_come_in_order_and_whole():
    async def pieces() -> AsyncGenerator[bytes, None]:
        for number in range(5):
            yield event(number)
            await asyncio.sleep(0)

    client = Client()
    asyncio.run(client.run(pieces()))
    assert b"".join(client.got) == b"".join(event(number) for number in range(5))
    assert client.seen == ["end"]


def test_a_failure_is_the_last_event():
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield event("first")
        raise ApiError(503, "it broke", code="generation_failed")

    client = Client()
    asyncio.run(client.run(pieces()))
    assert b"".join(client.got).endswith(
        b'data: {"error":{"message":"it broke","type":"service_unavailable_error","param":null,'
        b'"code":"generation_failed"}}\n\n'
    )


def test_a_comment_is_sent_while_nothing_happens():
    async def pieces() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.07)
        yield event("late")

    client = Client()
    asyncio.run(client.run(pieces()))
    assert client.got[0].startswith(b": ")
    assert client.got[-1] == event("late")


def test_a_client_that_does_not_read_ends_its_stream_and_nothing_more_is_made():
    made = 0
    closed: list[bool] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            while True:
                made += 1
                yield b"x" * 100
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    client = Client(stops_reading=1)
    asyncio.run(client.run(pieces()))
    assert made <= 1 + 2 * LIMITS.unread_bytes // 100 + 1
    assert closed == [True]
    assert client.aborted == 1
    # What it asked for has ended before the connection is given up.
    assert client.seen == ["slow", "end", "slow"]


def test_a_piece_may_be_larger_than_what_may_wait():
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"x" * 100
        yield b"y" * 10 * LIMITS.unread_bytes

    client = Client()
    asyncio.run(client.run(pieces()))
    assert len(b"".join(client.got)) == 100 + 10 * LIMITS.unread_bytes
    assert client.seen == ["end"]


def test_a_client_that_reads_again_is_told_why_its_stream_ended():
    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"x" * 100
            await asyncio.sleep(0)

    async def scenario() -> Client:
        client = Client(stops_reading=1)
        running = asyncio.create_task(client.run(pieces(), RequestLimits(unread_bytes=1000, stalled_s=5)))
        await until(lambda: "slow" in client.seen)
        client.reads_again.set()
        await running
        return client

    client = asyncio.run(scenario())
    assert b'"code":"slow_reader"' in client.got[-1]
    assert client.aborted == 0


@pytest.mark.parametrize("moment", [0, 3])
def test_a_client_that_leaves_closes_what_makes_the_pieces(moment: int):
    closed: list[bool] = []

    async def scenario() -> Client:
        client = Client()

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                number = 0
                while True:
                    if number == moment:
                        client.leaves.set()
                    number += 1
                    yield event(number)
                    await asyncio.sleep(0)
            finally:
                closed.append(True)

        await client.run(pieces())
        return client

    client = asyncio.run(scenario())
    assert closed == [True]
    assert client.seen == ["gone", "end"]


def test_all_streams_can_be_ended_together():
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield event("first")
        await asyncio.Event().wait()

    async def scenario() -> list[Client]:
        streams = Streams()
        clients = [Client(streams=streams) for _ in range(3)]
        running = [asyncio.create_task(client.run(pieces())) for client in clients]
        await until(lambda: len(streams) == 3 and all(client.got for client in clients))
        streams.end(ApiError(503, "The gateway stops.", code="shutting_down"))
        await asyncio.gather(*running)
        assert len(streams) == 0
        return clients

    for client in asyncio.run(scenario()):
        assert b"shutting_down" in client.got[-1]


def test_a_comment_is_one_line():
    assert comment("one\ndata: two") == b": one data: two\n\n"
