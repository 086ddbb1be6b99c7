"""A job's place in the queue on its owner's side: asked for, shown, waited for, planned with, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from fusionai.client.pool import beginning
from fusionai.client.pool.beginning import LeftQueue, Waiting, first_deployment, least_machines, sentence
from fusionai.client.pool.replanning import MachineHistory, PoolReplanner
from fusionai.client.pool.session import PoolMember
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import FusionError, PlanError, RefusedError, TransportError
from fusionai.primitives.ids import JobId
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan
from fusionai.wire.messages import QueuePlace, QueueRequest
from harness.told_pool import JOB, FakeClock, FakePool, member, problem, profile, working

WAITS = QueuePlace(place=1, waiting=1, why="it needs at least 2 machines")
TURN = QueuePlace(place=1, waiting=1, members=("a", "b"), turn_s=60.0)
REFUSED = RefusedError("no.", code="busy")


@dataclass
class QueueingPool(FakePool):
    """`places`: what each question for the place is answered or raises, the last for ever."""

    places: list[QueuePlace | FusionError] = field(default_factory=lambda: [TURN])
    questions: list[QueueRequest] = field(default_factory=list[QueueRequest])
    stopped: list[str] = field(default_factory=list[str])

    async def place(self, question: QueueRequest) -> QueuePlace:
        self.questions.append(question)
        found = self.places.pop(0) if len(self.places) > 1 else self.places[0]
        if isinstance(found, FusionError):
            raise found
        return found

    async def stop(self, job: JobId) -> None:
        self.stopped.append(job)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "ASK_S", 0.0)
    monkeypatch.setattr(beginning, "PLAN_PAUSE_S", 0.0)


def begin(
    pool: QueueingPool,
    notes: list[str] | None = None,
    *,
    waiting: Waiting | None = None,
    plan_with: Callable[[tuple[PoolMember, ...]], Plan] | None = None,
    excluded: frozenset[str] = frozenset(),
) -> Deployment:
    replanner = PoolReplanner(
        pool=pool,  # pyright: ignore[reportArgumentType]
        job=JOB,
        title="job",
        steps=10,
        problem=problem(),
        policy="exact",
        excluded=lambda members: excluded,
        barred=lambda: (SimpleNamespace(peer="untrusted"),),  # pyright: ignore[reportArgumentType]
        machines=MachineHistory(FakeClock()),
    )

    async def plan(usable: tuple[PoolMember, ...]) -> Plan:
        if plan_with is not None:
            return plan_with(usable)
        return planned(problem(*(one.profile for one in usable)))

    async def started() -> Deployment:
        return await first_deployment(
            replanner,
            plan,
            pool_name="pool",
            note=(notes if notes is not None else []).append,
            waiting=waiting or Waiting("low", asyncio.Event()),
        )

    return asyncio.run(started())


def peers(found: Deployment) -> set[str]:
    return {stage.peer for stage in found.plan.stages} - {"owner"}


def test_a_job_plans_with_the_machines_of_its_turn_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    notes: list[str] = []
    pool = QueueingPool([(member("a"), member("b"), member("c"))], places=[WAITS, WAITS, TURN])
    assert peers(begin(pool, notes, excluded=frozenset({"c"}))) == {"a", "b"}
    assert notes == [sentence(WAITS), "queue: it is this job's turn"], "what has not changed is shown once"
    assert [one.again for one in pool.questions] == [False, True, True]
    first = pool.questions[0]
    assert (first.job, first.machines, first.memory_bytes, first.priority) == (JOB, 2, 4000, "low")
    assert first.excluded == ("c", "untrusted")
    assert pool.stopped == []


def test_a_job_that_has_machines_needs_no_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    pool = QueueingPool([(working("a"), working("b"))], places=[QueuePlace(place=0)])
    assert peers(begin(pool)) == {"a", "b"}


def test_where_no_plan_fits_the_job_asks_for_one_machine_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    three = msgspec.structs.replace(TURN, members=("a", "b", "c"))
    pool = QueueingPool([(member("a"), member("b"), member("c"))], places=[TURN, three])

    def plan_with(usable: tuple[PoolMember, ...]) -> Plan:
        if len(usable) < 3:
            raise PlanError("too small.")
        return planned(problem(profile("a"), profile("b")))

    notes: list[str] = []
    begin(pool, notes, plan_with=plan_with)
    assert [one.machines for one in pool.questions] == [2, 3]
    assert "queue: 2 machines don't suffice: too small." in notes


def test_a_job_for_which_the_whole_pool_does_not_suffice_gives_up():
    def plan_with(_usable: tuple[PoolMember, ...]) -> Plan:
        raise PlanError("too small.")

    pool = QueueingPool([(member("a"), member("b"))])
    with pytest.raises(PlanError, match="too small"):
        begin(pool, plan_with=plan_with)
    assert pool.stopped == [JOB]


def test_a_machine_that_is_gone_and_a_plan_that_is_refused_are_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    both = (member("a"), member("b"))
    pool = QueueingPool([both, (member("a"), member("b", rests_s=5.0)), both], grants=[REFUSED, None])
    assert peers(begin(pool)) == {"a", "b"}
    assert len(pool.questions) == 3
    with pytest.raises(RefusedError, match="never"):
        begin(QueueingPool([both], grants=[RefusedError("never.", code="quota")]))


def test_the_place_is_kept_while_the_broker_is_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    notes: list[str] = []
    pool = QueueingPool([(member("a"), member("b"))], places=[WAITS, TransportError("gone."), TURN])
    begin(pool, notes)
    assert "queue: the broker can't be reached (gone); it keeps the place" in notes


def test_a_job_that_is_taken_out_of_the_queue_ends():
    asked = asyncio.Event()
    asked.set()
    pool = QueueingPool([(member("a"),)], places=[WAITS])
    with pytest.raises(LeftQueue, match="fusion stop"):
        begin(pool, waiting=Waiting("", asked))
    pool = QueueingPool([(member("a"),)], places=[WAITS, RefusedError("out.", code="unknown_job")])
    with pytest.raises(LeftQueue):
        begin(pool)
    with pytest.raises(RefusedError, match="no such class"):
        begin(QueueingPool([(member("a"),)], places=[RefusedError("no such class.", code="bad_message")]))


def test_an_interrupt_while_the_broker_refuses_ends_the_wait():
    interrupted = asyncio.Event()
    interrupted.set()
    pool = QueueingPool([(member("a"), member("b"))], grants=[REFUSED])
    with pytest.raises(asyncio.CancelledError):
        begin(pool, waiting=Waiting("", asyncio.Event(), interrupted))
    assert pool.stopped == [JOB]


def test_without_waiting_a_full_pool_names_the_flag():
    nobody = beginning.nobody("pool", (member("b", kept_for="job-9"), member("c", state="active", job="job-8")))
    assert "b is kept for job-9; c works on job-8" in nobody.message
    assert "--wait" in (nobody.hint or "")


def test_the_least_that_a_job_needs_comes_from_its_problem():
    posed = problem()
    assert least_machines(posed) == (2, 4000)
    assert least_machines(msgspec.structs.replace(posed, replicas=2)) == (4, 8000)
    assert least_machines(msgspec.structs.replace(posed, replicas="auto", stages=None)) == (1, 4000)
    assert least_machines(msgspec.structs.replace(posed, offload_weights="auto")) == (2, 0)


def test_an_estimate_is_shown_where_there_is_one():
    assert sentence(WAITS) == "queue: place 1 of 1; it needs at least 2 machines; its turn comes: not known"
    assert sentence(msgspec.structs.replace(WAITS, expected_s=90.0)).endswith("its turn comes: in about 90 s")


def halves() -> tuple[PoolMember, ...]:
    """Two parts of one device, and another machine."""

    def half(name: str, machine: str = "") -> PoolMember:
        made = member(name)
        return PoolMember(made.view, msgspec.structs.replace(made.profile, parts=2, machine=machine))

    return half("a"), half("a2", "a"), member("b")


def test_a_job_takes_one_part_of_a_device_and_more_only_if_it_must(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beginning, "_with_barred", lambda made, replanner: made)
    planned_with: list[list[str]] = []

    def plan_of(least: int) -> Callable[[tuple[PoolMember, ...]], Plan]:
        def plan(usable: tuple[PoolMember, ...]) -> Plan:
            planned_with.append([one.view.peer for one in usable])
            if len(usable) < least:
                raise PlanError("it does not fit.")
            return planned(problem(*(one.profile for one in usable)))

        return plan

    turn = QueuePlace(place=1, waiting=1, members=("a", "a2", "b"), turn_s=60.0)
    for least, seen in ((2, [["a", "b"]]), (3, [["a", "b"], ["a", "a2", "b"]])):
        notes: list[str] = []
        planned_with.clear()
        begin(QueueingPool([halves()], places=[turn]), notes, plan_with=plan_of(least))
        assert planned_with == seen
        assert any("taking several parts of a device" in one for one in notes) == (least == 3)
