"""The gateway killed and started again, a machine that leaves: clients and streams see no more of it than they must."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Final

import httpx
import pytest

from fusionai.client.pool.local_pool import BROKER
from fusionai.serving import job as progress
from harness.besieged_job import peers, seed_of
from harness.fault_proxy import free_port
from harness.live_pool import LivePool, Process
from harness.serving_siege import ServingSiege, besieging
from harness.serving_siege_streams import Reference, asked, write_model

pytestmark = pytest.mark.long

STAGES: Final = 2
STREAMS: Final = 4
START_S: Final = 400.0
"""For five processes that load torch on a busy machine."""
BEGUN: Final = 5
"""Tokens after which a stream is well under way."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """Two run a stage, one is spare."""
    directory = tmp_path_factory.mktemp("pool")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FUSION_HOME", str(directory / "default"))
        environment.setenv("FUSION_LOG", "info")
        with LivePool(directory, peers(STAGES + 1), broker_options=("--rest-after", "0")) as pool:
            yield pool


@dataclass
class Client:
    """One streaming request. `end`: how it ended, for the client."""

    url: str
    prompt: tuple[int, ...]
    max_tokens: int
    pieces: list[str] = field(default_factory=list[str])
    begun: Event = field(default_factory=Event)
    end: str = ""

    def listen(self) -> None:
        body = {"model": "tiny", "prompt": list(self.prompt), "max_tokens": self.max_tokens, "stream": True}
        asked = {**body, "temperature": 0, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=START_S) as answer:
                self.end = self._read(answer.iter_lines())
        except httpx.HTTPError as problem:
            self.end = type(problem).__name__
        finally:
            self.begun.set()

    def _read(self, lines: Iterator[str]) -> str:
        for line in lines:
            if not line.startswith("data: "):
                continue  # signs of life
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return "done"
            event = json.loads(data)
            if "error" in event:
                return f"error: {event['error']['message']}"
            self.pieces += [choice["text"] for choice in event.get("choices", ())]
            if len(self.pieces) == BEGUN:
                self.begun.set()
        return "ended without a word"


@contextmanager
def serving(pool: LivePool, model: Path, port: int, ready: Path, stages: int = STAGES) -> Iterator[Process]:
    """Until the block ends at the latest."""
    server = Process(
        *("serve", model, "--stages", stages, "--context", 256, "--sessions", STREAMS, "--port", port),
        *("--threads", 1, "--home", pool.owner, "--json", ready),
    )
    try:
        found = server.wait_until(lambda: next((line for line in server.lines if "curl " in line), None), START_S)
        assert found is not None, server.text
        yield server
    finally:
        server.end()


@pytest.mark.timeout(1800)
def test_a_gateway_that_was_killed_serves_again_and_nobody_takes_a_piece_for_the_whole(
    pool: LivePool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    port, pids = free_port(), {name: one.process.pid for name, one in pool.members.items()}
    url = f"http://127.0.0.1:{port}"
    asks = [asked(1, 2 * number) for number in range(STREAMS)]
    clients, anew = ([Client(url, ask.prompt, 180) for ask in asks] for _ in range(2))
    with ThreadPoolExecutor(STREAMS) as listening:
        with serving(pool, model, port, tmp_path / "first.json") as server:
            over = [listening.submit(client.listen) for client in clients]
            for client in clients:
                assert client.begun.wait(START_S)
            server.end()
            for one in over:
                one.result(START_S)
        # The connection broke inside an answer, which no client takes for its end; none waits for more.
        assert {client.end for client in clients} <= {"RemoteProtocolError", "ReadError"}
        refused = Client(url, asks[0].prompt, 4)
        refused.listen()
        assert refused.end == "ConnectError"

        killed_s = time.monotonic()
        with serving(pool, model, port, tmp_path / "second.json") as server:
            again_s = time.monotonic() - killed_s
            assert "was killed; its peers are free again" in server.text
            list(listening.map(Client.listen, anew))
            # In order: what is under way may finish, or is told.
            last = Client(url, asks[0].prompt, 60)
            under_way = listening.submit(last.listen)
            assert last.begun.wait(START_S)
            server.interrupt()
            under_way.result(START_S)
            assert server.ended() == 0
    assert [client.end for client in anew] == ["done"] * STREAMS
    assert last.end in ("done", "error: The gateway stops."), "on a busy machine it may take longer than is waited for"
    for client, later in zip(clients, anew, strict=True):
        assert "".join(later.pieces).startswith("".join(client.pieces).rstrip("\N{REPLACEMENT CHARACTER}"))
    before, now = (json.loads((tmp_path / one).read_text()) for one in ("first.json", "second.json"))
    assert {*before["peers"].values()} == {*now["peers"].values()}
    assert {name: one.process.pid for name, one in pool.members.items() if one.lives} == pids
    with capsys.disabled():
        print(f"\nserves again {again_s:.1f} s after its start, {len(pids)} peers as before")  # noqa: T201


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)  # noqa: T201 - figures

    return say


@pytest.mark.timeout(1200)
def test_a_machine_that_leaves_hands_its_sessions_over_first(
    pool: LivePool, model: Path, reference: Reference, tell: Callable[[str], None]
):
    """It ends by itself, after its standby has its stage; nobody waits for a machine, nothing is called a loss."""

    invitation = pool.invite()

    async def story() -> tuple[ServingSiege, float, float]:
        async with besieging(pool, model, seed_of(7), stages=STAGES) as siege:
            async with siege.streams(STREAMS):
                await siege.guarded()
                stage = siege.stages()[0]
                process = pool.members.pop(stage.name)
                asked_s = time.monotonic()
                asking = Process("leave", "--home", pool.directory / stage.name)
                assert await asyncio.to_thread(asking.ended) == 0, asking.text
                assert await asyncio.to_thread(process.ended) == 0, process.text
                gone_s = time.monotonic()
                assert stage.name not in {one.name for one in siege.stages()}
                await siege.until(lambda: siege.flows_since(gone_s), "every stream goes on")
                found = [
                    (at_s, event.note.text)
                    for at_s, event in siege.told
                    if isinstance(event, progress.Fault) and at_s > asked_s
                ]
                assert f"{stage.name} leaves" in found[0][1], found
                assert not any("is gone" in text or "failed" in text for _, text in found), found
                assert found[0][0] < gone_s
                gaps_s = [gap_s for answer in siege.answers for gap_s in answer.gaps_s(asked_s, gone_s)]
            # The pool as it was, for whatever comes next.
            await asyncio.to_thread(pool.start(stage.name, invitation).wait_for, "In pool")
            return siege, max(gaps_s), gone_s - asked_s

    siege, gap_s, took_s = asyncio.run(story())
    tell(f"left in {took_s:.1f} s, longest gap of a stream {gap_s:.3f} s")
    assert not any(held.state == "waiting" for answer in siege.answers for _, held in answer.held)
    assert all(answer.end is not None and answer.end.reason == "length" for answer in siege.answers)
    tell(str(reference.compare([(answer.ask, answer.tokens) for answer in siege.answers])))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_fast_machine_that_comes_back_gets_a_stage_again_when_no_session_runs(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]
):
    """A slow one has all of the model meanwhile: as the other's standby, or because it is cut anew over what is left.
    The model is large enough for plans to count its layers more than the way between processes of a busy machine."""
    model = write_model(tmp_path / "tiny", hidden_size=256, intermediate_size=1024)
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    calm, through, after = (Client(url, asked(1, 0).prompt, 120) for _ in range(3))
    with LivePool(tmp_path / "pool", ("quick",)) as pool:
        pool.start("slow", pool.invite(), "--share", "10%").wait_for("In pool")
        with (
            serving(pool, model, port, tmp_path / "out.json", stages=stages) as server,
            ThreadPoolExecutor(1) as listening,
        ):
            if stages == 1:
                server.wait_for("is on slow as a spare")
            calm.listen()
            under_way = listening.submit(through.listen)
            assert through.begun.wait(START_S)
            pool.kill("quick")
            server.wait_for("plan 2: ")
            pool.start("quick").wait_for("In pool")
            server.wait_for("is on quick as a spare")
            back_s = server.came_at_s[-1]
            under_way.result(START_S)
            over_s = time.time()
            moved = server.wait_until(
                lambda: next((line for line in server.lines if "no session runs" in line), None), START_S
            )
            assert moved is not None, server.text
            assert moved.count(" on quick") == 1
            assert moved.count(" on slow") == stages - 1
            moved_s = server.came_at_s[server.lines.index(moved)]
            assert moved_s > over_s
            after.listen()
            server.interrupt()
            assert server.ended() == 0, server.text
    assert [one.end for one in (calm, through, after)] == ["done"] * 3
    assert calm.pieces
    assert {"".join(one.pieces) for one in (through, after)} == {"".join(calm.pieces)}
    assert server.text.count("no session runs") == 1
    tell(f"{moved.strip()}\n{moved_s - back_s:.1f} s after it stood by, {moved_s - over_s:.1f} s after the last stream")


@pytest.mark.timeout(1200)
def test_every_peer_of_a_local_pool_is_killed_once_while_streams_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]
):
    """Each is started again and stands by before the next one falls; whoever reads a stream can tell nothing."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    port, figures = free_port(), tmp_path / "serve.json"
    url = f"http://127.0.0.1:{port}"
    server = Process(
        *("serve", model, "--local", 3, "--context", 256, "--sessions", STREAMS, "--port", port),
        *("--threads", 1, "--home", tmp_path / "home", "--json", figures),
    )

    def said(words: str, times: int = 1) -> None:
        heard = server.wait_until(
            lambda: True if sum(words in line for line in server.lines) >= times else None, START_S
        )
        assert heard, f"{words!r} came less than {times} times; said: {server.text}"

    def listening(stop: Event, clients: list[Client]) -> None:
        while not stop.is_set():
            clients.append(Client(url, asked(1, 2 * len(clients) % 8).prompt, 180))
            clients[-1].listen()

    stop = Event()
    streams: list[list[Client]] = [[] for _ in range(2)]
    try:
        said("curl ")
        peers = {name: pid for name, pid in json.loads(figures.read_text())["local_pids"].items() if name != BROKER}
        assert len(peers) == 4
        said("as a spare")
        with ThreadPoolExecutor(len(streams)) as reading:
            over = [reading.submit(listening, stop, clients) for clients in streams]
            for struck, (name, pid) in enumerate(peers.items(), 1):
                os.kill(pid, signal.SIGKILL)
                said(f"{name} was killed (signal 9); it is started again in")
                said(f"{name} runs again")
                said("can have a standby now", struck)
                said(f" is on {name} as a spare")
            stop.set()
            for one in over:
                one.result(START_S)
        assert "not started again" not in server.text
        assert "Traceback" not in server.text
        server.interrupt()
        assert server.ended() == 0, server.text
    finally:
        stop.set()
        if server.lives:  # its pool is ended by nobody else
            server.interrupt()
            server.ended()
        server.end()
    texts: dict[tuple[int, ...], set[str]] = {}
    clients = [client for one in streams for client in one]
    assert {client.end for client in clients} == {"done"}
    for client in clients:
        texts.setdefault(client.prompt, set()).add("".join(client.pieces))
    assert all(len(found) == 1 for found in texts.values())
    gaps = re.findall(r"tokens stood still for ([\d.]+ m?s)", server.text)
    tell(f"{len(clients)} streams, {len(peers)} peers killed; tokens stood still for {', '.join(gaps)}")
