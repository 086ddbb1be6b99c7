"""The serving machine in trouble: what is tried again, what costs a peer, what ends the job, how long it waits."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from fusionai.coordination.round.interface import (
    AskPlan,
    CommandFailed,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    ReportFault,
    StageFailure,
)
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.stage_times import ATTEMPTS, PassWork
from fusionai.coordination.serving.state import ServingPhase
from harness.serving_job import Job, decoding, rebuilding, roles, running


def again(job: Job) -> None:
    """The round comes to its end: passes run."""
    job.enlist()
    job.load()
    if job.machine.rounds.rebuilds:
        job.rebuild()
    if job.machine.rounds.probes:
        job.probe(*["x"] * len(job.machine.rounds.probes))
    assert job.phase is ServingPhase.RUNNING


def stage_fails(job: Job, stage: int, *, fatal: bool = False) -> None:
    job.tell(StageFailure(stage, "no memory", fatal, peer=job.machine.roles.places[stage], fence=job.fence))


# ------------------------------------------------------------------------------------------------------------ stages


def test_a_stage_that_fails_gets_another_round_then_another_peer() -> None:
    job = running()
    stage_fails(job, 2)
    assert [(told.kind, told.peer, told.stages) for told in job.of(ReportFault)] == [("stage", "b", (2,))]
    assert (job.phase, job.machine.roles.places[2]) == (ServingPhase.ENLISTING, "b")
    again(job)
    stage_fails(job, 2)
    assert [(told.kind, told.successors) for told in job.of(ReportFault)] == [("stage", {2: "g"})]
    again(job)
    stage_fails(job, 2)
    assert job.phase is ServingPhase.WAITING, "a third peer, where the job has been ready: it is not ended"


def test_a_pass_that_came_back_forgives_the_stage() -> None:
    job = running()
    for number in (1, 2, 3):
        stage_fails(job, 2)
        assert job.machine.roles.places[2] == "b"
        again(job)
        decoding(job, number)
        job.batcher.cancel(number)


def test_what_can_work_on_no_peer_ends_the_job_at_once() -> None:
    job = running()
    stage_fails(job, 2, fatal=True)
    assert job.phase is ServingPhase.ENDED
    assert job.of(EndJob)[0].failed == "stage 2 failed: no memory"


def test_before_the_job_was_ever_ready_a_third_failure_is_nobody_s_fault_but_the_model_s() -> None:
    job = Job(roles())
    for place in ("b", "b", "g"):
        assert job.machine.roles.places[2] == place
        job.enlist()
        stage_fails(job, 2)
    assert job.phase is ServingPhase.ENDED


def test_the_owner_s_own_stage_is_tried_three_times_and_can_go_to_nobody() -> None:
    job = running()
    for _ in range(2):
        stage_fails(job, 0)
        assert job.phase is ServingPhase.ENLISTING
        again(job)
    stage_fails(job, 0)
    assert job.phase is ServingPhase.ENDED


def test_a_probe_that_a_stage_can_t_compute_is_that_stage_s_trouble() -> None:
    job = Job(roles())
    for _ in range(2):
        job.enlist()
        job.load()
        assert job.phase is ServingPhase.PROBING
        job.tell(interface.PassFailure(max(job.machine.rounds.probes), 2, "no memory", fence=job.fence))
    assert job.machine.roles.places[2] == "g"


@pytest.mark.parametrize("how", ["too far off", "other bits"])
def test_before_the_job_was_ready_a_probe_that_is_wrong_ends_it(how: str) -> None:
    job = Job(roles())
    job.enlist()
    job.load()
    first, second = sorted(job.machine.rounds.probes)
    job.tell(interface.ProbeReturned(first, "x", 0.0, 0.1, fence=job.fence))
    far = how == "too far off"
    job.tell(interface.ProbeReturned(second, "x" if far else "y", 0.2 if far else 0.0, 0.1, fence=job.fence))
    assert job.phase is ServingPhase.ENDED


@pytest.mark.parametrize(
    ("distance", "said"),
    [(inf, "the logits of a probe are not finite"), (nan, "the logits of a probe are not finite"), (0.2, "0.2 off")],
)
def test_a_probe_that_ends_the_job_says_what_is_wrong_with_it(distance: float, said: str) -> None:
    job = Job(roles())
    job.enlist()
    job.load()
    job.tell(interface.ProbeReturned(min(job.machine.rounds.probes), "x", distance, 0.1, fence=job.fence))
    assert said in (job.of(EndJob)[0].failed or "")


def test_a_probe_as_far_off_as_is_tolerated_is_right() -> None:
    job = rebuilding()
    job.probe("y", distance=0.1)
    job.rebuild()
    assert job.phase is ServingPhase.RUNNING


def test_a_wrong_probe_with_nobody_new_but_the_owner_ends_the_job() -> None:
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="me")))
    job.enlist()
    job.load()
    job.probe("y", distance=0.5)
    assert job.phase is ServingPhase.ENDED


def test_the_loss_of_the_owner_s_own_process_ends_the_job() -> None:
    job = running()
    job.tell(PeerLost("me", "gone"))
    assert job.phase is ServingPhase.ENDED


def test_what_a_command_could_not_do_ends_the_job() -> None:
    job = running()
    job.tell(CommandFailed("no disk"))
    assert (job.phase, job.of(EndJob)[0].failed) == (ServingPhase.ENDED, "no disk")


# ------------------------------------------------------------------------------------------------------------- standbys


def test_a_standby_that_fails_is_replaced_and_passes_go_on() -> None:
    job = running(warm=False)
    job.tell(StageFailure(2, "no room", peer="g", fence=job.fence))
    assert [(told.kind, told.peer) for told in job.of(ReportFault)] == [("standby", "g")]
    assert [asked.urgent for asked in job.of(AskPlan)] == [False]
    assert (job.phase, job.machine.roles.standbys) == (ServingPhase.RUNNING, {})


def test_whoever_runs_a_stage_and_can_t_standby_another_keeps_the_one_it_runs() -> None:
    job = running(roles(standbys={2: "a", 3: "g"}), warm=False)
    fence = job.fence
    job.tell(StageFailure(2, "no room", peer="a", fence=fence))
    assert (job.fence, job.machine.roles.places[1], job.machine.roles.standbys) == (fence, "a", {3: "g"})
    assert job.of(interface.Dismiss) == []


@pytest.mark.parametrize("concerned", [True, False])
def test_a_plan_that_gives_a_stage_to_whoever_could_not_load_it_is_void(concerned: bool) -> None:
    job = running(roles(standbys={2: "a"}), warm=False)
    moved = {"s3": "n", "s2": "a"} if concerned else {"s3": "n"}
    job.tell(interface.PlanGiven(roles(2, standbys={}, **moved)))
    (brought,) = job.of(interface.EnlistStandby)
    job.tell(MemberEnlisted("n", fence=brought.fence), StageFailure(2, "no room", peer="a", fence=job.fence))
    job.tell(interface.StandbyLoaded("n", 3, fence=brought.fence))
    assert bool(job.of(interface.BeginRound)) is not concerned


# ------------------------------------------------------------------------------------------------------------- losses


def test_the_loss_of_strangers_and_of_whoever_is_lost_already_changes_nothing() -> None:
    job = running(roles(standbys={}))
    assert job.tell(PeerLost("somebody", "x")) == []
    job.tell(PeerLost("b", "x"))
    assert job.phase is ServingPhase.WAITING
    assert job.tell(PeerLost("b", "x")) == []


def test_a_lost_standby_is_asked_for_anew_urgently_only_while_the_job_waits() -> None:
    job = running()
    job.tell(PeerLost("g", "x"))
    assert job.phase is ServingPhase.RUNNING
    assert [(asked.urgent, asked.without) for asked in job.of(AskPlan)] == [(False, {"g"})]
    waiting = running(roles(standbys={3: "g"}))
    waiting.tell(PeerLost("b", "x"), PeerLost("g", "x"))
    assert [asked.urgent for asked in waiting.of(AskPlan)] == [True, True]
    assert waiting.of(AskPlan)[-1].without == {"b", "g"}


def test_whoever_was_only_to_come_is_not_missed_but_what_was_to_come_of_it_is_void() -> None:
    job = running()
    job.tell(interface.PlanGiven(roles(2, s2="n", standbys={})))
    (brought,) = job.of(interface.EnlistStandby)
    job.tell(MemberEnlisted("n", fence=brought.fence), PeerLost("n", "x"))
    assert job.of(AskPlan) == []
    job.tell(MemberEnlisted("n", fence=brought.fence), interface.StandbyLoaded("n", 2, fence=brought.fence))
    assert (job.phase, job.machine.roles.places[2]) == (ServingPhase.RUNNING, "b")


def test_a_plan_goes_on_being_prepared_when_somebody_else_is_lost() -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(interface.PlanGiven(roles(2, s2="n", standbys={})))
    (brought,) = job.of(interface.EnlistStandby)
    job.tell(PeerLost("g", "x"), MemberEnlisted("n", fence=brought.fence))
    job.tell(interface.StandbyLoaded("n", 2, fence=brought.fence))
    assert job.machine.roles.places[2] == "n"


@pytest.mark.parametrize("warm", [True, False])
def test_a_lost_stage_goes_to_whoever_was_about_to_take_it_if_it_has_loaded(warm: bool) -> None:
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="n", s3="m")))
    fence = job.of(interface.EnlistStandby)[0].fence
    job.tell(MemberEnlisted("n", fence=fence))
    if warm:
        job.tell(interface.StandbyLoaded("n", 2, fence=fence))
    job.tell(PeerLost("b", "x"))
    assert job.of(ReportFault)[0].successors == ({2: "n"} if warm else {})
    assert job.phase is (ServingPhase.ENLISTING if warm else ServingPhase.WAITING)


# -------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(("reporter", "other"), [("a", "a"), ("a", "somebody"), ("somebody", "a"), ("g", "a")])
def test_a_link_counts_only_between_two_that_passes_cross(reporter: str, other: str) -> None:
    job = running()
    assert job.tell(LinkBroken(reporter, other, "reset", fence=job.fence)) == []


def test_a_link_to_the_owner_counts_also_where_it_runs_no_stage() -> None:
    given = ServingRoles(version=1, owner="me", places={0: "a", 1: "b"}, caching=frozenset({0, 1}))
    job = running(given)
    job.tell(LinkBroken("b", "me", "reset", fence=job.fence))
    assert job.phase is ServingPhase.ENLISTING
    alone = running(ServingRoles(version=1, owner="me", places={0: "me", 1: "a"}, caching=frozenset({1})))
    alone.tell(LinkBroken("a", "me", "reset", fence=alone.fence))
    assert alone.phase is ServingPhase.ENLISTING


def test_a_link_that_breaks_again_costs_whoever_has_trouble_with_most() -> None:
    job = running(roles(standbys={3: "g"}))
    for pair in (("b", "c"), ("b", "a"), ("c", "b")):
        job.tell(LinkBroken(*pair, "reset", fence=job.fence))
        if job.phase is ServingPhase.ENLISTING:
            again(job)
    assert job.machine.lost == {"b"}


def test_a_link_that_breaks_again_costs_whoever_can_be_replaced_at_once_and_never_the_owner() -> None:
    job = running(roles(standbys={1: "g"}))
    for _ in range(2):
        job.tell(LinkBroken("a", "b", "reset", fence=job.fence))
        again(job)
    assert job.machine.lost == {"a"}
    owners = running()
    for _ in range(2):
        owners.tell(LinkBroken("me", "c", "reset", fence=owners.fence))
        if owners.phase is ServingPhase.ENLISTING:
            again(owners)
    assert owners.machine.lost == {"c"}


def test_whoever_is_lost_breaks_no_links() -> None:
    """The stage it had waits; the round's fence is still in force."""
    job = running(roles(standbys={}))
    job.tell(PeerLost("b", "x"))
    assert job.tell(LinkBroken("a", "b", "reset", fence=job.fence)) == []


# --------------------------------------------------------------------------------------------------------------- time


def stuck(phase: ServingPhase) -> Job:
    """A job that is not yet (or no more) running and hears nothing."""
    match phase:
        case ServingPhase.ENLISTING:
            return Job(roles())
        case ServingPhase.LOADING:
            job = Job(roles())
            job.enlist()
        case ServingPhase.REBUILDING:
            job = rebuilding()
        case _:
            job = rebuilding()
            job.rebuild()
    return job


LIMITS_S = {
    ServingPhase.ENLISTING: 10.0,
    ServingPhase.LOADING: 60.0,
    ServingPhase.REBUILDING: 20.0,
    ServingPhase.PROBING: 20.0,
}


@pytest.mark.parametrize(("phase", "limit_s"), LIMITS_S.items())
def test_a_phase_may_go_so_long_without_progress_and_no_longer(phase: ServingPhase, limit_s: float) -> None:
    job = stuck(phase)
    assert job.phase is phase
    job.tell(interface.Tick(50.0), interface.Tick(50.0 + limit_s))
    assert job.given == []
    job.tell(interface.Tick(50.1 + limit_s))
    assert job.of(ReportFault)[0].kind == "late"


def test_a_pass_may_take_its_time_and_no_longer() -> None:
    job = running()
    assert job.tell(interface.Tick(500.0)) == []
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    assert job.machine.next_pass(500.0) is not None
    assert job.tell(interface.Tick(530.0)) == []
    job.tell(interface.Tick(530.1))
    assert job.phase is ServingPhase.ENLISTING


def test_a_round_that_stalls_is_repeated_then_sessions_are_read_again_then_it_costs_the_suspects() -> None:
    job = rebuilding()
    computed = job.batcher.live[1]
    now_s = 0.0

    def stall() -> None:
        nonlocal now_s
        limit_s = 20.0 * 2**job.machine.patience.stalls
        assert job.tell(interface.Tick(now_s), interface.Tick(now_s + limit_s)) == []
        job.tell(interface.Tick(now_s + limit_s + 1.0))
        now_s += limit_s + 10.0

    stall()
    assert (job.machine.lost, job.batcher.live) == ({"b"}, {1: computed})
    job.enlist()
    job.load({1: ((1, computed),), 3: ((1, computed),)})
    assert job.phase is ServingPhase.REBUILDING
    stall()
    assert (job.machine.lost, job.batcher.live) == ({"b"}, {})
    job.enlist()
    job.load()
    assert job.phase is ServingPhase.PROBING
    stall()
    assert job.machine.lost == {"b", "g"}


def test_a_pass_that_came_back_forgives_a_stall() -> None:
    job = running()
    computed = decoding(job)
    for number in (2, 3, 4):
        assert job.machine.next_pass(100.0 * number) is not None
        job.tell(interface.Tick(100.0 * number + 31.0))
        assert job.batcher.live == {1: computed}, "not read again"
        job.enlist()
        job.load(dict.fromkeys((1, 2, 3), ((1, computed),)))
        job.batcher.hold(1)
        decoding(job, number)
        job.batcher.cancel(number)
        job.batcher.propose(1, ())


def test_the_owner_alone_is_never_a_suspect_but_not_waited_for_for_ever() -> None:
    given = ServingRoles(version=1, owner="me", places={0: "me", 1: "me"}, caching=frozenset({1}))
    job = Job(given)
    for attempt in range(ATTEMPTS + 1):
        assert job.fence.attempt == attempt
        job.enlist()
        job.load()
        assert job.phase is ServingPhase.PROBING
        job.tell(interface.Tick(1000.0 * attempt), interface.Tick(1000.0 * attempt + 20.0 * 2**attempt + 1.0))
    assert "nothing came back in time while probing" in (job.of(EndJob)[0].failed or "")


def test_sessions_whose_passes_never_come_back_fail_and_others_have_their_turn() -> None:
    """Every stage has them; who is late can't be told."""
    job = running()
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    told: list[interface.FailSessions] = []
    for time in range(ATTEMPTS + 1):
        assert not told
        assert job.machine.next_pass(10_000.0 * time) is not None
        job.tell(interface.Tick(10_000.0 * time + 30.0 * 2**time + 1.0))
        told += job.of(interface.FailSessions)
        again(job)
    assert job.machine.lost == frozenset()
    (failed,) = told
    assert failed.sessions == (1,)
    assert "5 attempts" in failed.reason
    assert "let a faster one join" in failed.reason
    job.batcher.submit(SessionSpec(number=2, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    assert job.machine.next_pass(99_000.0) is not None
    assert job.tell(interface.Tick(99_030.0)) == [], "limits are what they were"


# ------------------------------------------------------------------------------------------------- slow, not stuck


def slow_job(given: ServingRoles | None = None) -> tuple[Job, int]:
    """A prompt under way, and the number of its first pass."""
    job = running(given)
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(7,) * 40, max_tokens=3), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    return job, plan.number


def test_a_stage_that_says_that_it_works_is_waited_for_within_its_limit() -> None:
    """The prediction of 20 s a token makes a piece of 8 tokens no surprise after ten minutes."""
    job, number = slow_job(slow_roles(20.0))
    fence = job.fence
    for second in range(1, 600):
        job.tell(interface.StageWorking("a", 1, number, float(second), fence=fence), interface.Tick(float(second)))
        assert job.given == []
    assert job.machine.returned(fence, number, {}, (), 600.0) == {1}


def test_a_stage_beyond_its_limit_is_stuck_and_the_next_attempt_is_shorter_and_has_more_time() -> None:
    job, number = slow_job(slow_roles(1.0))
    limit_s = job.machine.patience.limit_s(1, PassWork(8, 8.0))
    assert limit_s > 4 * 8.0
    assert job.tell(interface.StageWorking("a", 1, number, limit_s, fence=job.fence)) == []
    job.tell(interface.StageWorking("a", 1, number, limit_s + 1.0, fence=job.fence))
    assert job.phase is ServingPhase.ENLISTING
    (told,) = job.of(ReportFault)
    assert told.kind == "late"
    assert f"stage 1 on a works on a piece of 8 positions for {limit_s + 1:.0f} s" in told.reason
    again(job)
    plan = job.machine.next_pass(1000.0)
    assert plan is not None
    assert job.machine.patience.limit_s(1, PassWork(8, 8.0)) > 2 * limit_s, "and what it took is known"


def test_without_a_word_passes_are_given_up_sooner_than_a_stage_that_works() -> None:
    job, number = slow_job(slow_roles(20.0))
    job.tell(interface.Tick(0.0), interface.StageWorking("a", 1, number, 20.0, fence=job.fence), interface.Tick(20.0))
    job.tell(interface.Tick(50.0))
    assert job.phase is ServingPhase.RUNNING
    job.tell(interface.Tick(50.1))
    assert job.phase is ServingPhase.ENLISTING


def test_a_stage_that_is_stuck_again_and_again_goes_to_its_standby() -> None:
    job = running(slow_roles(1.0))
    for attempt in range(3):
        job.batcher.submit(SessionSpec(number=attempt + 1, scope="", prompt=(7,) * 8, max_tokens=3), 0.0)
        plan = job.machine.next_pass(1000.0 * attempt)
        assert plan is not None
        limit_s = job.machine.patience.limit_s(2, PassWork(8, 8.0))
        job.tell(interface.StageWorking("b", 2, plan.number, limit_s + 1.0, fence=job.fence))
        if attempt < 2:
            assert job.machine.lost == frozenset()
            again(job)
    assert job.machine.lost == {"b"}
    assert job.machine.roles.places[2] == "g"


def test_a_stage_still_busy_with_an_earlier_round_keeps_its_place_while_it_loads() -> None:
    job = running()
    job.tell(LinkBroken("a", "b", "x", fence=job.fence))
    job.enlist()
    for second in range(1, 100):
        job.tell(interface.StageWorking("b", 2, 5, float(second), fence=job.fence), interface.Tick(float(second)))
    assert job.machine.lost == frozenset()
    for second in range(100, 1000):
        job.tell(interface.StageWorking("b", 2, 5, float(second), fence=job.fence), interface.Tick(float(second)))
    assert "b" in job.machine.lost, "it never ends"


def test_one_pass_that_went_astray_is_missed_while_others_come_back() -> None:
    job, _ = slow_job()
    limit_s = job.machine.patience.whole_s(())
    seconds = 0.0
    while job.phase is ServingPhase.RUNNING:
        seconds += 1.0
        assert seconds < 3 * limit_s
        job.tell(interface.StageWorking("a", 1, -1, 0.0, fence=job.fence), interface.Tick(seconds))
    assert seconds >= limit_s


def slow_roles(token_s: float) -> ServingRoles:
    return replace(roles(), predicted_s=dict.fromkeys(range(5), token_s))
