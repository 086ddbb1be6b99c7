"""A job that had to give way starts again, if it may wait and was not stopped meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionai.client.pool.job_process import GAVE_WAY, STOPPED_BY_MEMBER, Noted
from fusionai.client.training import train as training
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.train import RunEvent, TrainOptions, train
from fusionai.primitives.ids import JobId

RESULT = TrainingResult(job=JobId("job-1"), steps=7, stopped=None, checkpoint=None, directory=Path("run"))


@pytest.mark.parametrize(
    ("ends", "waits", "stops", "starts"),
    [
        ([GAVE_WAY, GAVE_WAY, None], True, False, 3),
        ([GAVE_WAY, STOPPED_BY_MEMBER], True, False, 2),
        ([GAVE_WAY], False, False, 1),
        ([GAVE_WAY], True, True, 1),
        ([STOPPED_BY_MEMBER], True, False, 1),
    ],
)
def test_it_starts_again(
    ends: list[str | None], waits: bool, stops: bool, starts: int, monkeypatch: pytest.MonkeyPatch
):
    stop, left, said = asyncio.Event(), list(ends), list[RunEvent]()

    async def started(*_: Any) -> TrainingResult:
        if stops:
            stop.set()
        return replace(RESULT, stopped=left.pop(0))

    monkeypatch.setattr(training, "_started", started)
    options = TrainOptions(home=Path("home"), wait=waits)
    result = asyncio.run(train(None, options, on_event=said.append, stop=stop))  # pyright: ignore[reportArgumentType]
    assert result.stopped == ends[-1]
    assert not left
    assert len(said) == starts - 1
    assert all(isinstance(one, Noted) and "stopped after 7 steps" in one.text for one in said)
