"""Commands that run until they are asked to stop. Decides what the first and the second Ctrl-C mean.

The first Ctrl-C (or SIGTERM) sets an event and the command ends cleanly; the second cancels it, which still ends what
it started; the third breaks into whatever does not come back to the event loop. Only the third raises from the signal
handler: an exception there may strike inside a library's fork hook, which can't pass it on and prints it instead.
A command with a lifeline is asked likewise, once when that is cut and again when it has not ended some seconds later.
Neighbours: `cli.broker`, `cli.join` and `cli.train` run their services through this.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import Final, TypeVar

from fusionai.cli import console
from fusionai.cli.lifeline import when_cut
from fusionai.transport.event_loop import run

_Result = TypeVar("_Result")
ORPHAN_S: Final = 10.0
"""Nobody is left to wait for what ends in order."""


def run_until_stopped(service: Callable[[asyncio.Event], Awaitable[_Result]], *, lifeline: bool = False) -> _Result:
    """Run `service(stop)` in an event loop of its own; `stop` is set by the first Ctrl-C, and, with a `lifeline`, when
    standard input ends."""

    times = 0  # not `stop`, which is set only when the loop comes round

    async def with_signals() -> _Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(service(stop))

        def asked(_number: int, _frame: FrameType | None) -> None:
            nonlocal times
            times += 1
            if times == 1:
                loop.call_soon_threadsafe(stop.set)
                console.note("Stopping; press Ctrl-C again to give up waiting.")
            elif times == 2:
                loop.call_soon_threadsafe(_cancel_everything, loop)
            else:
                raise KeyboardInterrupt

        def orphaned() -> None:
            """In the event loop."""
            nonlocal times
            times = max(times, 1)
            stop.set()
            loop.call_later(ORPHAN_S, give_up)

        def give_up() -> None:
            nonlocal times
            times = max(times, 2)
            _cancel_everything(loop)

        if lifeline:
            when_cut(lambda: _call_if_open(loop, orphaned))
        # `signal.signal` rather than the loop's own handlers: those don't exist on Windows.
        former = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return await serving
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    try:
        result = run(with_signals())
    except asyncio.CancelledError:
        if times < 2:
            raise
        raise KeyboardInterrupt from None
    if times >= 2:
        # A service that was ending already may swallow the cancellation; the user gave up all the same.
        raise KeyboardInterrupt
    return result


def _call_if_open(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the command has ended by itself
        loop.call_soon_threadsafe(work)


def _cancel_everything(loop: asyncio.AbstractEventLoop) -> None:
    """As the end of an event loop does: whoever waits for another task must not wait for it any more."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
