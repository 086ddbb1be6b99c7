"""Work beside the event loop: its result, its errors, and that nobody waits for it once it is not wanted."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fusionai.primitives.errors import DataError, UsageError
from fusionai.primitives.process import in_background


def test_the_result_and_the_error_come_back():
    def failing() -> int:
        raise DataError("nothing there.")

    assert asyncio.run(in_background(lambda: 7)) == 7
    with pytest.raises(DataError, match="nothing there"):
        asyncio.run(in_background(failing))


def test_leaving_the_program_from_there_is_an_error_with_a_sentence():
    def leaving() -> None:
        raise SystemExit(5)

    with pytest.raises(UsageError, match=r"sys\.exit\(5\)"):
        asyncio.run(in_background(leaving))


def test_the_program_ends_while_the_work_goes_on():
    go_on, seen = threading.Event(), threading.Event()

    def endless() -> None:
        seen.set()
        go_on.wait()

    async def dropped() -> None:
        work = asyncio.create_task(in_background(endless))
        await asyncio.to_thread(seen.wait)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(dropped())  # returns although `endless` has not
    go_on.set()
