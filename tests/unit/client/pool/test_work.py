"""Reports of work: numbered over starts, repeated until they are answered, silent while nothing has changed."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from fusionai.client.pool.session import PoolSession
from fusionai.client.pool.work import CommittedWork, WorkReports
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.ids import JobId
from fusionai.wire.messages import WorkReport, WorkShare

SHARE = WorkShare("a" * 52, 3, 30, 300.0)


class Pool:
    """Answers as `problem` says."""

    def __init__(self, problem: FusionError | None = None) -> None:
        self.problem = problem
        self.reports: list[WorkReport] = []
        self.warnings: list[str] = []
        self.work = CommittedWork(3, 30, (SHARE,))

    async def report_work(self, report: WorkReport) -> None:
        self.reports.append(report)
        if self.problem is not None:
            raise self.problem

    def opened(self, incarnation: int = 1) -> WorkReports:
        session = cast(PoolSession, self)
        return WorkReports(session, JobId("job-1"), "run-1", incarnation, lambda: self.work, self.warnings.append)


async def closed(reports: WorkReports, times: int = 1) -> None:
    for _ in range(times):
        await reports.close()


def test_the_same_sums_are_reported_once():
    pool = Pool()
    reports = pool.opened()
    asyncio.run(closed(reports, 2))
    pool.work = CommittedWork(4, 40, (SHARE,))
    asyncio.run(closed(reports))
    assert [(one.steps, one.tokens, one.shares) for one in pool.reports] == [(3, 30, (SHARE,)), (4, 40, (SHARE,))]


def test_numbers_grow_over_starts_of_the_owner():
    pool = Pool(TransportError("no answer"))
    asyncio.run(closed(pool.opened(), 3))
    asyncio.run(closed(pool.opened(incarnation=2)))
    assert {one.run for one in pool.reports} == {"run-1"}
    numbers = [one.sequence for one in pool.reports]
    assert numbers == sorted(set(numbers))
    assert not pool.warnings


def test_a_refusal_is_said_once():
    pool = Pool(RefusedError("no.", code="bad_message", hint="It names a machine twice."))
    asyncio.run(closed(pool.opened(), 3))
    assert len(pool.reports) == 3
    assert pool.warnings == ["the pool's ledger does not count this job's work: It names a machine twice."]


def test_reports_are_sent_at_intervals(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    pool = Pool()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError
        pool.work = CommittedWork(len(pauses), 30, ())

    monkeypatch.setattr("fusionai.client.pool.work.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(pool.opened().run())
    assert pauses == [300.0] * 3
    assert [one.steps for one in pool.reports] == [1, 2]


def test_sums_that_return_to_the_last_answered_ones_are_reported_again():
    """In between, a report may have arrived whose answer was lost."""
    pool = Pool()
    reports, first = pool.opened(), pool.work
    asyncio.run(closed(reports))
    pool.work, pool.problem = CommittedWork(4, 40, (SHARE,)), TransportError("no answer")
    asyncio.run(closed(reports))
    pool.work, pool.problem = first, None
    asyncio.run(closed(reports, 2))
    assert [one.steps for one in pool.reports] == [3, 4, 3]
