"""Hostile clients get clear errors, or none at all, while another's stream goes on to its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.serving.interface import Generation
from harness.gateway_stand import Stand, chat, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
LONG = "word " * 100


@pytest.fixture
def engine(text: Any) -> ScriptedEngine:
    return ScriptedEngine(text, context_tokens=4096)


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def while_a_stream_goes_on(
    engine: ScriptedEngine, attack: Callable[[Stand], Awaitable[None]], limits: RequestLimits | None = None
) -> None:
    """The stream waits at its first token until the attack is over or at its height, then must come to its end."""

    async def scenario() -> None:
        config = GatewayConfig("tiny", limits=limits or RequestLimits())
        async with (
            gateway_stand(engine, config) as stand,
            httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http,
            http.stream("POST", CHAT, json=chat(stream=True)) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            await attack(stand)
            rest = [line async for line in lines]
            assert "data: [DONE]" in rest
        assert engine.live == 0

    engine.script = lambda prompt, generation: LONG if "long" in prompt else "A patient answer in several tokens."
    engine.pause_s = 0.002
    asyncio.run(scenario())


def test_a_huge_prompt_is_refused(engine: ScriptedEngine):
    async def attack(stand: Stand) -> None:
        async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
            too_long = await http.post(CHAT, json=chat("x" * 400_000))
            assert too_long.json()["error"]["code"] == "context_length_exceeded"
            too_large = await http.post(CHAT, json=chat("x" * 9_000_000))
            assert too_large.json()["error"]["code"] == "request_too_large"

    while_a_stream_goes_on(engine, attack)


def test_a_thousand_connections_are_answered_or_refused_clearly(engine: ScriptedEngine):
    async def one(stand: Stand) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status = int((await reader.readline()).split()[1])
        opened.append((reader, writer))
        return status

    opened: list[Any] = []

    async def attack(stand: Stand) -> None:
        statuses = await asyncio.gather(*(one(stand) for _ in range(1000)))
        # The one that goes on has a place too.
        assert (statuses.count(200), statuses.count(503)) == (599, 401)
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in opened), return_exceptions=True)
        async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
            assert (await http.get("/v1/models")).status_code == 200

    while_a_stream_goes_on(engine, attack, RequestLimits(connections=600))


def test_too_many_requests_at_once_are_sent_away_with_a_time_to_come_back(engine: ScriptedEngine):
    async def attack(stand: Stand) -> None:
        async with httpx.AsyncClient(
            base_url=stand.url, timeout=CEILING_S, trust_env=False, limits=httpx.Limits(max_connections=None)
        ) as http:
            answers = await asyncio.gather(*(http.post(CHAT, json=chat()) for _ in range(30)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_requests"

    while_a_stream_goes_on(engine, attack, RequestLimits(requests=8))


def test_who_asks_and_does_not_read_loses_the_generation(engine: ScriptedEngine):
    async def attack(stand: Stand) -> None:
        writers: list[asyncio.StreamWriter] = []
        for _ in range(3):
            # A small window, so that what is not read piles up there and not here.
            narrow = socket.socket()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.connect(("127.0.0.1", stand.port))
            _, writer = await asyncio.open_connection(sock=narrow, limit=1024)
            body = chat("long", stream=True, logprobs=True, top_logprobs=20, n=2)
            writer.write(request_bytes(body))
            await writer.drain()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writers.append(writer)
        await until(lambda: len(engine.given) == 1 + 3 * 2)
        await until(lambda: engine.closed_early == 6)
        for writer in writers:
            writer.transport.abort()
        await until(lambda: engine.live <= 1)

    while_a_stream_goes_on(engine, attack, RequestLimits(unread_bytes=20_000, stalled_s=1.0))
    assert engine.closed_early == 6


def test_sixteen_clients_that_never_read_hold_their_sessions_for_a_bounded_number_of_tokens(engine: ScriptedEngine):
    """With sockets as clients have them, and the limits that ship."""

    def script(prompt: str, generation: Generation) -> str:
        return "word " * 3900 if "long" in prompt else "A patient answer in several tokens."

    async def attack(stand: Stand) -> None:
        engine.pause_s = 0.0
        engine.script = script
        writers: list[asyncio.StreamWriter] = []
        for _ in range(16):
            _, writer = await asyncio.open_connection("127.0.0.1", stand.port, limit=1024)
            writer.write(request_bytes(chat("long", stream=True, max_tokens=4000, logprobs=True, top_logprobs=2)))
            await writer.drain()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writers.append(writer)
        await until(lambda: len(engine.given) == 1 + 16)
        await until(lambda: engine.closed_early == 16)
        for writer in writers:
            writer.transport.abort()
        await until(lambda: engine.live <= 1)

    while_a_stream_goes_on(engine, attack)
    assert engine.closed_early == 16


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00" * 20, b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000],
    ids=["a TLS greeting", "an endless header"],
)
def test_what_is_no_http_is_refused(engine: ScriptedEngine, sent: bytes):
    async def attack(stand: Stand) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
        writer.write(sent)
        assert b" 4" in (await asyncio.wait_for(reader.read(), 10))[:20]
        writer.close()

    while_a_stream_goes_on(engine, attack, RequestLimits(head_timeout_s=2.0))
