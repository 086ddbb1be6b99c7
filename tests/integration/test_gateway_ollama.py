"""Ollama's client, unmodified: chats and prompts whole and streamed, tools, forms, thinking, models, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, KeyRing, RequestLimits
from harness.gateway_stand import Stand, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import STAGES, ScriptedEngine
from harness.tiny_text import TEMPLATE, write_tiny_text

pytestmark = pytest.mark.slow

ollama = pytest.importorskip("ollama")
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": "tiny", "options": {"temperature": 0, "num_predict": 100}}
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@asynccontextmanager
async def client(stand: Stand, **options: Any) -> AsyncIterator[Any]:
    api = ollama.AsyncClient(host=stand.url, timeout=CEILING_S, **options)
    try:
        yield api
    finally:
        await api.close()


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.text.tokenizer.decode(engine.given[-1].prompt, special=True)


def weather(city: str) -> str:
    """Say how the weather is.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


def test_chats_and_prompts_whole_and_streamed_say_the_same(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            whole = await api.chat(**ASKED, messages=HELLO, keep_alive="5m")
            assert (whole.message.role, whole.message.content) == ("assistant", "You said: hello")
            assert (whole.model, whole.done, whole.done_reason) == ("tiny", True, "stop")
            assert whole.total_duration >= whole.eval_duration + whole.prompt_eval_duration - 1 > 0
            lines = [line async for line in await api.chat(**ASKED, messages=HELLO, stream=True)]
            assert "".join(line.message.content for line in lines) == "You said: hello"
            assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
            assert lines[-1].eval_count == whole.eval_count == len(lines) - 1
            assert lines[-1].prompt_eval_count == whole.prompt_eval_count == len(engine.given[0].prompt)
            prompted = await api.generate(**ASKED, prompt="hello", system="Be brief.")
            assert (prompted.response, prompted.done_reason) == ("You said: hello", "stop")
            assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")
            parts = [line async for line in await api.generate(**ASKED, prompt="hello", stream=True)]
            assert "".join(line.response for line in parts) == "You said: hello"
            made = len(engine.given)
            assert (await api.generate(model="tiny")).done_reason == "load"
            assert (await api.chat(model="tiny", messages=[])).done_reason == "load"
            assert len(engine.given) == made

    asyncio.run(scenario())


def test_the_synchronous_client_and_a_bare_curl(engine: ScriptedEngine):
    def ask(url: str) -> str:
        with httpx.Client(base_url=url, trust_env=False, timeout=CEILING_S) as http:
            # Ollama's own examples send no media type, and an answer is a stream unless the request says otherwise.
            answer = http.post("/api/chat", content=json.dumps({**ASKED, "messages": HELLO}).encode())
        assert answer.headers["content-type"] == "application/x-ndjson"
        said = "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines())
        with ollama.Client(host=url, timeout=CEILING_S) as api:
            assert api.chat(**ASKED, messages=HELLO).message.content == said
            return "".join(line.response for line in api.generate(**ASKED, prompt="hello", stream=True))

    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            assert await asyncio.to_thread(ask, stand.url) == "You said: hello"

    asyncio.run(scenario())


def test_options_reach_the_engine_or_are_refused_by_name(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            options = {
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 7,
                "min_p": 0.125,
                "seed": 3,
                "repeat_penalty": 1.5,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "num_predict": 5,
                "num_ctx": 8192,
                "num_gpu": 1,
                "mirostat": 0,
            }
            cut = await api.chat(model="tiny", messages=HELLO, options=options)
            assert (cut.done_reason, cut.eval_count) == ("length", 5)
            sampling = engine.given[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
            assert (sampling.seed, sampling.repetition_penalty) == (3, 1.5)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
            stopped = await api.chat(model="tiny", messages=HELLO, options={"temperature": 0, "stop": ["aid"]})
            assert (stopped.message.content, stopped.done_reason) == ("You s", "stop")
            for more, why in (
                ({"options": {"temprature": 1}}, "Did you mean `temperature`"),
                ({"options": {"mirostat": 2}}, "`mirostat` is not supported"),
                ({"options": {"temperature": "hot"}}, "temperature"),
                ({"think": True}, "does not support thinking"),
                ({"logprobs": True}, "`logprobs` is not supported"),
                ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "This model reads text only"),
            ):
                with pytest.raises(ollama.ResponseError, match=why) as caught:
                    await api.chat(**{"model": "tiny", "messages": HELLO, **more})
                assert caught.value.status_code == 400
            for more in ({"raw": True}, {"suffix": "x"}, {"context": [1]}):
                with pytest.raises(ollama.ResponseError, match="is not supported by this gateway"):
                    await api.generate(model="tiny", prompt="a", **more)

    asyncio.run(scenario())


def test_tools_are_called_and_answered(engine: ScriptedEngine):
    engine.script = lambda prompt, generation: (
        'Let me look. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            asked = {"model": "tiny", "options": {"temperature": 0}, "tools": [weather]}
            whole = await api.chat(**asked, messages=HELLO)
            assert (whole.message.content.strip(), whole.done_reason) == ("Let me look.", "stop")
            cities = [call.function.arguments for call in whole.message.tool_calls]
            assert cities == [{"city": "Paris"}, {"city": "Rome"}]
            lines = [line async for line in await api.chat(**asked, messages=HELLO, stream=True)]
            streamed = [call for line in lines for call in line.message.tool_calls or ()]
            assert [(call.function.name, call.function.arguments) for call in streamed] == [
                ("weather", {"city": "Paris"}),
                ("weather", {"city": "Rome"}),
            ]
            results = [
                {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
                for call in whole.message.tool_calls
            ]
            await api.chat(**asked, messages=[*HELLO, whole.message, *results])
            assert prompt_of(engine).endswith(
                "<|im_start|>tool\nsunny in Paris<|im_end|>\n<|im_start|>tool\nsunny in Rome<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            # A call that is cut has no arguments that a program could use.
            cut = await api.chat(**{**asked, "options": {"temperature": 0, "num_predict": 40}}, messages=HELLO)
            assert (cut.message.tool_calls, cut.done_reason) == (None, "length")
            assert cut.message.content.startswith("Let me look. weather {")

    asyncio.run(scenario())


def test_answers_of_a_form(engine: ScriptedEngine):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            aged = await api.chat(**ASKED, messages=HELLO, format=schema)
            assert json.loads(aged.message.content) == {"age": 1}
            some = await api.generate(**ASKED, prompt="hello", format="json")
            assert isinstance(json.loads(some.response), dict)

    asyncio.run(scenario())


def test_thinking_is_apart(tmp_path: Path):
    engine = ScriptedEngine(
        write_tiny_text(tmp_path, THINKING), script=lambda prompt, generation: "Two. And two.\n</think>\n\nFour."
    )

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            assert (await api.show("tiny")).capabilities == ["completion", "tools", "thinking"]
            whole = await api.chat(**ASKED, messages=HELLO, think=True)
            assert (whole.message.thinking, whole.message.content) == ("Two. And two.", "Four.")
            lines = [line async for line in await api.generate(**ASKED, prompt="hello", stream=True)]
            assert "".join(line.thinking or "" for line in lines) == "Two. And two."
            assert "".join(line.response for line in lines) == "Four."
            await api.chat(**ASKED, messages=[*HELLO, whole.message, *HELLO])
            with pytest.raises(ollama.ResponseError, match="can't turn thinking off"):
                await api.chat(**ASKED, messages=HELLO, think=False)

    asyncio.run(scenario())


def test_models_are_listed_with_the_tag_and_known_by_it(engine: ScriptedEngine):
    async def scenario() -> None:
        config = GatewayConfig("tiny", adapters=("law", "poems:2"), created_s=86_400)
        async with gateway_stand(engine, config) as stand, client(stand) as api:
            listed = (await api.list()).models
            assert [model.model for model in listed] == ["tiny:latest", "law:latest", "poems:2"]
            assert [model.details.parent_model for model in listed] == ["", "tiny", "tiny"]
            assert listed[0].modified_at.isoformat() == "1970-01-02T00:00:00+00:00"
            for model in listed:
                assert (await api.chat(model=model.model, messages=HELLO)).model == model.model
            assert [given.adapter for given in engine.given] == [None, "law", "poems:2"]
            shown = await api.show("law:latest")
            assert (shown.template, shown.capabilities) == (TEMPLATE, ["completion", "tools"])
            architecture = shown.modelinfo["general.architecture"]
            assert shown.modelinfo[f"{architecture}.context_length"] == 512
            async with httpx.AsyncClient(base_url=stand.url, trust_env=False) as http:
                version = (await http.get("/api/version")).json()["version"]
            assert all(part.isdecimal() for part in version.split("."))

    asyncio.run(scenario())


def test_errors_have_ollamas_form(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("alice = a-good-long-key-of-hers\n")
    config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"))

    async def scenario() -> None:
        key = {"Authorization": "Bearer a-good-long-key-of-hers"}
        async with (
            gateway_stand(engine, config) as stand,
            client(stand) as stranger,
            client(stand, headers=key) as api,
        ):
            with pytest.raises(ollama.ResponseError, match="Authorization") as refused:
                await stranger.list()
            assert refused.value.status_code == 401
            with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
                await api.show("other")
            assert caught.value.status_code == 404
            engine.is_busy = True
            with pytest.raises(ollama.ResponseError, match="no page is free") as busy:
                await api.chat(**ASKED, messages=HELLO)
            assert busy.value.status_code == 429
            engine.is_busy, engine.fails_after = False, 3
            stream = await api.chat(**ASKED, messages=HELLO, stream=True)
            with pytest.raises(ollama.ResponseError, match="last machine"):
                [line async for line in stream]
            assert engine.live == 0

    asyncio.run(scenario())


def test_a_slow_stream_has_empty_lines_and_a_route_if_asked_for(engine: ScriptedEngine):
    async def scenario() -> None:
        engine.gate = asyncio.Event()
        config = GatewayConfig("tiny", limits=RequestLimits(keep_alive_s=0.02))
        async with (
            gateway_stand(engine, config) as stand,
            httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http,
        ):
            body = {**ASKED, "messages": HELLO}
            asking = asyncio.create_task(http.post("/api/chat", json=body, headers={"x-fusion-route": "1"}))
            await until(lambda: engine.live == 1)
            await asyncio.sleep(0.1)
            engine.gate.set()
            lines = [json.loads(line) for line in (await asking).text.splitlines()]
        assert (lines[0]["message"]["content"], lines[0]["done"]) == ("", False)
        assert lines[-1]["fusion"]["route"] == list(STAGES)
        assert not any("fusion" in line for line in lines[:-1])

    asyncio.run(scenario())
