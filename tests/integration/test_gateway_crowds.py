"""`fusion serve` under crowds: thousands of connections, slow readers, people who leave, nonsense, deadlines; all over
a real engine on real peers. Whoever behaves gets the same tokens as in a calm hour, and the process does not grow.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
import transformers

from fusionai.corpus.tokens import train_tokenizer
from harness.live_pool import Process
from harness.patience import CEILING_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
CONTEXT = 128
PROMPT = "a pool of peers serves"
PATIENCE_S = 200.0
GROWTH_BYTES = 24_000_000
"""Between two equal crowds: what allocators keep, no more."""


@dataclass(frozen=True)
class Site:
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def resident_bytes(self) -> int:
        return psutil.Process(self.pid).memory_info().rss

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/fusion/status", timeout=CEILING_S) as answer:
            return json.load(answer)["engine"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("crowds")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = directory / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    for name, content in train_tokenizer(iter(["a pool of peers serves a model " * 40]), 300).files.items():
        (model / name).write_bytes(content)
    figures = directory / "serve.json"
    server = Process(
        *("serve", model, "--local", 2, "--spares", 0, "--context", CONTEXT, "--sessions", 32, "--port", 0),
        *("--home", directory / "home", "--json", figures),
    )
    try:
        ready = server.wait_until(lambda: next((line for line in server.lines if "curl " in line), None), 900.0)
        assert ready is not None, server.text
        yield Site(json.loads(figures.read_text())["url"], server.process.pid)
        server.interrupt()
        assert server.ended() == 0
        assert "fusionai/gateway" not in server.text, "a mistake of the gateway was logged"
    finally:
        if server.lives:
            server.interrupt()
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=CEILING_S)
        server.end()


def request_bytes(body: object) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def asking(tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """Greedy: the same tokens every time."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**body, **fields}


@dataclass(frozen=True)
class Said:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]["code"]

    @property
    def text(self) -> str:
        return json.loads(self.body)["choices"][0]["text"]


@asynccontextmanager
async def connection(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(site: Site, body: object) -> Said:
    async with connection(site) as (reader, writer):
        writer.write(request_bytes(body))
        status = int((await reader.readline()).split()[1])
        headers: dict[str, str] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        rest = await reader.read()
        return Said(status, headers, rest)


async def streamed(site: Site, tokens: int) -> str:
    """The text of a whole stream; fails where it does not come to its end."""
    async with connection(site) as (reader, writer):
        writer.write(request_bytes(asking(tokens, stream=True)))
        text, done = "", False
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
        assert done, text
        return text


async def calm(site: Site) -> None:
    """All that was given up is free again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            state = await asyncio.to_thread(site.status)
            if state["state"] == "ready" and not state["running"] + state["queued"]:
                return
            await asyncio.sleep(0.2)


async def insisting(site: Site, body: object) -> Said:
    """Comes again when told, as long as it is sent away for a time."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            said = await ask(site, body)
            if said.status not in (429, 503):
                return said
            await asyncio.sleep(min(int(said.headers["retry-after"]), 5))


def while_streams_go_on(site: Site, crowd: Any) -> None:
    """Four streams that began before the crowd came end with the tokens of a calm hour."""

    async def scenario() -> None:
        tokens = CONTEXT - 40
        expected = await streamed(site, tokens)
        going = [asyncio.create_task(streamed(site, tokens)) for _ in range(4)]
        await asyncio.sleep(0.2)
        try:
            await crowd()
        finally:
            texts = await asyncio.gather(*going)
        assert texts == [expected] * 4
        await calm(site)

    asyncio.run(scenario())


def test_thousands_of_connections(site: Site) -> None:
    async def crowd() -> None:
        expected = (await ask(site, asking())).text
        answers = await asyncio.gather(*(ask(site, asking()) for _ in range(1500)))
        counted = Counter(answer.status for answer in answers)
        assert set(counted) <= {200, 429, 503}, counted
        assert counted[200] >= 32, counted
        assert counted[429] + counted[503] > 0, "a crowd within the limits tests nothing"
        for answer in answers:
            if answer.status == 200:
                assert answer.text == expected
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.error in ("too_many_requests", "engine_busy", "too_many_connections")
        # Whoever comes again when told is served in the end.
        assert (await insisting(site, asking())).text == expected

    while_streams_go_on(site, crowd)


def test_people_who_leave_in_the_middle(site: Site) -> None:
    async def leaves(after: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(request_bytes(asking(CONTEXT - 40, stream=True)))
        for _ in range(after):
            await reader.readline()
        # A reset, not a polite end.
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def crowd() -> None:
        for _ in range(3):
            await asyncio.gather(*(leaves(number % 20) for number in range(100)))

    while_streams_go_on(site, crowd)


def test_people_who_do_not_read(site: Site) -> None:
    async def crowd() -> None:
        writers: list[asyncio.StreamWriter] = []
        for _ in range(60):
            narrow = socket.socket()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", site.port))
            _, writer = await asyncio.open_connection(sock=narrow, limit=1024)
            writer.write(request_bytes(asking(CONTEXT - 40, stream=True, logprobs=20, n=4)))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writers.append(writer)
        # Others are served meanwhile, though these have the engine's places first.
        assert (await insisting(site, asking())).status == 200
        for writer in writers:
            writer.transport.abort()

    while_streams_go_on(site, crowd)


def test_nonsense(site: Site) -> None:
    wrong: list[tuple[object, int, str]] = [
        (asking(prompt="x" * 400_000), 400, "context_length_exceeded"),
        (asking(prompt="x" * 9_000_000), 413, "request_too_large"),
        (asking(prompt=[10**9]), 400, "invalid_value"),
        (asking(prompt=[[]]), 400, ""),
        (asking(max_tokens="many"), 400, "invalid_type"),
        (asking(temperature=-1), 400, ""),
        (asking(model="another"), 404, "model_not_found"),
        (asking(stop=[""]), 400, "invalid_value"),
        (asking(suffix="red"), 400, "unsupported_parameter"),
        (b"{" * 100_000, 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (asking(logit_bias={"x": 1}), 400, ""),
    ]

    async def crowd() -> None:
        for _ in range(3):
            answers = await asyncio.gather(*(ask(site, body) for body, _, _ in wrong * 4))
            for answer, (_, status, code) in zip(answers, wrong * 4, strict=True):
                assert answer.status == status, answer
                assert answer.error == code or not code

    while_streams_go_on(site, crowd)


def test_deadlines(site: Site) -> None:
    async def crowd() -> None:
        late = asking(CONTEXT - 40, timeout_s=0.001)
        answers = await asyncio.gather(*(ask(site, late) for _ in range(20)))
        assert {(answer.status, answer.error) for answer in answers} == {(504, "deadline_exceeded")}
        told = await ask(site, {**late, "stream": True})
        assert told.status == 200, "the stream had begun"
        assert b'"deadline_exceeded"' in told.body
        assert b"[DONE]" not in told.body

    while_streams_go_on(site, crowd)


def test_log_probabilities_of_prompts_have_the_prompt_s_length(site: Site) -> None:
    async def scenario() -> None:
        prompts = ["a", PROMPT, PROMPT + " a model" * 12]
        for fields in ({}, {"n": 2}, {"max_tokens": 0}):
            told = await ask(site, asking(4, prompt=prompts, echo=True, logprobs=3, **fields))
            assert told.status == 200, told
            body = json.loads(told.body)
            for choice in body["choices"]:
                logprobs = choice["logprobs"]
                lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
                assert lengths == {len(logprobs["tokens"])}
                assert "".join(logprobs["tokens"]) == choice["text"]
                assert logprobs["token_logprobs"][0] is None
                assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
            # The same again, now that the prompts are in the prefix cache.
            again = json.loads((await ask(site, asking(4, prompt=prompts, echo=True, logprobs=3, **fields))).body)
            assert [one["logprobs"] for one in again["choices"]] == [one["logprobs"] for one in body["choices"]]

    asyncio.run(scenario())


def test_the_process_does_not_grow(site: Site) -> None:
    async def crowd() -> None:
        answers = await asyncio.gather(*(ask(site, asking(4)) for _ in range(600)))
        assert {answer.status for answer in answers} <= {200, 429, 503}
        await asyncio.gather(*(ask(site, asking(prompt="x" * 1_000_000)) for _ in range(8)))
        await calm(site)

    async def scenario() -> list[int]:
        sizes: list[int] = []
        for _ in range(5):
            await crowd()
            sizes.append(site.resident_bytes)
        return sizes

    sizes = asyncio.run(scenario())
    # The first ones bring buffers and caches to their size.
    assert max(sizes[2:]) - sizes[1] < GROWTH_BYTES, sizes
