"""Commands that run until they are asked to stop. Decides what the first and the second Ctrl-C mean.

The first Ctrl-C (or SIGTERM) sets an event and the command ends cleanly; the second gives up waiting.
Neighbours: `cli.broker`, `cli.join` and `cli.train` run their services through this.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TypeVar

from fusionai.cli import console
from fusionai.transport.event_loop import run

_Result = TypeVar("_Result")


def run_until_stopped(service: Callable[[asyncio.Event], Awaitable[_Result]]) -> _Result:
    """Run `service(stop)` in an event loop of its own; `stop` is set by the first Ctrl-C."""

    async def with_signals() -> _Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        before = False

        def asked(_number: int, _frame: FrameType | None) -> None:
            nonlocal before  # not `stop`, which is set only when the loop comes round
            if before:
                raise KeyboardInterrupt
            before = True
            loop.call_soon_threadsafe(stop.set)
            console.note("Stopping; press Ctrl-C again to give up waiting.")

        # `signal.signal` rather than the loop's own handlers: those don't exist on Windows.
        former = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return await service(stop)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    return run(with_signals())
