"""What a served job makes of machines that are back: they get stages while no session runs, and nobody is disturbed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from fusionai.client.pool.replanning import MachineHistory
from fusionai.client.pool.session import PoolMember
from fusionai.client.serving.watch import ServingReplanner, ServingWatch
from fusionai.execution.connections import Deployment
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.scheduling.standby.continuation import REST_S, STEADY_S
from fusionai.serving.engine import ServingEngine
from fusionai.serving.interface import EngineStatus
from harness.told_pool import JOB, OWNER, FakeClock, FakePool, member, served, ticket, working

LOOK_S = 2.0


@dataclass
class FakeEngine:
    deployment: Deployment
    status: EngineStatus = field(default_factory=lambda: EngineStatus(state="ready"))
    is_waiting: bool = False
    warm_stages: frozenset[int] = frozenset()
    offers: list[tuple[Deployment, str]] = field(default_factory=list[tuple[Deployment, str]])

    @property
    def plan(self) -> Plan:
        return self.deployment.plan

    def offer(self, deployment: Deployment, reason: str) -> None:
        self.offers.append((deployment, reason))
        self.deployment = deployment

    def renew(self, deployment: Deployment) -> None:
        self.deployment = deployment


class Bench:
    """`slow` runs all, `quick` standbys it: it was lost, and is back."""

    def __init__(self) -> None:
        self.problem = served(profile("quick"), profile("slow"))
        made = planned(msgspec.structs.replace(self.problem, peers=(profile("slow"),)))
        self.clock = FakeClock()
        self.pool = FakePool([()])
        replanner = ServingReplanner(
            pool=self.pool,
            job=JOB,
            title="serve",
            steps=0,
            problem=self.problem,
            policy="tolerant",
            excluded=lambda _: frozenset(),
            machines=MachineHistory(self.clock),
        )
        deployment = Deployment(plan=msgspec.structs.replace(made, version=1), tickets={"owner": ticket(1e9)})
        self.engine = FakeEngine(deployment)
        self.watch = ServingWatch(
            *(replanner, cast(ServingEngine, self.engine), PeerId("owner"), self.clock),
            priced=lambda profiles: profiles,
            stands_by=True,
        )

    def looks(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.clock.seconds += LOOK_S
            holders = {stage.peer for stage in self.engine.plan.stages}
            self.pool.looks = [tuple(seen(name, works=name in holders) for name in ("quick", "slow"))]
            asyncio.run(self.watch._look())

    @property
    def moves(self) -> list[str]:
        return [reason for _, reason in self.engine.offers if reason.startswith("no session runs")]

    @property
    def holder(self) -> str:
        return next(stage.peer for stage in self.engine.plan.stages if "stage" in stage.roles)


def profile(name: str) -> PeerProfile:
    speed = 1.0 if name == "quick" else 0.3
    return msgspec.structs.replace(OWNER, peer=name, name=name, flops_per_s=1e9 * speed, roles=("stage",))


def seen(name: str, *, works: bool) -> PoolMember:
    return replace((working if works else member)(name), profile=profile(name))


def test_a_faster_machine_gets_the_stage_when_no_session_runs() -> None:
    one = Bench()
    one.looks(STEADY_S - LOOK_S)
    assert not one.moves
    assert one.holder == "slow"
    one.looks(3 * LOOK_S)
    assert one.moves == ["no session runs: stages move to faster machines"]
    assert one.holder == "quick"
    one.looks(3 * REST_S)
    assert len(one.moves) == 1


def test_while_sessions_run_or_come_and_go_nothing_moves() -> None:
    one = Bench()
    one.engine.status = EngineStatus(state="ready", running=1)
    one.looks(3 * STEADY_S)
    for tokens in range(60):
        one.engine.status = EngineStatus(state="ready", emitted_tokens=tokens)
        one.looks(LOOK_S)
    one.engine.status = EngineStatus(state="recovering")
    one.looks(3 * STEADY_S)
    assert not one.moves
    one.engine.status = EngineStatus(state="ready")
    one.looks(10.0)
    assert len(one.moves) == 1
