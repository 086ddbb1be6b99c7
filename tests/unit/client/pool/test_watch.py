"""What a running job makes of its pool: work handed over, standbys found, tickets renewed, one offer at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusionai.client.pool import watch as pool_watch
from fusionai.client.pool.replanning import FORGOTTEN_S, MachineHistory, TrainingReplanner
from fusionai.client.pool.session import PoolMember
from fusionai.client.pool.watch import PoolWatch
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import RefusedError, TransportError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.assignment import without_standbys
from fusionai.scheduling.standby.promotion import ENOUGH, SETTLING
from fusionai.scheduling.standby.straggling import Straggling
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.wire.messages import CommitRecord, Fence
from harness.told_pool import JOB, FakeClock, FakePool, member, problem, profile, ticket, working

ALL = (working("a"), working("b"))


@dataclass
class FakeDriver:
    deployment: Deployment
    is_waiting: bool = False
    warm_stages: frozenset[int] = frozenset()
    offers: list[tuple[Deployment, str]] = field(default_factory=list)
    renewals: list[Deployment] = field(default_factory=list)
    fallen: set[str] = field(default_factory=set[str])

    @property
    def plan(self) -> Plan:
        return without_standbys(self.deployment.plan, self.fallen)

    def offer(self, deployment: Deployment, reason: str) -> None:
        self.offers.append((deployment, reason))

    def adopt(self) -> None:
        self.deployment = self.offers[-1][0]
        self.fallen.clear()

    def renew(self, deployment: Deployment) -> None:
        self.renewals.append(deployment)


@dataclass
class Bench:
    watch: PoolWatch
    driver: FakeDriver
    pool: FakePool
    clock: FakeClock

    def look(self) -> None:
        asyncio.run(self.watch._look())

    def lose_guard(self, peer: str) -> None:
        self.driver.fallen.add(peer)
        self.watch.see(progress.FaultSeen("standby", peer, (), 0, "gone"))


Make = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Make]:
    with CommitJournal(tmp_path / "journal.sqlite") as journal:

        def make(*looks: Any, from_standby: bool = False, lasts_s: float = 600.0, policy: str = "exact") -> Bench:
            peers = [profile("a"), profile("b"), *([profile("c")] if from_standby else [])]
            base = problem(*peers)
            plan = msgspec.structs.replace(planned(msgspec.structs.replace(base, required=("a", "b"))), version=1)
            journal.adopt_plan(1, msgspec.json.encode(plan))
            clock, pool = FakeClock(), FakePool(list(looks))
            replanner = TrainingReplanner(
                pool=pool,
                job=JOB,
                title="job",
                steps=10,
                problem=base,
                policy=policy,  # pyright: ignore[reportArgumentType]
                excluded=lambda members: frozenset(),
                journal=journal,
                directory=RunDirectory(tmp_path),
                machines=MachineHistory(clock),
            )
            driver = FakeDriver(Deployment(plan=plan, tickets={"owner": ticket(clock.wall_s() + lasts_s)}))
            watch = PoolWatch(replanner, driver, PeerId("owner"), clock)
            return Bench(watch, driver, pool, clock)

        yield make


def places(plan: Plan) -> dict[int, str]:
    return {stage.stage: stage.peer for stage in plan.stages}


def test_a_pool_that_offers_nothing_is_left_alone(bench: Make):
    one = bench(ALL)
    one.look()
    assert not one.driver.offers
    assert not one.pool.asked


def test_a_machine_that_joins_standbys_what_nobody_standbys(bench: Make):
    one = bench((*ALL, member("d")))
    one.look()
    ((found, reason),) = one.driver.offers
    assert places(found.plan) == places(one.driver.plan)
    assert {standby.stage: standby.peer for standby in found.plan.standbys} == {0: "d", 1: "d"}
    assert reason == "a warm standby for stages 0, 1 is available"


def test_a_standby_that_is_left_takes_on_the_stage_of_one_that_was_lost(bench: Make):
    one = bench((*ALL, working("c")), from_standby=True)
    whole = one.driver.plan
    one.driver.deployment = Deployment(
        plan=msgspec.structs.replace(whole, standbys=whole.standbys[:1]), tickets=one.driver.deployment.tickets
    )
    one.look()
    ((found, reason),) = one.driver.offers
    assert {standby.stage: standby.peer for standby in found.plan.standbys} == {0: "c", 1: "c"}
    assert reason == "a warm standby for stage 1 is available"


def test_a_lost_standby_is_made_up_for_by_another_at_the_next_look(bench: Make):
    one = bench((*ALL, working("c"), member("d")), from_standby=True)
    assert {standby.peer for standby in one.driver.plan.standbys} == {"c"}
    one.look()
    assert not one.driver.offers, "all are with a standby"
    one.lose_guard("c")
    one.look()
    ((found, reason),) = one.driver.offers
    assert {standby.stage: standby.peer for standby in found.plan.standbys} == {0: "d", 1: "d"}
    assert reason == "a warm standby for stages 0, 1 is available"


@pytest.mark.parametrize("state", ["idle", "active"])
def test_a_lost_standby_that_is_heard_again_standbys_again(bench: Make, state: str):
    """A process started anew stands by; one that was frozen still has its place with the broker."""
    gone = member("c", state="lost", job=JOB)
    silent, heard = (member("c", state=state, job=JOB if state == "active" else "", last_heard_s=s) for s in (5.0, 0.2))
    one = bench((*ALL, gone), (*ALL, silent), (*ALL, heard), (*ALL, heard), from_standby=True)
    one.lose_guard("c")
    one.look()
    assert not one.driver.offers, "it is not there"
    one.clock.seconds += 3.0
    one.look()
    assert not one.driver.offers, "it was heard before it was lost, not since"
    one.look()
    ((found, _),) = one.driver.offers
    assert {standby.stage: standby.peer for standby in found.plan.standbys} == {0: "c", 1: "c"}
    one.driver.adopt()
    one.lose_guard("c")
    one.clock.seconds += 2.0
    one.look()
    assert len(one.driver.offers) == 1, "the second time it must have been there for longer"


@pytest.mark.slow
def test_a_standby_that_fails_each_time_is_asked_ever_more_seldom_until_it_joins_anew(bench: Make):
    """Its process never ends: nothing of it has changed."""
    one = bench((*ALL, member("c")), from_standby=True)
    one.driver.deployment = Deployment(
        plan=msgspec.structs.replace(one.driver.plan, standbys=()), tickets=one.driver.deployment.tickets
    )
    said: list[str] = []
    one.watch.replanner.machines.say = said.append
    asked_s: list[float] = []
    while one.clock.seconds < 100.0 + 6 * 3600:
        one.clock.seconds += 5 * pool_watch.LOOK_S  # ten thousand looks would take seconds
        before = len(one.driver.offers)
        one.look()
        if len(one.driver.offers) > before:
            asked_s.append(one.clock.seconds)
            one.driver.adopt()
            one.lose_guard("c")
    waits_s = [later - earlier for earlier, later in itertools.pairwise(asked_s)]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] == 3600
    assert len(asked_s) < 20
    assert said == [
        "c was lost or failed 6 times in a row: it is asked again after pauses that double up to 60 minutes, or when "
        "it has joined anew"
    ]
    one.clock.seconds += 31.0
    one.pool.looks = [(*ALL, member("c", boot=2))]
    before = len(one.driver.offers)
    one.look()
    assert len(one.driver.offers) == before + 1


def test_a_standby_that_stood_by_for_long_is_asked_soon_after_its_loss(bench: Make):
    one = bench((*ALL, working("c")), from_standby=True)
    for _ in range(8):
        one.watch.replanner.machines.note_lost("c")
    one.watch.replanner.machines.missing.clear()
    one.driver.warm_stages = frozenset({0, 1})
    one.look()
    one.clock.seconds += 121.0
    one.look()
    one.lose_guard("c")
    one.clock.seconds += 1.0
    one.look()
    assert len(one.driver.offers) == 1


def test_a_plan_whose_standby_falls_while_it_is_made_is_not_offered(bench: Make):
    one = bench((*ALL, member("d")), ALL)

    async def falls(job: JobId, title: str, plan: Plan, steps: int) -> Deployment:
        one.watch.see(progress.FaultSeen("standby", "d", (), 0, "gone"))
        return await granted(job, title, plan, steps)

    granted, one.pool.request = one.pool.request, falls
    one.look()
    assert not one.driver.offers
    one.pool.request, one.pool.grants = granted, [RefusedError("another plan.", code="stale_fence"), None]
    one.look()
    ((found, reason),) = one.driver.offers
    assert places(found.plan) == places(one.driver.plan)
    assert not found.plan.standbys
    assert reason == "the broker had another plan in force"


def test_one_offer_at_a_time_unless_it_is_never_taken(bench: Make):
    one = bench((*ALL, member("d")))
    one.look()
    one.look()
    assert len(one.driver.offers) == 1
    one.clock.seconds += 31.0
    one.look()
    assert len(one.driver.offers) == 2


def test_who_leaves_hands_its_work_over_and_standbys_it_meanwhile(bench: Make):
    leaving: tuple[PoolMember, ...] = (member("a", state="draining", job=JOB), working("b"), member("d"))
    one = bench(leaving, from_standby=False)
    before = places(one.driver.plan)
    stage = next(stage for stage, peer in before.items() if peer == "a")
    one.look()
    ((between, reason),) = one.driver.offers
    assert places(between.plan) == {**before, stage: "d"}
    assert (stage, "a") in {(standby.stage, standby.peer) for standby in between.plan.standbys}
    assert between.plan.snapshot_every > 0
    assert reason == "a leaves and hands its work over"
    one.driver.adopt()
    one.look()
    (_, (without, reason)) = one.driver.offers
    assert places(without.plan) == places(between.plan)
    assert "a" not in {standby.peer for standby in without.plan.standbys}
    assert reason == "a leaves"


def test_who_leaves_stays_while_nobody_can_take_its_work(bench: Make):
    one = bench((member("a", state="draining", job=JOB), working("b")))
    one.look()
    assert not one.driver.offers


def test_while_a_stage_waits_nothing_else_is_asked_for(bench: Make):
    one = bench((*ALL, member("d")))
    one.driver.is_waiting = True
    one.look()
    assert not one.pool.asked


def test_tickets_are_renewed_long_before_they_expire(bench: Make):
    one = bench(ALL)
    one.clock.seconds += 299.0
    one.look()
    assert not one.driver.renewals
    one.clock.seconds += 62.0
    one.look()
    assert len(one.driver.renewals) == 1
    assert one.pool.asked == [one.driver.plan], "the same plan, with its version"


def test_a_broker_that_is_away_disturbs_nothing(bench: Make):
    one = bench(TransportError("gone."))
    with pytest.raises(TransportError):
        one.look()  # `run` says so in the log and looks again
    assert not one.driver.offers


def test_after_a_lost_answer_broker_and_driver_agree_on_the_plan_again(bench: Make):
    one = bench((*ALL, member("d")), ALL)
    # The broker mints the plan with "d" and dies before it says so; then it knows another plan than the driver's.
    one.pool.grants = [TransportError("gone."), RefusedError("another plan.", code="stale_fence"), None]
    with pytest.raises(TransportError):
        one.look()
    one.look()
    ((found, reason),) = one.driver.offers
    assert places(found.plan) == places(one.driver.plan)
    assert found.plan.version > one.driver.plan.version
    assert reason == "the broker had another plan in force"
    one.driver.adopt()
    one.look()
    assert len(one.driver.offers) == 1
    assert not one.driver.renewals


def test_a_lost_question_costs_new_tickets_and_nothing_else(bench: Make):
    one = bench((*ALL, member("d")), ALL)
    one.pool.grants = [TransportError("gone."), None]
    with pytest.raises(TransportError):
        one.look()
    one.look()
    assert not one.driver.offers
    assert len(one.driver.renewals) == 1


def test_a_machine_found_slow_stays_slow_in_later_plans_until_it_is_forgotten(bench: Make):
    there = (*ALL, member("c"), member("d"))
    one = bench(there)
    replanner, plan = one.watch.replanner, one.driver.plan
    straggler = plan.stages[0].peer
    one.watch._slow = Straggling(
        quiet_until=0,
        slowdowns={stage.stage: (3.0 if stage.stage == 0 else 1.0,) for stage in plan.stages},
        stragglers=frozenset({0}),
    )
    found = asyncio.run(one.watch._faster(there))
    assert found is not None
    assert straggler not in places(found[0]).values(), "somebody as fast as planned is idle"

    def speeds() -> dict[str, float]:
        return {one.view.peer: one.profile.flops_per_s for one in replanner.usable(there)}

    fast = profile("c").flops_per_s
    assert speeds() == {**dict.fromkeys("abcd", fast), straggler: pytest.approx(fast / 3)}
    replanner.machines.learn({straggler: 2.0})
    assert speeds()[straggler] == pytest.approx(fast / 6), "beyond what it was planned with"
    one.clock.seconds += FORGOTTEN_S
    replanner.machines.keep_in_mind([straggler, "c"])
    one.clock.seconds += 1.0
    assert speeds()[straggler] == pytest.approx(fast / 6), "it ran a stage, planned at this pace"
    one.clock.seconds += FORGOTTEN_S
    assert speeds() == dict.fromkeys("abcd", fast)
    replanner.machines.keep_in_mind([straggler])
    assert speeds() == dict.fromkeys("abcd", fast), "it was planned at full speed since"


def test_in_an_exact_job_no_stage_moves_among_unequal_machines(bench: Make):
    one = bench(ALL)
    plan = one.driver.plan
    other = msgspec.structs.replace(
        plan, stages=tuple(msgspec.structs.replace(stage, fingerprint="other") for stage in plan.stages)
    )
    assert one.watch._is_allowed(plan, plan)
    assert not one.watch._is_allowed(plan, other)
    assert bench(ALL, policy="tolerant").watch._is_allowed(plan, other)


# ------------------------------------------------------------------------------------------------------- promotion


def faster(name: str, times: float, *, fingerprint: str = "f") -> PoolMember:
    known = msgspec.structs.replace(profile(name, fingerprint=fingerprint), flops_per_s=1e9 * times)
    view = member(name).view
    return PoolMember(msgspec.structs.replace(view, profile=msgspec.Raw(msgspec.msgpack.encode(known))), known)


def ready(one: Bench, *stages: int) -> None:
    one.driver.warm_stages = frozenset(stages)
    one.watch.replanner.steps = 1000


def test_a_faster_machine_standbys_a_stage_and_then_changes_places(bench: Make):
    all_ = (*ALL, working("c"), faster("d", 3.0))
    one = bench(all_, from_standby=True)
    before = places(one.driver.plan)
    ready(one, 0, 1)
    one.look()
    one.driver.adopt()
    ((first, reason),) = one.driver.offers
    assert places(first.plan) == before
    assert reason.endswith("and stands by for it first")
    stage = next(standby.stage for standby in first.plan.standbys if standby.peer == "d")
    former = places(first.plan)[stage]

    ready(one)
    one.look()
    assert one.driver.offers[-1][0] is first, "its snapshot is still on the way"

    ready(one, 0, 1)
    one.look()
    second, reason = one.driver.offers[-1]
    assert reason.endswith("and they change places")
    assert places(second.plan)[stage] == "d"
    assert {standby.stage: standby.peer for standby in second.plan.standbys}[stage] == former


def step_done(step_s: float) -> progress.StepDone:
    fence = Fence(plan_version=1, incarnation=1, attempt=1)
    record = CommitRecord(step=1, scale=1.0, learning_rate=0.0, total_norm=1.0, norms_hash="n", fence=fence, loss=1.0)
    return progress.StepDone(record, (), step_s, 1.0, False, {})


def test_moves_that_bring_nothing_cease(bench: Make):
    """Where machines share cores a faster one is no faster: after two moves in vain nobody offers a third."""
    one = bench((*ALL, working("c"), faster("d", 3.0)), from_standby=True)
    ready(one, 0, 1)
    first, moves = one.driver.deployment, 0
    for _ in range(12):
        one.clock.seconds += pool_watch.PATIENCE_S
        for _ in range(SETTLING + ENOUGH):
            one.watch.see(step_done(1.0))
        before, offers = places(one.driver.plan), len(one.driver.offers)
        one.look()
        if len(one.driver.offers) > offers:
            one.driver.adopt()
        if places(one.driver.plan) != before:
            moves += 1
        elif "d" in places(one.driver.plan).values():
            one.driver.deployment = first  # d is lost and comes back: its stage is where it was
    assert moves == 2


def test_a_faster_machine_that_was_lost_a_moment_ago_is_waited_for(bench: Make):
    one = bench((*ALL, working("c"), faster("d", 3.0)), from_standby=True)
    ready(one, 0, 1)
    one.watch.replanner.machines.note_lost("d")
    one.look()
    assert not one.driver.offers
    one.clock.seconds += 30.0
    one.look()
    assert one.driver.offers


def test_what_was_compared_in_vain_is_not_compared_again(bench: Make, monkeypatch: pytest.MonkeyPatch):
    one = bench((*ALL, working("c")), from_standby=True)
    ready(one, 0, 1)
    looked: list[object] = []
    monkeypatch.setattr(pool_watch, "promoted", lambda *given, **named: looked.append(given))
    one.look()
    one.look()
    assert len(looked) == 1
    ready(one, 0)
    one.look()
    assert len(looked) == 2


def test_an_exact_job_gets_no_machine_of_other_numerics_for_speed(bench: Make):
    one = bench((*ALL, working("c"), faster("d", 9.0, fingerprint="g")), from_standby=True, policy="exact")
    ready(one, 0, 1)
    one.look()
    assert not one.driver.offers


# ---------------------------------------------------------------------------------------------------- unlike, few


def test_whoever_leaves_hands_its_work_to_an_unlike_machine_after_the_grace_period(bench: Make):
    there = (working("a"), member("b", state="draining", job=JOB), member("e", fingerprint="other"))
    one = bench(there, policy="any")
    one.look()
    assert not one.driver.offers
    one.clock.seconds += 31.0
    one.look()
    ((found, reason),) = one.driver.offers
    assert reason == "b leaves and hands its work over"
    assert "e" in places(found.plan).values()
    assert "b" in {standby.peer for standby in found.plan.standbys}


def test_whoever_leaves_a_job_with_nobody_else_hands_its_work_to_those_that_stay(bench: Make):
    one = bench((working("a"), member("b", state="draining", job=JOB)), policy="any")
    one.look()
    one.clock.seconds += 31.0
    one.look()
    ((found, _),) = one.driver.offers
    assert set(places(found.plan).values()) == {"a", "owner"}
    assert {standby.peer for standby in found.plan.standbys} == {"b"}, "its state is there until it is elsewhere"


def test_machines_that_come_again_are_taken_in_where_the_model_was_cut_anew_without_them(bench: Make):
    one = bench((working("a"), member("b"), member("c")), policy="any")
    alone = planned(msgspec.structs.replace(one.watch.replanner.problem, peers=(profile("a"),), stages=None))
    one.driver.deployment = Deployment(
        plan=msgspec.structs.replace(alone, version=1), tickets=one.driver.deployment.tickets
    )
    blocks = tuple(
        msgspec.structs.replace(block, forward_flops=1e9, backward_flops=2e9)
        for block in one.watch.replanner.problem.blocks
    )
    one.watch.replanner.problem = msgspec.structs.replace(one.watch.replanner.problem, blocks=blocks)
    one.watch.replanner.steps = 1000
    one.watch._step = 60
    one.watch.replanner.is_shrunk = True
    one.look()
    ((found, reason),) = one.driver.offers
    assert len(set(places(found.plan).values()) - {"owner"}) == 2
    assert reason.startswith("machines have joined: cutting the model anew over 2 machines (")
    assert found.plan.tolerant_takeovers == ()
