"""Hours of a job: nothing official is lost, what disturbs costs what it must, the same seed gives the same course."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from fusionai.primitives.errors import PlanError, UsageError
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.scheduling.standby.continuation import numerics
from fusionai.simulator import course as module
from fusionai.simulator.course import Course, simulate_course
from fusionai.simulator.network import Weather
from fusionai.simulator.scenario import Churn, Event, Scenario, Timings

pytestmark = pytest.mark.slow

LINK = Link(bandwidth_bytes_per_s=12.5e6, latency_s=0.01)
STORMY = Churn(stay_s=1200, away_s=400, crashes=0.6, silent=0.4, freeze_every_s=900, freeze_s=5, late=0.25)


def peer(name: str, **changes: object) -> PeerProfile:
    base = PeerProfile(
        peer=name,
        name=name.upper(),
        flops_per_s=1e13,
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=4e11,
        fingerprint="gpu",
        uplink=LINK,
        downlink=LINK,
    )
    return msgspec.structs.replace(base, **changes)


def problem(machines: int = 6, **changes: object) -> Problem:
    def block(number: int, **other: object) -> BlockCost:
        base = BlockCost(
            block=number,
            forward_flops=1e11,
            backward_flops=2e11,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**6,
            output_bytes=300_000,
            gradient_bytes=300_000,
        )
        return msgspec.structs.replace(base, **other)

    base = Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(6)), block(6, parameter_bytes=0, trainable_bytes=0, forward_flops=1e8)),
        peers=tuple(peer(f"p{n}") for n in range(machines)),
        owner=peer("owner", flops_per_s=1e12),
        stages=3,
        microbatches=8,
        microbatch_tokens=1024,
    )
    return msgspec.structs.replace(base, **changes)


def scripted(monkeypatch: pytest.MonkeyPatch, *events: Event, machines: int = 6, **changes: object) -> Course:
    """Everybody is there from the start; then this happens."""
    coming = [Event(0.0, f"p{n}", "come") for n in range(machines)]
    monkeypatch.setattr(module, "fates", lambda *_: (*coming, *events))
    scenario = Scenario(hours=0.2, checkpoint_every=0)
    return simulate_course(problem(machines), msgspec.structs.replace(scenario, **changes))


def stage_peer(monkeypatch: pytest.MonkeyPatch, stage: int, machines: int = 6) -> tuple[str, str | None]:
    """Who runs a stage at first, and who stands by for it."""
    calm = scripted(monkeypatch, machines=machines)
    standbys = {standby.stage: standby.peer for standby in calm.first_plan.standbys}
    return calm.first_plan.stages[stage].peer, standbys.get(stage)


def test_undisturbed_hours_are_full_of_steps() -> None:
    course = simulate_course(problem(), Scenario(hours=0.5, checkpoint_every=0))
    assert course.goodput == pytest.approx(1.0, abs=0.005)
    assert (course.plans, course.incidents, course.lost_steps, course.redone_s) == (1, (), 0, 0.0)
    gaps = [after - before for before, after in pairwise(course.commits_s)]
    assert max(gaps) == pytest.approx(course.undisturbed_step_s, rel=0.01)
    for stage in course.first_plan.stages[:3]:
        assert course.working[stage.peer] == pytest.approx(8 * stage.compute_s / course.undisturbed_step_s, rel=0.02)
    assert set(course.present.values()) == {1.0}


def test_a_commit_waits_for_the_checkpoint_to_be_collected() -> None:
    # 18 MB of state over the owner's 12.5 MB/s.
    heavy = problem(owner=peer("owner", downlink=Link(bandwidth_bytes_per_s=2e6)))
    rare = simulate_course(heavy, Scenario(hours=0.5, checkpoint_every=0))
    often = simulate_course(heavy, Scenario(hours=0.5, checkpoint_every=10))
    collecting_s = 18e6 / 2e6
    row_s = 10 * rare.undisturbed_step_s
    assert often.steps == pytest.approx(rare.steps * row_s / (row_s + collecting_s - rare.undisturbed_step_s), rel=0.02)


def test_the_standby_of_a_crashed_peer_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, standby = stage_peer(monkeypatch, 1)
    course = scripted(monkeypatch, Event(300.0, victim, "crash"))
    (incident,) = course.incidents
    assert course.last_plan.stages[1].peer == standby
    assert incident.causes == [f"{victim.upper()} crashed (stage 1)"]
    assert (incident.restored, incident.rollback) == ((1,), False)
    assert incident.at_s == 300.0
    assert incident.replayed_steps < 2 * course.first_plan.snapshot_every
    assert incident.planned_s == pytest.approx(300.0 + Timings().notice_s + Timings().plan_s)
    assert incident.stopped_s is not None
    # Two rounds, the replay, one step; no state has to be sent.
    replay_s = incident.replayed_steps * 8 * course.first_plan.stages[1].compute_s
    assert incident.stopped_s == pytest.approx(0.25 + 0.08 + replay_s + course.undisturbed_step_s, rel=0.1)
    assert course.lost_steps == 0


def test_silence_is_noticed_later_than_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, _ = stage_peer(monkeypatch, 1)
    crashed = scripted(monkeypatch, Event(300.0, victim, "crash"))
    silent = scripted(monkeypatch, Event(300.0, victim, "fall silent"))
    timings = Timings()
    later_s = timings.silence_s - timings.notice_s
    assert silent.incidents[0].stopped_s == pytest.approx((crashed.incidents[0].stopped_s or 0) + later_s)


def test_a_short_freeze_only_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, _ = stage_peer(monkeypatch, 1)
    calm = scripted(monkeypatch)
    course = scripted(monkeypatch, Event(300.0, victim, "freeze"), Event(301.0, victim, "wake"))
    assert (course.incidents, course.plans) == ((), 1)
    late = [after - before for before, after in zip(calm.commits_s, course.commits_s, strict=False)]
    assert min(late) == 0.0
    assert late[-1] == pytest.approx(1.0)


def test_a_frozen_standby_and_an_idle_spare_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = scripted(monkeypatch)
    standby = calm.first_plan.standbys[0].peer
    course = scripted(monkeypatch, Event(300.0, standby, "fall silent"))
    assert course.incidents == ()
    assert course.steps >= calm.steps - 2
    assert any("standby of stage" in what for _, what in course.story)


def test_a_frozen_peer_that_nobody_can_replace_goes_on_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, standby = stage_peer(monkeypatch, 1, machines=3)
    assert standby is None
    course = scripted(
        monkeypatch, Event(300.0, victim, "freeze"), Event(330.0, victim, "wake"), machines=3, checkpoint_every=10
    )
    (incident,) = course.incidents
    assert incident.waited_for.startswith("waiting for a peer that")
    assert (incident.restored, incident.replayed_steps, incident.rollback) == ((), 0, False)
    assert course.waiting_s == pytest.approx(30.0, abs=3.5)
    assert course.last_plan.stages[1].peer == victim


def test_a_crashed_peer_that_nobody_can_replace_comes_back_to_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, _ = stage_peer(monkeypatch, 1, machines=3)
    events = (Event(300.0, victim, "crash"), Event(360.0, victim, "come"))
    patient = Timings(grace_s=3600.0)
    course = scripted(monkeypatch, *events, machines=3, checkpoint_every=10, timings=patient)
    (incident,) = course.incidents
    assert incident.rollback
    assert 0 < incident.replayed_steps <= 20
    assert course.lost_steps == 0
    assert course.redone_s > incident.replayed_steps * course.undisturbed_step_s * 0.99


def test_whoever_leaves_in_order_hands_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, _ = stage_peer(monkeypatch, 1)
    course = scripted(monkeypatch, Event(300.0, victim, "leave"))
    assert course.incidents == ()
    assert victim not in {stage.peer for stage in course.last_plan.stages}
    assert [what for _, what in course.story][1:3] == [
        f"plan 2: {victim.upper()} leaves and hands its work over",
        f"plan 3: {victim.upper()} leaves",
    ]
    assert course.present[victim] == pytest.approx(310 / 720, abs=0.02)


def test_whoever_must_wait_too_long_leaves_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, _ = stage_peer(monkeypatch, 1, machines=3)
    course = scripted(monkeypatch, Event(300.0, victim, "leave"), machines=3, timings=Timings(patience_s=20.0))
    (incident,) = course.incidents
    assert incident.at_s == pytest.approx(320.0)
    assert incident.causes == [f"{victim.upper()} left (stage 1)"]
    assert course.takeovers == {"recut": 1}


def test_those_that_remain_go_on_after_the_grace_period_and_take_others_in_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On lines as slow as these two machines are as fast as three: nobody is taken in for nothing."""
    victim, _ = stage_peer(monkeypatch, 1, machines=3)
    events = (Event(300.0, victim, "crash"), Event(360.0, victim, "come"))
    course = scripted(monkeypatch, *events, machines=3, checkpoint_every=10)
    (incident,) = course.incidents
    assert incident.planned_s == pytest.approx(330.0, abs=2.0)
    assert incident.rollback
    assert course.takeovers == {"recut": 1}
    assert course.lost_steps == 0
    assert {stage.peer for stage in course.last_plan.stages if stage.peer != "owner"} <= {"p0", "p1", "p2"} - {victim}


def test_an_unlike_machine_that_stands_by_goes_on_after_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = tuple(
        peer(f"p{n}", memory_bytes=110_000_000, fingerprint="other" if n == 3 else "gpu") for n in range(4)
    )
    heavy = tuple(
        msgspec.structs.replace(block, parameter_bytes=10**7, trainable_bytes=10**7) for block in problem().blocks[:-1]
    )
    pool = {"peers": machines, "blocks": (*heavy, problem().blocks[-1]), "required": ("p0", "p1", "p2")}
    coming = [Event(0.0, f"p{n}", "come") for n in range(4)]
    monkeypatch.setattr(module, "fates", lambda *_: (*coming, Event(300.0, "p1", "crash")))
    goodput: dict[str, float] = {}
    for takeover in ("exact", "any"):
        posed = problem(**pool, takeover=numerics(takeover))
        scenario = Scenario(hours=0.2, checkpoint_every=100, takeover=takeover)
        course = simulate_course(posed, scenario)
        goodput[takeover] = course.goodput
        assert course.lost_steps == 0
        assert course.takeovers == ({"tolerant": 1} if takeover == "any" else {})
    assert goodput["any"] > 1.5 * goodput["exact"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_loses_nothing_and_two_steps_are_never_closer_than_a_step_takes(seed: int) -> None:
    course = simulate_course(problem(), Scenario(hours=2, seed=seed, churn=STORMY, checkpoint_every=50))
    assert course.lost_steps == 0
    assert len(course.incidents) > 5
    # A plan over those that remain may be faster than the first one.
    assert 0.2 < course.goodput < 1.1
    gaps = [after - before for before, after in pairwise(course.commits_s)]
    # All machines are alike; one that has neighbouring stages for a while, or a new cut, saves hops.
    assert min(gaps) > 0.9 * course.undisturbed_step_s
    for one, other in pairwise(course.incidents):
        assert one.recovered_s is not None
        assert one.recovered_s <= other.at_s + 1e-9
    assert all(0 <= working <= course.present[peer] + 1e-9 for peer, working in course.working.items())


def test_skipped_heartbeats_change_nothing() -> None:
    scenario = Scenario(hours=0.5, seed=4, churn=STORMY, checkpoint_every=50)
    skipped = simulate_course(problem(), scenario)
    performed = simulate_course(problem(), scenario, every_beat=True)
    assert len(skipped.incidents) > 2
    assert skipped == performed


def test_the_seed_decides() -> None:
    def run(seed: int) -> Course:
        scenario = Scenario(hours=0.5, seed=seed, churn=STORMY, weather=Weather(jitter_s=0.005))
        return simulate_course(problem(), scenario)

    assert run(1) == run(1)
    assert run(1).commits_s != run(2).commits_s


def test_with_more_spares_a_job_waits_for_less() -> None:
    """Goodput need not grow with spares: few machines are cut anew, into fewer stages, and wait for fewer links."""

    def waiting_s(machines: int) -> float:
        churn = Churn(stay_s=1800, away_s=600, crashes=1.0)
        small = tuple(peer(f"p{n}", memory_bytes=60_000_000) for n in range(machines))
        course = simulate_course(problem(peers=small), Scenario(hours=3, seed=1, churn=churn))
        assert course.goodput > 0.8
        return course.waiting_s

    few, some, many = waiting_s(3), waiting_s(5), waiting_s(9)
    assert few >= some >= many
    assert few > many


def test_without_an_owners_machine_there_are_no_hours() -> None:
    with pytest.raises(UsageError, match="owner's machine"):
        simulate_course(problem(owner=None), Scenario())


def test_machines_that_never_come_make_no_plan() -> None:
    with pytest.raises(PlanError, match="were never there"):
        simulate_course(problem(), Scenario(hours=0.1, churn=Churn(late=1.0, away_s=1e9)))
