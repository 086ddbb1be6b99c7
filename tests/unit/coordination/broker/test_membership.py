"""The membership table, row by row: every (phase, event) pair is either listed here with its target or forbidden."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fusionai.coordination.broker.events import (
    MemberDraining,
    MemberLeft,
    MemberLost,
    MemberRegistered,
    PeerEnrolled,
)
from fusionai.coordination.broker.membership import (
    MEMBERSHIP,
    REMEMBERED_BOOTS,
    REMEMBERED_LOSSES,
    Member,
    Released,
    Reserved,
    enrolled,
    rests_until_s,
    successor,
)
from fusionai.coordination.machine import ForbiddenTransition, rows
from fusionai.primitives.ids import JobId, PeerId

PEER = PeerId("q" * 52)
JOB = JobId("job-1")
EVENTS = {
    "register": MemberRegistered(at_s=1.0, peer=PEER, boot=7, profile=b"p", addresses=("tcp://a:1",)),
    "reserve": Reserved(JOB, (0, 2)),
    "release": Released(),
    "drain": MemberDraining(at_s=1.0, peer=PEER),
    "leave": MemberLeft(at_s=1.0, peer=PEER),
    "lose": MemberLost(at_s=1.0, peer=PEER, boot=7, reason="silent"),
}
ALLOWED = {
    ("joining", "register"): "idle",
    ("joining", "leave"): "left",
    ("idle", "register"): "idle",
    ("idle", "reserve"): "active",
    ("idle", "leave"): "left",
    ("idle", "lose"): "lost",
    ("active", "register"): "active",
    ("active", "reserve"): "active",
    ("active", "release"): "idle",
    ("active", "drain"): "draining",
    ("active", "leave"): "left",
    ("active", "lose"): "lost",
    ("draining", "register"): "draining",
    ("draining", "reserve"): "draining",
    ("draining", "release"): "left",
    ("draining", "leave"): "left",
    ("draining", "lose"): "lost",
    ("lost", "register"): "active",
    ("lost", "release"): "lost",
    ("lost", "leave"): "left",
    ("left", "register"): "idle",
}
PHASES = ("joining", "idle", "active", "draining", "left", "lost")


def _member(phase: str) -> Member:
    held = phase in ("active", "draining", "lost")
    return Member(
        entity="member qqqqqqqq",
        phase=phase,
        peer=PEER,
        boot=7,
        job=JOB if held else None,
        stages=(0, 2) if held else (),
    )


@pytest.mark.parametrize(("phase", "event"), [*product(PHASES, EVENTS)])
def test_every_pair_of_phase_and_event(phase: str, event: str):
    member = _member(phase)
    target = ALLOWED.get((phase, event))
    if target is None:
        with pytest.raises(ForbiddenTransition):
            MEMBERSHIP.advance(member, EVENTS[event])
        return
    moved = MEMBERSHIP.advance(member, EVENTS[event])
    assert moved.phase == target
    keeps_job = target in ("active", "draining") or (event == "lose" and member.job is not None)
    assert (moved.job is not None) == keeps_job
    assert (moved.stages != ()) == (moved.job is not None)


def test_the_table_has_no_other_phase():
    assert {target for _, _, target, _ in rows(MEMBERSHIP)} == set(PHASES)


def test_a_lost_member_without_a_job_comes_back_as_a_spare():
    alone = replace(_member("lost"), job=None, stages=())
    assert MEMBERSHIP.advance(alone, EVENTS["register"]).phase == "idle"


def test_a_spare_that_standbys_has_a_job_and_no_stage():
    guarding = MEMBERSHIP.advance(replace(_member("idle"), standbys=()), Reserved(JOB, (), (1, 3)))
    assert (guarding.phase, guarding.job, guarding.stages, guarding.standbys) == ("active", JOB, (), (1, 3))
    promoted = MEMBERSHIP.advance(guarding, Reserved(JOB, (1,)))
    assert (promoted.stages, promoted.standbys) == ((1,), ())
    freed = MEMBERSHIP.advance(guarding, Released())
    assert (freed.phase, freed.job, freed.standbys) == ("idle", None, ())


def test_who_drains_still_drains_after_a_loss_within_the_same_process_and_a_new_process_does_not():
    draining = MEMBERSHIP.advance(_member("active"), EVENTS["drain"])
    lost = MEMBERSHIP.advance(draining, EVENTS["lose"])
    assert MEMBERSHIP.advance(lost, EVENTS["register"]).phase == "draining"
    released = MEMBERSHIP.advance(lost, Released())
    back = MEMBERSHIP.advance(released, EVENTS["register"])
    assert (back.phase, back.leaving) == ("idle", False)
    fresh = successor(lost, MemberRegistered(at_s=2.0, peer=PEER, boot=8, profile=b"", addresses=()))
    assert (fresh.phase, fresh.leaving) == ("idle", False)


@pytest.mark.parametrize(
    ("losses", "until_s"),
    [
        ((), 0.0),
        ((0.0, 10.0), 0.0),
        ((0.0, 50.0, 100.0), 130.0),
        ((0.0, 50.0, 100.1), 0.0),
        ((0.0, 1.0, 50.0, 100.0), 130.0),
        ((100.0, 0.0, 50.0), 130.0),  # the wall clock was set back meanwhile
    ],
)
def test_a_machine_lost_often_in_a_short_time_rests_from_its_last_loss(losses: tuple[float, ...], until_s: float):
    member = replace(_member("lost"), losses=losses)
    assert rests_until_s(member, losses=3, window_s=100.0, rest_s=30.0) == until_s
    assert rests_until_s(member, losses=0, window_s=100.0, rest_s=30.0) == 0.0


def test_one_loss_is_enough_where_one_is_the_limit():
    member = replace(_member("lost"), losses=(5.0,))
    assert rests_until_s(member, losses=1, window_s=100.0, rest_s=30.0) == 35.0


def test_as_much_is_remembered_as_the_rules_may_ask_for():
    assert (REMEMBERED_BOOTS, REMEMBERED_LOSSES) == (16, 16)


def test_losses_are_those_of_the_machine_and_bounded():
    member = _member("idle")
    for at_s in range(2 * REMEMBERED_LOSSES):
        lost = MEMBERSHIP.advance(member, MemberLost(at_s=float(at_s), peer=PEER, boot=7, reason=""))
        member = successor(lost, MemberRegistered(at_s=0.0, peer=PEER, boot=at_s + 8, profile=b"", addresses=()))
    assert member.losses == tuple(float(at_s) for at_s in range(REMEMBERED_LOSSES, 2 * REMEMBERED_LOSSES))


def test_registering_keeps_profile_and_addresses():
    fresh = enrolled(PeerEnrolled(at_s=0.0, peer=PEER, purpose="provider", invitation="ab"))
    assert (fresh.phase, fresh.entity) == ("joining", "member qqqqqqqq")
    idle = MEMBERSHIP.advance(fresh, EVENTS["register"])
    assert (idle.boot, idle.profile, idle.addresses) == (7, b"p", ("tcp://a:1",))


def test_a_new_process_is_a_new_member_that_remembers_earlier_boots():
    old = replace(_member("lost"), boot=6, story=("a", "b"))
    new = successor(old, EVENTS["register"])
    assert (new.phase, new.boot, new.earlier_boots, new.job) == ("idle", 7, (6,), None)
    assert new.story == ("MemberRegistered -> idle",)


def test_remembered_boots_are_bounded():
    member = _member("lost")
    for boot in range(100, 100 + 2 * REMEMBERED_BOOTS):
        member = successor(member, MemberRegistered(at_s=0.0, peer=PEER, boot=boot, profile=b"", addresses=()))
    assert len(member.earlier_boots) == REMEMBERED_BOOTS
    assert member.boot not in member.earlier_boots
