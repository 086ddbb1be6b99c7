"""Programs people have, over HTTP: openai, langchain-openai, litellm. Streams, tools, schemas, errors, leaving."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionai.gateway.config import GatewayConfig, KeyRing
from fusionai.serving.model_text import ModelText
from fusionai.serving.tools import ToolForm
from harness.gateway_stand import Stand, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine, calls_weather
from harness.tiny_text import write_tiny_text

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv" / "clients" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
AGE: Any = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def client(stand: Stand, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=key, max_retries=0, timeout=CEILING_S)


def test_openai_chat_whole_and_streamed_say_the_same(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            asked = {"model": "tiny", "messages": HELLO, "seed": 7, "temperature": 0.5, "n": 2}
            whole = await api.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
            assert [choice.message.content for choice in whole.choices] == [
                "You said: hello (seed 7)",
                "You said: hello (seed 8)",
            ]
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            first = whole.choices[0].logprobs.content
            assert "".join(one.token for one in first) == "You said: hello (seed 7)"
            assert len(first[0].top_logprobs) == 2
            assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
            stream = await api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            said, ends, usage = ["", ""], [], None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    said[choice.index] += choice.delta.content or ""
                    ends += [choice.finish_reason] if choice.finish_reason else []
            assert said == [choice.message.content for choice in whole.choices]
            assert ends == ["stop", "stop"]
            assert usage.completion_tokens == whole.usage.completion_tokens
            # The second time its prompt was in the cache.
            assert usage.prompt_tokens_details.cached_tokens > 0
            assert [model.id async for model in api.models.list()] == ["tiny"]

    asyncio.run(scenario())


def test_openai_completions_echo_and_stop_strings(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            several = await api.completions.create(model="tiny", prompt=["one", "two"], temperature=0, max_tokens=64)
            assert [choice.text for choice in several.choices] == ["You said: one", "You said: two"]
            tokens = engine.text.tokenizer.encode("one")
            by_tokens = await api.completions.create(model="tiny", prompt=tokens, temperature=0, max_tokens=64)
            assert by_tokens.choices[0].text == "You said: one"
            echoed = await api.completions.create(
                model="tiny", prompt="one", temperature=0, max_tokens=0, echo=True, logprobs=1
            )
            assert echoed.choices[0].text == "one"
            assert echoed.choices[0].logprobs.token_logprobs[0] is None
            assert echoed.usage.completion_tokens == 0
            assert "".join(echoed.choices[0].logprobs.tokens) == "one"
            stopped = await api.completions.create(model="tiny", prompt="one", temperature=0, stop="aid", max_tokens=9)
            assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("You s", "stop")
            cut = await api.completions.create(model="tiny", prompt="one", temperature=0, max_tokens=2)
            assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("You said", "length")
            on = await api.completions.create(
                model="tiny", prompt="one", temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
            )
            assert on.usage.completion_tokens == 30
            assert engine.live == 0

    asyncio.run(scenario())


def test_openai_embeddings_as_numbers_and_as_base64(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            # The package asks for base64 unless told otherwise.
            packed = await api.embeddings.create(model="tiny", input=["one", "two"])
            plain = await api.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
            for one, other in zip(packed.data, plain.data, strict=True):
                assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
                assert sum(value * value for value in other.embedding) == pytest.approx(1)
            short = await api.embeddings.create(model="tiny", input="one", dimensions=3, encoding_format="float")
            assert len(short.data[0].embedding) == 3

    asyncio.run(scenario())


XML_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
<function>{{ tool.function.name }}</function>
{%- endfor %}
Call with <tool_call> <function=name> <parameter=x> ...<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments|items %}
<parameter={{ name }}>
{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WRITE: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["text"],
        },
    },
}
CODE = 'def sums(a, b):\n    """Adds."""\n    return a < b\n'


def test_openai_calls_in_tags_come_while_they_are_written(tmp_path: Path):
    write_tiny_text(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": XML_TEMPLATE}))
    text = ModelText.load(tmp_path)
    assert text.tool_form is ToolForm.QWEN_XML
    engine = ScriptedEngine(text, context_tokens=2048)
    said = f"<parameter=text>\n{CODE}\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    engine.script = lambda prompt, generation: f"Well.\n<tool_call>\n<function=write>\n{said}</function>\n</tool_call>"

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            asked = {"model": "tiny", "messages": HELLO, "tools": [WRITE], "temperature": 0}
            whole = (await api.chat.completions.create(**asked)).choices[0]
            (call,) = whole.message.tool_calls
            assert (whole.finish_reason, whole.message.content.strip()) == ("tool_calls", "Well.")
            assert json.loads(call.function.arguments) == {"text": CODE, "lines": 3}
            deltas = [
                delta
                async for chunk in await api.chat.completions.create(**asked, stream=True)
                for delta in chunk.choices[0].delta.tool_calls or ()
            ]
            assert (deltas[0].function.name, deltas[0].type, deltas[0].index) == ("write", "function", 0)
            assert {(delta.id, delta.function.name, delta.index) for delta in deltas[1:]} == {(None, None, 0)}
            assert len(deltas) > 10, "piece by piece"
            assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
            # What was called before is put as the template has it.
            answered = [*HELLO, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
            await api.chat.completions.create(model="tiny", messages=answered, tools=[WRITE])
            prompt = text.tokenizer.decode(engine.given[-1].prompt, special=True)
            assert f"<parameter=text>\n{CODE}" in prompt
            assert "<parameter=lines>\n3\n</parameter>" in prompt

    asyncio.run(scenario())


def test_openai_tools_chosen_forced_and_streamed(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            engine.script = calls_weather
            asked = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "temperature": 0}
            whole = (await api.chat.completions.create(**asked)).choices[0]
            assert whole.finish_reason == "tool_calls"
            assert whole.message.content.strip() == "Let me look."
            (call,) = whole.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
            streamed = [
                delta
                async for chunk in await api.chat.completions.create(**asked, stream=True)
                for delta in chunk.choices[0].delta.tool_calls or ()
            ]
            assert [(delta.index, delta.function.name) for delta in streamed[:2]] == [(0, "weather"), (0, None)]
            assert json.loads("".join(delta.function.arguments for delta in streamed)) == {"city": "Paris"}
            choice: Any = {"type": "function", "function": {"name": "weather"}}
            for forced in ("required", choice):
                made = (await api.chat.completions.create(**asked, tool_choice=forced, max_tokens=200)).choices[0]
                assert made.finish_reason == "tool_calls"
                assert json.loads(made.message.tool_calls[0].function.arguments) == {"city": "Paris"}
            none = (await api.chat.completions.create(**asked, tool_choice="none")).choices[0]
            assert none.message.tool_calls is None
            assert "<tool_call>" in none.message.content
            # What a client sends back after a call.
            answered = [
                *HELLO,
                whole.message.model_dump(),
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            ]
            await api.chat.completions.create(model="tiny", messages=answered, tools=[WEATHER])

    asyncio.run(scenario())


def test_openai_answers_of_a_schema(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            wanted: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}
            made = await api.chat.completions.create(model="tiny", messages=HELLO, response_format=wanted)
            assert json.loads(made.choices[0].message.content) == {"age": 1}
            some = await api.chat.completions.create(
                model="tiny", messages=HELLO, response_format={"type": "json_object"}
            )
            assert isinstance(json.loads(some.choices[0].message.content), dict)
            broken: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
            with pytest.raises(openai.BadRequestError):
                await api.chat.completions.create(model="tiny", messages=HELLO, response_format=broken)

    asyncio.run(scenario())


def test_openai_errors_are_its_own_exceptions(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("alice = a-good-long-key-of-hers\nbob = a-good-long-key-of-his\n")
    config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"))

    async def scenario() -> None:
        async with gateway_stand(engine, config) as stand:
            async with client(stand, "wrong") as api:
                with pytest.raises(openai.AuthenticationError, match="not valid for this gateway"):
                    await api.models.list()
            async with client(stand, "a-good-long-key-of-hers") as api:
                create = api.chat.completions.create
                with pytest.raises(openai.NotFoundError, match="Did you mean `tiny`"):
                    await create(model="tinny", messages=HELLO)
                with pytest.raises(openai.BadRequestError) as caught:
                    await create(model="tiny", messages=HELLO, max_tokens=100_000)
                assert caught.value.code == "context_length_exceeded"
                engine.is_busy = True
                with pytest.raises(openai.RateLimitError) as busy:
                    await create(model="tiny", messages=HELLO)
                assert busy.value.response.headers["retry-after"] == "3"
                engine.is_busy, engine.state = False, "starting"
                with pytest.raises(openai.InternalServerError, match="not ready"):
                    await create(model="tiny", messages=HELLO)
                engine.state, engine.fails_after = "recovering", 3
                with pytest.raises(openai.InternalServerError, match="last machine"):
                    await create(model="tiny", messages=HELLO)
                stream = await create(model="tiny", messages=HELLO, stream=True)
                with pytest.raises(openai.APIError, match="last machine"):
                    async for _ in stream:
                        pass
                engine.fails_after, engine.breaks_after = None, 2
                with pytest.raises(openai.InternalServerError, match="its log says why"):
                    await create(model="tiny", messages=HELLO)
                engine.breaks_after = None
                await create(model="tiny", messages=HELLO)
            async with client(stand, "a-good-long-key-of-his") as api:
                mine = await api.chat.completions.create(model="tiny", messages=HELLO)
                # What another key's holder asked is in no cache for this one.
                assert mine.usage.prompt_tokens_details.cached_tokens == 0
            assert len({generation.scope for generation in engine.given}) == 2
            assert engine.live == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stream", [True, False])
def test_openai_leaving_cancels_the_generation(engine: ScriptedEngine, is_stream: bool):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            engine.gate = asyncio.Event()
            asking = asyncio.create_task(
                api.chat.completions.create(model="tiny", messages=HELLO, stream=is_stream, n=3)
            )
            await until(lambda: engine.live == 3)
            if is_stream:
                await (await asking).close()
            else:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: engine.live == 0)
            assert engine.closed_early == 3

    asyncio.run(scenario())


def test_langchain_streams_calls_tools_and_gets_schemas(engine: ScriptedEngine):
    langchain = pytest.importorskip("langchain_openai")

    async def scenario() -> None:
        # A connection that the package made itself would stay open for ever.
        async with gateway_stand(engine) as stand, openai.DefaultAsyncHttpxClient() as connections:
            shared = {"base_url": f"{stand.url}/v1", "api_key": "none", "http_async_client": connections}
            model = langchain.ChatOpenAI(**shared, model="tiny", temperature=0, max_retries=0)
            assert (await model.ainvoke("hello")).content == "You said: hello"
            assert "".join([piece.content async for piece in model.astream("hello")]) == "You said: hello"
            formed = model.with_structured_output({"title": "age", **AGE}, method="json_schema")
            assert await formed.ainvoke("hello") == {"age": 1}
            engine.script = calls_weather
            called = await model.bind_tools([WEATHER]).ainvoke("hello")
            assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Paris"})]
            with pytest.raises(openai.BadRequestError):
                await model.ainvoke("hello", max_tokens=100_000)
            vectors = langchain.OpenAIEmbeddings(**shared, model="tiny", check_embedding_ctx_length=False)
            assert len(await vectors.aembed_query("hello")) == 8

    asyncio.run(scenario())


LITELLM = """
import json, sys
import litellm
litellm.suppress_debug_info = True
url, tool = sys.argv[1], json.loads(sys.argv[2])
common = dict(model="openai/tiny", api_base=url, api_key="none", messages=[{"role": "user", "content": "hello"}],
              temperature=0, num_retries=0)
told = {"whole": litellm.completion(**common).choices[0].message.content}
told["streamed"] = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**common, stream=True))
made = litellm.completion(**common, tools=[tool], tool_choice="required", max_tokens=200)
told["tool"] = made.choices[0].message.tool_calls[0].function.arguments
try:
    litellm.completion(**common, max_tokens=100000)
except litellm.BadRequestError as problem:
    told["error"] = type(problem).__name__
told["embedding"] = len(litellm.embedding(model="openai/tiny", api_base=url, api_key="none", input=["a"],
                                          encoding_format="float").data[0]["embedding"])
print(json.dumps(told))
"""


@pytest.mark.skipif(not CLIENTS.exists(), reason="litellm needs an environment of its own: make clients")
def test_litellm_streams_calls_tools_and_reads_errors(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            process = await asyncio.create_subprocess_exec(
                CLIENTS, "-c", LITELLM, f"{stand.url}/v1", json.dumps(WEATHER),
                env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            told, complaints = await asyncio.wait_for(process.communicate(), 90)
            assert process.returncode == 0, complaints.decode()
            answer = json.loads(told.decode().strip().splitlines()[-1])
            assert answer["whole"] == answer["streamed"] == "You said: hello"
            assert json.loads(answer["tool"]) == {"city": "Paris"}
            assert "BadRequestError" in answer["error"] or "ContextWindow" in answer["error"]
            assert answer["embedding"] == 8

    asyncio.run(scenario())
