"""The broker's page in a real browser: signed in by its link, live, reached by keyboard, readable for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusionai.cli.page.actions import (
    ApproveMachine,
    EndProgram,
    EvictMachine,
    MakeCode,
    MakeInvitation,
    PlanTraining,
    ServeModel,
    ServeTrained,
    StartTraining,
    StopPoolJob,
)
from fusionai.cli.page.app import BrokerPage
from fusionai.cli.page.overview import PageNotice
from fusionai.cli.page.run import PageOptions, open_page
from fusionai.cli.page.training import TrainingForm
from fusionai.gateway.server import serve
from fusionai.primitives.clock import SystemClock
from harness.browser import DESK, PHONE, browsed, needs_browser, serious
from harness.certificates import self_signed
from harness.scripted_desk import OVERVIEW, ScriptedDesk, machine

pytestmark = [pytest.mark.slow, needs_browser]


@asynccontextmanager
async def page_stand(desk: ScriptedDesk, home: Path, options: PageOptions | None = None) -> AsyncIterator[str]:
    """The page's link, with its key."""
    found = open_page(options or PageOptions(port=0), home)
    stop, ready = asyncio.Event(), asyncio.Event()
    app = BrokerPage(desk, found.gate, found.address, SystemClock())
    served = asyncio.create_task(serve(app, found.listener, stop=stop, on_listening=ready.set, tls=found.tls))
    try:
        await ready.wait()
        yield found.link
    finally:
        stop.set()
        await served


def test_the_pool_is_shown_live_and_changed_by_its_owner(tmp_path: Path):
    desk = ScriptedDesk()

    async def scenario() -> None:
        async with page_stand(desk, tmp_path) as link, browsed(link) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            assert "#" not in page.url, "the key does not stay in the address"
            assert await page.locator("#machines .name").all_inner_texts() == [row.name for row in OVERVIEW.machines]
            assert await page.locator("#present").inner_text() == "3"
            assert await page.locator("#jobs .stages .name").all_inner_texts() == ["0 attic", "1 laptop", "2 job owner"]
            assert await page.locator("#jobs progress").first.get_attribute("value") == "120"
            assert "110 MB/s" in await page.locator("#links-body").inner_text()
            assert await page.locator("#events .bad").count() == 2
            # Live: a machine comes, another one is said to be lost.
            desk.shown = msgspec.structs.replace(
                OVERVIEW,
                machines=(*OVERVIEW.machines, machine("cellar")),
                notices=(*OVERVIEW.notices, PageNotice(at_s=1_700_000_060.0, text="cellar lends 8 GB.")),
            )
            await page.locator("#machines .name", has_text="cellar").wait_for()
            assert "cellar lends" in await page.locator("#events li").first.inner_text()
            await page.locator("#make-code").click()
            await page.locator("#made-code", has_text="012 345").wait_for()
            await page.locator("#make-invitation").click()
            await page.locator("#made-command", has_text="fusion1-abc").wait_for()
            await page.get_by_role("button", name="Evict cellar").click()
            await page.keyboard.press("Enter")  # the focus is on Cancel
            await page.get_by_role("button", name="Stop poems-a1").click()
            await page.locator("#ask-yes").click()
            await page.get_by_role("button", name="Evict laptop").click()
            await page.locator("#ask-yes").click()
            await page.locator("#done", has_text="Done.").wait_for()
            await page.get_by_role("button", name="Approve newcomer").click()
            assert "q" * 52 in await page.locator("#ask-text").inner_text()
            await page.locator("#ask-yes").click()
            await page.get_by_role("button", name="History of poems-a1").click()
            await page.locator("#log-lines", has_text="office took its place").wait_for()
            await page.keyboard.press("Escape")
            assert await page.get_by_role("link", name="Open chat").get_attribute("href") == "http://127.0.0.1:8123/"
            assert "failed (1)" in await page.locator("#programs").inner_text()
            desk.refusal = "there is no such member."
            await page.get_by_role("button", name="Evict attic").click()
            await page.locator("#ask-yes").click()
            await page.locator("#problem", has_text="no such member. Try another one.").wait_for()
            await page.locator("#sign-out").click()
            await page.locator("#sign-in").wait_for()
            await page.reload()
            await page.locator("#sign-in").wait_for()

    asyncio.run(scenario())
    assert desk.asked == [
        MakeCode(),
        MakeInvitation(),
        StopPoolJob(job="poems-a1"),
        EvictMachine(peer="peer-laptop"),
        ApproveMachine(peer="q" * 52),
        EvictMachine(peer="peer-attic"),
    ]


def test_a_job_is_planned_before_it_is_started(tmp_path: Path):
    desk = ScriptedDesk()

    async def scenario() -> None:
        async with page_stand(desk, tmp_path) as link, browsed(link) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            assert not await page.locator("#start").is_visible()
            await page.fill("#name", "Wrong Name")
            await page.fill("#files", "/texts/*.txt")
            await page.click("#plan")
            assert desk.asked == [], "the browser refuses the name"
            await page.fill("#name", "poems")
            await page.fill("#steps", "7")
            await page.select_option("#base", "")
            await page.fill("#base-text", "owner/name")
            await page.fill("#rank", "16")
            await page.click("#plan")
            await page.locator("#verdict li", has_text="Fits: 2 machines").wait_for()
            assert await page.locator("#planned-plan .name").all_inner_texts() == ["0 attic", "1 laptop", "2 job owner"]
            await page.fill("#steps", "8")
            assert not await page.locator("#start").is_visible(), "what is started is what was planned"
            await page.click("#plan")
            await page.click("#start")
            await page.locator("#planned").wait_for(state="hidden")
            await page.get_by_role("button", name="Start poems again").click()
            await page.get_by_role("button", name="Serve poems").click()
            await page.fill("#served", "owner/chatty")
            await page.get_by_role("button", name="Serve it").click()
            await page.get_by_role("button", name="End owner/chatty").click()
            await page.locator("#ask-yes").click()
            await page.get_by_role("button", name="Log of poems").click()
            await page.locator("#log-lines", has_text="no machine is here").wait_for()

    asyncio.run(scenario())
    form = TrainingForm(name="poems", model="owner/name", files="/texts/*.txt", steps=7, adapter_rank=16)
    assert desk.asked == [
        PlanTraining(form=form),
        PlanTraining(form=msgspec.structs.replace(form, steps=8)),
        StartTraining(name="poems"),
        StartTraining(name="poems"),
        ServeTrained(name="poems"),
        ServeModel(model="owner/chatty"),
        EndProgram(number=2),
    ]


@pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", DESK), ("light", PHONE)])
def test_a_checker_of_accessibility_finds_nothing_serious(scheme: str, size: Any, tmp_path: Path):
    async def scenario() -> None:
        # The checker is a script of its own, which the page's policy would rightly refuse.
        options = {"color_scheme": scheme, "viewport": size, "bypass_csp": True, "reduced_motion": "reduce"}
        async with page_stand(ScriptedDesk(), tmp_path) as link:
            async with browsed(link.partition("#")[0], **options) as page:
                await page.locator("#sign-in").wait_for()
                assert await serious(page) == []
            async with browsed(link, **options) as page:
                await page.locator("#state[data-state=ready]").wait_for()
                await page.locator("#make-invitation").click()
                await page.locator("#made-qr summary").click()
                await page.fill("#name", "poems")
                await page.fill("#files", "/texts/*.txt")
                await page.click("#plan")
                await page.locator("#verdict li").first.wait_for()
                assert await serious(page) == []
                await page.get_by_role("button", name="Evict laptop").click()
                assert await serious(page) == []
                width = await page.evaluate("() => document.documentElement.scrollWidth")
                assert width <= size["width"]

    asyncio.run(scenario())


def test_beyond_loopback_a_password_opens_it_over_tls(tmp_path: Path):
    certificate, key = self_signed(tmp_path)
    (tmp_path / "word").write_text("a good long password\n")
    options = PageOptions(port=0, password_file=tmp_path / "word", tls_cert=certificate, tls_key=key)

    async def scenario() -> None:
        async with page_stand(ScriptedDesk(), tmp_path, options) as link:
            assert link.startswith("https://")
            async with browsed(link, ignore_https_errors=True) as page:
                await page.fill("#secret", "a wrong long password")
                await page.get_by_role("button", name="Sign in").click()
                await page.locator("#problem", has_text="That is not right.").wait_for()
                await page.fill("#secret", "a good long password")
                await page.keyboard.press("Enter")
                await page.locator("#state[data-state=ready]").wait_for()
                assert not await page.evaluate("() => document.cookie"), "no script reads the session"

    asyncio.run(scenario())


def test_a_broker_that_ends_is_said_to_be_away(tmp_path: Path):
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(page_stand(ScriptedDesk(), tmp_path))
            async with browsed(link) as page:
                await page.locator("#state[data-state=ready]").wait_for()
                await stack.aclose()
                await page.locator("#state[data-state=unreachable]").wait_for()
                assert await page.locator("#machines li").count() == len(OVERVIEW.machines), "the last view stays"

    asyncio.run(scenario())
