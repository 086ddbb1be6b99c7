"""When a further pipeline is opened, on which machines, and when one is dissolved."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fusionai.client.pool.job_process import Noted
from fusionai.client.pool.replanning import MachineHistory
from fusionai.client.pool.session import PoolMember
from fusionai.client.serving.job import Goal
from fusionai.client.serving.pipelines import (
    DISSOLVE_S,
    FREE_S,
    RETRY_S,
    TRY_OUT_S,
    OpenPipeline,
    PipelineEvent,
    Pipelines,
)
from fusionai.client.serving.watch import ServingReplanner
from fusionai.coordination.serving.routing import Pace, TextToRoute
from fusionai.execution.connections import Deployment
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.serving.interface import EngineStatus
from fusionai.serving.pipelines import PipelinedEngine
from harness.told_pool import JOB, FakeClock, FakePool, member, profile, served, working

PACE = Pace(token_s=(0.01,), prompt_token_s=0.001, sessions=4)


@dataclass
class FakeEngine:
    deployment: Deployment
    state: str = "ready"
    adapters: dict[str, int] = field(default_factory=dict[str, int])
    purpose: str = "generate"
    vocabulary: int = 9
    context_tokens: int = 100
    stop_tokens: frozenset[int] = frozenset()
    closed: list[str] = field(default_factory=list[str])

    @property
    def plan(self) -> Plan:
        return self.deployment.plan

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state=self.state)  # type: ignore[arg-type]


class Bench:
    """`one` runs the first pipeline."""

    def __init__(self, goal: Goal = "balanced", problem_: Problem | None = None) -> None:
        self.clock = FakeClock()
        self.events: list[PipelineEvent] = []
        self.known = {name: profile(name) for name in ("one", "two", "three")}
        self.problem = problem_ or served()
        process: Any = SimpleNamespace(
            pool=FakePool([()]), clock=self.clock, note=lambda _: None, known=SimpleNamespace(profiles=self.known)
        )
        loaded: Any = SimpleNamespace(model=SimpleNamespace(files=SimpleNamespace(name="tiny")))
        request: Any = SimpleNamespace(goal=goal, local=None)
        self.pipelines = Pipelines(
            request=request,
            process=process,
            loaded=loaded,
            home=None,  # type: ignore[arg-type]
            priced=lambda profiles: profiles,
            on_event=self.events.append,
            stack=AsyncExitStack(),
        )
        self.first = self.add(1, "one")

    def add(self, number: int, machine: str) -> FakeEngine:
        made = planned(msgspec.structs.replace(self.problem, peers=(profile(machine),)))
        engine = FakeEngine(Deployment(plan=msgspec.structs.replace(made, version=1)))
        replanner = ServingReplanner(
            pool=self.pipelines.process.pool,
            job=JOB,
            title="serve",
            steps=0,
            problem=self.problem,
            policy="tolerant",
            excluded=lambda _: frozenset(),
            machines=MachineHistory(self.clock),
        )
        stack = AsyncExitStack()
        stack.callback(engine.closed.append, "closed")
        given: Any = engine
        self.pipelines._open[number] = OpenPipeline(
            number=number,
            replanner=replanner,
            engine=given,
            job=SimpleNamespace(),  # type: ignore[arg-type]
            running=asyncio.get_running_loop().create_future(),
            stack=stack,
            version=1,
        )
        if number == 1:
            self.pipelines.engine = PipelinedEngine(given, PACE, self.clock)
        else:
            self.pipelines.engine.add(number, given, PACE)
        self.pipelines._last_number = number
        return engine

    async def further(self, *members: PoolMember) -> Plan | None:
        found = await self.pipelines._further(members)
        return None if found is None else found[1]

    async def looks(self, seconds: float, *members: PoolMember) -> None:
        """Look after the pipelines every second."""
        for _ in range(int(seconds)):
            self.clock.seconds += 1.0
            await self.pipelines._look_after(members)

    def peers(self, plan: Plan) -> set[str]:
        return {stage.peer for stage in plan.stages} - {"owner"}


def test_machines_that_have_been_free_for_a_while_make_a_pipeline():
    async def story() -> None:
        bench = Bench()
        there = (working("one"), member("two"))
        assert await bench.further(*there) is None  # it has just become free
        bench.clock.seconds += FREE_S - 1
        assert await bench.further(*there) is None
        bench.clock.seconds += 1
        plan = await bench.further(*there)
        assert plan is not None
        assert bench.peers(plan) == {"two"}
        # A machine that works in between begins to wait anew.
        assert await bench.further(working("one"), working("two")) is None
        assert await bench.further(*there) is None

    asyncio.run(story())


def test_the_goal_says_whether_machines_stand_by():
    async def story(goal: Goal) -> Plan:
        bench = Bench(goal)
        bench.pipelines._free_since_s = {"two": 0.0, "three": 0.0}
        plan = await bench.further(working("one"), member("two"), member("three"))
        assert plan is not None
        return plan

    balanced = asyncio.run(story("balanced"))
    machines = {stage.peer for stage in balanced.stages} | {standby.peer for standby in balanced.standbys}
    assert machines == {"owner", "two", "three"}
    assert len(balanced.standbys) == 1
    assert not asyncio.run(story("throughput")).standbys


def test_a_pipeline_that_does_not_pay_is_not_opened_and_not_planned_again():
    async def story() -> None:
        bench = Bench()
        slow = msgspec.structs.replace(profile("two"), flops_per_s=1e8)
        seen = member("two")
        seen = PoolMember(msgspec.structs.replace(seen.view, profile=msgspec.Raw(msgspec.msgpack.encode(slow))), slow)
        bench.pipelines._free_since_s = {"two": 0.0}
        assert await bench.further(working("one"), seen) is None
        tried = bench.pipelines._tried
        assert tried is not None
        assert await bench.further(working("one"), seen) is None
        assert bench.pipelines._tried is tried
        # Where only throughput counts, it pays.
        bench = Bench("throughput")
        bench.pipelines._free_since_s = {"two": 0.0}
        assert await bench.further(working("one"), seen) is not None

    asyncio.run(story())


def test_the_owners_memory_counts_once_for_each_pipeline():
    async def story(pipelines: int) -> int:
        bench = Bench(problem_=served(weights_bytes=200_000_000))
        for number in range(2, pipelines + 1):
            bench.add(number, "two")
        asked = bench.pipelines._problem_of(bench.problem, ())
        assert asked.owner is not None
        return asked.owner.memory_bytes

    one, two = asyncio.run(story(1)), asyncio.run(story(2))
    assert 2**30 - one >= 2 * 200_000_000  # embedding and head
    assert one - two == 2**30 - one


def test_a_pipeline_that_waits_is_dissolved_while_another_computes():
    async def story() -> None:
        bench = Bench()
        second = bench.add(2, "two")
        second.state = "waiting"
        await bench.looks(DISSOLVE_S)
        assert set(bench.pipelines._open) == {1, 2}
        await bench.looks(1)
        assert set(bench.pipelines._open) == {1}
        assert second.closed == ["closed"]
        assert set(bench.pipelines.engine.open) == {1}
        (note,) = bench.events
        assert isinstance(note, Noted)
        assert note.text == "pipeline 2 is dissolved: it waits for a machine, and its texts go on in other pipelines"
        # The last one is kept, whatever happens to it, and so is one that computes again in time.
        bench.first.state = "waiting"
        await bench.looks(3 * DISSOLVE_S)
        assert set(bench.pipelines._open) == {1}

    asyncio.run(story())


def test_a_pipeline_that_computes_again_in_time_stays():
    async def story() -> None:
        bench = Bench()
        second = bench.add(2, "two")
        for _ in range(3):
            second.state = "waiting"
            await bench.looks(DISSOLVE_S - 1)
            second.state = "ready"
            await bench.looks(1)
        assert set(bench.pipelines._open) == {1, 2}

    asyncio.run(story())


def test_a_machine_that_leaves_without_a_successor_dissolves_its_pipeline():
    async def story() -> None:
        bench = Bench()
        bench.add(2, "two")
        there = (working("one"), member("two", state="draining", job=JOB))
        await bench.looks(DISSOLVE_S, *there)
        assert set(bench.pipelines._open) == {1, 2}
        await bench.looks(1, *there)
        assert set(bench.pipelines._open) == {1}
        (note,) = bench.events
        assert isinstance(note, Noted)
        assert "two leaves" in note.text

    asyncio.run(story())


def test_a_changed_plan_is_priced_anew():
    async def story() -> None:
        bench = Bench()
        await bench.looks(1)
        assert bench.pipelines.engine.routing.token_s(1) == (PACE.token_s[0], 0)
        plan = msgspec.structs.replace(bench.first.plan, version=2)
        bench.first.deployment = Deployment(plan=plan)
        await bench.looks(1)
        assert bench.pipelines.engine.routing.token_s(1) != (PACE.token_s[0], 0)

    asyncio.run(story())


def test_pipelines_are_tried_one_after_the_other_and_again_if_they_are_idle_while_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
):
    async def story() -> None:
        bench, tried = Bench(), list[int]()
        bench.clock.seconds = 5.0

        async def try_out(number: int) -> bool:
            tried.append(number)
            return number != 2

        monkeypatch.setattr(bench.pipelines.engine, "try_out", try_out)
        await bench.pipelines._try_out()
        assert tried == []  # there is no choice
        bench.add(2, "two")
        for _ in range(4):
            await bench.pipelines._try_out()
        assert tried == [1, 2]
        # All are idle, so nothing depends on it.
        bench.clock.seconds += TRY_OUT_S + RETRY_S
        await bench.pipelines._try_out()
        assert tried == [1, 2]
        bench.pipelines.engine.routing.began(1, TextToRoute(tokens=(1,), cache=(), most_tokens=1))
        await bench.pipelines._try_out()
        await bench.pipelines._try_out()
        assert tried == [1, 2, 2]
        # A changed plan has yet to be measured.
        bench.pipelines.engine.routing.ended(1)
        bench.pipelines._open[1].version = 0
        await bench.looks(1)
        await bench.pipelines._try_out()
        assert tried == [1, 2, 2, 1]

    asyncio.run(story())


def test_an_engine_that_ends_is_dissolved_and_the_last_one_ends_the_model():
    async def story() -> None:
        bench = Bench()
        second = bench.add(2, "two")
        pipelines = bench.pipelines
        lost = pipelines._open[2]
        lost.running.set_exception(RuntimeError("it broke"))
        pipelines._over(lost)
        await asyncio.gather(*pipelines._dissolving)
        assert second.closed == ["closed"]
        assert not pipelines.engine.ended.done()
        last = pipelines._open[1]
        last.running.set_exception(RuntimeError("it broke too"))
        pipelines._over(last)
        assert str(pipelines.engine.ended.exception()) == "it broke too"

    asyncio.run(story())
