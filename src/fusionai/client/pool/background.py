"""Runs long blocking work in a daemon thread beside the event loop.

Unlike with `asyncio.to_thread`, the program can end at once after a cancelled call. Only for work that may be cut off
at any point, as in a killed process. `client.training.train` and `client.serving.serve` prepare and plan with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from fusionai.primitives.errors import UsageError

T = TypeVar("T")
THREAD_NAME: Final = "background"
"""Name of these threads. At its end the program looks for threads of this name that still compute."""


async def in_background(work: Callable[[], T]) -> T:
    """Run `work` in a new thread and return its result. If the call is cancelled, the thread runs on."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except SystemExit as leaving:
            # The job owner's own code runs here, and its `sys.exit` must be reported.
            future.set_exception(UsageError(f"the model's code called sys.exit({leaving.code!r})."))
        except Exception as problem:  # noqa: BLE001 - passed to the awaiting caller
            future.set_exception(problem)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)
