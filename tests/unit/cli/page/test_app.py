"""The page over HTTP, with a scripted desk: nothing without a session, nothing for other pages, all headers strict."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from fusionai.cli.page.access import LOOPBACK, gate_of
from fusionai.cli.page.actions import EvictMachine, MakeInvitation
from fusionai.cli.page.app import MOST_BODY_BYTES, BrokerPage, PageAddress
from harness.scripted_desk import ScriptedDesk
from harness.virtual_clock import VirtualClock

SECRET = "a good long secret"
ORIGIN = {"Origin": "http://127.0.0.1:4780"}


def visit(
    desk: ScriptedDesk, scenario: Callable[[httpx.AsyncClient], Awaitable[None]], *, scheme: str = "http"
) -> None:
    async def run() -> None:
        page = BrokerPage(desk, gate_of(SECRET), PageAddress(scheme, LOOPBACK, 4780), VirtualClock())
        transport = httpx.ASGITransport(page)
        async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://127.0.0.1:4780") as http:
            await scenario(http)

    asyncio.run(run())


async def signed_in(http: httpx.AsyncClient) -> None:
    answer = await http.post("/session", json={"secret": SECRET}, headers=ORIGIN)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/", "/style.css", "/page.css", "/page.js", "/draw.js", "/icon.svg"])
def test_files_are_for_everybody_and_load_nothing_foreign(path: str):
    async def scenario(http: httpx.AsyncClient) -> None:
        answer = await http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"

    visit(ScriptedDesk(), scenario)


def test_nothing_of_the_pool_is_shown_without_a_session():
    desk = ScriptedDesk()

    async def scenario(http: httpx.AsyncClient) -> None:
        assert (await http.get("/events")).status_code == 401
        assert (await http.get("/jobs/poems-a1")).status_code == 401
        assert (await http.post("/actions", json={"do": "code"}, headers=ORIGIN)).status_code == 401
        wrong = await http.post("/session", json={"secret": "no"}, headers=ORIGIN)
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        http.cookies.set("fusion_page_4780", "guessed")
        assert (await http.post("/actions", json={"do": "code"}, headers=ORIGIN)).status_code == 401

    visit(desk, scenario)
    assert desk.asked == []


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_cookie_is_out_of_reach(scheme: str):
    async def scenario(http: httpx.AsyncClient) -> None:
        origin = {"Origin": f"{scheme}://127.0.0.1:4780"}
        cookie = (await http.post("/session", json={"secret": SECRET}, headers=origin)).headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert ("secure" in cookie) is (scheme == "https")
        assert "domain" not in cookie

    visit(ScriptedDesk(), scenario, scheme=scheme)


def test_actions_reach_the_desk_and_refusals_the_reader():
    desk = ScriptedDesk()

    async def scenario(http: httpx.AsyncClient) -> None:
        await signed_in(http)
        made = (await http.post("/actions", json={"do": "invite", "uses": 3}, headers=ORIGIN)).json()
        assert made["command"] == "fusion join fusion1-abc"
        await http.post("/actions", json={"do": "evict", "peer": "x"}, headers=ORIGIN)
        desk.refusal = "there is no such member."
        refused = await http.post("/actions", json={"do": "evict", "peer": "y"}, headers=ORIGIN)
        assert refused.status_code == 400
        assert refused.json() == {"message": "there is no such member.", "hint": "Try another one."}
        assert (await http.get("/jobs/poems-a1")).json()["lines"]
        assert (await http.get("/jobs/unknown")).status_code == 400
        assert (await http.get("/programs/1")).json()["lines"][0] == "step 1/4"
        assert (await http.get("/programs/9")).status_code == 400
        assert (await http.get("/programs/..%2f1")).status_code == 404
        assert (await http.get("/nothing")).status_code == 404
        await http.request("DELETE", "/session", headers={**ORIGIN, "Content-Type": "application/json"})
        assert (await http.get("/jobs/poems-a1")).status_code == 401

    visit(desk, scenario)
    assert desk.asked == [MakeInvitation(uses=3), EvictMachine(peer="x"), EvictMachine(peer="y")]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"headers": {}}, 403),
        ({"headers": {"Origin": "http://evil.example"}}, 403),
        ({"headers": {**ORIGIN, "Host": "evil.example:4780"}}, 403),
        ({"headers": {**ORIGIN, "Content-Type": "text/plain"}}, 415),
        ({"content": b"{"}, 400),
        ({"content": b'{"do": "run", "command": "rm"}'}, 400),
        ({"content": b'{"do": "invite", "uses": 0}'}, 400),
        ({"content": b'{"do": "invite", "home": "/etc"}'}, 400),
        ({"content": b'{"do": "serve", "model": ""}'}, 400),
        ({"content": b'{"do": "plan", "form": {"name": "../x", "model": "m", "files": "f"}}'}, 400),
        ({"content": b'{"do": "plan", "form": {"name": "x", "model": "m", "files": "f", "home": "/"}}'}, 400),
        ({"content": b'{"do": "plan", "form": {"name": "x", "model": "m", "files": "f", "steps": "1 --x"}}'}, 400),
        ({"content": b"[" * 10_000}, 400),
        ({"content": b" " * (MOST_BODY_BYTES + 1)}, 413),
    ],
)
def test_what_is_not_a_request_of_the_page_does_nothing(sent: dict[str, Any], status: int):
    desk = ScriptedDesk()

    async def scenario(http: httpx.AsyncClient) -> None:
        await signed_in(http)
        headers = {"Content-Type": "application/json", **sent.get("headers", ORIGIN)}
        content = sent.get("content", b'{"do": "code"}')
        answer = await http.post("/actions", content=content, headers=headers)
        assert answer.status_code == status, answer.text

    visit(desk, scenario)
    assert desk.asked == []
