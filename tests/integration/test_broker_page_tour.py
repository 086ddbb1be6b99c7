"""A tour of the page with real processes: a machine joins by what it shows, a job is planned, trained through a fault,
stopped, resumed and served, a machine is evicted, and all programs end with the broker."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.browser import browsed, needs_browser
from harness.live_pool import LivePool, write_text

pytestmark = [pytest.mark.long, needs_browser]
LONG_MS = 120_000


def touring(directory: Path, tour: Callable[[LivePool, Any], Awaitable[None]]) -> str:
    """Run the tour on a pool of two machines whose broker has a page; return what the broker printed, once it has
    ended by Ctrl-C."""
    options = ("--page", "--page-port", "0")
    with LivePool(directory, peers=("one", "two"), broker_options=options) as pool:
        link = re.findall(r"Page: (\S+)", pool.broker.text)[0]

        async def run() -> None:
            async with browsed(link) as page:
                page.set_default_timeout(LONG_MS)
                await page.locator("#machines li").nth(1).wait_for()
                await tour(pool, page)

        asyncio.run(run())
        pool.broker.interrupt()
        assert pool.broker.ended() == 0, pool.broker.text
        return pool.broker.text


def test_the_whole_tour(tmp_path: Path):
    write_text(tmp_path / "text.txt", lines=300)

    async def tour(pool: LivePool, page: Any) -> None:
        await page.click("#make-invitation")
        command = await page.locator("#made-command", has_text="fusion join").inner_text()
        pool.start("three", command.removeprefix("fusion join "))
        await page.locator("#machines .name", has_text="three").wait_for()
        await page.fill("#name", "poems")
        await page.fill("#files", str(tmp_path / "*.txt"))
        for field, value in (("steps", 400), ("sequence", 32), ("batch", 4), ("microbatches", 2)):
            await page.fill(f"#{field}", str(value))
        await page.click("#plan")
        assert "can train it" in await page.locator("#verdict li").first.inner_text()
        await page.click("#start")
        working = page.locator("#machines li", has=page.locator(".badge[data-state=active]"))
        job = page.locator("#jobs li", has=page.locator(".badge[data-state=running]"))
        await job.locator(".stages li").first.wait_for()
        await page.wait_for_function("() => (document.querySelector('#jobs progress')?.value ?? 0) > 20")
        runs = await working.filter(has_text="runs ").locator(".name").all_inner_texts()
        victim = next(name for name in runs if name != "this machine")
        pool.kill(victim)
        await page.locator("#events .bad", has_text=f"{victim} is lost").wait_for()
        await page.wait_for_function("() => (document.querySelector('#jobs progress')?.value ?? 0) > 60")
        await page.locator("#jobs").get_by_role("button", name=re.compile("Stop")).first.click()
        await page.locator("#ask-yes").click()
        await page.locator("#programs li", has_text="[ended with exit code 0]").wait_for()
        await page.get_by_role("button", name="Serve poems").click()
        chat = page.get_by_role("link", name="Open chat")
        await chat.wait_for()
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.get(f"{await chat.get_attribute('href')}v1/models")
        assert answer.json()["data"][0]["id"] == "poems"
        await page.get_by_role("button", name="End poems").click()
        await page.locator("#ask-yes").click()
        await page.locator("#programs .badge[data-state=running]").wait_for(state="detached")
        await page.get_by_role("button", name="Start poems again").click()
        await page.wait_for_function("() => (document.querySelector('#jobs progress')?.value ?? 0) > 65")
        left = next(name for name in ("one", "two", "three") if name != victim)
        await page.get_by_role("button", name=f"Evict {left}").click()
        await page.locator("#ask-yes").click()
        await page.locator("#done", has_text="Evicted: ").wait_for()
        await page.locator("#machines .name", has_text=left).wait_for(state="detached")

    touring(tmp_path, tour)
    logs = sorted((tmp_path / "broker" / "page" / "logs").glob("*.log"))
    assert [log.read_text().splitlines()[-1].partition("[ended")[1] for log in logs] == ["[ended"] * 3
