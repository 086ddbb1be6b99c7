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
def test_messages_in_channels(tmp_path: Path) -> None:
    template = TEMPLATE.replace("tool_call", "|channel|").replace("...", "<|message|>")
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."

    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, said, template, HARMONY_MARKS)) as stand:
            message = (await whole(stand))["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")

    asyncio.run(scenario())


def test_models_that_do_not_think(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_stand(engine(tmp_path, "<think>a</think>b", TEMPLATE)) as stand:
            answer = await whole(stand)
            assert answer["choices"][0]["message"]["content"] == "<think>a</think>b"
            assert "reasoning_content" not in answer["choices"][0]["message"]
            assert "completion_tokens_details" not in answer["usage"]

    asyncio.run(scenario())
