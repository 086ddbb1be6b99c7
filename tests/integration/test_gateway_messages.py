"""Anthropic's client, unmodified: messages whole and streamed, tools, thinking, counting, errors in its own form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, KeyRing, RequestLimits
from harness.gateway_stand import Stand, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import STAGES, ScriptedEngine, calls_weather
from harness.tiny_text import TEMPLATE, write_tiny_text

pytestmark = pytest.mark.slow

anthropic = pytest.importorskip("anthropic")
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": "tiny", "max_tokens": 100, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "description": "Says how the weather is.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


def client(stand: Stand, key: str = "none") -> Any:
    return anthropic.AsyncAnthropic(base_url=stand.url, api_key=key, max_retries=0, timeout=CEILING_S)


def prompt_of(engine: ScriptedEngine) -> str:
    return engine.text.tokenizer.decode(engine.given[-1].prompt, special=True)


def test_a_message_whole_and_streamed_says_the_same(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            whole = await api.messages.create(**ASKED, messages=HELLO, metadata={"user_id": "x"}, service_tier="auto")
            assert (whole.content[0].text, whole.stop_reason) == ("You said: hello", "end_turn")
            assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
            names: list[str] = []
            async with api.messages.stream(**ASKED, messages=HELLO) as stream:
                async for event in stream:
                    names.append(event.type)
                streamed = await stream.get_final_message()
            assert (streamed.content[0].text, streamed.stop_reason) == ("You said: hello", "end_turn")
            assert names[:2] == ["message_start", "content_block_start"]
            assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            # The second time the prompt was in the cache.
            first, second = whole.usage, streamed.usage
            assert second.cache_read_input_tokens > first.cache_read_input_tokens == 0
            assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens
            assert (second.output_tokens, second.output_tokens_details) == (first.output_tokens, None)
            counted = await api.messages.count_tokens(model="tiny", messages=HELLO)
            assert counted.input_tokens == first.input_tokens

    asyncio.run(scenario())


def test_the_synchronous_client_streams_too(engine: ScriptedEngine):
    def ask(url: str) -> list[str]:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=CEILING_S) as api:
            whole = api.messages.create(**ASKED, messages=HELLO).content[0].text
            with api.messages.stream(**ASKED, messages=HELLO) as stream:
                return [whole, "".join(stream.text_stream)]

    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            assert await asyncio.to_thread(ask, stand.url) == ["You said: hello"] * 2

    asyncio.run(scenario())


def test_why_an_answer_ended(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            stopped = await api.messages.create(**ASKED, messages=HELLO, stop_sequences=["zebra", "aid"])
            assert (stopped.content[0].text, stopped.stop_reason) == ("You s", "stop_sequence")
            assert stopped.stop_sequence == "aid"
            async with api.messages.stream(**ASKED, messages=HELLO, stop_sequences=["aid"]) as stream:
                assert (await stream.get_final_message()).stop_sequence == "aid"
            cut = await api.messages.create(**ASKED | {"max_tokens": 2}, messages=HELLO)
            assert (cut.content[0].text, cut.stop_reason) == ("You said", "max_tokens")
            warmed = await api.messages.create(**ASKED | {"max_tokens": 0}, messages=HELLO)
            assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
            # More than the context has room for is no mistake: the answer ends with the context.
            engine.script = lambda prompt, generation: "a" * 2000
            long = await api.messages.create(**ASKED | {"max_tokens": 32_000}, messages=HELLO)
            assert long.stop_reason == "model_context_window_exceeded"
            assert long.usage.input_tokens + long.usage.cache_read_input_tokens + long.usage.output_tokens == 512

    asyncio.run(scenario())


def test_a_conversation_reaches_the_template(engine: ScriptedEngine):
    short: Any = {"type": "ephemeral"}
    turns: Any = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "second", "cache_control": short}]},
        {"role": "assistant", "content": [{"type": "text", "text": "answered", "citations": None}]},
        {"role": "user", "content": "third"},
    ]
    system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", "cache_control": short}]

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            await api.messages.create(**ASKED, messages=turns, system=system, cache_control=short)
            assert prompt_of(engine) == (
                "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\nfirst\nsecond<|im_end|>\n"
                "<|im_start|>assistant\nanswered<|im_end|>\n<|im_start|>user\nthird<|im_end|>\n<|im_start|>assistant\n"
            )
            body = {**ASKED["extra_body"], "top_p": 0.5, "top_k": 7}
            await api.messages.create(**ASKED | {"extra_body": body}, messages=HELLO, system="Be brief.")
            assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")
            sampling = engine.given[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)

    asyncio.run(scenario())


def test_tools_are_called_answered_and_forced(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            engine.script = calls_weather
            asked: Any = {**ASKED, "tools": [WEATHER]}
            whole = await api.messages.create(**asked, messages=HELLO)
            said, call = whole.content
            assert (said.text.strip(), whole.stop_reason) == ("Let me look.", "tool_use")
            assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
            pieces: list[str] = []
            async with api.messages.stream(**asked, messages=HELLO) as stream:
                async for event in stream:
                    if event.type == "input_json":
                        pieces.append(event.partial_json)
                streamed = await stream.get_final_message()
            assert json.loads("".join(pieces)) == {"city": "Paris"}
            assert (streamed.content[1].name, streamed.content[1].input) == ("weather", {"city": "Paris"})
            assert streamed.stop_reason == "tool_use"
            result: Any = {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "no"}]},
                    {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "lost"},
                    {"type": "text", "text": "So?"},
                ],
            }
            await api.messages.create(**asked, messages=[*HELLO, whole.to_param(), result])
            assert prompt_of(engine).endswith(
                "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nno<|im_end|>\n"
                "<|im_start|>tool\nError: lost<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
            )
            for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
                made = await api.messages.create(**asked, messages=HELLO, tool_choice=choice)
                assert (made.content[-1].input, made.stop_reason) == ({"city": "Paris"}, "tool_use")
            none = await api.messages.create(**asked, messages=HELLO, tool_choice={"type": "none"})
            assert ([block.type for block in none.content], none.stop_reason) == (["text"], "end_turn")
            # A call that is cut has no arguments that a program could use.
            cut = await api.messages.create(**asked | {"max_tokens": 40}, messages=HELLO)
            assert ([block.type for block in cut.content], cut.stop_reason) == (["text", "text"], "max_tokens")

    asyncio.run(scenario())


def test_thinking_is_a_block_of_its_own(tmp_path: Path):
    engine = ScriptedEngine(
        write_tiny_text(tmp_path, THINKING), script=lambda prompt, generation: "Two. And two.\n</think>\n\nFour."
    )

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            enabled: Any = {"type": "enabled", "budget_tokens": 1024}
            whole = await api.messages.create(**ASKED, messages=HELLO, thinking=enabled)
            assert [block.type for block in whole.content] == ["thinking", "text"]
            assert (whole.content[0].thinking, whole.content[1].text) == ("Two. And two.", "Four.")
            assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
            async with api.messages.stream(**ASKED, messages=HELLO) as stream:
                thought = "".join([event.thinking async for event in stream if event.type == "thinking"])
                streamed = await stream.get_final_message()
            assert thought == streamed.content[0].thinking == "Two. And two."
            assert streamed.content[1].text == "Four."
            await api.messages.create(**ASKED, messages=[*HELLO, whole.to_param(), *HELLO])
            omitted: Any = {"type": "adaptive", "display": "omitted"}
            short = await api.messages.create(**ASKED, messages=HELLO, thinking=omitted)
            assert [block.type for block in short.content] == ["text"]

    asyncio.run(scenario())


def test_an_answer_of_a_schema(engine: ScriptedEngine):
    schema: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            wanted: Any = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
            made = await api.messages.create(**ASKED, messages=HELLO, output_config=wanted)
            assert json.loads(made.content[0].text) == {"age": 1}

    asyncio.run(scenario())


def test_what_is_not_supported_is_refused_by_name(engine: ScriptedEngine):
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": [image]}]}, "This model reads text only"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]}
                ]
            },
            "images in results of tools are not read",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "can't continue an answer"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "does not think"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "needs `tools`"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "needs a `name`"),
        ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "`mcp_servers` is not supported"),
        ({"extra_body": {"temprature": 1}}, "Did you mean `temperature`"),
    ]

    async def scenario() -> None:
        async with gateway_stand(engine, GatewayConfig("tiny", is_strict=True)) as stand, client(stand) as api:
            for fields, why in cases:
                with pytest.raises(anthropic.BadRequestError, match=why) as caught:
                    await api.messages.create(**{**ASKED, "messages": HELLO, **fields})
                assert caught.value.body["error"]["type"] == "invalid_request_error"
            assert not engine.given

    asyncio.run(scenario())


def test_errors_are_the_clients_own_exceptions(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("alice = a-good-long-key-of-hers\n")
    config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"))

    async def scenario() -> None:
        async with gateway_stand(engine, config) as stand:
            async with client(stand, "wrong") as api:
                with pytest.raises(anthropic.AuthenticationError, match="not valid for this gateway") as caught:
                    await api.messages.create(**ASKED, messages=HELLO)
                assert caught.value.request_id.startswith("req_")
            async with client(stand, "a-good-long-key-of-hers") as api:
                create = api.messages.create
                with pytest.raises(anthropic.NotFoundError, match="Did you mean `tiny`"):
                    await create(**ASKED | {"model": "tinny"}, messages=HELLO)
                with pytest.raises(anthropic.NotFoundError, match="Did you mean `tiny`"):
                    await api.messages.count_tokens(model="tinny", messages=HELLO)
                with pytest.raises(anthropic.BadRequestError, match="limit is 512 tokens"):
                    await create(**ASKED, messages=[{"role": "user", "content": "x" * 700}])
                engine.is_busy = True
                with pytest.raises(anthropic.RateLimitError):
                    await create(**ASKED, messages=HELLO)
                engine.is_busy, engine.state = False, "starting"
                with pytest.raises(anthropic.InternalServerError, match="not ready"):
                    await create(**ASKED, messages=HELLO)
                engine.state, engine.fails_after = "recovering", 3
                with pytest.raises(anthropic.APIStatusError, match="last machine") as failed:
                    async with api.messages.stream(**ASKED, messages=HELLO) as stream:
                        await stream.get_final_message()
                assert failed.value.body["error"]["type"] == "overloaded_error"
            assert engine.live == 0

    asyncio.run(scenario())


def test_a_slow_stream_has_pings_and_a_route_if_asked_for(engine: ScriptedEngine):
    async def scenario() -> None:
        engine.gate = asyncio.Event()
        config = GatewayConfig("tiny", limits=RequestLimits(keep_alive_s=0.02))
        body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
        async with (
            gateway_stand(engine, config) as stand,
            httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http,
        ):
            asking = asyncio.create_task(http.post("/v1/messages", json=body, headers={"x-fusion-route": "1"}))
            await until(lambda: engine.live == 1)
            await asyncio.sleep(0.1)
            engine.gate.set()
            answer = (await asking).text
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer
        end = next(line for line in answer.split("\n") if '"type":"message_delta"' in line)
        assert json.loads(end[6:])["fusion"]["route"] == list(STAGES)

    asyncio.run(scenario())


def test_leaving_cancels_the_generation(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            engine.gate = asyncio.Event()
            asking = asyncio.create_task(api.messages.create(**ASKED, messages=HELLO))
            await until(lambda: engine.live == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: engine.live == 0)
            assert engine.closed_early == 1

    asyncio.run(scenario())


def test_what_claude_code_asks_of_every_model_is_left_out_and_named(engine: ScriptedEngine):
    fields = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "tools": [
            {"name": "weather", "description": "tells it", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
    }

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            raw = await api.messages.with_raw_response.create(
                model="tiny", max_tokens=64, messages=[{"role": "user", "content": "hello"}], extra_body=fields
            )
            named = "context_management, output_config.effort, tools[web_search_20250305]"
            assert raw.headers["x-fusion-ignored"] == named
            assert (await raw.parse()).content[0].text.startswith("You said: hello")
            assert "weather" in prompt_of(engine)
            assert "web_search" not in prompt_of(engine)
            counted = await api.messages.count_tokens(
                model="tiny", messages=[{"role": "user", "content": "hello"}], extra_body=fields
            )
            assert counted.input_tokens > 0

    asyncio.run(scenario())
