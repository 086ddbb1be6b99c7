"""The fold over facts: what a plan reserves, what an end releases, what is refused and changes nothing."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.coordination.broker import events
from fusionai.coordination.broker.events import Fact, MemberPlacement, decode, encode
from fusionai.coordination.broker.pool import (
    DEPARTED_KEPT,
    ENDED_JOBS_KEPT,
    Pool,
    UnknownEntity,
    advance,
    freeze,
    replay,
    thaw,
)
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId, PeerId

A, B, C = (PeerId(letter * 52) for letter in "abc")


def invited(uses: int = 10) -> Fact:
    return events.InvitationIssued(at_s=0.0, invitation="inv", uses=uses, expires_at_s=100.0)


def joined(peer: PeerId, boot: int = 1) -> list[Fact]:
    return [
        events.PeerEnrolled(at_s=1.0, peer=peer, purpose="provider", invitation="inv"),
        events.MemberRegistered(at_s=2.0, peer=peer, boot=boot, profile=b"", addresses=()),
    ]


def asked(job: str = "job-1") -> Fact:
    return events.JobRequested(at_s=3.0, job=job, title="", owner=A, steps=1)


def planned(version: int, *peers: PeerId, job: str = "job-1") -> Fact:
    members = tuple(MemberPlacement(peer, (stage,)) for stage, peer in enumerate(peers))
    return events.PlanMinted(at_s=4.0, job=job, version=version, plan=b"plan", members=members)


def phases(pool: Pool) -> dict[str, str]:
    return {peer[0]: member.phase for peer, member in pool.members.items()}


START = [invited(), *joined(A), *joined(B), *joined(C)]


def test_registered_members_are_idle():
    pool = replay(START)
    assert phases(pool) == {"a": "idle", "b": "idle", "c": "idle"}
    assert pool.invitations["inv"].uses_left == 7


def test_a_plan_reserves_exactly_the_members_it_names():
    pool = replay([*START, asked(), planned(1, A, C)])
    assert phases(pool) == {"a": "active", "b": "idle", "c": "active"}
    assert [member.stages for member in pool.members_of(JobId("job-1"))] == [(0,), (1,)]
    assert (pool.newest_version, [*pool.plans], pool.jobs[JobId("job-1")].plan_version) == (1, [1], 1)


def test_a_new_plan_releases_whom_it_leaves_out_and_supersedes_the_old_one():
    pool = replay([*START, asked(), planned(1, A, C), planned(2, B, C)])
    assert phases(pool) == {"a": "idle", "b": "active", "c": "active"}
    assert [*pool.plans] == [2]
    assert pool.plans[2].members == (MemberPlacement(B, (0,)), MemberPlacement(C, (1,)))


def test_standbys_are_reserved_and_released_like_those_that_run_stages():
    has_standby = events.PlanMinted(
        at_s=4.0, job="job-1", version=1, plan=b"plan", members=(MemberPlacement(A, (0,)), MemberPlacement(C, (), (0,)))
    )
    pool = replay([*START, asked(), has_standby])
    assert phases(pool) == {"a": "active", "b": "idle", "c": "active"}
    assert [(member.stages, member.standbys) for member in pool.members_of(JobId("job-1"))] == [((0,), ()), ((), (0,))]
    with pytest.raises(FusionError, match="already holds"):
        advance(advance(pool, asked("job-2")), planned(2, C, job="job-2"))
    assert phases(advance(pool, planned(2, A))) == {"a": "active", "b": "idle", "c": "idle"}


def test_an_incumbent_that_drains_stays_until_a_plan_leaves_it_out():
    drained = events.MemberDraining(at_s=5.0, peer=A)
    pool = replay([*START, asked(), planned(1, A, B), drained, planned(2, A, C)])
    assert phases(pool) == {"a": "draining", "b": "idle", "c": "active"}
    assert phases(advance(pool, planned(3, B, C))) == {"a": "left", "b": "active", "c": "active"}


@pytest.mark.parametrize("end", [events.JobDone, events.JobFailed])
def test_the_end_of_a_job_releases_its_members_and_retires_its_plan(end: type):
    drained = events.MemberDraining(at_s=5.0, peer=A)
    lost = events.MemberLost(at_s=5.0, peer=B, boot=1, reason="")
    pool = replay([*START, asked(), planned(1, A, B, C), drained, lost])
    assert phases(pool) == {"a": "draining", "b": "lost", "c": "active"}
    pool = advance(pool, end(at_s=6.0, job="job-1", step=3, detail=""))
    assert phases(pool) == {"a": "left", "b": "lost", "c": "idle"}
    assert all(member.job is None for member in pool.members.values())
    assert pool.plans == {}


def test_a_member_of_another_job_is_not_given_away():
    pool = replay([*START, asked(), asked("job-2"), planned(1, A, B)])
    with pytest.raises(FusionError, match="already holds stages of job-1"):
        advance(pool, planned(2, B, C, job="job-2"))
    assert phases(pool) == {"a": "active", "b": "active", "c": "idle"}


def test_a_new_process_takes_the_place_only_after_the_old_one_is_lost():
    pool = replay(START)
    with pytest.raises(UnknownEntity, match="must be lost before boot 2"):
        advance(pool, joined(A, boot=2)[1])
    pool = advance(pool, events.MemberLost(at_s=5.0, peer=A, boot=1, reason=""))
    pool = advance(pool, joined(A, boot=2)[1])
    assert (pool.members[A].boot, pool.members[A].phase, pool.members[A].earlier_boots) == (2, "idle", (1,))


def test_a_suspicion_names_the_boot():
    with pytest.raises(UnknownEntity, match="expected boot 1, got 9"):
        advance(replay(START), events.MemberLost(at_s=5.0, peer=A, boot=9, reason=""))


def test_an_invitation_is_used_up():
    pool = replay([invited(uses=1), *joined(A)])
    assert pool.invitations["inv"].uses_left == 0
    with pytest.raises(UnknownEntity, match="is used up"):
        advance(pool, joined(B)[0])


def test_expired_invitations_are_forgotten_when_a_new_one_is_issued():
    later = events.InvitationIssued(at_s=100.0, invitation="new", uses=1, expires_at_s=200.0)
    assert list(advance(replay(START), later).invitations) == ["new"]


@pytest.mark.parametrize(
    "fact",
    [
        events.MemberLeft(at_s=0.0, peer="x" * 52),
        events.JobStarted(at_s=0.0, job="nothing"),
        planned(1, A, job="nothing"),
        events.PeerEnrolled(at_s=0.0, peer=A, purpose="owner", invitation="none"),
        invited(),
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_facts_about_nobody_are_refused(fact: Fact):
    with pytest.raises(FusionError):
        advance(replay(START), fact)


def test_plan_versions_are_shared_by_all_jobs():
    pool = replay([*START, asked(), planned(1, A), asked("job-2"), planned(2, B, job="job-2")])
    with pytest.raises(FusionError, match="expected plan version 3"):
        advance(pool, planned(2, C))


def test_old_ended_jobs_are_forgotten_with_their_plans():
    pool = replay([*START])
    for number in range(ENDED_JOBS_KEPT + 20):
        name = f"job-{number}"
        pool = advance(advance(pool, asked(name)), planned(number + 1, A, job=name))
        pool = advance(pool, events.JobDone(at_s=9.0, job=name, step=0, detail=""))
    assert len(pool.jobs) <= ENDED_JOBS_KEPT + 1
    assert pool.plans == {}
    assert pool.newest_version == ENDED_JOBS_KEPT + 20


def test_only_the_latest_departed_members_are_remembered():
    pool = replay([invited(uses=DEPARTED_KEPT + 50), *joined(A), asked(), planned(1, A)])
    numbered = [PeerId(f"{number:052d}") for number in range(DEPARTED_KEPT + 20)]
    for peer in numbered:
        for fact in (*joined(peer), events.MemberLost(at_s=5.0, peer=peer, boot=1, reason="")):
            pool = advance(pool, fact)
    assert (pool.expected(), len(pool.members)) == (1, 1 + DEPARTED_KEPT)
    assert A in pool.members
    assert numbered[19] not in pool.members
    back = advance(pool, events.MemberRegistered(at_s=6.0, peer=numbered[20], boot=2, profile=b"", addresses=()))
    assert (back.expected(), back.members[numbered[20]].losses) == (2, (5.0,))
    # The one whose job waits for it is not among those that may be forgotten.
    kept = advance(pool, events.MemberLost(at_s=7.0, peer=A, boot=1, reason=""))
    for fact in (*joined(numbered[0]), events.MemberLeft(at_s=8.0, peer=numbered[0])):
        kept = advance(kept, fact)
    assert A in kept.members


def test_a_frozen_pool_is_the_same_pool_and_goes_on():
    facts = [*START, asked(), planned(1, A, C), events.MemberLost(at_s=5.0, peer=A, boot=1, reason="")]
    facts += [asked("job-2"), events.KeyVouched(at_s=5.0, peer="v" * 52, purpose="owner", sponsor=A)]
    for count in range(len(facts) + 1):
        pool = thaw(freeze(replay(facts[:count])))
        assert pool == replay(facts[:count])
        assert replay(facts[count:], pool) == replay(facts)


def test_a_pool_frozen_under_former_names_is_read():
    facts = [*START, asked(), planned(1, A, C), events.JobNoted(at_s=1.5, job="job-1", text="slow")]
    now = replay([*facts, events.MemberLost(at_s=5.0, peer=A, boot=1, reason="")])
    assert now.jobs["job-1"].notes
    former = msgspec.msgpack.decode(freeze(now))
    for member in former["members"].values():
        member["guards"] = member.pop("standbys")
    for known in former["jobs"].values():
        known["told"] = known.pop("notes")
    assert thaw(msgspec.msgpack.encode(former)) == now


@pytest.mark.parametrize("stored", [[], {"members": 1}, {"members": {A: []}}, {"jobs": {"job-1": {"told": 3}}}])
def test_what_is_no_pool_is_refused(stored: object):
    with pytest.raises(msgspec.ValidationError):
        thaw(msgspec.msgpack.encode(stored))


def test_a_placement_of_an_earlier_version_reads_as_one_without_standbys():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([A, [1]]), type=MemberPlacement) == MemberPlacement(A, (1,))


def test_facts_survive_encoding():
    for fact in (*START, asked(), planned(1, A, C), events.JobNoted(at_s=1.5, job="job-1", text="ä")):
        assert decode(encode(fact)) == fact
