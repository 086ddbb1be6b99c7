"""The serving machine's standbys and plans: who loads what beside passes, when a stage moves, who leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusionai.coordination.round.interface import AskPlan, LinkBroken, MemberEnlisted, PeerLost
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingRoles
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
    (fence,) = [command.fence for command in job.of(interface.EnlistStandby) if command.peer == peer]
    job.tell(MemberEnlisted(peer, fence=fence))
    return fence


def loads(job: Job) -> list[tuple[str, int]]:
    return [(load.peer, load.stage) for load in job.of(interface.SendLoad)]


# ------------------------------------------------------------------------------------------------------------- standbys


def test_a_standby_is_asked_to_load_once_however_often_plans_come() -> None:
    job = running(warm=False)
    job.tell(interface.PlanGiven(roles(2)))
    assert job.given == []
    job.tell(interface.StandbyLoaded("g", 2, fence=job.fence), interface.PlanGiven(roles(3)))
    assert job.given == []


def test_a_standby_that_is_enlisted_anew_is_asked_again_for_what_it_has_not_loaded_and_others_are_not() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    job.tell(interface.PlanGiven(roles(2, standbys={1: "g", 2: "g", 3: "h"})))
    assert loads(job) == []
    brought(job, "g")
    assert loads(job) == [("g", 1), ("g", 2)]


def test_a_standby_that_came_back_has_to_load_again_and_others_are_as_warm_as_before() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}))
    job.tell(PeerLost("g", "x"))
    assert (job.machine.is_warm(2), job.machine.is_warm(3)) == (False, True)
    job.tell(interface.PlanGiven(roles(2, standbys={2: "g", 3: "h"}), frozenset({"g"})))
    fence = brought(job, "g")
    assert loads(job) == [("g", 2)]
    assert not job.machine.is_warm(2)
    job.tell(interface.StandbyLoaded("g", 2, fence=fence))
    assert job.machine.is_warm(2)


def test_a_standby_that_was_asked_and_came_back_is_asked_again_and_others_are_not() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    job.tell(PeerLost("g", "x"))
    job.tell(interface.PlanGiven(roles(2, standbys={2: "g", 3: "h"}), frozenset({"g"})))
    brought(job, "g")
    assert loads(job) == [("g", 2)]


def test_whoever_runs_a_stage_is_told_to_standby_another_in_the_next_round_only() -> None:
    job = running(roles(standbys={}))
    job.tell(interface.PlanGiven(roles(2, standbys={2: "a"})))
    assert job.given == []
    job.tell(LinkBroken("b", "c", "x", fence=job.fence))
    again(job)
    assert loads(job) == [("a", 2)]


def test_weights_for_a_stage_of_another_cut_are_of_no_use() -> None:
    job = running()
    job.tell(interface.PlanGiven(replace(roles(2), partition="another")))
    assert not job.machine.is_warm(2)
    assert job.phase is ServingPhase.ENLISTING, "nothing of another cut can be prepared"
    again(job)
    assert loads(job) == [("g", 2)]


def test_the_same_cut_s_weights_are_kept() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}))
    job.tell(PeerLost("c", "x"), interface.PlanGiven(roles(2, standbys={2: "g"}, s3="h")))
    assert job.machine.is_warm(2)


# -------------------------------------------------------------------------------------------------------------- plans


def test_a_version_that_is_known_changes_nothing() -> None:
    job = running(roles(version=2))
    for version in (1, 2):
        assert job.tell(interface.PlanGiven(roles(version, standbys={2: "n"}))) == []
    job.tell(interface.PlanGiven(roles(3, standbys={}, s2="n")))
    assert job.tell(interface.PlanGiven(roles(3, standbys={}, s2="m"))) == []


def test_a_standby_of_one_stage_that_is_to_take_another_gets_it_by_the_round_alone() -> None:
    """It goes by the round's plan: what a later one told it would make the round stale to it."""
    job = running(roles(standbys={3: "g"}))
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="g")))
    assert job.of(interface.EnlistStandby) == []
    assert job.fence == Fence(2, 7, 1)


def test_a_standby_that_is_to_take_its_own_stage_loads_it_first() -> None:
    job = running(warm=False)
    job.tell(interface.PlanGiven(roles(2, standbys={}, s2="g")))
    assert (job.of(interface.EnlistStandby), job.phase) == ([], ServingPhase.RUNNING)
    job.tell(interface.StandbyLoaded("g", 2, fence=job.fence))
    assert job.machine.roles.places[2] == "g"
    assert job.fence == Fence(2, 7, 1)


def test_the_owner_is_never_brought_in_beside_a_round() -> None:
    job = running(ServingRoles(version=1, owner="me", places={0: "a", 1: "b"}, caching=frozenset({0, 1})))
    job.tell(
        interface.PlanGiven(ServingRoles(version=2, owner="me", places={0: "a", 1: "me"}, caching=frozenset({0, 1})))
    )
    assert job.of(interface.EnlistStandby) == []
    assert job.machine.roles.places[1] == "me"


def test_a_plan_that_came_during_a_round_is_prepared_after_it() -> None:
    job = running()
    job.tell(LinkBroken("a", "b", "x", fence=job.fence), interface.PlanGiven(roles(2, s2="n", standbys={})))
    assert job.of(interface.EnlistStandby) == []
    again(job)
    fence = brought(job, "n")
    job.tell(interface.StandbyLoaded("n", 2, fence=fence))
    assert job.machine.roles.places[2] == "n"


def test_a_plan_without_moves_replaces_one_that_was_being_prepared() -> None:
    job = running()
    job.tell(interface.PlanGiven(roles(2, s2="n", standbys={})))
    fence = brought(job, "n")
    job.tell(interface.PlanGiven(roles(3)))
    assert [gone.peer for gone in job.of(interface.Dismiss)] == ["n"]
    job.tell(interface.StandbyLoaded("n", 2, fence=fence))
    assert job.machine.roles.places[2] == "b"


def test_another_cut_moves_every_stage() -> None:
    assert roles().moves(replace(roles(2), partition="another"))
    assert roles().moves(roles(2, s2="n"))
    assert not roles().moves(roles(2, standbys={}))


# ------------------------------------------------------------------------------------------------------------ leaving


def test_the_owner_and_strangers_don_t_leave_and_nobody_leaves_twice() -> None:
    job = running(warm=False)
    assert job.tell(interface.MemberLeaving("me"), interface.MemberLeaving("somebody")) == []
    assert len(job.tell(interface.MemberLeaving("b"))) == 1
    assert job.tell(interface.MemberLeaving("b")) == []


def test_a_standby_leaves_at_once_and_without_a_round() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), warm=False)
    fence = job.fence
    job.tell(interface.MemberLeaving("g"))
    assert [gone.peer for gone in job.of(interface.Dismiss)] == ["g"]
    assert [(asked.without, asked.urgent) for asked in job.of(AskPlan)] == [({"g"}, False)]
    job.tell(interface.StandbyLoaded("h", 3, fence=fence))
    assert (job.fence, job.machine.roles.standbys) == (fence, {3: "h"})


def test_nothing_is_handed_over_to_somebody_who_leaves_too() -> None:
    job = running(roles(standbys={2: "a"}))
    assert job.machine.is_warm(2)
    job.tell(interface.MemberLeaving("a"), interface.MemberLeaving("b"))
    assert job.phase is ServingPhase.RUNNING
    assert job.of(AskPlan)[-1].without == {"a", "b"}


def test_whoever_runs_two_stages_leaves_when_both_have_warm_standbys() -> None:
    job = running(roles(standbys={1: "g", 2: "h"}, s2="a"), warm=False)
    job.tell(interface.StandbyLoaded("g", 1, fence=job.fence), interface.MemberLeaving("a"))
    assert job.phase is ServingPhase.RUNNING
    job.tell(interface.StandbyLoaded("h", 2, fence=job.fence))
    assert {job.machine.roles.places[stage] for stage in (1, 2)} == {"g", "h"}


@pytest.mark.parametrize("leaver", ["n", "g"])
def test_a_plan_is_void_when_one_it_counts_on_leaves_and_only_then(leaver: str) -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(interface.PlanGiven(roles(2, s2="n", standbys={})))
    fence = brought(job, "n")
    job.tell(interface.MemberLeaving(leaver))
    job.tell(interface.StandbyLoaded("n", 2, fence=fence))
    assert job.machine.roles.places[2] == ("b" if leaver == "n" else "n")


def test_who_leaves_while_the_job_waits_makes_a_plan_urgent() -> None:
    job = running(roles(standbys={3: "g"}))
    job.tell(PeerLost("b", "x"), interface.MemberLeaving("g"), interface.MemberLeaving("a"))
    assert [asked.urgent for asked in job.of(AskPlan)] == [True, True, True]
    assert job.of(AskPlan)[-1].without == {"b", "g", "a"}
