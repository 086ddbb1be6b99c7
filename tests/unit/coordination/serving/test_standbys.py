"""The serving machine's standbys and plans: who loads what beside passes, when a stage moves, who leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusionai.coordination.serving import commands, events
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.coordination.serving.state import ServingPhase
from fusionai.wire.base import Fence
from harness.serving_job import Job, roles, running


def again(job: Job) -> None:
    """The round comes to its end: passes run."""
    job.enlist()
    job.load()
    if job.machine.rounds.probes:
        job.probe(*["x"] * len(job.machine.rounds.probes))
    assert job.phase is ServingPhase.RUNNING


def brought(job: Job, peer: str) -> Fence:
    """Enlisted beside the round, now."""
    (fence,) = [command.fence for command in job.of(commands.EnlistStandby) if command.peer == peer]
    job.tell(events.MemberEnlisted(fence, peer))
    return fence


def loads(job: Job) -> list[tuple[str, int]]:
    return [(load.peer, load.stage) for load in job.of(commands.SendLoad)]


# ------------------------------------------------------------------------------------------------------------- standbys


def test_a_standby_is_asked_to_load_once_however_often_plans_come() -> None:
    job = running(warm=False)
    job.tell(events.PlanGiven(roles(2)))
    assert job.given == []
    job.tell(events.StandbyLoaded(job.fence, "g", 2), events.PlanGiven(roles(3)))
    assert job.given == []


def test_a_standby_that_is_enlisted_anew_is_asked_again_for_what_it_has_not_loaded_and_others_are_not() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    job.tell(events.PlanGiven(roles(2, standbys={1: "g", 2: "g", 3: "h"})))
    assert loads(job) == []
    brought(job, "g")
    assert loads(job) == [("g", 1), ("g", 2)]


def test_a_standby_that_came_back_has_to_load_again_and_others_are_as_warm_as_before() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}))
    job.tell(events.PeerLost("g", "x"))
    assert (job.machine.is_warm(2), job.machine.is_warm(3)) == (False, True)
    job.tell(events.PlanGiven(roles(2, standbys={2: "g", 3: "h"}), frozenset({"g"})))
    fence = brought(job, "g")
    assert loads(job) == [("g", 2)]
    assert not job.machine.is_warm(2)
    job.tell(events.StandbyLoaded(fence, "g", 2))
    assert job.machine.is_warm(2)


def test_a_standby_that_was_asked_and_came_back_is_asked_again_and_others_are_not() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    job.tell(events.PeerLost("g", "x"))
    job.tell(events.PlanGiven(roles(2, standbys={2: "g", 3: "h"}), frozenset({"g"})))
    brought(job, "g")
    assert loads(job) == [("g", 2)]


def test_whoever_runs_a_stage_is_told_to_standby_another_in_the_next_round_only() -> None:
    job = running(roles(standbys={}))
    job.tell(events.PlanGiven(roles(2, standbys={2: "a"})))
    assert job.given == []
    job.tell(events.LinkBroken(job.fence, "b", "c", "x"))
    again(job)
    assert loads(job) == [("a", 2)]


def test_weights_for_a_stage_of_another_cut_are_of_no_use() -> None:
    job = running()
    job.tell(events.PlanGiven(replace(roles(2), partition="another")))
    assert not job.machine.is_warm(2)
    assert job.phase is ServingPhase.ENLISTING, "nothing of another cut can be prepared"
    again(job)
    assert loads(job) == [("g", 2)]


def test_the_same_cut_s_weights_are_kept() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}))
    job.tell(events.PeerLost("c", "x"), events.PlanGiven(roles(2, standbys={2: "g"}, s3="h")))
    assert job.machine.is_warm(2)


# -------------------------------------------------------------------------------------------------------------- plans


def test_a_version_that_is_known_changes_nothing() -> None:
    job = running(roles(version=2))
    for version in (1, 2):
        assert job.tell(events.PlanGiven(roles(version, standbys={2: "n"}))) == []
    job.tell(events.PlanGiven(roles(3, standbys={}, s2="n")))
    assert job.tell(events.PlanGiven(roles(3, standbys={}, s2="m"))) == []


def test_a_standby_of_one_stage_that_is_to_take_another_gets_it_by_the_round_alone() -> None:
    """It goes by the round's plan: what a later one told it would make the round stale to it."""
    job = running(roles(standbys={3: "g"}))
    job.tell(events.PlanGiven(roles(2, standbys={}, s2="g")))
    assert job.of(commands.EnlistStandby) == []
    assert job.fence == Fence(2, 7, 1)


def test_a_standby_that_is_to_take_its_own_stage_loads_it_first() -> None:
    job = running(warm=False)
    job.tell(events.PlanGiven(roles(2, standbys={}, s2="g")))
    assert (job.of(commands.EnlistStandby), job.phase) == ([], ServingPhase.RUNNING)
    job.tell(events.StandbyLoaded(job.fence, "g", 2))
    assert job.machine.roles.places[2] == "g"
    assert job.fence == Fence(2, 7, 1)


def test_the_owner_is_never_brought_in_beside_a_round() -> None:
    job = running(ServingRoles(version=1, owner="me", places={0: "a", 1: "b"}, caching=frozenset({0, 1})))
    job.tell(events.PlanGiven(ServingRoles(version=2, owner="me", places={0: "a", 1: "me"}, caching=frozenset({0, 1}))))
    assert job.of(commands.EnlistStandby) == []
    assert job.machine.roles.places[1] == "me"


def test_a_plan_that_came_during_a_round_is_prepared_after_it() -> None:
    job = running()
    job.tell(events.LinkBroken(job.fence, "a", "b", "x"), events.PlanGiven(roles(2, s2="n", standbys={})))
    assert job.of(commands.EnlistStandby) == []
    again(job)
    fence = brought(job, "n")
    job.tell(events.StandbyLoaded(fence, "n", 2))
    assert job.machine.roles.places[2] == "n"


def test_a_plan_without_moves_replaces_one_that_was_being_prepared() -> None:
    job = running()
    job.tell(events.PlanGiven(roles(2, s2="n", standbys={})))
    fence = brought(job, "n")
    job.tell(events.PlanGiven(roles(3)))
    assert [gone.peer for gone in job.of(commands.Dismiss)] == ["n"]
    job.tell(events.StandbyLoaded(fence, "n", 2))
    assert job.machine.roles.places[2] == "b"


def test_another_cut_moves_every_stage() -> None:
    assert roles().moves(replace(roles(2), partition="another"))
    assert roles().moves(roles(2, s2="n"))
    assert not roles().moves(roles(2, standbys={}))


# ------------------------------------------------------------------------------------------------------------ leaving


def test_the_owner_and_strangers_don_t_leave_and_nobody_leaves_twice() -> None:
    job = running(warm=False)
    assert job.tell(events.MemberLeaving("me"), events.MemberLeaving("somebody")) == []
    assert len(job.tell(events.MemberLeaving("b"))) == 1
    assert job.tell(events.MemberLeaving("b")) == []


def test_a_standby_leaves_at_once_and_without_a_round() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    fence = job.fence
    job.tell(events.MemberLeaving("g"))
    assert [gone.peer for gone in job.of(commands.Dismiss)] == ["g"]
    assert [(asked.without, asked.urgent) for asked in job.of(commands.AskPlan)] == [({"g"}, False)]
    job.tell(events.StandbyLoaded(fence, "h", 3))
    assert (job.fence, job.machine.roles.standbys) == (fence, {3: "h"})


def test_nothing_is_handed_over_to_somebody_who_leaves_too() -> None:
    job = running(roles(standbys={2: "a"}))
    assert job.machine.is_warm(2)
    job.tell(events.MemberLeaving("a"), events.MemberLeaving("b"))
    assert job.phase is ServingPhase.RUNNING
    assert job.of(commands.AskPlan)[-1].without == {"a", "b"}


def test_whoever_runs_two_stages_leaves_when_both_have_warm_standbys() -> None:
    job = running(roles(standbys={1: "g", 2: "h"}, s2="a"), warm=False)
    job.tell(events.StandbyLoaded(job.fence, "g", 1), events.MemberLeaving("a"))
    assert job.phase is ServingPhase.RUNNING
    job.tell(events.StandbyLoaded(job.fence, "h", 2))
    assert {job.machine.roles.places[stage] for stage in (1, 2)} == {"g", "h"}


@pytest.mark.parametrize("leaver", ["n", "g"])
def test_a_plan_is_void_when_one_it_counts_on_leaves_and_only_then(leaver: str) -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(events.PlanGiven(roles(2, s2="n", standbys={})))
    fence = brought(job, "n")
    job.tell(events.MemberLeaving(leaver))
    job.tell(events.StandbyLoaded(fence, "n", 2))
    assert job.machine.roles.places[2] == ("b" if leaver == "n" else "n")


def test_who_leaves_while_the_job_waits_makes_a_plan_urgent() -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(events.PeerLost("b", "x"), events.MemberLeaving("g"), events.MemberLeaving("a"))
    assert [asked.urgent for asked in job.of(commands.AskPlan)] == [True, True, True]
    assert job.of(commands.AskPlan)[-1].without == {"b", "g", "a"}
