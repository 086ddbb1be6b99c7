"""Adapters that clients load and unload over HTTP, as vLLM's clients do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig
from fusionai.primitives.errors import ModelError, StorageError
from harness.gateway_stand import Stand, chat, gateway_stand
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.slow


@dataclass
class Loader:
    """What the gateway asks of `serving.interface.AdapterLoader`; the files that are not good are named after that."""

    loaded: dict[str, str] = field(default_factory=lambda: {"law": "at the start"})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    async def load(self, name: str, path: str) -> None:
        if path == "strange":
            raise ModelError("the adapter is for a layer that the model does not have.")
        if path == "damaged":
            raise StorageError("the file ends early.")
        self.loaded[name] = path

    async def unload(self, name: str) -> None:
        del self.loaded[name]


def client(stand: Stand) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False)


def test_an_adapter_is_a_model_from_its_loading_to_its_unloading(engine: ScriptedEngine):
    loader = Loader()

    async def scenario() -> None:
        async with gateway_stand(engine, loader=loader) as stand, client(stand) as http:

            async def parents() -> dict[str, str | None]:
                return {one["id"]: one["parent"] for one in (await http.get("/v1/models")).json()["data"]}

            assert await parents() == {"tiny": None, "law": "tiny"}
            assert (await http.post("/v1/chat/completions", json=chat(model="me/poems"))).status_code == 404
            asked = {"lora_name": "me/poems", "lora_path": "poems/newest"}
            answer = await http.post("/v1/load_lora_adapter", json=asked)
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'me/poems' added successfully.")
            assert loader.loaded["me/poems"] == "poems/newest"
            assert await parents() == {"tiny": None, "law": "tiny", "me/poems": "tiny"}
            tags = [one["name"] for one in (await http.get("/api/tags")).json()["models"]]
            assert tags == ["tiny:latest", "law:latest", "me/poems:latest"]
            said = (await http.post("/v1/chat/completions", json=chat(model="me/poems"))).json()
            assert (said["model"], engine.given[-1].adapter) == ("me/poems", "me/poems")
            answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "me/poems", "lora_int_id": 2})
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'me/poems' removed successfully.")
            assert await parents() == {"tiny": None, "law": "tiny"}

    asyncio.run(scenario())


def test_what_can_not_be_loaded_or_unloaded_is_said(engine: ScriptedEngine):
    cases = [
        ("load", {"lora_name": "a", "lora_path": "strange"}, 400, "a layer that the model does not have"),
        ("load", {"lora_name": "a", "lora_path": "damaged"}, 400, "ends early"),
        ("load", {"lora_name": "tiny", "lora_path": "good"}, 400, "the model's own"),
        ("load", {"lora_name": "other", "lora_path": "good"}, 400, "the model's own"),
        ("load", {"lora_name": "a"}, 400, "lora_path"),
        ("unload", {"lora_name": "a"}, 404, "does not exist"),
        ("unload", {"lora_name": "tiny"}, 400, "not an adapter"),
    ]

    async def scenario() -> None:
        config = GatewayConfig("tiny", ("other",))
        async with gateway_stand(engine, config, loader=Loader()) as stand, client(stand) as http:
            for verb, body, status, word in cases:
                answer = await http.post(f"/v1/{verb}_lora_adapter", json=body)
                assert (answer.status_code, word in answer.json()["error"]["message"]) == (status, True), body

    asyncio.run(scenario())


def test_without_a_directory_nothing_is_loaded(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine, GatewayConfig("tiny", adapters=("law",))) as stand, client(stand) as http:
            for verb in ("load", "unload"):
                body = {"lora_name": "law", "lora_path": "/etc"}
                answer = await http.post(f"/v1/{verb}_lora_adapter", json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "adapters_fixed")
                assert "--adapter-directory" in answer.json()["error"]["message"]
            assert (await http.post("/v1/chat/completions", json=chat(model="law"))).status_code == 200

    asyncio.run(scenario())
