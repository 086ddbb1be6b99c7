"""Thinking in answers of the gateway: in a field of its own, whole and streamed, for models that have a form for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.gateway_stand import Stand, chat, gateway_stand
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import MARKS, TEMPLATE, write_tiny_text

CHAT = "/v1/chat/completions"
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
CHANNELS = TEMPLATE.replace("tool_call", "|channel|").replace("...", "<|message|> functions.")
ASKED = {"temperature": 0, "max_tokens": 200}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def engine(directory: Path, answer: str, template: str = THINKING, marks: tuple[str, ...] = MARKS) -> ScriptedEngine:
    return ScriptedEngine(write_tiny_text(directory, template, marks), script=lambda prompt, generation: answer)


async def whole(stand: Stand, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
        answer = await http.post(CHAT, json=chat(**ASKED | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def deltas(stand: Stand, **fields: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
        answer = await http.post(CHAT, json=chat(**ASKED | fields, stream=True))
    data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in data[:-1]]


def joined(choices: list[dict[str, Any]], field: str) -> str:
    return "".join(choice["delta"].get(field) or "" for choice in choices)


def test_thinking_that_the_prompt_opens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "Two. And two.\n</think>\n\nFour. Five")) as stand:
            answer = await whole(stand, logprobs=True)
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert (message["reasoning_content"], message["content"]) == ("Two. And two.", "Four. Five")
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            # The marks' tokens count too; log-probabilities are those of the answer.
            said = answer["choices"][0]["logprobs"]["content"]
            assert thought + len(said) == usage["completion_tokens"]
            assert "".join(one["token"] for one in said).strip() == "Four. Five"
            stopped = (await whole(stand, stop=". "))["choices"][0]["message"]
            assert (stopped["reasoning_content"], stopped["content"]) == ("Two. And two.", "Four")
            cut = (await whole(stand, max_tokens=3))["choices"][0]
            assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")
            assert cut["message"]["reasoning_content"]
            choices = await deltas(stand)
            assert joined(choices, "reasoning_content") == "Two. And two."
            assert joined(choices, "content") == "Four. Five"
            assert sum("reasoning_content" in choice["delta"] for choice in choices) > 3

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_call_after_the_thinking(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, f"I need f: {CALL}</think>\n\n{CALL}")) as stand:
            choice = (await whole(stand, tools=[TOOL]))["choices"][0]
            assert choice["message"]["reasoning_content"] == f"I need f: {CALL}"
            assert choice["message"]["content"] is None
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
            assert choice["finish_reason"] == "tool_calls"

    asyncio.run(scenario())


@pytest.mark.slow
def test_calls_in_channels(tmp_path: Path) -> None:
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    said += '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}'

    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, said, CHANNELS, HARMONY_MARKS)) as stand:
            choice = (await whole(stand, tools=[TOOL]))["choices"][0]
            assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "I look.")
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
            choices = await deltas(stand, tools=[TOOL])
            calls = [one for choice in choices for one in choice["delta"].get("tool_calls") or ()]
            assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
            assert choices[-1]["finish_reason"] == "tool_calls"
            enforced = (await whole(stand, tools=[TOOL], tool_choice="required"))["choices"][0]["message"]
            assert [call["function"]["name"] for call in enforced["tool_calls"]] == ["f"]
            assert enforced["content"] is None

    asyncio.run(scenario())


@pytest.mark.slow
def test_messages_in_channels(tmp_path: Path) -> None:
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."

    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, said, CHANNELS, HARMONY_MARKS)) as stand:
            message = (await whole(stand))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")

    asyncio.run(scenario())


SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
SWITCHED = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{OFF}{{% endif %}}")


@pytest.mark.parametrize("template", [THINKING, SWITCHED])
def test_an_enforced_form_comes_after_the_thinking(tmp_path: Path, template: str) -> None:
    async def scenario() -> None:
        marks = (*MARKS, "<think>", "</think>")
        async with gateway_stand(engine(tmp_path, "", template, marks)) as stand:
            usage = (answer := await whole(stand, response_format=FORMAT))["usage"]
            assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
            # The script chooses the closing mark as soon as it is allowed.
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            assert thought == (1 if template is THINKING else 0)
            answer = await whole(stand, tools=[TOOL], tool_choice="required")
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            if template is SWITCHED:
                await whole(stand, response_format=FORMAT, reasoning_effort="none")
                prompt = stand.engine.text.tokenizer.decode(stand.engine.given[-1].prompt, special=True)
                assert prompt.endswith("<think>\n\n</think>\n\n")

    asyncio.run(scenario())


def test_an_enforced_form_behind_messages_in_channels(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "", CHANNELS, HARMONY_MARKS)) as stand:
            answer = await whole(stand, response_format=FORMAT)
            assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
            assert answer["choices"][0]["message"]["reasoning_content"] is None

    asyncio.run(scenario())


@pytest.mark.slow
def test_calls_or_a_form(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "", TEMPLATE)) as stand:
            # Of what is allowed, the script takes a quote first, and the smallest token otherwise: here a call's mark.
            called = await whole(stand, tools=[TOOL], response_format=FORMAT)
            assert called["choices"][0]["message"]["tool_calls"]
            quoted = await whole(stand, tools=[TOOL], structured_outputs={"choice": ['"yes"']})
            assert quoted["choices"][0]["message"]["content"] == '"yes"'
            assert quoted["choices"][0]["finish_reason"] == "stop"
            enforced = await whole(stand, response_format=FORMAT, tools=[TOOL], tool_choice="required")
            assert enforced["choices"][0]["finish_reason"] == "tool_calls"
            chosen = await whole(stand, structured_outputs={"choice": ["yes", "a no"]})
            assert chosen["choices"][0]["message"]["content"] == "a no"
            param, _ = await refusal(stand, tools=[TOOL], guided_grammar='start: "a"')
            assert param == "tools"
            async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
                body = {"model": "tiny", "prompt": "x", "structured_outputs": {"regex": "a{3}"}, "max_tokens": 9}
                text = (await http.post("/v1/completions", json=body)).json()
            assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == ("aaa", "stop")

    asyncio.run(scenario())


async def refusal(stand: Stand, **fields: Any) -> tuple[str, str]:
    async with httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http:
        answer = await http.post(CHAT, json=chat(**ASKED | fields))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def test_what_can_not_be_thought(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "a</think>b")) as stand:
            param, message = await refusal(stand, reasoning_effort="none")
            assert param == "reasoning_effort"
            assert "can't turn thinking off" in message
            # The tokenizer has no tokens for these marks.
            _, message = await refusal(stand, response_format=FORMAT)
            assert "several tokens" in message
        async with gateway_stand(engine(tmp_path, "a", SWITCHED)) as stand:
            _, message = await refusal(stand, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
            assert "leave one out" in message
            await whole(stand, reasoning_effort="low", chat_template_kwargs={"enable_thinking": True})

    asyncio.run(scenario())


def test_models_that_do_not_think(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "<think>a</think>b", TEMPLATE)) as stand:
            answer = await whole(stand)
            assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
            assert "reasoning_content" not in answer["choices"][0]["message"]
            assert "completion_tokens_details" not in answer["usage"]

    asyncio.run(scenario())
