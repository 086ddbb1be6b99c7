"""Jobs whose server was killed: ended for the pool at the next start, those of servers that live are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from fusionai.client.pool.reporting import ServedNote, end_leftovers, leftovers
from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.ids import JobId
from fusionai.wire import messages as wire

KILLED, LIVING = JobId("tiny-00000001"), JobId("tiny-00000002")


class Broker:
    """Notes what it is told; `problem` is its answer where there is one."""

    def __init__(self, problem: FusionError | None = None) -> None:
        self.reported: list[tuple[str, str]] = []
        self.problem = problem

    async def report(self, report: wire.JobReport) -> None:
        self.reported.append((report.job, report.state))
        if self.problem is not None:
            raise self.problem


def end(broker: Broker, home: Path) -> tuple[JobId, ...]:
    return asyncio.run(end_leftovers(cast("PoolSession", broker), home))


def test_a_job_whose_server_is_gone_is_ended_once(tmp_path: Path):
    ServedNote(tmp_path, KILLED).close(reported=False)  # what a killed process leaves: the file without its lock
    living = ServedNote(tmp_path, LIVING)
    broker = Broker()
    assert end(broker, tmp_path) == (KILLED,)
    assert broker.reported == [(KILLED, "failed")]
    assert end(broker, tmp_path) == ()
    living.close(reported=True)
    assert end(broker, tmp_path) == ()
    assert broker.reported == [(KILLED, "failed")]


@pytest.mark.parametrize(
    ("problem", "over"),
    [
        pytest.param(TransportError("away"), False, id="away"),
        pytest.param(RefusedError("no such job", code="unknown_job"), True, id="over"),
    ],
)
def test_a_broker_that_is_away_is_told_at_the_next_start(problem: FusionError, over: bool, tmp_path: Path):
    ServedNote(tmp_path, KILLED).close(reported=False)
    assert end(Broker(problem), tmp_path) == ((KILLED,) if over else ())
    assert leftovers(tmp_path) == (() if over else (KILLED,))


def test_without_a_job_ever_there_is_nothing(tmp_path: Path):
    assert leftovers(tmp_path) == ()
