"""A page in chromium without a window, and a check of its accessibility. Tests that use it are skipped without a
browser."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

playwright = pytest.importorskip("playwright.async_api")
axe = pytest.importorskip("axe_playwright_python.async_playwright")
BROWSER: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: install it (apt-get install chromium)")
PHONE: Final = {"width": 390, "height": 800}
DESK: Final = {"width": 1280, "height": 820}


@asynccontextmanager
async def browsed(url: str, **options: Any) -> AsyncIterator[Any]:
    """The page at `url`. Errors of its scripts fail the test."""
    problems: list[str] = []
    async with playwright.async_playwright() as tool:
        # No sandbox: where tests run as root there is none.
        browser = await tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        context = await browser.new_context(**{"viewport": DESK, **options})
        page = await context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        await page.goto(url)
        yield page
        await browser.close()
    assert not problems


async def serious(page: Any) -> list[str]:
    """What a checker of accessibility finds that is serious or worse."""
    found = await axe.Axe().run(page)
    return [
        f"{each['id']}: {each['nodes'][0]['target']}"
        for each in found.response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
