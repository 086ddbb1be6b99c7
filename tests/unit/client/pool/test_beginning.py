"""With which deployment a driver starts: the one it had, renewed or from the disk, or a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fusionai.client.pool import beginning
from fusionai.client.pool.beginning import begin
from fusionai.client.pool.replanning import MachineHistory, TrainingReplanner, keep_deployment
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import FusionError, PlanError, RefusedError, TransportError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from fusionai.wire.messages import CommitRecord, Fence
from harness.told_pool import JOB, OWNER, FakeClock, FakePool, member, problem, profile, working

HAD = msgspec.structs.replace(planned(problem(profile("a"), profile("b"))), version=7)
Begin = Callable[..., tuple[Deployment, FakePool]]


def record() -> CommitRecord:
    return CommitRecord(
        step=0,
        scale=1.0,
        learning_rate=1.0,
        total_norm=1.0,
        norms_hash="",
        fence=Fence(7, 1, 0),
        loss=1.0,
    )


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.setattr(
        beginning, "problem_for", lambda prepared, members, owner, note: problem(*(one.profile for one in members))
    )
    with CommitJournal(tmp_path / "journal.sqlite") as journal:
        directory = RunDirectory(tmp_path)

        def run(
            *looks: Any,
            had: Plan | None = HAD,
            kept: Deployment | None = None,
            committed: bool = False,
            policy: str = "exact",
            grants: list[FusionError | None] | None = None,
            away: bool = False,
        ) -> tuple[Deployment, FakePool]:
            if had is not None:
                journal.adopt_plan(had.version, msgspec.json.encode(had))
            if kept is not None:
                keep_deployment(directory, kept)
            if committed:
                journal.append(record())
            pool = FakePool(list(looks), grants=grants or [None], version=7)
            replanner = TrainingReplanner(
                pool=pool,
                job=JOB,
                title="job",
                steps=10,
                problem=problem(profile("a"), profile("b")),
                policy=policy,  # pyright: ignore[reportArgumentType]
                excluded=lambda members: frozenset(),
                journal=journal,
                directory=directory,
                machines=MachineHistory(FakeClock()),
            )
            prepared = SimpleNamespace(
                graph_hash="g", recipe=SimpleNamespace(placement=SimpleNamespace(stages=2, required=(), excluded=()))
            )
            members = None if away else looks[0]
            starting = begin(
                replanner,
                prepared,  # pyright: ignore[reportArgumentType]
                OWNER,
                members,
                pool_name="pool",
                driving=asyncio.Event(),
                note=lambda text: None,
            )
            return asyncio.run(starting), pool

        yield run


GONE = TransportError("gone.")
ALL = (working("a"), working("b"))


def test_the_plan_it_had_with_new_tickets(start: Begin):
    found, pool = start(ALL)
    assert found.plan == HAD
    assert pool.asked == [HAD]


def test_without_a_broker_the_deployment_on_the_disk(start: Begin):
    kept = Deployment(plan=HAD, members={"a": ("tcp://a:1",)}, tickets={"owner": b"t"})
    found, _ = start(GONE, kept=kept, grants=[GONE], away=True)
    assert found == kept


def test_without_a_broker_a_deployment_of_an_older_plan_is_none(start: Begin):
    kept = Deployment(plan=msgspec.structs.replace(HAD, version=6))
    with pytest.raises(TransportError):
        start(GONE, kept=kept, grants=[GONE], away=True)


def test_without_a_broker_a_new_job_can_not_begin(start: Begin):
    with pytest.raises(TransportError, match="can't be reached"):
        start(GONE, had=None, away=True)


def test_a_job_that_has_ended_for_the_pool_is_planned_anew(start: Begin):
    found, _ = start((member("a"), member("c")), grants=[RefusedError("no.", code="unknown_job"), None])
    assert found.plan.version == 8
    assert {stage.peer for stage in found.plan.stages} == {"a", "c", "owner"}


def test_a_plan_that_is_not_in_force_any_more_keeps_its_places(start: Begin):
    found, _ = start(ALL, grants=[RefusedError("no.", code="stale_fence"), None])
    assert found.plan.version == 8
    assert found.plan.stages == HAD.stages


def test_steps_made_exactly_go_on_only_among_equal_machines(start: Begin):
    grants: list[FusionError | None] = [RefusedError("no.", code="unknown_job"), None]
    others = (member("c", fingerprint="x"), member("d", fingerprint="x"))
    with pytest.raises(PlanError, match="computes the same bits"):
        start(others, committed=True, grants=list(grants))


def test_a_tolerant_job_goes_on_anywhere(start: Begin):
    grants: list[FusionError | None] = [RefusedError("no.", code="unknown_job"), None]
    others = (member("c", fingerprint="x"), member("d", fingerprint="x"))
    found, _ = start(others, committed=True, policy="tolerant", grants=grants)
    assert {stage.peer for stage in found.plan.stages} == {"c", "d", "owner"}


def test_with_nobody_there_it_says_who_is_in_the_pool(start: Begin):
    with pytest.raises(PlanError, match="w works on another"):
        start((member("w", state="active", job="another"),), had=None)


def test_who_still_clears_what_another_job_left_is_waited_for(start: Begin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "PLAN_PAUSE_S", 0.0)
    late = member("c", clears="another")
    found, _ = start((member("a"), late), (member("a"), late), (member("a"), member("c")), had=None)
    assert {stage.peer for stage in found.plan.stages} == {"a", "c", "owner"}


def test_members_without_a_connection_are_waited_for(start: Begin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "PLAN_PAUSE_S", 0.0)
    silent = member("c", state="silent")
    found, _ = start((member("a"), silent), (member("a"), silent), (member("a"), member("c")), had=None)
    assert {stage.peer for stage in found.plan.stages} == {"a", "c", "owner"}


def test_but_not_for_ever_where_others_will_do(start: Begin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "PLAN_PAUSE_S", 0.0)
    found, pool = start((member("a"), member("b"), member("c", clears="another")), had=None)
    assert {stage.peer for stage in found.plan.stages} == {"a", "b", "owner"}
    assert len(pool.asked) == 1


def test_a_pool_that_only_clears_ends_the_patience(start: Begin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "PLAN_PAUSE_S", 0.0)
    with pytest.raises(PlanError, match="no peer is free"):
        start((member("c", clears="another"),), had=None)


def test_what_is_left_of_the_job_itself_is_in_nobodys_way(start: Begin):
    found, _ = start((member("a"), member("c", clears=JOB)), had=None)
    assert {stage.peer for stage in found.plan.stages} == {"a", "c", "owner"}
