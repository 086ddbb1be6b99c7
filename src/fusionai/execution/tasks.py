"""Tasks that the driver of a job runs beside its event loop; a task that fails reports the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from fusionai.primitives.errors import FusionError, TransportError

log = logging.getLogger(__name__)


class JobTasks:
    """Tasks of one job that end together. `failed` gets the reason why a task failed, because the job must end with a
    reason instead of waiting for that task."""

    def __init__(self, job: str, failed: Callable[[str], None]) -> None:
        self._job = job
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        async def reported() -> None:
            try:
                await work
            except TransportError as error:  # the connection's owner reports the loss as an event
                log.info("a connection of %s: %s", self._job, error)
            except FusionError as error:
                self._failed(str(error))
            except Exception as error:
                log.exception("a command of %s failed", self._job)
                self._failed(f"{type(error).__name__}: {error}")

        task = asyncio.create_task(reported())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # for a task that was cancelled before it began
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
