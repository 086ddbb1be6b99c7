"""The queue's decisions: places, turns, what is kept for whom, and what a job that does not wait is answered."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.job_queue import LATE_S, MOST_MISSED, PriorityClass, QueuePolicy, Quota
from fusionai.coordination.broker.pool import Pool, freeze, replay, thaw
from fusionai.coordination.broker.requests import Answer, IssueTickets, Notify
from fusionai.coordination.broker.state import BrokerRules, BrokerState, Decision, job_list, pool_view, recovered
from fusionai.coordination.broker.turns import MOST_OF_OWNER
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import QueuePlace, Refused, StopNotice

BROKER, ANNA, BERT, CARL = (PeerId(letter * 52) for letter in "yopq")
A, B, C = (PeerId(letter * 52) for letter in "abc")
GB = 10**9
WALL_S = 1_000_000.0
POLICY = QueuePolicy(turn_s=60.0, kept_s=1000.0)


class Desk:
    """A broker with machines that lend 4 GB each, and owners on connections of their own."""

    def __init__(self, policy: QueuePolicy = POLICY, machines: tuple[PeerId, ...] = (A, B, C)) -> None:
        self.now_s = 0.0
        self.rules = BrokerRules(pool="home", broker=BROKER, queue=policy)
        self.desk: BrokerState = recovered(self.rules, Pool(), 0.0)
        self.facts: list[events.Fact] = []
        for peer in (ANNA, BERT, CARL, *machines):
            self.ask(requests.Invite(BROKER, f"for {peer}", 1, 60.0))
            self.ask(requests.Enrol(f"for {peer}", peer, "provider"))
        for peer in machines:
            self.register(peer)

    def register(self, peer: PeerId, *, boot: int = 1, memory_bytes: int = 4 * GB) -> None:
        self.ask(requests.RegisterMember(peer, ord(peer[0]), boot, b"", (), memory_bytes, 1e9))

    def ask(self, request: requests.Request) -> Decision:
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=WALL_S + self.now_s)
        self.desk = decision.desk
        self.facts += decision.facts
        assert replay(self.facts) == self.desk.pool
        return decision

    def answer(self, request: requests.Request) -> object:
        (found,) = [one.message for one in self.ask(request).commands if isinstance(one, Answer)]
        return found

    def place(
        self, name: str, owner: PeerId = ANNA, machines: int = 1, memory_bytes: int = 0, **more: object
    ) -> QueuePlace:
        found = self.answer(want(name, owner, machines, memory_bytes, **more))
        assert isinstance(found, QueuePlace), found
        return found

    def refused(self, request: requests.Request, code: str) -> str:
        found = self.answer(request)
        assert isinstance(found, Refused)
        assert found.code == code
        return found.reason

    def start(self, name: str, *peers: PeerId, owner: PeerId = ANNA) -> None:
        assert any(isinstance(one, IssueTickets) for one in self.ask(start(name, *peers, owner=owner)).commands)

    def end(self, name: str, owner: PeerId = ANNA) -> None:
        self.ask(requests.ReportJob(owner, ord(owner[0]), JobId(name), "done", 1, ""))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for peer, member in self.desk.pool.members.items():
            if peer in self.desk.leases:
                self.ask(requests.Beat(peer, ord(peer[0]), member.boot, (member.job,) if member.job else ()))
        self.ask(requests.DeadlinePassed())

    def restart(self) -> None:
        """The broker starts again; its members and the owners that wait come back."""
        self.desk = recovered(self.rules, thaw(freeze(self.desk.pool)), self.now_s)

    def phase(self, name: str) -> str:
        return self.desk.pool.jobs[JobId(name)].phase

    def kept(self) -> dict[str, str]:
        return {peer[0]: name for peer, name in self.desk.line.kept.items()}


def want(
    name: str, owner: PeerId = ANNA, machines: int = 1, memory_bytes: int = 0, **more: object
) -> requests.AskPlace:
    return requests.AskPlace(owner, ord(owner[0]), JobId(name), "title", 5, machines, memory_bytes, **more)  # pyright: ignore[reportArgumentType]


def start(name: str, *peers: PeerId, owner: PeerId = ANNA) -> requests.RequestJob:
    members = tuple(MemberPlacement(peer, (stage,)) for stage, peer in enumerate(peers))
    return requests.RequestJob(owner, ord(owner[0]), JobId(name), "title", 5, b"plan", 0, members)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_job_that_finds_machines_has_its_turn_at_once_with_all_that_are_free(desk: Desk):
    found = desk.place("job-1")
    assert (found.place, found.waiting, found.members, found.turn_s) == (1, 1, (A, B, C), 60.0)
    desk.start("job-1", A, B)
    assert desk.phase("job-1") == "requested"
    assert not desk.desk.turns
    assert desk.desk.line.jobs == ()


def test_a_second_job_waits_and_has_its_turn_when_the_first_ends(desk: Desk):
    desk.start("job-1", A, B, C)
    found = desk.place("job-2", BERT)
    assert (found.place, found.waiting, found.members) == (1, 1, ())
    assert found.why == "it needs at least 1 machine"
    assert desk.refused(start("job-2", A, owner=BERT), "queued").endswith("it is not its turn.")
    desk.end("job-1")
    assert desk.place("job-2", BERT, again=True).members == (A, B, C)
    desk.start("job-2", A, owner=BERT)


def test_an_owner_that_does_not_wait_is_refused_while_others_wait(desk: Desk):
    desk.start("job-1", A, B)
    desk.place("job-2", BERT, machines=2)
    assert desk.refused(start("job-3", C, owner=CARL), "queued") == (
        "1 job waits for machines in the queue of this pool."
    )
    desk.place("job-4", CARL, machines=3)
    assert desk.refused(start("job-3", C, owner=CARL), "queued").startswith("2 jobs wait")


def test_machines_are_gathered_for_the_first_job_that_they_can_suffice_for(desk: Desk):
    desk.start("job-1", A, B)
    assert "1 machine kept for it" in desk.place("job-2", BERT, machines=2).why
    assert desk.kept() == {"c": "job-2"}
    assert desk.place("job-3", CARL).members == ()
    assert [view.kept_for for view in pool_view(desk.desk, 0.0, WALL_S).members] == ["", "", "job-2"]
    desk.end("job-1")
    assert len(desk.place("job-2", BERT, machines=2, again=True).members) == 2
    assert len(desk.place("job-3", CARL, again=True).members) == 1, "what the first one leaves over"
    assert len(desk.kept()) == 3


def test_a_later_job_gets_what_the_first_one_cannot_use(desk: Desk):
    desk.start("job-1", A)
    desk.place("job-2", BERT, machines=2, excluded=(C,))
    assert desk.place("job-3", CARL).members == (C,)
    assert desk.kept() == {"b": "job-2", "c": "job-3"}


def test_nothing_is_kept_for_a_job_for_which_the_whole_pool_does_not_suffice(desk: Desk):
    found = desk.place("job-1", machines=4)
    assert found.why == "it needs at least 4 machines and the pool has 3 machines with 12 GB: machines must join"
    assert desk.kept() == {}
    assert "20 GB and the pool has" in desk.place("job-1", memory_bytes=20 * GB).why
    assert desk.place("job-2", BERT, machines=3).members == (A, B, C)


def test_a_turn_has_the_largest_machines_and_no_more_than_needed_while_others_wait(desk: Desk):
    desk.register(B, memory_bytes=8 * GB)
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT, memory_bytes=7 * GB)
    desk.place("job-3", CARL)
    desk.end("job-1")
    assert desk.place("job-2", BERT, memory_bytes=7 * GB).members == (B,)
    assert desk.place("job-3", CARL).members == (A,)


def test_a_turn_that_is_not_taken_passes_and_after_three_the_place_is_lost(desk: Desk):
    desk.place("job-1")
    desk.place("job-2", BERT)
    for missed in range(1, MOST_MISSED):
        desk.wait(60.0)
        assert desk.desk.pool.jobs[JobId("job-1")].missed == missed
        assert desk.phase("job-1") == "queued"
    desk.wait(60.0)
    assert desk.phase("job-1") == "failed"
    assert "3 times" in desk.desk.pool.jobs[JobId("job-1")].notes[-1].text


def test_during_a_turn_its_machines_are_for_that_job_alone(desk: Desk):
    desk.start("job-1", A, B)
    desk.place("job-2", BERT)
    assert desk.kept() == {"c": "job-2"}
    assert "is kept for job-2" in desk.refused(start("job-1", A, B, C), "busy")
    assert "is kept for job-2" in desk.refused(start("job-1", A, C), "busy"), "not even in place of another"
    assert desk.refused(start("job-2", A, owner=BERT), "busy").endswith("plan again without it.")


def test_a_running_job_may_replace_a_machine_by_one_that_is_gathered_but_not_grow(desk: Desk):
    desk.start("job-1", A, B)
    desk.place("job-2", BERT, machines=2)
    assert "is kept for job-2" in desk.refused(start("job-1", A, B, C), "busy")
    desk.start("job-1", A, C)
    assert desk.kept() == {"b": "job-2"}


def test_a_need_that_has_grown_ends_the_turn_and_keeps_the_place(desk: Desk):
    desk.start("job-1", A, B)
    desk.place("job-2", BERT)
    desk.place("job-3", CARL)
    asked_at_s = desk.desk.pool.jobs[JobId("job-2")].queued_at_s
    desk.now_s += 5.0
    found = desk.place("job-2", BERT, machines=2, again=True)
    assert (found.place, found.members) == (1, ())
    assert desk.desk.pool.jobs[JobId("job-2")].queued_at_s == asked_at_s
    assert desk.kept() == {"c": "job-2"}
    assert desk.place("job-3", CARL, again=True).members == ()


def test_a_lost_machine_ends_a_turn_for_which_the_others_do_not_suffice(desk: Desk):
    assert desk.place("job-1", machines=3).members == (A, B, C)
    desk.ask(requests.AskLeave(C, 99, drain=False))
    assert desk.place("job-1", machines=3, again=True).members == ()
    desk.place("job-1", machines=2)
    assert desk.place("job-1", machines=2).members == (A, B)


def test_a_member_that_leaves_is_taken_out_of_a_turn_that_it_is_not_needed_for(desk: Desk):
    assert desk.place("job-1").members == (A, B, C)
    desk.ask(requests.AskLeave(C, 99, drain=False))
    assert desk.place("job-1", again=True).members == (A, B)


def test_a_place_outlives_its_owner_and_the_broker(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    desk.place("job-3", CARL)
    desk.ask(requests.Disconnected(ord(BERT[0])))
    desk.wait(desk.rules.lease_s)
    assert not desk.desk.pool.jobs[JobId("job-2")].attended
    desk.restart()
    for peer in (A, B, C):
        desk.register(peer)
    assert desk.place("job-3", CARL, again=True).place == 2
    assert desk.place("job-2", BERT).place == 1
    desk.end("job-1")
    assert desk.place("job-2", BERT).members != ()


def test_an_absent_owner_gets_no_turn_and_holds_nothing_up_until_it_is_back(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    desk.ask(requests.Disconnected(ord(BERT[0])))
    desk.wait(desk.rules.lease_s)
    desk.end("job-1")
    assert desk.kept() == {}
    desk.start("job-3", A, B, C, owner=CARL)
    desk.end("job-3", CARL)
    assert desk.place("job-2", BERT).members == (A, B, C)


def test_a_place_is_lost_when_its_owner_stays_away(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    desk.ask(requests.Disconnected(ord(BERT[0])))
    desk.wait(desk.rules.lease_s)
    desk.now_s += POLICY.kept_s - 1.0
    desk.ask(requests.DeadlinePassed())
    assert desk.phase("job-2") == "queued"
    desk.now_s += 1.0
    desk.ask(requests.DeadlinePassed())
    assert desk.phase("job-2") == "failed"
    assert desk.desk.pool.jobs[JobId("job-2")].notes[-1].text.startswith("failed: given up after 1000 s")


def test_a_queued_job_can_be_taken_out_by_its_owner_and_the_brokers(desk: Desk):
    desk.start("job-1", A, B, C)
    for sender in (BERT, BROKER):
        desk.place("job-2", BERT)
        assert desk.refused(requests.StopJob(CARL, JobId("job-2")), "not_authorised")
        stopped = desk.ask(requests.StopJob(sender, JobId("job-2"), 77))
        assert Notify(ord(BERT[0]), StopNotice(job="job-2")) in stopped.commands
        assert desk.phase("job-2") == "done"
        assert desk.refused(want("job-2", BERT, again=True), "unknown_job")
    assert JobId("job-2") not in desk.desk.drivers


def test_the_owner_that_gives_up_its_place_is_not_notified(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    assert not any(
        isinstance(one, Notify) for one in desk.ask(requests.StopJob(BERT, JobId("job-2"), ord(BERT[0]))).commands
    )
    desk.place("job-2", BERT)
    desk.ask(requests.ReportJob(BERT, ord(BERT[0]), JobId("job-2"), "failed", 0, "its server was killed"))
    assert desk.phase("job-2") == "done"


def test_an_evicted_owners_job_leaves_the_queue(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    desk.ask(requests.EvictMember(BROKER, BERT))
    assert desk.phase("job-2") == "failed"


def test_a_job_with_machines_needs_no_place_and_names_belong_to_their_owners(desk: Desk):
    desk.start("job-1", A)
    assert desk.place("job-1").place == 0
    assert desk.refused(want("job-1", BERT), "not_authorised")
    assert desk.refused(want("job-9", PeerId("z" * 52)), "unknown_peer")


def test_jobs_are_listed_with_their_places(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    desk.place("job-3", CARL)
    assert [(view.job, view.state, view.place) for view in job_list(desk.desk).jobs] == [
        ("job-1", "requested", 0),
        ("job-2", "queued", 1),
        ("job-3", "queued", 2),
    ]
    assert job_list(desk.desk, JobId("job-3")).jobs[0].place == 2


def test_owners_whose_jobs_hold_less_come_first(desk: Desk):
    desk.start("job-1", A, B)
    desk.place("job-2", ANNA, machines=2)
    desk.place("job-3", BERT, machines=2)
    assert desk.desk.line.jobs == ("job-3", "job-2")
    desk.place("job-4", BERT, machines=2)
    desk.place("job-5", BERT, machines=2)
    assert desk.desk.line.jobs == ("job-3", "job-2", "job-4", "job-5"), "as if each had got its machines"


def test_a_more_urgent_class_comes_first_and_waiting_makes_urgent(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT, priority="low")
    desk.now_s += 10.0
    desk.place("job-3", CARL)
    assert desk.desk.line.jobs == ("job-3", "job-2")
    desk.now_s += POLICY.age_s - 10.0
    desk.ask(requests.Stalled())
    desk.place("job-4", ANNA, priority="low")
    assert desk.desk.line.jobs == ("job-2", "job-3", "job-4")


def test_classes_are_those_of_the_policy_and_of_whom_it_says(desk: Desk):
    assert desk.refused(want("job-2", priority="urgent"), "bad_message").endswith("it has high, normal, low, idle.")
    assert "is not for jobs of" in desk.refused(want("job-2", priority="high"), "not_authorised")
    classes = (PriorityClass("urgent", frozenset({BERT})), PriorityClass("normal"))
    other = Desk(replace(POLICY, classes=classes))
    other.start("job-1", A, B, C)
    other.place("job-2", ANNA)
    assert other.place("job-3", BERT, priority="urgent").place == 1


def test_the_brokers_own_machine_may_use_every_class(desk: Desk):
    desk.ask(requests.Vouch(BROKER, PeerId("w" * 52), "owner"))
    assert desk.place("job-1", PeerId("w" * 52), priority="high").members == (A, B, C)


def test_a_quota_holds_for_all_keys_of_a_machine_and_keeps_nothing_from_others():
    desk = Desk(replace(POLICY, quota=Quota(machines=2), quotas={BERT: Quota(memory_bytes=12 * GB)}))
    key = PeerId("v" * 52)
    desk.ask(requests.Vouch(ANNA, key, "owner"))
    desk.start("job-1", A)
    assert "would hold 3 machines" in desk.refused(start("job-1", A, B, C), "quota")
    assert desk.place("job-2", key).members == (B,)
    desk.start("job-2", B, owner=key)
    found = desk.place("job-3", key)
    assert found.members == ()
    assert found.why == (
        "its owner's jobs hold 2 machines with 8 GB, and the pool's policy lets one owner hold 2 machines at most"
    )
    assert desk.refused(start("job-4", C), "queued")
    assert desk.place("job-5", BERT).members == (C,)
    assert desk.refused(want("job-6", key, machines=3), "quota")
    assert "12 GB at most" in desk.refused(want("job-6", BERT, memory_bytes=13 * GB), "quota")


def test_an_owner_without_a_queue_is_held_to_its_quota():
    desk = Desk(replace(POLICY, quota=Quota(machines=2)))
    desk.start("job-1", A)
    assert desk.refused(start("job-2", B, C), "quota")
    desk.start("job-2", B)


def test_the_queue_has_a_limit():
    desk = Desk(replace(POLICY, most_jobs=1))
    desk.start("job-1", A, B, C)
    desk.place("job-2", BERT)
    assert desk.refused(want("job-3", CARL), "busy") == "The queue is full: 1 of 1 places are taken."
    assert desk.place("job-2", BERT).place == 1
    assert desk.place("job-2", BERT, machines=2).place == 1, "it has its place already"


def test_a_suspended_broker_gives_turns_a_new_lease(desk: Desk):
    desk.place("job-1")
    desk.now_s += 100.0
    desk.ask(requests.Stalled())
    desk.ask(requests.DeadlinePassed())
    assert desk.desk.pool.jobs[JobId("job-1")].missed == 0
    assert desk.place("job-1").turn_s == 60.0


def test_an_estimate_is_given_to_the_first_where_running_jobs_have_steps(desk: Desk):
    desk.start("job-1", A, B)
    desk.start("job-2", C, owner=BERT)
    assert desk.place("job-3", CARL).expected_s == 0.0, "nothing is known of jobs that have just begun"
    desk.now_s += 20.0
    desk.ask(requests.ReportJob(ANNA, ord(ANNA[0]), JobId("job-1"), "running", 1, ""))
    assert desk.place("job-3", CARL).expected_s == 30.0, "2 of 5 steps took 20 s"
    assert desk.place("job-3", CARL, machines=3).expected_s == 0.0
    desk.ask(requests.ReportJob(BERT, ord(BERT[0]), JobId("job-2"), "running", 0, ""))
    assert desk.place("job-3", CARL, machines=3).expected_s == 80.0
    assert desk.place("job-3", CARL, excluded=(A, B)).expected_s == 80.0
    assert desk.place("job-4", BERT).expected_s == 0.0, "how long those ahead will run is not known"


def test_an_estimate_counts_only_the_steps_since_a_job_was_resumed(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.ask(requests.ReportJob(ANNA, ord(ANNA[0]), JobId("job-1"), "done", 2, ""))
    desk.start("job-1", A, B, C)
    desk.now_s += 20.0
    desk.ask(requests.ReportJob(ANNA, ord(ANNA[0]), JobId("job-1"), "running", 3, ""))
    assert desk.place("job-2", BERT).expected_s == 20.0


def test_a_pool_of_an_earlier_version_has_an_empty_queue():
    """Frozen before jobs could wait: neither the jobs nor the members have the newer fields."""
    desk = Desk()
    desk.start("job-1", A)
    old = msgspec.msgpack.decode(freeze(desk.desk.pool))
    for job in old["jobs"].values():
        for name in ("need", "queued_at_s", "missed", "ended_at_s", "held_bytes", "held_flops_per_s", "begun_at_step"):
            del job[name]
    for member in old["members"].values():
        del member["memory_bytes"], member["flops_per_s"]
    pool = thaw(msgspec.msgpack.encode(old))
    assert pool.queued_jobs() == ()
    assert pool.jobs[JobId("job-1")] == desk.desk.pool.jobs[JobId("job-1")]
    desk.desk = recovered(desk.rules, pool, 0.0)
    desk.facts = []
    fact = events.decode(
        msgspec.msgpack.encode(
            {"e": "member_registered", "at_s": 1.0, "peer": A, "boot": 2, "profile": b"", "addresses": ()}
        )
    )
    assert isinstance(fact, events.MemberRegistered)
    assert (fact.memory_bytes, fact.flops_per_s) == (0, 0.0)


def test_a_member_of_an_earlier_version_says_what_it_lends_when_it_registers_again(desk: Desk):
    desk.register(A, memory_bytes=0)
    assert desk.desk.pool.members[A].memory_bytes == 0
    desk.register(A)
    assert desk.desk.pool.members[A].memory_bytes == 4 * GB
    assert not desk.ask(requests.RegisterMember(A, ord("a"), 1, b"", (), 4 * GB, 1e9)).facts


def test_a_turn_ends_with_its_owners_presence(desk: Desk):
    desk.place("job-1")
    desk.place("job-2", BERT)
    desk.ask(requests.Disconnected(ord(ANNA[0])))
    desk.wait(desk.rules.lease_s)
    assert JobId("job-1") not in desk.desk.turns
    assert len(desk.place("job-2", BERT).members) == 3


def test_a_job_that_ended_before_is_refused_like_a_new_one_while_others_wait(desk: Desk):
    desk.start("job-1", A)
    desk.end("job-1")
    desk.start("job-2", A, B, C, owner=BERT)
    desk.place("job-3", CARL)
    desk.refused(start("job-1", A), "queued")


def test_a_quota_counts_the_owners_own_jobs_alone():
    desk = Desk(replace(POLICY, quota=Quota(machines=2)))
    desk.start("job-1", A, owner=BERT)
    desk.start("job-2", B, C)
    desk.start("job-2", B, C)


def test_no_estimate_is_made_of_machines_that_leave_and_jobs_without_an_end(desk: Desk):
    desk.ask(replace_steps(start("job-1", A), 0))
    desk.start("job-2", B, owner=BERT)
    desk.start("job-3", C, owner=CARL)
    desk.now_s += 20.0
    for name, owner in (("job-1", ANNA), ("job-2", BERT)):
        desk.ask(requests.ReportJob(owner, ord(owner[0]), JobId(name), "running", 1, ""))
    assert desk.place("job-4", CARL).expected_s == 30.0
    desk.ask(requests.AskLeave(B, 99, drain=True))
    assert desk.place("job-4", CARL).expected_s == 0.0


def replace_steps(request: requests.RequestJob, steps: int) -> requests.RequestJob:
    return msgspec.structs.replace(request, steps=steps)


def test_what_is_waited_for_leaves_out_machines_that_the_job_may_not_use(desk: Desk):
    assert desk.place("job-1", machines=2, excluded=(A, B)).why == (
        "it needs at least 2 machines and the pool has 1 machine with 4 GB: machines must join"
    )
    assert "the pool has none" in desk.place("job-1", excluded=(A, B, C)).why


def test_the_queue_is_arranged_anew_when_the_pool_changes_and_at_most_once_a_second_otherwise(desk: Desk):
    desk.start("job-1", A, B, C)
    desk.now_s = 10.0
    desk.ask(requests.DeadlinePassed())
    assert desk.desk.arranged_s == 0.0, "nothing waits"
    desk.place("job-2", BERT)
    assert desk.desk.arranged_s == 10.0
    desk.now_s = 10.9
    desk.place("job-2", BERT)
    assert desk.desk.arranged_s == 10.0
    desk.now_s = 11.0
    desk.place("job-2", BERT)
    assert desk.desk.arranged_s == 11.0
    desk.now_s = 15.0
    desk.ask(requests.Beat(A, ord("a"), 1, ("job-1",)))
    assert desk.desk.arranged_s == 11.0, "a heartbeat that changes nothing"
    desk.place("job-3", CARL)
    assert desk.desk.arranged_s == 15.0
    desk.now_s = 15.1
    desk.end("job-1")
    assert desk.desk.arranged_s == 15.1


def test_an_owner_that_lets_turns_pass_comes_behind_the_others_for_an_hour(desk: Desk):
    def order() -> tuple[str, ...]:
        desk.start("all", A, B, C, owner=CARL)
        desk.place("job-1", ANNA)
        desk.place("job-2", BERT)
        found = desk.desk.line.jobs
        for name, owner in (("job-1", ANNA), ("job-2", BERT)):
            desk.ask(requests.StopJob(owner, JobId(name)))
        desk.end("all", CARL)
        return found

    for number in range(MOST_MISSED):
        assert order() == ("job-1", "job-2")
        desk.place(f"idle-{number}")
        desk.wait(60.0)
        desk.ask(requests.StopJob(ANNA, JobId(f"idle-{number}")))
    assert order() == ("job-2", "job-1")
    desk.now_s += LATE_S - 121.0
    desk.ask(requests.Stalled())
    assert order() == ("job-2", "job-1")
    desk.now_s += 121.0
    desk.ask(requests.Stalled())
    assert order() == ("job-1", "job-2")


def test_one_owner_has_a_limited_number_of_places(desk: Desk):
    desk.start("job-0", A, B, C)
    for number in range(MOST_OF_OWNER):
        desk.place(f"job-{number + 1}", BERT)
    assert "200 jobs of this owner" in desk.refused(want("job-x", BERT), "busy")
    assert desk.place("job-1", BERT, machines=2).waiting == MOST_OF_OWNER
    assert desk.place("job-x", CARL).waiting == MOST_OF_OWNER + 1


def idle(desk: Desk, name: str, *peers: PeerId, owner: PeerId = ANNA) -> None:
    """Start a job of the class that gives way on machines of its turn."""
    assert set(peers) <= set(desk.place(name, owner, machines=len(peers), priority="idle").members)
    desk.start(name, *peers, owner=owner)
    desk.ask(requests.ReportJob(owner, ord(owner[0]), JobId(name), "running", 0, ""))


def given_way(decision: Decision) -> dict[str, str]:
    """Return which jobs are asked to give way, and to which one."""
    notices = [one.message for one in decision.commands if isinstance(one, Notify)]
    return {one.job: one.gives_way_to for one in notices if isinstance(one, StopNotice)}


def test_an_idle_job_gives_way_and_gets_machines_again_later(desk: Desk):
    idle(desk, "idle-1", A, B, C)
    decision = desk.ask(want("job-2", BERT, machines=2))
    assert given_way(decision) == {"idle-1": "job-2"}
    assert desk.phase("idle-1") == "stopping"
    assert "gives way to job-2" in desk.desk.pool.jobs[JobId("idle-1")].notes[-1].text
    assert given_way(desk.ask(want("job-2", BERT, machines=2))) == {}, "once is enough"
    desk.end("idle-1")
    assert desk.place("idle-1", machines=3, priority="idle").place == 2
    desk.start("job-2", *desk.place("job-2", BERT, machines=2).members[:2], owner=BERT)
    assert desk.place("idle-1", machines=3, priority="idle").members == ()
    desk.end("job-2", BERT)
    assert desk.place("idle-1", machines=3, priority="idle").members == (A, B, C)
    assert not desk.desk.pool.jobs[JobId("idle-1")].missed


def test_as_few_jobs_as_possible_give_way_the_youngest_first(desk: Desk):
    for name, peer in (("idle-1", A), ("idle-2", B), ("idle-3", C)):
        idle(desk, name, peer)
        desk.wait(1.0)
    assert given_way(desk.ask(want("job-1", BERT))) == {"idle-3": "job-1"}
    assert given_way(desk.ask(want("job-2", BERT))) == {}, "the machine of a job that stops already is counted"
    desk.end("idle-3")
    desk.start("job-1", *desk.place("job-1", BERT).members, owner=BERT)
    assert (desk.phase("idle-1"), desk.phase("idle-2")) == ("running", "stopping"), "now for job-2"
    assert given_way(desk.ask(want("job-2", BERT, machines=2))) == {"idle-1": "job-2"}


def test_a_large_job_alone_gives_way_where_small_ones_are_not_needed_too():
    desk = Desk(machines=(A, B, C))
    desk.register(C, boot=1, memory_bytes=16 * GB)
    idle(desk, "large", C)
    desk.wait(1.0)
    idle(desk, "small", A)
    assert given_way(desk.ask(want("job-1", BERT, memory_bytes=12 * GB))) == {"large": "job-1"}


def test_nothing_gives_way_in_vain_nor_to_its_equals(desk: Desk):
    idle(desk, "idle-1", A)
    desk.start("job-1", B, owner=CARL)
    assert given_way(desk.ask(want("job-2", BERT, machines=3))) == {}, "job-1 does not give way"
    assert given_way(desk.ask(want("idle-2", BERT, machines=2, priority="idle"))) == {}
    desk.ask(requests.ReportJob(BERT, ord("p"), JobId("job-2"), "done", 0, ""))
    assert given_way(desk.ask(want("job-3", BERT, machines=2, excluded=(A,)))) == {}
    assert given_way(desk.ask(want("job-3", BERT, machines=2))) == {"idle-1": "job-3"}


def test_a_waiting_job_at_its_owners_quota_makes_none_give_way():
    desk = Desk(QueuePolicy(quota=Quota(machines=1)))
    idle(desk, "idle-1", A)
    desk.start("job-1", B, owner=BERT)
    desk.start("job-2", C, owner=CARL)
    assert given_way(desk.ask(want("job-3", BERT))) == {}


def test_a_driver_that_comes_back_hears_to_what_it_gives_way_and_a_members_stop_outlasts_that(desk: Desk):
    idle(desk, "idle-1", A, B, C)
    desk.ask(requests.Disconnected(ord(ANNA[0])))
    assert given_way(desk.ask(want("job-2", BERT))) == {}, "nobody hears it now"
    report = requests.ReportJob(ANNA, 99, JobId("idle-1"), "running", 3, "")
    assert given_way(desk.ask(report)) == {"idle-1": "job-2"}
    assert given_way(desk.ask(requests.StopJob(ANNA, JobId("idle-1")))) == {"idle-1": ""}
    assert given_way(desk.ask(report)) == {"idle-1": ""}


def test_an_idle_job_that_nobody_attends_to_ends_at_once(desk: Desk):
    idle(desk, "idle-1", A, B, C)
    desk.ask(requests.Disconnected(ord(ANNA[0])))
    desk.wait(desk.rules.lease_s + 1.0)
    assert not desk.desk.pool.jobs[JobId("idle-1")].attended
    desk.ask(want("job-2", BERT))
    assert desk.phase("idle-1") == "failed"
    assert desk.place("job-2", BERT).members == (A, B, C)
