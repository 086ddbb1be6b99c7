"""What no client package asks for: routes and times, metrics, status, errors of every kind, keys and doors, the end."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, KeyRing, RequestLimits
from fusionai.gateway.server import open_listener
from fusionai.primitives.errors import UsageError
from fusionai.serving.interface import FaultNote
from harness.gateway_stand import Stand, chat, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import STAGES, ScriptedEngine

CHAT = "/v1/chat/completions"


def client(stand: Stand, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False, **options)


def events(body: str) -> list[Any]:
    data = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.slow
def test_the_route_and_its_times_come_when_asked_for(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as http:
            plain = (await http.post(CHAT, json=chat())).json()
            assert "fusion" not in plain
            engine.hold_at = 2
            whole = (await http.post(CHAT, json=chat(), headers={"x-fusion-route": "1"})).json()["fusion"]
            assert whole["route"] == list(STAGES)
            tokens = plain["usage"]["completion_tokens"]
            assert [(hop["stage"], hop["peer"], hop["tokens"]) for hop in whole["hops"]] == [
                (at, name, tokens) for at, name in enumerate(STAGES)
            ]
            last = whole["hops"][2]
            assert last["transfer_s"] == pytest.approx(0.002)
            assert last["last_compute_s"] == pytest.approx(0.002 + 5e-4 * (tokens - 1))
            assert last["compute_s"] == pytest.approx(0.002 + 5e-4 * (tokens - 1) / 2)
            assert [wait["state"] for wait in whole["waits"]] == ["recovering", "running"]
            for more in ({}, {"stream_options": {"include_usage": True}}):
                answer = await http.post(CHAT, json=chat(stream=True, fusion_route=True, **more))
                assert ": recovering: tower was lost; attic takes its place" in answer.text
                chunks = events(answer.text)
                assert [chunk["fusion"]["route"] for chunk in chunks if "fusion" in chunk] == [list(STAGES)]
                assert "fusion" in chunks[-1]
            texts = {"model": "tiny", "prompt": "one", "temperature": 0, "stream": True, "fusion_route": True}
            assert "fusion" in events((await http.post("/v1/completions", json=texts)).text)[-1]

    asyncio.run(scenario())


@pytest.mark.slow
def test_every_error_has_the_same_form(engine: ScriptedEngine):
    async def scenario() -> None:
        limits = RequestLimits(body_bytes=2000, choices=4)
        async with gateway_stand(engine, GatewayConfig("tiny", limits=limits)) as stand, client(stand) as http:
            cases: list[tuple[Any, int, str]] = [
                (http.get("/nowhere"), 404, "not_found"),
                (http.get("/v1/chat/completions"), 405, "method_not_allowed"),
                (http.delete("/v1/models"), 405, "method_not_allowed"),
                (http.get("/v1/models/other"), 404, "model_not_found"),
                (http.post(CHAT, content=b"{}"), 415, "unsupported_media_type"),
                (http.post(CHAT, json=chat("x" * 3000)), 413, "request_too_large"),
                (http.post(CHAT, json=chat(n=5)), 400, "invalid_value"),
                (http.post(CHAT, json=chat(model="gpt")), 404, "model_not_found"),
                (http.post(CHAT, json=chat(stream_options={"include_usage": True})), 400, "invalid_value"),
                (http.post(CHAT, json=chat(top_logprobs=2)), 400, "invalid_value"),
                (http.post(CHAT, json=chat(logit_bias={"99999": 1})), 400, "invalid_value"),
                (http.post(CHAT, json=chat(logit_bias={"x": 1})), 400, "invalid_value"),
                (http.post(CHAT, json=chat(stop="")), 400, "invalid_value"),
                (http.post(CHAT, json=chat(stop_token_ids=[9999])), 400, "invalid_value"),
                (http.post(CHAT, json=chat(max_tokens=5, max_completion_tokens=5)), 400, "invalid_value"),
                (http.post(CHAT, json=chat(tool_choice="required")), 400, "invalid_value"),
                (http.post(CHAT, json=chat(), headers={"x-fusion-route": "maybe"}), 400, "invalid_value"),
                (http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", 1]}), 400, "invalid_type"),
                (http.post("/v1/completions", json={"model": "tiny", "prompt": [9999]}), 400, "invalid_value"),
                (http.post("/v1/completions", json={"model": "tiny", "prompt": ""}), 400, "invalid_value"),
                (http.post("/v1/completions", json={"model": "tiny", "prompt": ["a"] * 5}), 400, "invalid_value"),
                (
                    http.post("/v1/embeddings", json={"model": "tiny", "input": "a", "dimensions": 9}),
                    400,
                    "invalid_value",
                ),
                (http.get("/v1/models", headers={"host": "evil.example"}), 403, "foreign_host"),
                (http.get("/v1/models", headers={"origin": "http://evil.example"}), 403, "foreign_origin"),
                (http.get("/v1/models", headers={"origin": "null"}), 403, "foreign_origin"),
            ]
            for request, status, code in cases:
                answer = await request
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (status, code), error
                assert set(error) == {"message", "type", "param", "code"}
                assert answer.headers["x-request-id"].startswith("req_")
            assert (await http.get("/v1/models", headers={"x-request-id": "mine-1"})).headers[
                "x-request-id"
            ] == "mine-1"
            assert not engine.given

    asyncio.run(scenario())


def test_up_ready_status_and_numbers(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as http:
            engine.state = "recovering"
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            # While it recovers, requests wait their turn; only before the first token ever are they sent away.
            assert (await http.post(CHAT, json=chat())).status_code == 200
            engine.state = "starting"
            refused = await http.post(CHAT, json=chat())
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            engine.state = "ready"
            assert (await http.get("/ready")).json()["ready"] is True
            engine.faults = (FaultNote(1_700_000_000.0, "tower was lost", 0.4),)
            status = (await http.get("/fusion/status")).json()
            assert [stage["name"] for stage in status["engine"]["stages"]] == list(STAGES)
            assert status["engine"]["faults"] == [{"at_s": 1_700_000_000.0, "text": "tower was lost", "gap_s": 0.4}]
            numbers = (await http.get("/metrics")).text
            tokens = engine.text.tokenizer.encode("You said: hello", framed=False)
            assert f"fusion_generated_tokens_total {float(len(tokens))}\n" in numbers
            assert "fusion_first_token_seconds_count 1.0\n" in numbers
            assert f"fusion_between_tokens_seconds_count {float(len(tokens) - 1)}\n" in numbers
            assert 'fusion_requests_total{endpoint="chat_completions",status="503"} 1.0' in numbers
            assert 'fusion_stage_compute_seconds{peer="tower",pipeline="1",stage="2"} 0.006' in numbers
            assert "fusion_engine_accepted_tokens 3.0" in numbers
            assert "fusion_engine_faults_total 1.0" in numbers

    asyncio.run(scenario())


@pytest.mark.slow
def test_status_comes_again_when_it_changed(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.gateway.app._STATUS_PERIOD_S", 0.05)

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as http:
            async with http.stream("GET", "/fusion/status/events") as stream:
                lines = (line async for line in stream.aiter_lines() if line.startswith("data: "))
                first = json.loads((await anext(lines))[6:])
                engine.state = "waiting"
                second = json.loads((await anext(lines))[6:])
            assert [report["engine"]["state"] for report in (first, second)] == ["ready", "waiting"]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_key_opens_everything_but_the_page_and_the_health(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("a-good-long-key-of-hers\n")
    config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"))

    async def scenario() -> None:
        async with gateway_stand(engine, config) as stand, client(stand) as http:
            for path in ("/v1/models", "/fusion/status", "/fusion/status/events", "/metrics", "/v1/nothing"):
                assert (await http.get(path)).status_code == 401, path
            for path in ("/", "/page.js", "/health", "/ready", "/openapi.json"):
                assert (await http.get(path)).status_code == 200, path
            good = {"authorization": "Bearer a-good-long-key-of-hers", "host": "pool.example"}
            assert (await http.get("/v1/models", headers=good)).status_code == 200
            for key, status in (("a-good-long-key-of-hers", 200), ("another-key-of-nobody", 401)):
                assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == status
            assert (await http.get("/openapi.json")).json()["security"] == [{"key": []}]

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_only_this_machine_is_served(host: str):
    with pytest.raises(UsageError, match="without API keys"):
        open_listener(host, 0, has_keys=False)


def test_a_port_in_use_is_said_so():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match=r"can't listen on 127\.0\.0\.1"),
    ):
        open_listener("127.0.0.1", taken.getsockname()[1], has_keys=False)


@pytest.mark.slow
def test_at_its_end_streams_may_finish_and_late_ones_are_told(engine: ScriptedEngine):
    async def ask(http: httpx.AsyncClient) -> str:
        return (await http.post(CHAT, json=chat(stream=True))).text

    async def scenario(drain_s: float) -> str:
        engine.gate = asyncio.Event()
        config = GatewayConfig("tiny", limits=RequestLimits(drain_s=drain_s))
        async with gateway_stand(engine, config) as stand, client(stand) as http:
            asking = asyncio.create_task(ask(http))
            await until(lambda: engine.live == 1)
            stand.stop.set()
            await asyncio.sleep(0.3)
            if drain_s > 1:
                engine.gate.set()
            told = await asking
            await stand.served
        assert engine.live == 0
        return told

    assert events(asyncio.run(scenario(8.0)))[-1]["choices"][0]["finish_reason"] == "stop"
    assert '"code":"shutting_down"' in asyncio.run(scenario(0.1))


def test_adapters_are_models_beside_the_model(engine: ScriptedEngine):
    async def scenario() -> None:
        config = GatewayConfig("tiny", aliases=("default",), adapters=("law", "poems"))
        async with gateway_stand(engine, config) as stand, client(stand) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["parent"]) for one in listed] == [
                ("tiny", None),
                ("default", None),
                ("law", "tiny"),
                ("poems", "tiny"),
            ]
            assert (await http.get("/v1/models/poems")).json()["parent"] == "tiny"
            engine.given.clear()
            for name in ("poems", "default", "tiny"):
                answer = (await http.post(CHAT, json=chat(model=name))).json()
                assert answer["model"] == ("poems" if name == "poems" else "tiny")
            body = {"model": "law", "prompt": "a", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).json()["model"] == "law"
            assert [given.adapter for given in engine.given] == ["poems", None, None, "law"]
            vectors = await http.post("/v1/embeddings", json={"model": "law", "input": "a"})
            assert vectors.json()["model"] == "law"
            refused = await http.post(CHAT, json=chat(model="poem"))
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
            assert "poems" in refused.json()["error"]["message"]

    asyncio.run(scenario())


def test_unknown_fields_are_named_in_a_header(engine: ScriptedEngine):
    asked = chat(colour="red", temprature=3)
    asked["messages"][0]["mood"] = "blue\n"

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as http:
            assert "x-fusion-ignored" not in (await http.post(CHAT, json=chat())).headers
            for body in (asked, {**asked, "stream": True}):
                answer = await http.post(CHAT, json=body)
                assert answer.status_code == 200
                assert answer.headers["x-fusion-ignored"] == "colour, messages[].mood, temprature"
            vectors = await http.post("/v1/embeddings", json={"model": "tiny", "input": "a", "é\n": 1})
            assert vectors.headers["x-fusion-ignored"] == "%C3%A9%0A"
            # What OpenAI's API has, and would change the answer, is refused as before.
            refused = await http.post(CHAT, json={**asked, "audio": {"voice": "x"}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "audio")
            wrong = await http.post(CHAT, json={**asked, "n": "two"})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
        async with gateway_stand(engine, GatewayConfig("tiny", is_strict=True)) as stand, client(stand) as http:
            refused = (await http.post(CHAT, json=chat(temprature=3))).json()["error"]
            assert (refused["code"], refused["param"]) == ("unknown_parameter", "temprature")
            assert "temperature" in refused["message"]

    asyncio.run(scenario())
