"""Runs commands that last until they are asked to stop, and handles Ctrl-C for them.

Also starts the event loop (on uvloop where it is installed) and notices the end of the process that started the command
(`lifeline_option`).

The first Ctrl-C (or SIGTERM) sets an event and the command ends cleanly. The second cancels all tasks, which still
clean up. The third raises `KeyboardInterrupt` in code that does not return to the event loop. Only the third raises
from the signal handler: an exception there may occur inside a library's fork hook, which prints it instead of passing
it on. For a command with a lifeline, the end of standard input counts as the first Ctrl-C; if the command has not ended
`ORPHAN_S` seconds later, its tasks are cancelled. `cli.pool.broker`, `cli.pool.join`, `cli.training.train` and others
use this."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, Final, TypeVar

import click

from fusionai.cli import console

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, with `loop_factory`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the constructor of a uvloop, or None for asyncio's own loop where uvloop is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


_Function = TypeVar("_Function", bound=Callable[..., Any])
_READ_BYTES: Final = 4096


def lifeline_option(function: _Function) -> _Function:
    """Give a command the hidden parameter `lifeline: bool`, for programs that start the command."""
    return click.option("--lifeline", is_flag=True, hidden=True, help="End when standard input ends.")(function)


def when_cut(on_end: Callable[[], None]) -> None:
    """Call `on_end` in a new thread once standard input has ended. Input is discarded."""

    def watch() -> None:
        # `os.read` instead of `sys.stdin`: a thread blocked in Python's buffer would block the process's exit.
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), _READ_BYTES):
                pass
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


ORPHAN_S: Final = 10.0
"""Time for a clean end after the lifeline is cut, in seconds (chosen). Then the tasks are cancelled."""


def run_until_stopped(service: Callable[[asyncio.Event], Awaitable[T]], *, lifeline: bool = False) -> T:
    """Run `service(stop)` in a new event loop and return its result. `stop` is set by the first Ctrl-C and, with
    `lifeline`, when standard input ends. Raises `KeyboardInterrupt` after a second Ctrl-C."""

    times = 0  # counted here, because `stop` is set only when the event loop next runs

    async def with_signals() -> T:
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
            """Runs in the event loop."""
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
        # A service that was already ending may swallow the cancellation; the command was still interrupted.
        raise KeyboardInterrupt
    return result


def _call_if_open(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: the command has ended
        loop.call_soon_threadsafe(work)


def _cancel_everything(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks, as `asyncio.run` does at its end: a task must not keep waiting for another one."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
