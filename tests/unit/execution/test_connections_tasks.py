"""Tasks of a driver: a failure becomes a reason for the job to end; a lost connection does not."""

from __future__ import annotations

import asyncio

import pytest

from fusionai.execution.connections import JobTasks
from fusionai.primitives.errors import ExecutionError, TransportError


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (ExecutionError("no room."), ["no room."]),
        (KeyError("stage"), ["KeyError: 'stage'"]),
        (TransportError("the link broke."), []),
    ],
)
def test_a_failed_task_says_why_unless_a_connection_was_lost(error: Exception, reasons: list[str]) -> None:
    failed: list[str] = []

    async def fails() -> None:
        raise error

    async def run() -> None:
        tasks = JobTasks("job", failed.append)
        tasks.start(fails())
        await tasks.wait()

    asyncio.run(run())
    assert failed == reasons


def test_cancelled_tasks_say_nothing_and_need_not_have_begun() -> None:
    failed: list[str] = []

    async def run() -> None:
        tasks = JobTasks("job", failed.append)
        begun = tasks.start(asyncio.Event().wait())
        await asyncio.sleep(0)
        late = tasks.start(asyncio.Event().wait())
        tasks.cancel()
        await tasks.wait()
        assert begun.cancelled()
        assert late.cancelled()

    asyncio.run(run())
    assert failed == []
