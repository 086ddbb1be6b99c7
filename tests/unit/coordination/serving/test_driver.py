"""The serving machine: barriers of a round, who takes a stage over, what is rebuilt from where, plans beside passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusionai.coordination.round.interface import (
    AskPlan,
    DriverEvent,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    ReportFault,
    StageFailure,
    StopAsked,
)
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.state import ServingPhase
from fusionai.wire.base import Fence
from harness.serving_job import PLACES, Job, decoding, rebuilding, roles, running


def test_passes_go_only_when_all_is_loaded_and_two_probes_are_equal() -> None:
    job = Job(roles())
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1,), max_tokens=1), 0.0)
    assert job.of(interface.BeginRound)[0].fence == Fence(1, 7, 0)
    job.enlist()
    loads = job.of(interface.SendLoad)
    assert {(load.peer, load.stage) for load in loads} == {(peer, stage) for stage, peer in PLACES.items()}
    assert all(load.fresh and not load.standby for load in loads)
    assert job.machine.next_pass(0.0) is None
    job.load()
    assert len(job.of(interface.SendProbePass)) == 2
    assert job.machine.next_pass(0.0) is None
    job.probe("x", "x")
    assert job.of(interface.ReportState)[0].state == "ready"
    assert [(load.peer, load.stage, load.standby) for load in job.of(interface.SendLoad)] == [("g", 2, True)]
    assert job.machine.next_pass(0.0) is not None


def test_other_bits_the_second_time_end_the_job() -> None:
    job = Job(roles())
    job.enlist()
    job.load()
    job.probe("x", "y")
    assert job.phase is ServingPhase.ENDED
    assert "other bits" in (job.of(EndJob)[0].failed or "")


def test_a_standby_that_does_not_answer_holds_nobody_up() -> None:
    job = Job(roles())
    job.tell(*(MemberEnlisted(peer, fence=job.fence) for peer in ("me", "a", "b", "c")))
    job.load()
    assert job.phase is ServingPhase.PROBING


@pytest.mark.parametrize("loaded", [False, True])
def test_a_standby_that_answers_late_loads_once_passes_run(loaded: bool) -> None:
    job = Job(roles())
    job.tell(*(MemberEnlisted(peer, fence=job.fence) for peer in ("me", "a", "b", "c")))
    if loaded:
        job.load()
    job.tell(MemberEnlisted("g", fence=job.fence))
    if not loaded:
        job.load()
    job.probe("x", "x")
    assert [(load.peer, load.stage, load.standby) for load in job.of(interface.SendLoad)] == [("g", 2, True)]


def test_a_standby_takes_over_at_once_and_its_cache_is_rebuilt_from_the_stage_before() -> None:
    job = running()
    computed = decoding(job)
    job.tell(PeerLost("b", "silent"))
    told, begun, asked = job.of(ReportFault)[0], job.of(interface.BeginRound)[0], job.of(AskPlan)[0]
    assert told.successors == {2: "g"}
    assert begun.fence == Fence(1, 7, 1)
    assert begun.roles.places[2] == "g"
    assert begun.roles.standbys == {}
    assert (asked.urgent, asked.without) == (False, frozenset({"b"}))
    assert job.of(interface.Dismiss)[0].peer == "b"
    job.enlist()
    assert {load.stage for load in job.of(interface.SendLoad) if load.fresh} == {2}
    job.load({1: ((1, computed),), 3: ((1, computed),)})
    (rebuild,) = job.of(interface.SendRebuild)
    assert (rebuild.source, rebuild.through, rebuild.tokens) == (1, 2, ())
    assert [(one.session, one.start, one.length) for one in rebuild.segments] == [(1, 0, computed)]
    assert len(job.of(interface.SendProbePass)) == 1
    job.rebuild()
    assert job.phase is ServingPhase.PROBING
    job.probe("other bits", distance=0.05)
    assert job.phase is ServingPhase.RUNNING
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert (plan.tokens, plan.segments[0].start, plan.segments[0].first_page) == ((8,), computed, 0)


def test_contiguous_lost_stages_are_rebuilt_in_one_run_others_in_their_own() -> None:
    job = running(roles(standbys={1: "g", 3: "h"}))
    computed = decoding(job)
    job.tell(PeerLost("a", "x"), PeerLost("c", "x"))
    job.enlist()
    job.load({2: ((1, computed),)})
    assert [(one.source, one.through) for one in job.of(interface.SendRebuild)] == [(0, 1), (2, 3)]
    both = running(roles(standbys={1: "g", 2: "h"}))
    decoding(both)
    both.tell(PeerLost("a", "x"), PeerLost("b", "x"))
    both.enlist()
    both.load({3: ((1, computed),)})
    assert [(one.source, one.through) for one in both.of(interface.SendRebuild)] == [(0, 2)]


def test_with_nobody_before_the_lost_stage_the_tokens_are_sent() -> None:
    given = ServingRoles(version=1, owner="me", places={0: "a", 1: "b"}, standbys={0: "g"}, caching=frozenset({0, 1}))
    job = running(given)
    computed = decoding(job)
    job.tell(PeerLost("a", "x"))
    job.enlist()
    job.load({1: ((1, computed),)})
    (rebuild,) = job.of(interface.SendRebuild)
    assert (rebuild.source, rebuild.through, rebuild.tokens) == (-1, 0, (5,) * 6)


def test_what_a_returned_peer_says_of_its_cache_does_not_count() -> None:
    job = running(roles(standbys={}))
    computed = decoding(job)
    job.tell(PeerLost("b", "frozen"))
    assert job.phase is ServingPhase.WAITING
    assert job.of(AskPlan)[0].urgent
    job.tell(interface.PlanGiven(roles(2, standbys={}), frozenset({"b"})))
    assert job.fence == Fence(2, 7, 1)
    job.enlist()
    job.load(dict.fromkeys((1, 2, 3), ((1, computed),)))
    assert [(one.source, one.through) for one in job.of(interface.SendRebuild)] == [(1, 2)]


@pytest.mark.parametrize("cut", ["", "another"])
def test_a_stage_that_moved_away_and_back_before_passes_ran_has_no_cache(cut: str) -> None:
    """Whoever a round does not place with a stage, or with a stage of another cut, drops it."""
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(replace(roles(2, standbys={}, s2="n"), partition=cut)))
    for standing in job.of(interface.EnlistStandby):
        job.tell(MemberEnlisted("n", fence=standing.fence), interface.StandbyLoaded("n", 2, fence=standing.fence))
    assert job.machine.roles.places[2] == "n"
    job.tell(PeerLost("n", "silent"), interface.PlanGiven(roles(3, standbys={}), frozenset({"n"})))
    job.enlist()
    fresh = {load.stage for load in job.of(interface.SendLoad) if load.fresh}
    assert fresh == ({2} if cut == "" else set(PLACES))
    job.load()
    assert job.of(interface.SendProbePass)


def test_who_waits_is_told_for_what_and_whose_loss_it_is() -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(PeerLost("c", "it ended a connection."))
    (told,) = job.of(interface.ReportState)
    assert (told.state, told.detail) == ("recovering", "lost c (it ended a connection)")
    job.tell(PeerLost("b", "frozen"))
    (told,) = job.of(interface.ReportState)
    assert (told.state, told.detail) == ("waiting", "waiting for a machine to run stage 2: lost b (frozen)")


def test_a_broken_link_is_a_round_without_rebuild_or_probe_and_the_second_costs_a_peer() -> None:
    job = running()
    computed = decoding(job)
    job.tell(LinkBroken("a", "b", "reset", fence=job.fence))
    assert job.phase is ServingPhase.ENLISTING
    job.enlist()
    job.load(dict.fromkeys((1, 2, 3), ((1, computed),)))
    assert job.phase is ServingPhase.RUNNING
    job.tell(LinkBroken("b", "a", "reset", fence=job.fence))
    assert job.of(ReportFault)[0].peer == "b"
    assert job.machine.roles.places[2] == "g"


def test_a_pass_that_came_back_forgives_the_link() -> None:
    job = running()
    for number in (1, 2):
        computed = decoding(job, number)
        job.tell(LinkBroken("a", "b", "reset", fence=job.fence))
        assert not job.of(AskPlan)
        job.enlist()
        live = tuple((one, computed) for one in job.batcher.live)
        job.load(dict.fromkeys((1, 2, 3), live))
        job.batcher.cancel(number)


def test_messages_of_older_rounds_change_nothing() -> None:
    job = running()
    decoding(job)
    old = job.fence
    job.batcher.submit(SessionSpec(number=2, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    job.tell(LinkBroken("a", "b", "reset", fence=old))
    late: tuple[DriverEvent, ...] = (
        MemberEnlisted("a", fence=old),
        interface.StageLoaded("a", 1, fence=old),
        interface.StandbyLoaded("g", 2, fence=old),
        LinkBroken("c", "b", "reset", fence=old),
        interface.PassFailure(plan.number, 1, "late", fence=old),
        StageFailure(1, "late", peer="a", fence=old),
    )
    assert job.tell(*late) == []
    assert job.machine.returned(old, plan.number, {2: (9,)}, (), 0.0) == frozenset()


def test_a_probe_that_is_back_before_all_is_rebuilt_is_waited_for_no_more() -> None:
    job = rebuilding()
    assert job.probe("x") == []
    assert job.phase is ServingPhase.REBUILDING
    assert job.machine.next_pass(0.0) is None
    job.rebuild()
    assert job.phase is ServingPhase.RUNNING


def test_a_probe_too_far_off_counts_while_caches_are_rebuilt_too() -> None:
    job = rebuilding()
    job.probe("z", distance=float("nan"))
    assert job.phase is ServingPhase.WAITING
    assert job.of(ReportFault)[0].kind == "probe"


def test_a_probe_that_fails_while_caches_are_rebuilt_is_a_fault_of_that_stage() -> None:
    job = rebuilding()
    (number,) = job.machine.rounds.probes
    job.tell(interface.PassFailure(number, 3, "no pages", fence=job.fence))
    assert job.phase is ServingPhase.ENLISTING
    assert job.of(ReportFault)[0].stages == (3,)


def test_a_probe_too_far_off_after_a_takeover_costs_whoever_is_new() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}))
    job.tell(PeerLost("b", "x"))
    job.enlist()
    job.load()
    job.probe("z", distance=float("nan"))
    assert job.phase is ServingPhase.WAITING
    assert job.of(ReportFault)[0].kind == "probe"
    assert job.of(AskPlan)[0].without == {"b", "g"}


def test_other_standbys_cost_no_round_and_passes_go_on() -> None:
    job = running(roles(standbys={}))
    fence = job.fence
    job.tell(interface.PlanGiven(roles(2, standbys={2: "n"})))
    (brought,) = job.of(interface.EnlistStandby)
    assert (brought.peer, brought.fence) == ("n", Fence(2, 7, 0))
    assert job.fence == fence
    job.tell(MemberEnlisted("n", fence=brought.fence))
    (load,) = job.of(interface.SendLoad)
    assert (load.peer, load.stage, load.standby, load.fence) == ("n", 2, True, brought.fence)
    job.tell(interface.StandbyLoaded("n", 2, fence=brought.fence))
    assert job.machine.is_warm(2)
    assert job.phase is ServingPhase.RUNNING
    job.tell(PeerLost("b", "x"))
    assert job.fence == Fence(2, 7, 1)
    assert job.machine.roles.places[2] == "n"


def test_a_plan_that_moves_a_stage_waits_until_its_new_holder_has_loaded() -> None:
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="n")))
    assert job.phase is ServingPhase.RUNNING
    fence = job.of(interface.EnlistStandby)[0].fence
    job.tell(MemberEnlisted("n", fence=fence))
    assert job.phase is ServingPhase.RUNNING
    job.tell(interface.StandbyLoaded("n", 2, fence=fence))
    assert job.fence == Fence(2, 7, 1)
    assert [command.peer for command in job.of(interface.Dismiss)] == ["b"]


def test_a_plan_with_somebody_lost_since_is_void() -> None:
    job = running()
    job.tell(PeerLost("b", "x"))
    assert job.tell(interface.PlanGiven(roles(2))) == []
    job.tell(interface.PlanGiven(roles(3, standbys={}, s2="g")))
    assert job.machine.roles.version == 3


def test_a_standby_that_is_given_another_stage_is_enlisted_for_both_before_it_loads() -> None:
    """It takes no stage that it was not told to stand by for."""
    job = running()
    fence = job.fence
    job.tell(interface.PlanGiven(roles(2, standbys={1: "g", 2: "g"})))
    (anew,) = job.of(interface.EnlistStandby)
    assert (anew.peer, anew.fence, anew.roles.standby_of("g")) == ("g", Fence(2, 7, 0), (1, 2))
    assert job.of(interface.SendLoad) == []
    job.tell(MemberEnlisted("g", fence=anew.fence))
    assert [(load.peer, load.stage, load.fence) for load in job.of(interface.SendLoad)] == [("g", 1, anew.fence)]
    job.tell(interface.StandbyLoaded("g", 1, fence=anew.fence))
    assert job.machine.is_warm(1)
    assert job.machine.is_warm(2)
    assert job.fence == fence


def test_whoever_is_to_take_a_stage_over_is_told_to_standby_it_until_then() -> None:
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="n")))
    (brought,) = job.of(interface.EnlistStandby)
    assert brought.roles.standby_of("n") == (2,)
    assert brought.roles.places == PLACES


def test_a_stage_that_moves_to_whoever_runs_another_moves_at_once() -> None:
    """It can't be prepared beside the round that it takes part in."""
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="a")))
    assert job.fence == Fence(2, 7, 1)


def test_what_a_standby_was_not_told_to_keep_is_not_warm() -> None:
    job = running(roles(standbys={1: "g", 2: "g"}))
    job.tell(interface.PlanGiven(roles(2, standbys={2: "g"})))
    job.tell(LinkBroken("a", "b", "x", fence=job.fence))
    job.enlist()
    job.load()
    assert job.phase is ServingPhase.RUNNING
    job.tell(interface.PlanGiven(roles(3, standbys={1: "g", 2: "g"})))
    assert not job.machine.is_warm(1)
    assert job.machine.is_warm(2)


def test_whoever_leaves_hands_over_to_its_warm_standby() -> None:
    job = running()
    job.tell(interface.MemberLeaving("b"))
    assert job.machine.roles.places[2] == "g"
    assert job.of(interface.BeginRound)
    assert "b" in {command.peer for command in job.of(interface.Dismiss)}
    cold = running(warm=False)
    cold.tell(interface.MemberLeaving("b"))
    assert cold.phase is ServingPhase.RUNNING
    assert cold.of(AskPlan)[0].without == {"b"}
    cold.tell(interface.StandbyLoaded("g", 2, fence=cold.fence))
    assert cold.machine.roles.places[2] == "g"


def test_a_failed_rebuild_or_none_retained_reads_sessions_again() -> None:
    for retain in (True, False):
        job = running(retain=retain)
        computed = decoding(job)
        job.tell(PeerLost("b", "x"))
        job.enlist()
        job.load({1: ((1, computed),), 3: ((1, computed),)})
        if retain:
            (rebuild,) = job.of(interface.SendRebuild)
            job.tell(interface.PassFailure(rebuild.number, rebuild.source, "nothing retained", fence=job.fence))
            job.enlist()
            job.load()
        assert not job.of(interface.SendRebuild)
        job.probe("x")
        plan = job.machine.next_pass(0.0)
        assert plan is not None
        assert plan.tokens == (*(5,) * 6, 8)


def test_a_failure_of_a_rebuild_that_is_over_changes_nothing() -> None:
    job = rebuilding()
    job.tell(interface.PassFailure(max(job.machine.rounds.rebuilds) + 100, 1, "late", fence=job.fence))
    assert (job.phase, job.given) == (ServingPhase.REBUILDING, [])


def test_a_rebuild_is_over_when_the_last_position_of_each_session_is_there() -> None:
    job = rebuilding()
    ((number, (_, left)),) = job.machine.rounds.rebuilds.items()
    ((session, end),) = left.items()
    job.tell(interface.CacheRebuilt(number, session, end - 1, fence=job.fence))
    assert job.machine.rounds.rebuilds
    job.tell(interface.CacheRebuilt(number, session, end, fence=job.fence))
    assert not job.machine.rounds.rebuilds


def test_a_failed_pass_is_tried_once_more_then_its_session_fails_alone() -> None:
    job = running()
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    for told in (0, 1):
        plan = job.machine.next_pass(0.0)
        assert plan is not None
        job.tell(interface.PassFailure(plan.number, 2, "no memory", fence=job.fence))
        assert len(job.of(interface.FailSessions)) == told
    assert job.of(interface.FailSessions)[0].sessions == (1,)
    assert job.phase is ServingPhase.RUNNING


@pytest.mark.parametrize("phase", ["enlisting", "loading"])
def test_whoever_does_not_come_along_in_time_is_replaced(phase: str) -> None:
    job = Job(roles())
    job.tell(interface.Tick(0.0))
    if phase == "loading":
        job.enlist()
        others = {stage: peer for stage, peer in PLACES.items() if stage != 2}
        job.tell(*(interface.StageLoaded(peer, stage, fence=job.fence) for stage, peer in others.items()))
    else:
        job.tell(*(MemberEnlisted(peer, fence=job.fence) for peer in ("me", "a", "c", "g")))
    job.tell(interface.Tick(100.0))
    assert not job.of(ReportFault)
    job.tell(interface.Tick(161.0))
    assert [(told.kind, told.peer) for told in job.of(ReportFault)] == [("late", "b")]
    assert job.machine.roles.places[2] == "g"


def test_signs_of_loading_put_the_deadline_off() -> None:
    job = Job(roles())
    job.enlist()
    for second in range(0, 300, 50):
        job.tell(interface.Tick(float(second)), interface.LoadProgressed("b", 2, fence=job.fence))
        assert not job.of(ReportFault)


def test_a_stage_that_only_says_that_it_loads_is_not_waited_for_for_ever() -> None:
    job = Job(roles())
    job.enlist()
    for second in range(0, 1800, 50):
        job.tell(interface.Tick(float(second)), interface.LoadProgressed("b", 2, 700, fence=job.fence))
        assert not job.of(ReportFault)
    for second in range(1800, 2000, 50):
        job.tell(interface.LoadProgressed("b", 2, 700, fence=job.fence), interface.Tick(float(second)))
    assert "b" in job.machine.lost


def test_a_pass_that_never_comes_back_begins_a_round() -> None:
    job = running()
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    assert job.machine.next_pass(0.0) is not None
    job.tell(interface.Tick(29.0))
    assert job.phase is ServingPhase.RUNNING
    job.tell(interface.Tick(31.0))
    assert job.phase is ServingPhase.ENLISTING


def test_stopping_ends_it_from_everywhere() -> None:
    for job in (Job(roles()), running()):
        job.tell(StopAsked("asked to"))
        assert job.of(EndJob)[0].stopped == "asked to"
        assert job.tell(PeerLost("b", "x"), interface.Tick(1.0)) == []


def test_the_driver_samples_for_whoever_is_in_a_pass_of_this_round() -> None:
    job = running()
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert job.batcher.sessions_of(plan.number) == (1,)
    assert job.machine.returned(Fence(1, 7, 9), plan.number, {1: (9,)}, (), 0.0) == frozenset()


def told_to_forget(job: Job) -> set[int]:
    """By what was sent last: probes, else by the next pass."""
    probes = job.of(interface.SendProbePass)
    if probes:
        return {session for probe in probes for session in probe.forget}
    job.batcher.submit(SessionSpec(number=99, scope="", prompt=(1, 2), max_tokens=3), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    return set(plan.forget)


def test_what_a_stage_still_has_of_sessions_that_are_over_is_forgotten_and_of_no_others() -> None:
    job = running()
    computed = decoding(job)
    job.tell(LinkBroken("a", "b", "x", fence=job.fence))
    job.enlist()
    job.load({1: ((1, computed), (77, 5)), 2: ((1, computed), (78, 5)), 3: ((1, computed),)})
    assert told_to_forget(job) == {77, 78}


def test_what_a_probe_told_to_forget_is_told_again_unless_it_came_back() -> None:
    """A round that ends before has reached nobody knows how many stages."""
    job = running()
    decoding(job)
    job.batcher.cancel(1)
    job.tell(PeerLost("b", "x"))
    job.enlist()
    job.load()
    assert told_to_forget(job) == {1}
    job.tell(LinkBroken("a", "c", "x", fence=job.fence))
    job.enlist()
    job.load()
    assert told_to_forget(job) == {1}
    job.probe("x")
    assert told_to_forget(job) == set()


def test_what_a_probe_told_to_forget_is_told_again_where_it_failed() -> None:
    job = running()
    decoding(job)
    job.batcher.cancel(1)
    job.tell(PeerLost("b", "x"))
    job.enlist()
    job.load()
    job.tell(interface.PassFailure(max(job.machine.rounds.probes), 3, "no memory", fence=job.fence))
    job.enlist()
    job.load()
    assert told_to_forget(job) == {1}


def test_what_a_pass_told_to_forget_is_told_again_after_the_round_it_was_lost_in() -> None:
    job = running()
    decoding(job)
    job.batcher.hold(1)
    decoding(job, 2)
    job.batcher.cancel(1)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert plan.forget == (1,)
    job.tell(LinkBroken("a", "b", "x", fence=job.fence))
    job.enlist()
    job.load(dict.fromkeys((1, 2, 3), ((2, 6),)))
    assert told_to_forget(job) == {1}


@pytest.mark.parametrize("lost", [True, False])
def test_a_prefix_is_found_again_unless_a_stage_lost_its_cache(lost: bool) -> None:
    """What living sessions don't have is computed again nowhere."""
    job = running()
    decoding(job)
    job.batcher.cancel(1)
    job.tell(PeerLost("b", "x") if lost else LinkBroken("a", "b", "x", fence=job.fence))
    job.enlist()
    job.load()
    if lost:
        job.probe("x")
    job.batcher.submit(SessionSpec(number=2, scope="", prompt=(5,) * 6, max_tokens=9), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert plan.segments[0].start == (0 if lost else 4)


def test_a_stage_may_have_loaded_before_all_have_answered() -> None:
    job = Job(roles())
    job.tell(MemberEnlisted("a", fence=job.fence), interface.StageLoaded("a", 1, fence=job.fence))
    job.tell(*(MemberEnlisted(peer, fence=job.fence) for peer in ("me", "b", "c")))
    assert job.phase is ServingPhase.LOADING
    job.tell(*(interface.StageLoaded(peer, stage, fence=job.fence) for stage, peer in PLACES.items() if peer != "a"))
    assert job.phase is ServingPhase.PROBING


def test_what_somebody_without_a_part_says_does_not_count() -> None:
    """Nor later, when it gets one."""
    job = running(roles(standbys={}))
    assert job.tell(interface.StandbyLoaded("n", 2, fence=job.fence)) == []
    job.tell(interface.PlanGiven(roles(2, standbys={2: "n"})))
    assert not job.machine.is_warm(2)
    assert [command.peer for command in job.of(interface.EnlistStandby)] == ["n"]


def test_a_result_that_comes_while_the_job_waits_or_is_over_counts_for_nobody() -> None:
    """Its fence is still that of the last round."""
    for end in (PeerLost("b", "x"), StopAsked("asked to")):
        job = running(roles(standbys={}))
        job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1, 2), max_tokens=3), 0.0)
        plan = job.machine.next_pass(0.0)
        assert plan is not None
        fence = job.fence
        job.tell(end)
        assert job.fence == fence
        assert job.batcher.sessions_of(plan.number) == ()
        assert job.machine.returned(fence, plan.number, {1: (9,)}, (), 0.0) == frozenset()
        assert job.machine.next_pass(0.0) is None


def test_times_of_another_round_are_not_measured() -> None:
    job = running()
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(1,) * 4, max_tokens=2), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    times = job.machine.patience.times
    before = repr(times)
    job.machine.measured(Fence(1, 7, job.fence.attempt + 1), plan.number, 1, 3.0)
    assert repr(times) == before
    job.machine.measured(job.fence, plan.number, 1, 3.0)
    assert repr(times) != before


def test_what_comes_too_late_is_no_sign_of_progress() -> None:
    job = running()
    decoding(job)
    assert job.machine.next_pass(1.0) is not None
    patience = job.machine.patience
    patience.progressed(1.0)
    assert job.tell(interface.StageLoaded("a", 1, fence=job.fence)) == []
    assert patience.idle_s(5.0, nothing_sent=False) == 4.0


def test_the_story_leaves_ticks_out() -> None:
    job = running()
    tick = interface.Tick(1.0)
    assert job.machine.brief(tick) == ""
    assert job.machine.brief(StopAsked("enough")) == repr(StopAsked("enough"))


def test_other_weights_are_loaded_in_a_round_that_keeps_every_cache() -> None:
    """The standby is warm again once it has them too, and a probe crosses the stages although none is new."""
    job = running()
    computed = decoding(job)
    assert job.machine.is_warm(2)
    job.tell(interface.WeightsReplaced("an adapter is loaded"))
    assert (job.of(interface.ReportState)[0].state, job.of(ReportFault)) == ("recovering", [])
    assert not job.machine.is_warm(2)
    job.enlist()
    loads = job.of(interface.SendLoad)
    assert {(load.peer, load.stage) for load in loads} == {(peer, stage) for stage, peer in PLACES.items()}
    assert not any(load.fresh for load in loads)
    job.load(dict.fromkeys((1, 2, 3), ((1, computed),)))
    assert not job.of(interface.SendRebuild)
    assert len(job.of(interface.SendProbePass)) == 1
    assert job.machine.next_pass(0.0) is None
    job.probe("x")
    assert [(load.peer, load.stage, load.standby) for load in job.of(interface.SendLoad)] == [("g", 2, True)]
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert plan.segments[0].start == computed


def test_weights_that_come_while_a_machine_is_waited_for_are_loaded_with_the_next_plan() -> None:
    job = running(roles(standbys={}))
    job.tell(PeerLost("b", "x"))
    assert job.phase is ServingPhase.WAITING
    assert job.tell(interface.WeightsReplaced("an adapter is loaded")) == []
    assert job.phase is ServingPhase.WAITING
