"""OpenAI's Responses API over HTTP: the openai package unmodified. Streams, tools, schemas, conversations."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from fusionai.gateway.config import GatewayConfig, KeyRing, RequestLimits
from harness.gateway_stand import Stand, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import TEMPLATE, write_tiny_text

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
from openai.types import responses as shapes  # noqa: E402 - only if the package is there

AGENTS = (
    Path(__file__).parents[2] / ".venv" / "agents" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME: Any = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}}


THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}{% if message.tool_calls %} (calls){% endif %}",
)


class Age(BaseModel):
    age: int


def client(stand: Stand, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=key, max_retries=0, timeout=CEILING_S)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hello", "temperature": 0, **fields}


def asks_for_weather(prompt: str, generation: Any) -> str:
    """Calls the tool, and says its result once that is there."""
    del generation
    if "tool\n" in prompt:
        return "It is " + prompt.rsplit("tool\n", 1)[1].split("<|im_end|>")[0]
    return 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def prompt_of(engine: ScriptedEngine, at: int = -1) -> str:
    return engine.text.tokenizer.decode(engine.given[at].prompt, special=True)


async def raw_events(stand: Stand, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream, each checked against the package's type for it."""
    known = TypeAdapter(shapes.ResponseStreamEvent)
    async with (
        httpx.AsyncClient(timeout=CEILING_S, trust_env=False) as http,
        http.stream("POST", f"{stand.url}/v1/responses", json={**body, "stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                assert data["type"] == name
                assert known.validate_python(data).type == name
                yield data


def test_a_whole_answer_has_the_packages_shape(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            made = await api.responses.create(**asked(instructions="be brief", metadata={"a": "b"}, top_p=0.5))
            shapes.Response.model_validate(made.to_dict())
            assert (made.output_text, made.status, made.error) == ("You said: hello", "completed", None)
            assert made.id.startswith("resp_")
            (message,) = made.output
            assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
            assert (made.metadata, made.temperature, made.top_p) == ({"a": "b"}, 0, 0.5)
            assert (made.instructions, made.model, made.truncation) == ("be brief", "tiny", "disabled")
            assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
            assert made.usage.output_tokens_details.reasoning_tokens == 0
            assert "system\nbe brief<|im_end|>" in prompt_of(engine)
            again = await api.responses.create(**asked(instructions="be brief"))
            assert again.usage.input_tokens_details.cached_tokens > 0
            cut = await api.responses.create(**asked(max_output_tokens=2))
            assert (cut.status, cut.output_text) == ("incomplete", "You said")
            assert (cut.incomplete_details.reason, cut.output[0].status) == ("max_output_tokens", "incomplete")
            counted = await api.responses.create(**asked(top_logprobs=2, include=["message.output_text.logprobs"]))
            logprobs = counted.output[0].content[0].logprobs
            assert "".join(one.token for one in logprobs) == "You said: hello"
            assert len(logprobs[0].top_logprobs) == 2

    asyncio.run(scenario())


def test_the_synchronous_client_reads_the_same(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand:

            def talk() -> None:
                with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0) as api:
                    made = api.responses.create(**asked())
                    assert made.output_text == "You said: hello"
                    assert api.responses.retrieve(made.id).to_dict() == made.to_dict()
                    with api.responses.stream(model="tiny", input="hello", temperature=0) as stream:
                        said = [event.delta for event in stream if event.type == "response.output_text.delta"]
                        assert "".join(said) == stream.get_final_response().output_text == "You said: hello"
                    api.responses.delete(made.id)
                    with pytest.raises(openai.NotFoundError, match="There is no response"):
                        api.responses.retrieve(made.id)

            await asyncio.to_thread(talk)

    asyncio.run(scenario())


def test_a_stream_tells_everything_in_order(engine: ScriptedEngine):
    engine.script = asks_for_weather

    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            body = asked(tools=[WEATHER])
            events = [event async for event in raw_events(stand, body)]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            kinds = [event["type"].removeprefix("response.") for event in events]
            in_order = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]]
            assert in_order == [
                *("created", "in_progress"),
                *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
                *("content_part.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
                *("output_item.done", "completed"),
            ]
            response = events[-1]["response"]
            assert (events[0]["response"]["status"], response["status"]) == ("in_progress", "completed")
            assert [item["type"] for item in response["output"]] == ["message", "function_call"]
            assert [item["status"] for item in response["output"]] == ["completed", "completed"]
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == response["output"]
            said = [event for event in events if event["type"] == "response.output_text.delta"]
            assert "".join(event["delta"] for event in said) == response["output"][0]["content"][0]["text"]
            assert {event["item_id"] for event in said} == {response["output"][0]["id"]}
            pieces = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
            assert "".join(event["delta"] for event in pieces) == response["output"][1]["arguments"]
            assert {event["output_index"] for event in pieces} == {1}
            # Whole, the answer has the same items.
            async with httpx.AsyncClient(trust_env=False) as http:
                whole = (await http.post(f"{stand.url}/v1/responses", json=body)).json()
            assert [_without_ids(item) for item in whole["output"]] == [
                _without_ids(item) for item in response["output"]
            ]
            cut = [event async for event in raw_events(stand, asked(max_output_tokens=2))]
            assert cut[-1]["type"] == "response.incomplete"
            assert cut[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    asyncio.run(scenario())


def test_long_settings_and_answers_do_not_count_as_a_slow_reader(engine: ScriptedEngine):
    engine.context_tokens = 400_000
    engine.script = lambda prompt, generation: "word " * 6000

    async def scenario() -> None:
        limits = RequestLimits(unread_bytes=8 * 2**10)
        async with gateway_stand(engine, GatewayConfig("tiny", limits=limits)) as stand:
            events = [event async for event in raw_events(stand, asked(instructions="rule " * 20_000))]
            assert events[-1]["type"] == "response.completed"
            assert len(events[-1]["response"]["output"][0]["content"][0]["text"]) == 30_000

    asyncio.run(scenario())


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_reasoning_is_an_item_of_its_own(tmp_path: Path):
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    engine = ScriptedEngine(
        write_tiny_text(tmp_path, THINKING), script=lambda prompt, _: f"Hm. Yes.\n</think>\n\n{call}"
    )

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            events = [event async for event in raw_events(stand, asked(tools=[TIME]))]
            kinds = [event["type"].removeprefix("response.") for event in events]
            in_order = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]]
            assert in_order[2:8] == [
                *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
                *("content_part.done", "output_item.done"),
            ]
            # The blank lines between thinking and call are no message.
            assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "function_call"]
            made = await api.responses.create(
                **asked(tools=[TIME]), include=["reasoning.encrypted_content"], store=False
            )
            thought, called = made.output
            assert (thought.content[0].text, thought.summary) == ("Hm. Yes.", [])
            assert made.usage.output_tokens_details.reasoning_tokens > 0
            # Sent back as it came, or in the opaque form alone, as some programs do.
            result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "noon"}
            opaque: Any = {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "encrypted_content": thought.encrypted_content,
            }
            for reasoning in (thought, opaque):
                await api.responses.create(**asked(input=[{"role": "user", "content": "?"}, reasoning, called, result]))
                assert "assistant\n<think>Hm. Yes.</think> (calls)<|im_end|>" in prompt_of(engine)
            cut = await api.responses.create(**asked(max_output_tokens=2))
            assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stored", [True, False])
def test_tools_in_a_loop(engine: ScriptedEngine, is_stored: bool):
    engine.script = asks_for_weather

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "how is Paris?"}]}]
            shared: Any = {"model": "tiny", "tools": [WEATHER], "temperature": 0, "store": is_stored}
            made = await api.responses.create(**shared, input=items)
            message, call = made.output
            assert (message.content[0].text.strip(), call.name) == ("Let me look.", "weather")
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            if is_stored:
                last = await api.responses.create(**shared, input=[result], previous_response_id=made.id)
                assert last.previous_response_id == made.id
            else:
                # The whole conversation is sent, with the output as it came.
                last = await api.responses.create(**shared, input=[*items, *made.output, result])
            assert last.output_text == "It is sunny"
            prompt = prompt_of(engine)
            assert "user\nhow is Paris?<|im_end|>" in prompt
            assert "assistant\nLet me look." in prompt
            assert "tool\nsunny<|im_end|>" in prompt

    asyncio.run(scenario())


def test_tools_chosen_forced_and_allowed(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            shared = asked(tools=[TIME, WEATHER])
            forced: Any = {"type": "function", "name": "weather"}
            allowed: Any = {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            }
            for choice in (forced, allowed):
                made = await api.responses.create(**shared, tool_choice=choice)
                (call,) = made.output
                assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
                assert made.tool_choice.to_dict() == choice
            assert '"time"' not in prompt_of(engine)
            engine.script = asks_for_weather
            free = await api.responses.create(**shared, tool_choice="none")
            assert [item.type for item in free.output] == ["message"]
            async with api.responses.stream(**shared) as stream:
                final = await stream.get_final_response()
            # The package reads the arguments of a strict tool.
            assert final.output[1].parsed_arguments == {"city": "Paris"}

    asyncio.run(scenario())


def test_answers_of_a_schema(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            made = await api.responses.parse(**asked(), text_format=Age)
            assert made.output_parsed == Age(age=1)
            assert made.text.format.name == "Age"
            # An agent may offer tools and want a form of its answer: the model chooses.
            either = await api.responses.parse(**asked(tools=[TIME]), text_format=Age)
            assert [item.type for item in either.output] == ["function_call"]
            async with api.responses.stream(**asked(), text_format=Age) as stream:
                done = [event async for event in stream if event.type == "response.output_text.done"]
                assert done[0].parsed == Age(age=1)
                assert (await stream.get_final_response()).output_parsed == Age(age=1)
            some = await api.responses.create(**asked(), text={"format": {"type": "json_object"}})
            assert isinstance(json.loads(some.output_text), dict)
            broken: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}
            with pytest.raises(openai.BadRequestError):
                await api.responses.create(**asked(), text=broken)

    asyncio.run(scenario())


def test_conversations_are_continued_read_and_deleted(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("alice = a-good-long-key-of-hers\nbob = a-good-long-key-of-his\n")
    config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"), limits=RequestLimits(stored_responses=3))

    async def scenario() -> None:
        async with gateway_stand(engine, config) as stand, client(stand, "a-good-long-key-of-hers") as api:
            first = await api.responses.create(**asked(input="one", instructions="be brief"))
            async with api.responses.stream(**asked(input="two"), previous_response_id=first.id) as stream:
                second = await stream.get_final_response()
            assert (await api.responses.retrieve(second.id)).output_text == "You said: two"
            third = await api.responses.create(**asked(input="three"), previous_response_id=second.id)
            prompt = prompt_of(engine)
            at = [prompt.index(part) for part in ("user\none", "You said: one", "user\ntwo", "You said: two")]
            assert at == sorted(at)
            # Instructions are of one response only.
            assert "be brief" not in prompt
            # A response keeps the turns before it, deleted or displaced.
            await api.responses.delete(first.id)
            await api.responses.create(**asked(), previous_response_id=third.id)
            assert "user\none" in prompt_of(engine)
            reference: Any = {"type": "item_reference", "id": third.output[0].id}
            await api.responses.create(**asked(input=[reference, {"role": "user", "content": "and?"}]))
            assert "assistant\nYou said: three<|im_end|>\n<|im_start|>user\nand?" in prompt_of(engine)
            with pytest.raises(openai.BadRequestError, match="the last 3 responses") as lost:
                await api.responses.create(**asked(), previous_response_id=second.id)
            assert (lost.value.code, lost.value.param) == ("previous_response_not_found", "previous_response_id")
            secret = await api.responses.create(**asked(), store=False)
            with pytest.raises(openai.NotFoundError, match="store: false"):
                await api.responses.retrieve(secret.id)
            async with client(stand, "a-good-long-key-of-his") as other:
                for attempt in (other.responses.retrieve, other.responses.delete):
                    with pytest.raises(openai.NotFoundError):
                        await attempt(third.id)
                with pytest.raises(openai.BadRequestError, match="no response"):
                    await other.responses.create(**asked(), previous_response_id=third.id)

    asyncio.run(scenario())


def test_truncation_drops_the_oldest_turns(engine: ScriptedEngine):
    engine.context_tokens = 200

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            turns: Any = [{"role": "developer", "content": "be brief"}]
            for number in range(12):
                turns += [
                    {"role": "user", "content": f"question {number}"},
                    {"role": "assistant", "content": f"answer {number}"},
                ]
            turns += [{"role": "user", "content": "last"}]
            with pytest.raises(openai.BadRequestError) as caught:
                await api.responses.create(**asked(input=turns))
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
            made = await api.responses.create(**asked(input=turns, max_output_tokens=40), truncation="auto")
            assert made.output_text == "You said: last"
            prompt = prompt_of(engine)
            assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nquestion ")
            assert "question 0" not in prompt
            counted = await api.responses.input_tokens.count(
                model="tiny", input=turns, truncation="auto", extra_body={"max_output_tokens": 40}
            )
            kept = made.usage.input_tokens
            assert counted.input_tokens == kept
            assert 200 - 40 - 60 < kept <= 200 - 40
            # One turn that is too long stays too long.
            with pytest.raises(openai.BadRequestError):
                await api.responses.create(**asked(input="word " * 300), truncation="auto")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"background": True}, "background", "Use `stream`"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search.*no hosted tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "file_search"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "detailed"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning_effort"),
        ({"input": []}, "input", "at least one item"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "reads text only",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "input_file.*Models here read `input_text`",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
        ({"input": [{"role": "user", "contents": "x"}]}, "input[0].contents", "Unknown"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "msg_1"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]},
            "input",
            "No function call has the `call_id` `c1`",
        ),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"}]},
            "input",
            "not of this gateway",
        ),
        ({"temprature": 1}, "temprature", "`temperature`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 100_000}, "input", "the request asks for 100000"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]", "512"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
    ],
)
def test_what_is_refused_is_named(engine: ScriptedEngine, fields: dict[str, Any], param: str, said: str):
    async def scenario() -> None:
        async with gateway_stand(engine, GatewayConfig("tiny", is_strict=True)) as stand, client(stand) as api:
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                await api.responses.create(model="tiny", input="hello", extra_body=fields)
            assert caught.value.param == param
            assert engine.live == 0

    asyncio.run(scenario())


def test_failures_are_the_packages_exceptions_and_events(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            with pytest.raises(openai.NotFoundError, match="Did you mean `tiny`"):
                await api.responses.create(model="tinny", input="hello")
            engine.is_busy = True
            with pytest.raises(openai.RateLimitError):
                await api.responses.create(**asked())
            engine.is_busy, engine.fails_after = False, 3
            with pytest.raises(openai.InternalServerError, match="last machine"):
                await api.responses.create(**asked())
            events = [event async for event in raw_events(stand, asked())]
            failed = events[-1]
            assert failed["type"] == "response.failed"
            assert failed["sequence_number"] == len(events) - 1
            assert failed["response"]["status"] == "failed"
            assert failed["response"]["error"]["code"] == "server_error"
            assert "last machine" in failed["response"]["error"]["message"]
            assert failed["response"]["output"][0]["status"] == "incomplete"
            # A failed response is not kept.
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(failed["response"]["id"])
            assert engine.live == 0

    asyncio.run(scenario())


def test_leaving_cancels_the_generation(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            engine.gate = asyncio.Event()
            stream = await api.responses.create(**asked(), stream=True)
            await until(lambda: engine.live == 1)
            await stream.close()
            await until(lambda: engine.live == 0)
            assert engine.closed_early == 1

    asyncio.run(scenario())


AGENT = """
import asyncio, json, sys
from openai import AsyncOpenAI
from pydantic import BaseModel
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, SQLiteSession
from agents import function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    "Returns the weather of a city."
    return f"sunny in {city}"


class Age(BaseModel):
    age: int


async def main(url: str) -> dict[str, object]:
    told: dict[str, object] = {}
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = OpenAIResponsesModel("tiny", client)
        settings = ModelSettings(temperature=0)
        agent = Agent("a", instructions="be brief", model=model, model_settings=settings, tools=[weather])
        told["whole"] = (await Runner.run(agent, "how is Paris?")).final_output
        streamed = Runner.run_streamed(agent, "how is Paris?")
        told["events"] = sorted({event.type async for event in streamed.stream_events()})
        told["streamed"] = streamed.final_output
        session = SQLiteSession("s")
        await Runner.run(agent, "how is Paris?", session=session)
        told["session"] = (await Runner.run(agent, "and again?", session=session)).final_output
        chained = await Runner.run(agent, "how is Paris?", auto_previous_response_id=True)
        told["chained"] = chained.final_output
        formed = Agent("b", model=model, model_settings=settings, output_type=Age)
        told["formed"] = (await Runner.run(formed, "how old?")).final_output.age
        other = Agent("c", model=model, model_settings=settings, handoffs=[formed])
        told["handoff"] = (await Runner.run(other, "pass it on")).final_output.age
    return told


print(json.dumps(asyncio.run(main(sys.argv[1]))))
"""


def works_with_agents(prompt: str, generation: Any) -> str:
    if "pass it on" in prompt and "tool\n" not in prompt:
        return '<tool_call>\n{"name": "transfer_to_b", "arguments": {}}\n</tool_call>'
    return asks_for_weather(prompt, generation)


@pytest.mark.skipif(not AGENTS.exists(), reason="openai-agents needs an environment of its own: make clients")
def test_agents_call_tools_hand_over_and_remember(engine: ScriptedEngine):
    engine.script, engine.context_tokens = works_with_agents, 4096

    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            process = await asyncio.create_subprocess_exec(
                AGENTS, "-c", AGENT, f"{stand.url}/v1",
                env={"NO_PROXY": "*"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            told, complaints = await asyncio.wait_for(process.communicate(), 90)
            assert process.returncode == 0, complaints.decode()
            assert json.loads(told.decode().splitlines()[-1]) == {
                **dict.fromkeys(("whole", "streamed", "session", "chained"), "It is sunny in Paris"),
                "events": ["agent_updated_stream_event", "raw_response_event", "run_item_stream_event"],
                "formed": 1,
                "handoff": 1,
            }

    asyncio.run(scenario())


def test_what_codex_asks_of_every_model_is_left_out_and_named(engine: ScriptedEngine):
    spawn = {"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}}
    fields = {
        "tools": [
            {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
            {"type": "namespace", "name": "multi_agent_v1", "description": "sub-agents", "tools": [spawn]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-session",
        "client_metadata": {"x-codex-installation-id": "one"},
    }

    async def scenario() -> None:
        async with gateway_stand(engine) as stand, client(stand) as api:
            raw = await api.responses.with_raw_response.create(model="tiny", input="hello", extra_body=fields)
            assert raw.headers["x-fusion-ignored"] == "reasoning.effort, tools[namespace], tools[web_search]"
            response = raw.parse()
            assert response.output_text.startswith("You said: hello")
            assert [tool.name for tool in response.tools] == ["shell"]

    asyncio.run(scenario())
