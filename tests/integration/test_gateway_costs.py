"""What a client sends costs no more than its limits: all that is rendered counts, and costly texts stop no others.

Neighbours: `test_gateway_hostile` has clients that misuse connections.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.gateway.errors import nearest
from harness.gateway_stand import Stand, chat, gateway_stand, until
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
LONG = "x" * 400_000
USER = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": LONG}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **fields}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


@pytest.fixture
def engine(text: Any) -> ScriptedEngine:
    return ScriptedEngine(text, context_tokens=4096)


def at(
    engine: ScriptedEngine,
    body: Callable[[Stand, httpx.AsyncClient], Awaitable[None]],
    limits: RequestLimits | None = None,
) -> None:
    async def scenario() -> None:
        config = GatewayConfig("tiny", limits=limits or RequestLimits(), is_strict=True)
        async with (
            gateway_stand(engine, config) as stand,
            httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False) as http,
        ):
            await body(stand, http)

    asyncio.run(scenario())


def refused(engine: ScriptedEngine, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The errors of these requests. None of them may reach the template."""
    answers: list[dict[str, Any]] = []

    async def ask(_: Stand, http: httpx.AsyncClient) -> None:
        for body in bodies:
            answer = await http.post(CHAT, json=body)
            assert answer.status_code == 400, answer.text
            answers.append(answer.json()["error"])

    at(engine, ask)
    return answers


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": LONG}, USER]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]},
        {"messages": [{"role": "user", "content": "hello", "name": LONG}]},
        {"messages": [USER, {"role": "tool", "content": "", "tool_call_id": LONG}]},
        {"tools": [tool(description=LONG)]},
        {"tools": [tool(parameters={"type": "object", "properties": {LONG: {"type": "string"}}})]},
        {"chat_template_kwargs": {"style": LONG}},
        {"chat_template_kwargs": {LONG: True}},
        {"chat_template_kwargs": {"list": [[]] * 200_000}},
    ],
    ids=["reasoning", "arguments", "name", "call-id", "description", "field-name", "variable", "variable-name", "many"],
)
def test_all_that_may_be_rendered_counts(
    engine: ScriptedEngine, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.text), "chat_tokens", lambda *_, **__: pytest.fail("it was rendered"))
    (error,) = refused(engine, chat() | fields)
    assert error["code"] == "context_length_exceeded", error


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_deep_data_is_refused(engine: ScriptedEngine, name: str) -> None:
    fields = {"tools": [tool(parameters=nested(100))]} if name == "tools" else {"chat_template_kwargs": nested(100)}
    (error,) = refused(engine, chat() | fields)
    assert f"`{name}` is nested too deeply: at most 32 levels" in error["message"]


def test_a_long_name_is_neither_compared_nor_repeated(engine: ScriptedEngine) -> None:
    assert nearest("temperatur", ["temperature"]) == " Did you mean `temperature`?"
    assert nearest("temperature" * 10, ["temperature" * 10]) == ""
    unknown, model, wrong = refused(
        engine,
        chat(**{LONG: 1}),
        chat(tool_choice={"type": "function", "function": {"name": "f", LONG: 1}}),
        chat(response_format={"type": LONG}),
    )
    for error in (unknown, model, wrong):
        assert len(error["message"]) < 600, error["message"][:100]


@pytest.mark.slow
def test_a_costly_template_ends_and_stops_no_other_request(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(*_: Any, **__: Any) -> None:
        begun.set()
        for _ in itertools.count():
            pass

    async def attack(_: Stand, http: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.text), "chat_tokens", endless)
            asking = asyncio.create_task(http.post(CHAT, json=chat()))
            await until(begun.is_set)
            assert (await http.get("/health")).status_code == 200
            assert not asking.done()
            error = (await asking).json()["error"]
            assert error["code"] == "prompt_too_costly"
            assert error["message"] == "Reading this prompt took longer than 5 s."
        await until(lambda: not [one for one in threading.enumerate() if one.name == "gateway-text"])
        assert (await http.post(CHAT, json=chat())).status_code == 200

    at(engine, attack, RequestLimits(text_s=5.0))


def test_what_can_not_be_interrupted_holds_one_place(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    def blocked(*_: Any, **__: Any) -> None:
        begun.set()
        over.wait()

    async def attack(_: Stand, http: httpx.AsyncClient) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.text), "chat_tokens", blocked)
            asking = asyncio.create_task(http.post(CHAT, json=chat()))
            await until(begun.is_set)
            busy = await http.post(CHAT, json=chat())
            assert (busy.status_code, busy.json()["error"]["code"]) == (503, "text_threads_busy")
            assert "retry-after" in busy.headers
            assert (await asking).json()["error"]["code"] == "prompt_too_costly"
            over.set()
        answer = await http.post(CHAT, json=chat())
        assert answer.status_code == 200, answer.text

    at(engine, attack, RequestLimits(text_s=0.5, texts=1))


def test_the_process_does_not_wait_for_them(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(type(engine.text), "chat_tokens", lambda *_, **__: over.wait())

    async def attack(_: Stand, http: httpx.AsyncClient) -> None:
        await http.post(CHAT, json=chat())
        (stuck,) = [one for one in threading.enumerate() if one.name == "gateway-text"]
        assert stuck.daemon

    try:
        at(engine, attack, RequestLimits(text_s=0.1))
    finally:
        over.set()
