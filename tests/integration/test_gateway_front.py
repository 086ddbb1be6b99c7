"""One address for several models: requests reach the model that they name, and what concerns all is answered at once.

Neighbours: `test_cli_several` runs the processes; `unit/coordination/serving/test_hosting` has who is loaded when.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anthropic
import httpx
import ollama
import openai
import pytest

from fusionai.client.serving.hosts import ModelProgram, ModelUnavailable
from fusionai.gateway.config import GatewayConfig, KeyRing, RequestLimits
from fusionai.gateway.front import SMALL_BYTES, Front
from fusionai.serving.model_text import ModelText
from harness.gateway_stand import LIMIT_S, Stand, chat, gateway_stand, listening, until
from harness.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
NAMES = ("small", "large")


@dataclass
class ScriptedHosts:
    """Models that are loaded when a test says so."""

    stands: dict[str, Stand]
    loaded: list[str] = field(default_factory=lambda: ["small"])
    used: list[str] = field(default_factory=list[str])
    running: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""
    programs: tuple[ModelProgram, ...] = (ModelProgram("small", (), ()), ModelProgram("large", ("law",), ()))

    @property
    def phases(self) -> dict[str, str]:
        return {name: "ready" if name in self.loaded else "cold" for name in NAMES}

    @property
    def urls(self) -> dict[str, str]:
        return {name: self.stands[name].url for name in reversed(self.loaded)}

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str]:
        if self.refusal:
            raise ModelUnavailable(self.refusal)
        self.used.append(name)
        if name not in self.loaded:
            await self.gate.wait()
            self.loaded.append(name)
        self.running += 1
        try:
            yield self.stands[name].url
        finally:
            self.running -= 1


@dataclass(frozen=True)
class FrontStand:
    url: str
    hosts: ScriptedHosts
    stop: asyncio.Event


@asynccontextmanager
async def front_stand(
    text: ModelText, keys: KeyRing | None = None, limits: RequestLimits | None = None
) -> AsyncIterator[FrontStand]:
    """A front before two gateways, of which `small` is loaded."""
    async with AsyncExitStack() as stack:
        stands: dict[str, Stand] = {}
        for name in NAMES:
            engine = ScriptedEngine(
                text, script=lambda prompt, generation, name=name: f"{name} says hello", pause_s=0.01
            )
            config = GatewayConfig(name, adapters=("law",) if name == "large" else (), keys=keys)
            stands[name] = await stack.enter_async_context(gateway_stand(engine, config))
        hosts = ScriptedHosts(stands)
        front = Front(GatewayConfig("", keys=keys, limits=limits or RequestLimits()), hosts)
        url, stop, _ = await stack.enter_async_context(listening(front))
        yield FrontStand(url, hosts, stop)


def test_requests_reach_the_model_that_they_name(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front, httpx.AsyncClient(base_url=front.url, timeout=LIMIT_S) as http:
            front.hosts.gate.set()
            for name, model in (("small", "small"), ("large", "large"), ("law", "large")):
                answer = await http.post(CHAT, json=chat(model=name))
                assert answer.json()["choices"][0]["message"]["content"] == f"{model} says hello"
            streamed = (await http.post(CHAT, json=chat(model="large", stream=True))).text
            assert streamed.rstrip().endswith("data: [DONE]")
            assert front.hosts.running == 0
            assert front.hosts.used == ["small", "large", "large", "large"]

    asyncio.run(scenario())


def test_a_form_reaches_the_model_that_it_names(text: ModelText) -> None:
    """The model's own gateway answers it, here with a refusal."""

    async def scenario() -> None:
        async with front_stand(text) as front, httpx.AsyncClient(base_url=front.url, timeout=LIMIT_S) as http:
            front.hosts.gate.set()
            sound = {"file": ("a.wav", bytes(SMALL_BYTES))}
            answer = await http.post("/v1/audio/transcriptions", data={"model": "large"}, files=sound)
            assert "`large` gives no texts of speech" in answer.json()["error"]["message"]
            assert front.hosts.used == ["large"]

    asyncio.run(scenario())


def test_clients_of_all_protocols_choose_a_model(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front:
            front.hosts.gate.set()
            async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as v1:
                listed = [model.id async for model in await v1.models.list()]
                assert listed == ["small", "large", "law"]
                made = await v1.responses.create(model="large", input="hello")
                assert made.output_text == "large says hello"
                assert (await v1.responses.retrieve(made.id)).id == made.id
                with pytest.raises(openai.NotFoundError):
                    await v1.responses.retrieve("resp_none")
            async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none") as messages:
                said = await messages.messages.create(
                    model="small", max_tokens=16, messages=[{"role": "user", "content": "hello"}]
                )
                assert said.content[0].type == "text"
                assert said.content[0].text == "small says hello"
            chats = ollama.AsyncClient(front.url)
            answer = await chats.chat("large:latest", [{"role": "user", "content": "hello"}])
            assert answer.message.content == "large says hello"
            tags = [model.model for model in (await chats.list()).models]
            assert tags == ["small:latest", "large:latest", "law:latest"]
            await chats.close()

    asyncio.run(scenario())


def test_a_request_waits_until_its_model_is_loaded_and_a_client_may_leave(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front, httpx.AsyncClient(base_url=front.url, timeout=LIMIT_S) as http:
            waiting = asyncio.create_task(http.post(CHAT, json=chat(model="large")))
            leaving = asyncio.create_task(http.post(CHAT, json=chat(model="large")))
            await until(lambda: len(front.hosts.used) == 2)
            leaving.cancel()
            card = (await http.get("/v1/models/large")).json()
            assert (card["loaded"], "max_model_len" in card) == (False, False)
            front.hosts.gate.set()
            assert (await waiting).json()["choices"][0]["message"]["content"] == "large says hello"
            card = (await http.get("/v1/models/large")).json()
            assert (card["loaded"], card["max_model_len"] > 0) == (True, True)
            await until(lambda: front.hosts.running == 0)

    asyncio.run(scenario())


def test_refusals_name_what_is_wrong(text: ModelText) -> None:
    async def scenario() -> None:
        limits = RequestLimits(image_body_bytes=2000)
        async with front_stand(text, limits=limits) as front, httpx.AsyncClient(base_url=front.url) as http:
            unknown = await http.post(CHAT, json=chat(model="smal"))
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert "Did you mean `small`?" in unknown.text
            large = await http.post(CHAT, json=chat("x" * 3000, model="small"))
            assert large.status_code == 413
            broken = await http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
            front.hosts.refusal = "the model 'large' can't be loaded: no peer is free."
            refused = await http.post("/v1/messages", json={"model": "large"})
            assert refused.status_code == 503
            assert refused.json() == {
                "type": "error",
                "error": {"type": "overloaded_error", "message": front.hosts.refusal},
            }
            assert int(refused.headers["retry-after"]) > 0
            foreign = await http.get("/v1/models", headers={"host": "evil.example"})
            assert foreign.status_code == 403

    asyncio.run(scenario())


def test_keys_are_checked_before_a_model_is_loaded(text: ModelText, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice = 0123456789abcdef\n")

    async def scenario() -> None:
        async with front_stand(text, KeyRing.load(path)) as front, httpx.AsyncClient(base_url=front.url) as http:
            assert (await http.post(CHAT, json=chat(model="large"))).status_code == 401
            assert front.hosts.used == []
            key = {"Authorization": "Bearer 0123456789abcdef"}
            answer = await http.post(CHAT, json=chat(model="small"), headers=key)
            assert answer.json()["choices"][0]["message"]["content"] == "small says hello"
            listed = (await http.get("/v1/models", headers=key)).json()["data"]
            assert [card["loaded"] for card in listed] == [True, False, False]

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_its_generation(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front:
            engine = front.hosts.stands["small"].engine
            engine.gate = asyncio.Event()
            async with httpx.AsyncClient(base_url=front.url) as http:
                sending = asyncio.create_task(http.post(CHAT, json=chat(model="small", stream=True)))
                await until(lambda: engine.status.running == 1)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await until(lambda: engine.status.running == 0)
            await until(lambda: front.hosts.running == 0)
            async with httpx.AsyncClient() as http:
                for url in (front.url, front.hosts.stands["small"].url):
                    numbers = (await http.get(f"{url}/metrics")).text
                    assert "fusion_internal_errors_total 0.0" in numbers, "leaving is no mistake of the gateway"

    asyncio.run(scenario())


def test_metrics_of_all_models_are_one_text(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front, httpx.AsyncClient(base_url=front.url) as http:
            front.hosts.gate.set()
            await http.post(CHAT, json=chat(model="large"))
            await http.post(CHAT, json=chat(model="small"))
            numbers = (await http.get("/metrics")).text
            for name in NAMES:
                assert (
                    f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{name}"}} 1.0'
                    in numbers
                )
                assert f'fusion_generated_tokens_total{{model="{name}"}}' in numbers
            assert 'fusion_requests_total{endpoint="forward",status="200"} 2.0' in numbers
            families = [line.split()[2] for line in numbers.splitlines() if line.startswith("# TYPE")]
            assert len(families) == len(set(families))

    asyncio.run(scenario())


def test_the_page_and_the_state_of_the_pool_come_from_the_model_used_last(text: ModelText) -> None:
    async def scenario() -> None:
        async with front_stand(text) as front, httpx.AsyncClient(base_url=front.url) as http:
            assert "<html" in (await http.get("/")).text
            assert (await http.get("/fusion/status")).json()["model"] == "small"
            assert (await http.get("/ready")).json() == {"ready": True, "models": {"small": "ready", "large": "cold"}}
            front.hosts.loaded.clear()
            nothing = await http.get("/fusion/status")
            assert (nothing.status_code, nothing.json()["error"]["code"]) == (503, "not_ready")
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            assert json.loads((await http.get("/api/version")).text)["version"]

    asyncio.run(scenario())


def test_at_the_end_streams_are_cut_off(text: ModelText) -> None:
    async def scenario() -> None:
        limits = RequestLimits(drain_s=0.2)
        async with front_stand(text, limits=limits) as front, httpx.AsyncClient(base_url=front.url) as http:
            engine = front.hosts.stands["small"].engine
            engine.gate = asyncio.Event()
            async with http.stream("POST", CHAT, json=chat(model="small", stream=True)) as answer:
                front.stop.set()
                with pytest.raises(httpx.HTTPError):
                    await answer.aread()
            await until(lambda: engine.status.running == 0)

    asyncio.run(scenario())
