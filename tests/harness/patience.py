"""How long tests wait for what must come. Progress decides, not the clock: only what hangs meets these limits.

A machine that has other work starves a process for tens of seconds; a limit that is near what an idle machine takes
tells of the machine, not of the product. Limits that a test is *about* (what is given up, and when) are the test's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

CEILING_S: Final = 300.0
"""For an event in one process, or between processes that are there."""


async def until(seen: Callable[[], object]) -> None:
    """Wait for what other tasks bring about and no event tells."""
    async with asyncio.timeout(CEILING_S):
        while not seen():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
