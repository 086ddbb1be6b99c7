"""Long blocking work beside the event loop, which nobody waits for once it is not wanted any more.

Unlike `asyncio.to_thread`, a cancelled call lets the program end at once: the thread is a daemon. Only for work that
may be cut off at any point, as a killed process would be. Neighbours: `client.train` prepares and plans with it.
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
"""Name of these threads, for a program that ends while one computes on."""


async def in_background(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except SystemExit as leaving:
            # The job owner's own code runs here: its `sys.exit` must not end anything unsaid.
            future.set_exception(UsageError(f"the model's code left the program (sys.exit({leaving.code!r}))."))
        except Exception as problem:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(problem)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)
