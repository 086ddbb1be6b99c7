"""Another plan for a serving job: who came back standbys again at once, where nobody else does."""

from __future__ import annotations

import asyncio

import msgspec

from fusionai.client.pool.replanning import MachineHistory
from fusionai.client.pool.session import PoolMember
from fusionai.client.serving.watch import ServingReplanner
from fusionai.execution.connections import Deployment
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan
from harness.patience import CEILING_S
from harness.told_pool import JOB, FakeClock, FakePool, member, problem, profile, working


class Bench:
    """Stages on `a` and `b`, both with a standby by `c`; `d` was lost as a standby ten seconds ago."""

    def __init__(self, *there: PoolMember) -> None:
        base = problem(profile("a"), profile("b"), profile("c"))
        present = msgspec.structs.replace(planned(msgspec.structs.replace(base, required=("a", "b"))), version=1)
        assert {standby.peer for standby in present.standbys} == {"c"}
        self.present = Deployment(plan=present)
        self.clock = FakeClock()
        self.replanner = ServingReplanner(
            pool=FakePool([there]),
            job=JOB,
            title="job",
            steps=0,
            problem=base,
            policy="exact",
            excluded=lambda _: frozenset(),
            machines=MachineHistory(self.clock),
        )
        self.replanner.machines.note_lost("d")
        self.clock.seconds += 10.0

    def replaced(self, *lost: str) -> Plan:
        async def body() -> Deployment:
            async with asyncio.timeout(CEILING_S):
                return await self.replanner.replacement(self.present, frozenset(lost), lambda _: None)

        self.present = asyncio.run(body())
        return self.present.plan


LIVING = (working("b"), working("c"))


def standbys(plan: Plan) -> set[tuple[int, str]]:
    return {(standby.stage, standby.peer) for standby in plan.standbys}


def test_who_came_back_standbys_what_nobody_else_does() -> None:
    plan = Bench(*LIVING, member("d")).replaced("a", "d")
    assert [stage.peer for stage in plan.stages][:2] == ["c", "b"]
    assert standbys(plan) == {(0, "d"), (1, "d")}


def test_who_is_there_without_having_been_lost_comes_first() -> None:
    plan = Bench(*LIVING, member("d"), member("e")).replaced("a", "d")
    assert standbys(plan) == {(0, "e"), (1, "e")}


def test_who_was_not_heard_since_standbys_nothing() -> None:
    assert standbys(Bench(*LIVING, member("d", last_heard_s=9.5)).replaced("a", "d")) == set()
    assert standbys(Bench(*LIVING).replaced("a", "d")) == set()


def test_who_standbys_again_and_is_lost_again_has_to_be_heard_again() -> None:
    bench = Bench(*LIVING, member("d"))
    assert standbys(bench.replaced("a", "d"))
    assert standbys(bench.replaced("d")) == set()
    bench.clock.seconds += 1.0
    assert standbys(bench.replaced("d")) == {(0, "d"), (1, "d")}
