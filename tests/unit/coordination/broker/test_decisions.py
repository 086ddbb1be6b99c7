"""The broker's decisions: who may do what, what is journalled, who is told, and what silence leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from fusionai.coordination.broker import events, requests, state
from fusionai.coordination.broker.decisions import MAX_VOUCHED, handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.pool import EVICTED_KEPT_S, Pool, replay
from fusionai.coordination.broker.requests import Answer, Certify, IssueTickets, Notify, Request
from fusionai.coordination.broker.state import BrokerRules, BrokerState, Decision, recovered
from fusionai.peer.acceptor import ORPHANED_S
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import (
    Done,
    Evicted,
    HeartbeatAck,
    InvitationList,
    InvitationView,
    LeaveNotice,
    Refused,
    StopNotice,
)

BROKER, OWNER, A, B, C, STRANGE = (PeerId(letter * 52) for letter in "yoabcx")
JOB = JobId("job-1")
RULES = BrokerRules(pool="home", broker=BROKER)
WALL_S = 1_000_000.0


class Drive:
    """A desk with a clock. Every decision's facts are kept, to compare live state with replay."""

    def __init__(self, rules: BrokerRules = RULES) -> None:
        self.now_s = 0.0
        self.desk: BrokerState = recovered(rules, Pool(), 0.0)
        self.facts: list[events.Fact] = []

    def ask(self, request: Request) -> Decision:
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=WALL_S + self.now_s)
        self.desk = decision.desk
        self.facts += decision.facts
        assert replay(self.facts) == self.desk.pool
        return decision

    def wait(self, seconds: float) -> Decision:
        self.now_s += seconds
        return self.ask(requests.DeadlinePassed())

    def answer(self, request: Request) -> object:
        answers = [c.message for c in self.ask(request).commands if isinstance(c, Answer)]
        assert len(answers) == 1
        return answers[0]

    def refused(self, request: Request, code: str) -> str:
        decision = self.ask(request)
        assert not decision.facts
        [answer] = decision.commands
        assert isinstance(answer, Answer)
        assert isinstance(answer.message, Refused)
        assert answer.message.code == code
        return answer.message.reason

    def join(self, *peers: PeerId) -> None:
        for peer in peers:
            digest = f"for {peer}"
            self.ask(requests.Invite(BROKER, digest, 1, 60.0))
            assert self.ask(requests.Enrol(digest, peer, "provider")).commands == (Certify(peer),)

    def register(self, *peers: PeerId, boot: int = 1) -> None:
        for peer in peers:
            self.ask(register(peer, boot=boot))

    def phase(self, peer: PeerId) -> str:
        return self.desk.pool.members[peer].phase

    def notes(self) -> list[str]:
        return [line.text for line in self.desk.pool.jobs[JOB].notes]


def register(peer: PeerId, *, boot: int = 1, connection: int | None = None) -> requests.RegisterMember:
    return requests.RegisterMember(peer, ord(peer[0]) if connection is None else connection, boot, b"", ())


def want(*peers: PeerId, job: JobId = JOB, owner: PeerId = OWNER, version: int = 0) -> requests.RequestJob:
    members = tuple(MemberPlacement(peer, (stage,)) for stage, peer in enumerate(peers))
    return requests.RequestJob(owner, 500, job, "title", 10, b"plan", version, members)


def report(state: str, *, step: int = 0, sender: PeerId = OWNER, connection: int = 500) -> requests.ReportJob:
    return requests.ReportJob(sender, connection, JOB, state, step, "")  # pyright: ignore[reportArgumentType]


@pytest.fixture
def drive() -> Drive:
    drive = Drive()
    drive.join(OWNER, A, B, C)
    drive.register(A, B, C)
    return drive


# ---------------------------------------------------------------------------------------------------- invitations


def test_an_unknown_token_is_refused(drive: Drive):
    drive.refused(requests.Enrol("guess", STRANGE, "provider"), "bad_invitation")
    assert STRANGE not in drive.desk.pool.members


def test_an_invitation_serves_its_number_of_keys_and_the_same_key_twice(drive: Drive):
    drive.ask(requests.Invite(BROKER, "d", 1, 60.0))
    drive.ask(requests.Enrol("d", STRANGE, "provider"))
    again = drive.ask(requests.Enrol("d", STRANGE, "provider"))
    assert (again.facts, again.commands) == ((), (Certify(STRANGE),))
    assert "used up" in drive.refused(requests.Enrol("d", PeerId("z" * 52), "provider"), "bad_invitation")


def test_an_invitation_expires(drive: Drive):
    drive.ask(requests.Invite(BROKER, "d", 5, 60.0))
    drive.now_s += 60.0
    drive.refused(requests.Enrol("d", STRANGE, "provider"), "bad_invitation")


def test_only_the_owner_and_those_it_named_invite(drive: Drive):
    drive.refused(requests.Invite(A, "d", 1, 60.0), "not_authorised")
    drive.desk = replace(drive.desk, rules=replace(RULES, inviters=frozenset({A})))
    assert drive.ask(requests.Invite(A, "d", 1, 60.0)).commands == (requests.HandOut(),)


def test_an_invitation_can_be_withdrawn_by_the_owner_by_the_beginning_of_its_id(drive: Drive):
    for digest in ("d1", "d2", "e1"):
        drive.ask(requests.Invite(BROKER, digest, 5, 60.0))
    drive.ask(requests.Enrol("d1", STRANGE, "provider"))
    drive.refused(requests.RevokeInvitation(A, "d1"), "not_authorised")
    assert "ambiguous: 2 invitations" in drive.refused(requests.RevokeInvitation(BROKER, "d"), "bad_invitation")
    assert "unknown or over" in drive.refused(requests.RevokeInvitation(BROKER, "q"), "bad_invitation")
    assert drive.answer(requests.RevokeInvitation(BROKER, "d1")) == Done()
    drive.refused(requests.Enrol("d1", PeerId("z" * 52), "provider"), "bad_invitation")
    assert drive.phase(STRANGE) == "joining", "those that it admitted stay"
    assert drive.ask(requests.Enrol("d2", PeerId("z" * 52), "provider")).commands == (Certify(PeerId("z" * 52)),)


def test_the_owner_alone_sees_the_valid_invitations(drive: Drive):
    drive.ask(requests.Invite(BROKER, "d", 5, 60.0))
    drive.ask(requests.Enrol("d", STRANGE, "provider"))
    wall_s = WALL_S + drive.now_s
    found = state.invitation_list(drive.desk, BROKER, wall_s)
    assert isinstance(found, InvitationList)
    assert found.invitations[-1] == InvitationView("d", 4, wall_s + 60.0, (STRANGE,))
    refused = state.invitation_list(drive.desk, A, wall_s)
    assert isinstance(refused, Refused)
    assert refused.code == "not_authorised"
    assert state.invitation_list(drive.desk, BROKER, wall_s + 60.0) == InvitationList()


# -------------------------------------------------------------------------------------------------------- eviction


def test_an_evicted_member_is_gone_and_comes_back_by_no_door(drive: Drive):
    before = drive.desk.pool.revocations
    decision = drive.ask(requests.EvictMember(BROKER, A))
    assert decision.commands == (requests.SpreadRevocations(), Answer(Evicted(peers=(A,))))
    assert (drive.phase(A), drive.desk.knows(A)) == ("left", False)
    assert drive.desk.pool.revocations > before
    assert drive.desk.pool.revocations >= WALL_S
    assert A not in drive.desk.leases
    assert A not in drive.desk.links
    drive.ask(requests.Invite(BROKER, "d", 5, 60.0))
    for request in (requests.Enrol("d", A, "provider"), requests.Vouch(B, A, "provider")):
        assert "was evicted from this pool" in drive.refused(request, "evicted")
    drive.refused(requests.Vouch(A, A, "provider"), "unknown_peer")
    assert drive.desk.knows(B)


def test_the_version_grows_with_every_eviction(drive: Drive):
    versions = [drive.desk.pool.revocations]
    for peer in (A, B, C):
        drive.ask(requests.EvictMember(BROKER, peer))
        versions.append(drive.desk.pool.revocations)
    assert versions == sorted(set(versions))
    assert set(drive.desk.pool.evicted) == {A, B, C}


def test_heartbeats_carry_the_version(drive: Drive):
    drive.ask(requests.EvictMember(BROKER, A))
    answer = drive.answer(requests.Beat(B, ord("b"), 1))
    assert isinstance(answer, HeartbeatAck)
    assert answer.revocations == drive.desk.pool.revocations


def test_a_job_goes_on_without_its_evicted_member(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(requests.EvictMember(BROKER, A))
    assert (drive.phase(A), drive.phase(B)) == ("lost", "active")
    assert any("it was evicted" in note for note in drive.notes())
    assert drive.desk.pool.jobs[JOB].live
    drive.refused(want(A, B, job=JobId("job-2")), "unknown_peer")
    drive.ask(want(B, C, version=0))
    assert A not in {member.peer for member in drive.desk.pool.members_of(JOB)}


def test_the_jobs_of_an_evicted_owner_end(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(requests.EvictMember(BROKER, OWNER))
    assert not drive.desk.pool.jobs[JOB].live
    assert (drive.phase(A), drive.phase(B)) == ("idle", "idle")


@pytest.mark.parametrize("named", [A, STRANGE])
def test_all_keys_of_a_machine_are_evicted_together(drive: Drive, named: PeerId):
    drive.ask(requests.Vouch(A, STRANGE, "owner"))
    assert drive.answer(requests.EvictMember(BROKER, named)) == Evicted(peers=(A, STRANGE))
    assert set(drive.desk.pool.evicted) == {A, STRANGE}
    again = drive.ask(requests.EvictMember(BROKER, named))
    assert not again.facts, "once is enough"


def test_only_the_owner_evicts_and_never_itself(drive: Drive):
    drive.refused(requests.EvictMember(A, B), "not_authorised")
    drive.ask(requests.Vouch(BROKER, STRANGE, "owner"))
    for own in (STRANGE,):
        assert "the broker's own machine" in drive.refused(requests.EvictMember(BROKER, own), "not_authorised")
    drive.refused(requests.EvictMember(BROKER, PeerId("q")), "unknown_peer")


def test_a_key_that_the_pool_has_forgotten_can_be_evicted(drive: Drive):
    """Its certificate may still be valid."""
    assert drive.answer(requests.EvictMember(BROKER, PeerId("q" * 52))) == Evicted(peers=(PeerId("q" * 52),))
    drive.ask(requests.Invite(BROKER, "d", 1, 60.0))
    drive.refused(requests.Enrol("d", PeerId("q" * 52), "provider"), "evicted")


def test_evictions_are_limited_and_forgotten_when_certificates_have_long_expired(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusionai.coordination.broker.decisions.MAX_EVICTED", 1)
    drive.ask(requests.EvictMember(BROKER, A))
    assert "which is the limit" in drive.refused(requests.EvictMember(BROKER, B), "busy")
    drive.now_s += EVICTED_KEPT_S
    drive.ask(requests.EvictMember(BROKER, B))
    assert set(drive.desk.pool.evicted) == {B}


def test_a_member_renews_its_own_certificate(drive: Drive):
    drive.ask(requests.Vouch(A, STRANGE, "owner"))
    for peer in (A, STRANGE, BROKER):
        renewed = drive.ask(requests.Vouch(peer, peer, "provider"))
        assert (renewed.facts, renewed.commands) == ((), (Certify(peer),))


def test_a_full_pool_takes_nobody():
    drive = Drive(replace(RULES, max_members=1))
    drive.join(A)
    drive.ask(requests.Invite(BROKER, "d", 1, 60.0))
    assert "full" in drive.refused(requests.Enrol("d", B, "provider"), "busy")


def test_members_that_left_fill_no_pool_and_a_forgotten_one_comes_in_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.coordination.broker.pool.DEPARTED_KEPT", 1)
    drive = Drive(replace(RULES, max_members=1))
    drive.ask(requests.Invite(BROKER, "d", 9, 60.0))
    for peer in (A, B, A):
        drive.ask(requests.Enrol("d", peer, "provider"))
        drive.ask(requests.RegisterMember(peer, 1, 1, b"", ()))
        drive.ask(requests.AskLeave(peer, 1, False))
    assert [peer for peer in drive.desk.pool.members if drive.phase(peer) == "left"] == [A]


def test_a_member_may_have_a_few_further_keys_certified_and_those_none(drive: Drive):
    keys = [PeerId(letter * 52) for letter in "defghijklmnpqrstu"]
    assert len(keys) == MAX_VOUCHED + 1
    for key in keys[:MAX_VOUCHED]:
        assert drive.ask(requests.Vouch(A, key, "owner")).commands == (Certify(key),)
        assert (drive.phase(key), drive.desk.pool.members[key].sponsor) == ("joining", A)
    assert drive.ask(requests.Vouch(A, keys[0], "owner")).facts == ()
    drive.refused(requests.Vouch(A, keys[-1], "owner"), "not_authorised")
    drive.refused(requests.Vouch(keys[0], keys[-1], "owner"), "not_authorised")
    drive.refused(requests.Vouch(STRANGE, keys[-1], "owner"), "unknown_peer")
    drive.ask(requests.RegisterMember(keys[0], 8, 1, b"", ()))
    machines = {one.peer: one.machine for one in state.pool_view(drive.desk, drive.now_s, WALL_S).members}
    assert (machines[A], machines[keys[0]]) == ("", A), "which devices are of one machine is the broker's word"
    drive.ask(want(A, owner=keys[0]))
    assert drive.desk.pool.jobs[JOB].owner == keys[0]
    drive.refused(requests.StopJob(B, JOB), "not_authorised")
    assert Answer(Done()) in drive.ask(requests.StopJob(A, JOB)).commands


# --------------------------------------------------------------------------------------------------------- members


def test_somebody_without_a_certificate_of_this_pool_cannot_register(drive: Drive):
    drive.refused(register(STRANGE), "unknown_peer")


def test_registering_again_unchanged_writes_nothing(drive: Drive):
    decision = drive.ask(register(A))
    assert decision.facts == ()
    assert drive.phase(A) == "idle"


def test_heartbeats_keep_a_lease_alive_without_writing_anything(drive: Drive):
    for _ in range(10):
        drive.now_s += 3.0
        assert drive.ask(requests.Beat(A, 97, 1)).facts == ()
        drive.ask(requests.DeadlinePassed())
    assert (drive.phase(A), drive.phase(B)) == ("idle", "lost")
    assert list(drive.desk.leases) == [A]


def test_a_lost_member_must_register_again(drive: Drive):
    drive.wait(12.0)
    assert drive.phase(A) == "lost"
    assert "register again" in drive.refused(requests.Beat(A, 97, 1), "stale_fence")
    drive.register(A)
    assert drive.phase(A) == "idle"


def test_a_lost_member_whose_job_went_on_without_it_must_clear_first(drive: Drive):
    drive.ask(want(A))
    drive.now_s += 11.0
    drive.ask(requests.Beat(B, 98, 1))
    drive.wait(1.0)
    assert drive.ask(want(B)).commands[-1] == IssueTickets(JOB, 2)
    assert "clear your stages" in drive.refused(requests.Beat(A, 97, 1, (JOB,)), "stale_fence")


def test_a_lost_member_whose_job_waited_for_it_is_back_with_what_it_holds(drive: Drive):
    drive.ask(want(A))
    drive.wait(12.0)
    decision = drive.ask(requests.Beat(A, 97, 1, (JOB,)))
    assert [type(fact).__name__ for fact in decision.facts] == ["MemberRegistered", "JobNoted"]
    assert (drive.phase(A), drive.desk.pool.members[A].stages, drive.desk.links[A]) == ("active", (0,), 97)
    assert A in drive.desk.leases
    assert drive.notes()[-1] == "member aaaaaaaa is back"


def test_who_was_dropped_without_hearing_of_it_is_told_to_clear_in_time_and_taken_by_nobody_before(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Beat(A, 97, 1, (JOB,)))
    assert drive.desk.leftovers == {}
    drive.ask(want(B))  # A's owner thought it dead, and was wrong
    for _ in range(10):
        assert drive.ask(requests.Beat(A, 97, 1, (JOB,))).facts == ()
        assert "clears" in drive.refused(want(A, job=JobId("other")), "busy")
        drive.now_s += 3.0
    assert "goes on without it" in drive.refused(requests.Beat(A, 97, 1, (JOB,)), "stale_fence")
    drive.register(A)
    drive.ask(requests.Beat(A, 97, 1))
    assert drive.desk.leftovers == {}
    drive.ask(want(A, job=JobId("other")))
    assert drive.phase(A) == "active"


def test_who_slept_when_its_job_ended_is_told_to_clear_with_the_next_heartbeat(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.ReportJob(OWNER, 1, JOB, "done", 1, ""))
    drive.ask(requests.Beat(A, 97, 1, (JOB,)))
    (view,) = [one for one in state.pool_view(drive.desk, drive.now_s, WALL_S).members if one.peer == A]
    assert (view.state, view.clears) == ("idle", JOB)
    drive.now_s += 3.0
    assert "or has ended" in drive.refused(requests.Beat(A, 97, 1, (JOB,)), "stale_fence")
    drive.register(A)
    drive.ask(requests.Beat(A, 97, 1))
    (view,) = [one for one in state.pool_view(drive.desk, drive.now_s, WALL_S).members if one.peer == A]
    assert view.clears == ""


def test_the_job_it_still_holds_stages_of_may_take_it_back_at_once(drive: Drive):
    drive.ask(want(A))
    drive.ask(want(B))
    drive.ask(requests.Beat(A, 97, 1, (JOB,)))
    drive.ask(want(A, B))
    drive.ask(requests.Beat(A, 97, 1, (JOB,)))
    assert drive.desk.leftovers == {}


# -------------------------------------------------------------------------------------------------------- flapping


def flap(drive: Drive, times: int) -> None:
    """`times` losses of A by restarts of its process, 10 s apart."""
    for _ in range(times):
        drive.now_s += 10.0
        drive.register(A, boot=drive.desk.pool.members[A].boot + 1)
        for peer in (B, C):
            drive.ask(requests.Beat(peer, ord(peer[0]), 1))


def state_of(drive: Drive, peer: PeerId) -> tuple[str, float]:
    view = state.pool_view(drive.desk, drive.now_s, WALL_S + drive.now_s)
    return next((member.state, member.rests_s) for member in view.members if member.peer == peer)


def test_a_machine_lost_too_often_rests_and_comes_back_by_itself(drive: Drive):
    flap(drive, RULES.losses_before_rest - 1)
    assert state_of(drive, A) == ("idle", 0.0)
    drive.ask(want(A))
    drive.ask(report("done"))
    flap(drive, 1)
    assert state_of(drive, A) == ("resting", RULES.rest_s)
    assert "rests for another 300 s" in drive.refused(want(A, B), "busy")
    for _ in range(int(RULES.rest_s / 10)):
        drive.now_s += 10.0
        drive.ask(requests.Beat(A, 97, drive.desk.pool.members[A].boot))
        drive.ask(requests.Beat(B, 98, 1))
    assert state_of(drive, A) == ("idle", 0.0)
    drive.ask(want(A, B))
    assert drive.phase(A) == "active"


def test_two_losses_or_old_ones_are_no_reason_to_rest(drive: Drive):
    flap(drive, 2)
    assert state_of(drive, A)[0] == "idle"
    drive.now_s += RULES.loss_window_s
    drive.ask(requests.Stalled())
    flap(drive, RULES.losses_before_rest - 1)
    assert state_of(drive, A)[0] == "idle"


def test_rest_outlasts_a_restart_of_the_broker_and_is_not_prolonged_by_its_clock(drive: Drive):
    flap(drive, RULES.losses_before_rest)
    drive.desk = recovered(RULES, replay(drive.facts), drive.now_s)
    member = drive.desk.pool.members[A]
    assert drive.desk.rest_left_s(member, WALL_S + drive.now_s + 1.0) == RULES.rest_s - 1.0
    assert drive.desk.rest_left_s(member, WALL_S - 1e5) == 0.0


def test_a_job_keeps_the_machine_it_has_although_that_flaps(drive: Drive):
    flap(drive, RULES.losses_before_rest - 1)
    drive.ask(want(A))
    boot = drive.desk.pool.members[A].boot
    drive.wait(12.0)
    drive.ask(requests.Beat(A, 97, boot, (JOB,)))
    drive.register(B)
    drive.ask(want(A, B))
    assert (drive.phase(A), drive.desk.rest_left_s(drive.desk.pool.members[A], WALL_S + drive.now_s)) == (
        "active",
        RULES.rest_s,
    )


def test_no_machine_rests_where_the_rules_say_so(drive: Drive):
    drive.desk = replace(drive.desk, rules=replace(RULES, losses_before_rest=0))
    flap(drive, 10)
    assert state_of(drive, A)[0] == "idle"


def test_a_broken_connection_alone_loses_nobody(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(97))
    drive.wait(11.0)
    assert drive.phase(A) == "active"
    drive.ask(register(A, connection=200))
    drive.wait(11.0)
    assert (drive.phase(A), drive.desk.links[A]) == ("active", 200)


def test_a_lost_member_that_comes_back_in_the_same_process_keeps_its_place(drive: Drive):
    drive.ask(want(A))
    drive.wait(12.0)
    assert (drive.phase(A), drive.desk.pool.members[A].job) == ("lost", JOB)
    drive.register(A)
    assert (drive.phase(A), drive.desk.pool.members[A].job) == ("active", JOB)


def test_a_new_process_is_a_new_member_and_its_predecessor_counts_no_more(drive: Drive):
    drive.ask(want(A))
    drive.register(A, boot=2)
    assert (drive.phase(A), drive.desk.pool.members[A].boot) == ("idle", 2)
    assert drive.notes()[-1] == "member aaaaaaaa lost: a new process of its machine registered"
    drive.refused(requests.Beat(A, 97, 1), "not_authorised")
    drive.refused(register(A, boot=1), "not_authorised")


def test_an_idle_member_leaves_at_once_and_its_process_is_told(drive: Drive):
    decision = drive.ask(requests.AskLeave(A, 300, drain=True))
    assert drive.phase(A) == "left"
    assert decision.commands == (Notify(97, LeaveNotice(drain=True)), Answer(Done()))
    assert drive.ask(requests.AskLeave(A, 300, drain=True)).facts == ()
    drive.refused(requests.Beat(A, 97, 1), "unknown_peer")


def test_an_active_member_drains_and_is_seen_off_when_its_job_ends(drive: Drive):
    drive.ask(want(A, B))
    assert drive.ask(requests.AskLeave(A, 97, drain=True)).commands == (Answer(Done()),)
    assert drive.phase(A) == "draining"
    decision = drive.ask(report("done", step=9))
    assert (drive.phase(A), drive.phase(B)) == ("left", "idle")
    assert Notify(97, LeaveNotice(drain=False)) in decision.commands
    assert A not in drive.desk.leases


def test_leaving_at_once_leaves_the_job_behind(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(requests.AskLeave(A, 97, drain=False))
    assert drive.phase(A) == "left"
    assert drive.notes()[-1] == "member aaaaaaaa left at once"


# ------------------------------------------------------------------------------------------------------------ jobs


def test_a_granted_job_reserves_and_mints_before_tickets_are_issued(drive: Drive):
    decision = drive.ask(want(A, B))
    assert [type(fact).__name__ for fact in decision.facts] == ["JobRequested", "PlanMinted"]
    assert decision.commands == (IssueTickets(JOB, 1),)
    assert (drive.phase(A), drive.phase(B), drive.phase(C)) == ("active", "active", "idle")


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda drive: drive.ask(want(B, job=JobId("other"))), "busy"),
        (lambda drive: drive.wait(12.0), "unknown_peer"),
        (lambda drive: drive.ask(requests.Disconnected(98)), "unknown_peer"),
        (lambda drive: drive.ask(requests.AskLeave(B, 98, drain=False)), "unknown_peer"),
    ],
    ids=["busy", "lost", "out of touch", "left"],
)
def test_a_plan_with_a_member_that_is_not_free_reserves_nobody(drive: Drive, prepare, code: str):
    prepare(drive)
    reason = drive.refused(want(A, B), code) if code == "busy" else drive.refused(want(B, C), code)
    assert "plan again" in reason
    assert JOB not in drive.desk.pool.jobs
    assert drive.phase(C) != "active"


def test_standbys_are_reserved_and_no_other_job_takes_them(drive: Drive):
    has_standby = structs.replace(want(A), members=(MemberPlacement(A, (0,)), MemberPlacement(B, (), (0,))))
    drive.ask(has_standby)
    assert (drive.phase(B), drive.desk.pool.members[B].standbys) == ("active", (0,))
    drive.refused(want(B, job=JobId("other")), "busy")
    view = state.pool_view(drive.desk, drive.now_s, WALL_S)
    assert [(m.peer[0], m.state, m.stages, m.standbys) for m in view.members] == [
        ("a", "active", (0,), ()),
        ("b", "active", (), (0,)),
        ("c", "idle", (), ()),
    ]
    drive.ask(structs.replace(want(B), members=(MemberPlacement(B, (0,)), MemberPlacement(C, (), (0,)))))
    assert (drive.phase(A), drive.phase(B), drive.phase(C)) == ("idle", "active", "active")
    drive.ask(report("done"))
    assert (drive.phase(B), drive.phase(C)) == ("idle", "idle")


def test_a_standby_that_is_gone_is_refused_like_any_member(drive: Drive):
    drive.ask(requests.AskLeave(B, 98, drain=False))
    drive.refused(
        structs.replace(want(A), members=(MemberPlacement(A, (0,)), MemberPlacement(B, (), (0,)))), "unknown_peer"
    )


def test_an_incumbent_that_drains_may_stay_and_leaves_when_a_plan_leaves_it_out(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(requests.AskLeave(A, 97, drain=True))
    drive.ask(want(A, C))
    assert (drive.phase(A), drive.phase(B)) == ("draining", "idle")
    assert Notify(97, LeaveNotice(drain=False)) in drive.ask(want(B, C)).commands
    assert drive.phase(A) == "left"


def test_a_draining_member_gets_nothing_new(drive: Drive):
    drive.ask(want(A, job=JobId("other")))
    drive.ask(requests.AskLeave(A, 97, drain=True))
    drive.refused(want(A), "leaving")


def test_a_name_belongs_to_the_owner_who_took_it(drive: Drive):
    drive.ask(want(A))
    drive.refused(want(B, owner=C), "not_authorised")
    drive.ask(report("done"))
    drive.refused(want(B, owner=C), "not_authorised")


def test_only_members_may_ask_for_a_job(drive: Drive):
    drive.refused(want(A, owner=STRANGE), "unknown_peer")


def test_fresh_tickets_for_the_same_plan_mint_nothing(drive: Drive):
    drive.ask(want(A, B))
    decision = drive.ask(want(A, B, version=1))
    assert (decision.facts, decision.commands) == ((), (IssueTickets(JOB, 1),))
    drive.refused(want(A, B, version=2), "stale_fence")
    drive.refused(structs.replace(want(A, B, version=1), plan=b"another"), "stale_fence")
    drive.refused(want(A, job=JobId("none"), version=1), "unknown_job")


def test_a_restarted_driver_gets_a_higher_version_and_swaps_members(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(report("running"))
    assert drive.ask(want(B, C)).commands == (IssueTickets(JOB, 2),)
    assert (drive.phase(A), drive.phase(B), drive.phase(C)) == ("idle", "active", "active")


def test_reports_move_the_job_and_repeat_harmlessly(drive: Drive):
    drive.ask(want(A))
    assert [type(f).__name__ for f in drive.ask(report("running", step=1)).facts] == ["JobStarted"]
    assert drive.ask(report("running", step=2)).facts == ()
    assert state.job_list(drive.desk).jobs[0].step == 2
    drive.ask(report("done", step=9))
    assert drive.answer(report("done", step=9)) == Done()
    assert "is done" in drive.refused(report("running"), "bad_message")
    assert drive.phase(A) == "idle"


def test_only_its_owner_reports_a_job(drive: Drive):
    drive.ask(want(A))
    drive.refused(report("done", sender=A), "not_authorised")
    drive.refused(structs.replace(report("done"), job=JobId("none")), "unknown_job")


def test_a_stop_reaches_the_driver_from_those_entitled_only(drive: Drive):
    drive.ask(want(A))
    drive.refused(requests.StopJob(A, JOB), "not_authorised")
    for sender in (OWNER, BROKER):
        assert drive.ask(requests.StopJob(sender, JOB)).commands == (Notify(500, StopNotice(job=JOB)), Answer(Done()))
    assert drive.desk.pool.jobs[JOB].phase == "stopping"
    drive.refused(want(A), "bad_message")


def test_a_driver_that_comes_back_learns_of_the_stop_it_missed(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(500))
    assert drive.ask(requests.StopJob(OWNER, JOB)).commands == (Answer(Done()),)
    decision = drive.ask(report("running", connection=600))
    assert decision.commands == (Answer(Done()), Notify(600, StopNotice(job=JOB)))
    decision = drive.ask(structs.replace(want(A, version=1), connection=700))
    assert decision.commands == (IssueTickets(JOB, 1), Notify(700, StopNotice(job=JOB)))


@pytest.mark.slow
def test_a_job_without_its_driver_runs_on_and_is_given_up_in_the_end(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(500))

    def keep(seconds: float) -> None:
        for _ in range(int(seconds / 3)):
            drive.now_s += 3.0
            drive.ask(requests.Beat(A, 97, 1))
            drive.ask(requests.DeadlinePassed())

    keep(12.0)
    assert drive.notes()[-1] == "unattended: its driver is out of touch"
    assert drive.phase(A) == "active"
    keep(RULES.unattended_s)
    assert drive.desk.pool.jobs[JOB].phase == "failed"
    assert drive.phase(A) == "idle"
    assert drive.desk.waits == {}


def test_a_driver_that_comes_back_in_time_leaves_no_trace_in_the_journal(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(500))
    drive.now_s += 5.0
    drive.ask(report("running", connection=600))
    drive.ask(report("running", connection=600))
    assert "unattended" not in " ".join(drive.notes())
    assert drive.desk.waits == {}


def test_a_job_whose_driver_let_its_members_go_unheard_is_over(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(report("running"))

    def beats(seconds: float, **held: tuple[str, ...]) -> None:
        for _ in range(int(seconds / 3)):
            drive.now_s += 3.0
            for peer in (A, B, C):
                drive.ask(requests.Beat(peer, ord(peer[0]), 1, held.get(peer[0], ())))

    beats(60.0)
    assert drive.desk.pool.jobs[JOB].live, "its driver is in touch: members may be loading"
    beats(3.0, a=(JOB,), b=(JOB,))
    drive.ask(requests.Disconnected(500))
    beats(60.0, a=(JOB,), b=(JOB,))
    assert drive.desk.pool.jobs[JOB].live, "members hold their stages for a driver that crashed"
    beats(60.0, a=(JOB,))
    assert drive.desk.pool.jobs[JOB].live, "one still holds its stage"
    beats(RULES.clear_s - 3.0)
    assert drive.desk.pool.jobs[JOB].live
    beats(6.0)
    assert not drive.desk.pool.jobs[JOB].live
    assert "let its members go" in drive.notes()[-1]
    assert (drive.phase(A), drive.phase(B)) == ("idle", "idle")


def test_a_draining_member_whose_heartbeat_ends_its_job_has_left_without_a_trace(drive: Drive):
    drive.ask(want(A))
    drive.ask(report("running"))
    drive.ask(requests.Disconnected(500))
    drive.ask(requests.AskLeave(A, ord(A[0]), True))
    while drive.phase(A) == "draining":
        drive.now_s += 3.0
        last = drive.ask(requests.Beat(A, ord(A[0]), 1))
    assert drive.phase(A) == "left"
    assert Notify(ord(A[0]), LeaveNotice(drain=False)) in last.commands, "its process learns that it may end"
    assert A not in drive.desk.links
    assert A not in drive.desk.leases


def test_a_dead_owners_machines_are_free_within_two_minutes(drive: Drive):
    """The members drop what they hold by themselves, and say so with their heartbeats."""
    drive.ask(want(A, B))
    drive.ask(report("running"))
    drive.ask(requests.Disconnected(500))
    died_s = drive.now_s
    while drive.phase(A) == "active":
        drive.now_s += 3.0
        held = (JOB,) if drive.now_s - died_s < ORPHANED_S else ()
        for peer in (A, B, C):
            drive.ask(requests.Beat(peer, ord(peer[0]), 1, held))
        drive.ask(requests.DeadlinePassed())
    assert drive.now_s - died_s <= 120.0
    assert (drive.phase(A), drive.phase(B)) == ("idle", "idle")


def test_a_job_that_its_members_hold_runs_on_while_only_the_broker_misses_its_driver(drive: Drive):
    drive.ask(want(A, B))
    drive.ask(report("running"))
    drive.ask(requests.Disconnected(500))
    for _ in range(int(3 * RULES.unattended_s / 3)):
        drive.now_s += 3.0
        for peer in (A, B, C):
            drive.ask(requests.Beat(peer, ord(peer[0]), 1, (JOB,) if peer != C else ()))
        drive.ask(requests.DeadlinePassed())
    assert drive.desk.pool.jobs[JOB].phase == "running"
    assert (drive.phase(A), drive.phase(B)) == ("active", "active")


def _drive_on(drive: Drive, seconds: float, state: str) -> None:
    """A present driver that reports this state, and a present member, for so many seconds."""
    for _ in range(int(seconds / 3)):
        drive.now_s += 3.0
        drive.ask(requests.Beat(A, 97, 1))
        drive.ask(report(state))
        drive.ask(requests.DeadlinePassed())


@pytest.mark.parametrize("state", ["running", "stopping"])
def test_a_job_whose_driver_ignores_the_stop_is_ended_after_a_grace_period(state: str):
    drive = Drive(replace(RULES, stop_grace_s=30.0))
    drive.join(OWNER, A)
    drive.register(A)
    drive.ask(want(A))
    drive.ask(report("running"))
    drive.ask(requests.StopJob(OWNER, JOB))
    _drive_on(drive, 27.0, state)
    assert drive.desk.pool.jobs[JOB].phase == "stopping"
    drive.ask(requests.StopJob(OWNER, JOB))  # a second stop prolongs nothing
    drive.wait(3.0)
    assert drive.notes()[-1] == "failed: its driver did not end it within 30 s of the stop"
    assert drive.phase(A) == "idle"
    assert drive.desk.stops == {}
    drive.refused(report(state), "bad_message")


def test_a_broker_that_started_again_or_stood_still_grants_a_stopping_job_a_new_grace_period():
    drive = Drive(replace(RULES, stop_grace_s=30.0))
    drive.join(OWNER, A)
    drive.register(A)
    drive.ask(want(A))
    drive.ask(requests.StopJob(OWNER, JOB))
    drive.now_s = 40.0
    drive.ask(requests.Stalled())
    assert drive.desk.stops[JOB].expires_at_s == 70.0
    drive.desk = recovered(drive.desk.rules, drive.desk.pool, 100.0)
    assert drive.desk.stops[JOB].expires_at_s == 130.0


def test_a_job_that_ends_in_time_and_is_asked_for_again_is_not_ended_by_its_old_stop():
    drive = Drive(replace(RULES, stop_grace_s=30.0))
    drive.join(OWNER, A)
    drive.register(A)
    drive.ask(want(A))
    drive.ask(requests.StopJob(OWNER, JOB))
    drive.ask(report("done"))
    drive.ask(want(A))
    _drive_on(drive, 60.0, "running")
    assert drive.desk.pool.jobs[JOB].phase == "running"


def test_stopping_an_unattended_job_ends_it(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(500))
    drive.wait(12.0)
    drive.ask(requests.StopJob(BROKER, JOB))
    assert drive.desk.pool.jobs[JOB].phase == "failed"
    assert drive.notes()[-1] == "failed: stopped while nobody attended to it"


def test_a_job_asked_to_stop_just_after_its_driver_went_frees_its_members_when_the_grace_is_over(drive: Drive):
    drive.ask(want(A))
    drive.ask(requests.Disconnected(500))
    drive.ask(requests.StopJob(BROKER, JOB))
    assert drive.desk.pool.jobs[JOB].phase == "stopping"  # the driver may still come back and end it in order
    for _ in range(4):
        drive.now_s += 3.0
        drive.ask(requests.Beat(A, 97, 1))
        drive.ask(requests.DeadlinePassed())
    assert drive.notes()[-1] == "failed: stopped while nobody attended to it"
    assert drive.phase(A) == "idle"


# --------------------------------------------------------------------------------------------------------- restart


def test_after_a_restart_everybody_has_one_lease_of_grace(drive: Drive):
    drive.ask(want(A, B))
    drive.now_s += 100.0
    drive.desk = recovered(RULES, replay(drive.facts), drive.now_s)
    assert drive.desk.next_deadline_s == drive.now_s + RULES.lease_s
    drive.now_s += 11.0
    drive.ask(requests.DeadlinePassed())
    drive.ask(requests.Beat(A, 1, 1))
    drive.wait(1.0)
    assert (drive.phase(A), drive.phase(B)) == ("active", "lost")
    assert drive.notes()[-2:] == ["member bbbbbbbb lost: not heard for 12 s", "unattended: its driver is out of touch"]


@pytest.mark.parametrize(("members", "grace_s"), [(600, 12.0), (2000, 40.0)])
def test_the_members_of_a_large_pool_have_time_to_come_back_one_after_the_other(
    drive: Drive, members: int, grace_s: float
):
    pool = replay(drive.facts)
    known = pool.members[A]
    many = {PeerId(f"{n}"): replace(known, peer=PeerId(f"{n}")) for n in range(members)}
    desk = recovered(RULES, replace(pool, members=many), 100.0)
    assert desk.next_deadline_s == 100.0 + grace_s
    back = handle(desk, requests.Beat(PeerId("7"), 1, 1), now_s=99.0 + grace_s, wall_s=WALL_S)
    late = handle(back.desk, requests.DeadlinePassed(), now_s=100.0 + grace_s, wall_s=WALL_S)
    assert [peer for peer, member in late.desk.pool.members.items() if member.phase == "idle"] == [PeerId("7")]


def test_nobody_is_blamed_while_the_broker_itself_stood_still(drive: Drive):
    drive.now_s += 60.0
    drive.ask(requests.Stalled())
    drive.ask(requests.DeadlinePassed())
    assert drive.phase(A) == "idle"
    drive.wait(12.0)
    assert drive.phase(A) == "lost"


# ----------------------------------------------------------------------------------------------------------- views


def test_the_pool_shows_processes_not_certificates(drive: Drive):
    drive.ask(want(B))
    drive.ask(requests.Disconnected(99))
    drive.ask(requests.AskLeave(A, 97, drain=False))
    drive.now_s += 4.0
    view = state.pool_view(drive.desk, drive.now_s, WALL_S)
    assert [(member.peer[0], member.state, member.job) for member in view.members] == [
        ("b", "active", JOB),
        ("c", "silent", ""),
    ]
    assert [member.last_heard_s for member in view.members] == [4.0, 4.0]


def test_a_story_is_told_only_when_asked_for(drive: Drive):
    drive.ask(want(A))
    assert state.job_list(drive.desk).jobs[0].story == ()
    [view] = state.job_list(drive.desk, JOB).jobs
    assert view.story[0] == "1970-01-12 13:46:40Z asked for by oooooooo"
    assert state.job_list(drive.desk, JobId("none")).jobs == ()
