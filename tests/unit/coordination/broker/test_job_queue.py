"""The queue's order, shares and choices of machines, on pools that are written down."""

from __future__ import annotations

from dataclasses import replace

from fusionai.coordination.broker.job import Job, Need
from fusionai.coordination.broker.job_queue import (
    USED_S,
    Arrangement,
    LentAmount,
    Line,
    PriorityClass,
    QueuePolicy,
    Quota,
)
from fusionai.coordination.broker.ledger import Ledger, LentWork
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.pool import Pool
from fusionai.primitives.ids import JobId, PeerId

GB = 10**9
NOW_S = 10 * 86_400.0
ANNA, BERT, CARL = (PeerId(letter * 52) for letter in "opq")


def member(name: str, memory_bytes: int = 4 * GB, flops_per_s: float = 1e9, job: str = "", **changes: object) -> Member:
    known = Member(
        entity=name, phase="active" if job else "idle", peer=PeerId(name), job=JobId(job) if job else None, boot=1
    )
    return replace(known, memory_bytes=memory_bytes, flops_per_s=flops_per_s, **changes)  # pyright: ignore[reportArgumentType]


def job(name: str, owner: PeerId, phase: str = "queued", need: Need | None = None, **changes: object) -> Job:
    known = Job(
        entity=name,
        phase=phase,
        job=JobId(name),
        title=name,
        owner=owner,
        steps=1,
        requested_at_s=NOW_S,
        queued_at_s=NOW_S,
    )
    return replace(known, need=need or Need(1, 0, (), "normal"), **changes)  # pyright: ignore[reportArgumentType]


def arrangement(members: list[Member], jobs: list[Job], policy: QueuePolicy | None = None) -> Arrangement:
    pool = Pool(members={one.peer: one for one in members}, jobs={one.job: one for one in jobs})
    free = {one.peer: one for one in members if one.phase == "idle"}
    return Arrangement(pool, policy or QueuePolicy(), free, {}, NOW_S)


def order(members: list[Member], jobs: list[Job], policy: QueuePolicy | None = None) -> list[str]:
    return list(arrangement(members, jobs, policy).order())


def test_the_dominant_share_is_the_larger_of_memory_and_speed():
    whole = LentAmount(4, 100, 10.0)
    assert LentAmount(1, 50, 1.0).share_of(whole) == 0.5
    assert LentAmount(1, 10, 9.0).share_of(whole) == 0.9
    assert LentAmount(1, 0, 0.0).share_of(LentAmount(4)) == 0.25, "machines that said nothing count by number"
    assert LentAmount(1, 5, 0.0).share_of(LentAmount(2, 10, 0.0)) == 0.5
    assert LentAmount().share_of(LentAmount()) == 0.0
    assert LentAmount(1, 2, 3.0) + LentAmount(10, 20, 30.0) == LentAmount(11, 22, 33.0)


def test_a_quota_and_a_need_are_met_at_the_limit():
    assert Quota(2, 10).allows(LentAmount(2, 10))
    assert not Quota(2, 10).allows(LentAmount(3, 10))
    assert not Quota(2, 10).allows(LentAmount(2, 11))
    assert Quota().allows(LentAmount(10**6, 10**18))
    assert Quota(None, 10).allows(LentAmount(3, 10))
    assert Quota(2, None).allows(LentAmount(2, 11))
    assert LentAmount(2, 10).meets(Need(2, 10))
    assert not LentAmount(1, 10).meets(Need(2, 10))
    assert not LentAmount(2, 9).meets(Need(2, 10))


def test_a_fast_machine_counts_as_much_as_a_large_one():
    members = [member("a", 1 * GB, 8e9, job="run-1"), member("b", 4 * GB, 1e9, job="run-2"), member("c", 4 * GB, 1e9)]
    runs = [job("run-1", ANNA, "running"), job("run-2", BERT, "running")]
    assert order(members, [*runs, job("q-1", ANNA), job("q-2", BERT)]) == ["q-2", "q-1"]


def test_what_the_jobs_ahead_would_hold_counts_too():
    members = [member(name) for name in "abcd"]
    half = Need(1, 8 * GB, (), "normal")
    jobs = [job("a-1", ANNA, need=half), job("a-2", ANNA), job("b-1", BERT), job("b-2", BERT), job("b-3", BERT)]
    assert order(members, jobs) == ["a-1", "b-1", "b-2", "a-2", "b-3"]


def test_owners_that_hold_the_same_are_ordered_by_the_last_day_and_then_by_time():
    members = [member(name) for name in "abcd"]
    ran = {"ended_at_s": NOW_S, "held_bytes": 4 * GB, "held_flops_per_s": 1e9}
    past = [
        job("a-0", ANNA, "done", requested_at_s=NOW_S - 100.0, **ran),
        job("b-0", BERT, "done", requested_at_s=NOW_S - 50.0, **ran),
        job("c-0", CARL, "done", **{**ran, "ended_at_s": NOW_S - USED_S}, requested_at_s=NOW_S - USED_S - 999.0),
    ]
    queued = [job("a-1", ANNA), job("b-1", BERT, queued_at_s=NOW_S + 1.0), job("c-1", CARL, queued_at_s=NOW_S + 2.0)]
    assert order(members, [*past, *queued]) == ["c-1", "b-1", "a-1"]
    assert order(members, queued) == ["a-1", "b-1", "c-1"]
    runs = [job("b-0", BERT, "running", requested_at_s=NOW_S - 500.0), past[0]]
    busy = [member("a", job="b-0"), *members[1:]]
    assert order(busy, [*runs, job("a-1", ANNA), job("b-1", BERT)]) == ["a-1", "b-1"]


def test_speed_counts_in_the_last_day_as_well():
    members = [member(name) for name in "abcd"]
    past = [
        job("a-0", ANNA, "done", requested_at_s=NOW_S - 100.0, ended_at_s=NOW_S, held_bytes=0, held_flops_per_s=4e9),
        job("b-0", BERT, "done", requested_at_s=NOW_S - 100.0, ended_at_s=NOW_S, held_bytes=4 * GB),
    ]
    assert order(members, [*past, job("a-1", ANNA), job("b-1", BERT)]) == ["b-1", "a-1"]


def test_an_owners_first_job_grows_more_urgent_while_it_gets_no_machines():
    members = [member("a", job="run"), member("b")]
    policy = QueuePolicy(age_s=100.0)
    old = job("low", ANNA, need=Need(1, 0, (), "low"), queued_at_s=NOW_S - 101.0, requested_at_s=0.0)
    run = job("run", CARL, "running")
    assert order(members, [run, old, job("new", BERT)], policy) == ["low", "new"], "the same class, asked earlier"
    young = replace(old, queued_at_s=NOW_S - 99.0)
    assert order(members, [run, young, job("new", BERT)], policy) == ["new", "low"]
    served = job("done", ANNA, "done", requested_at_s=NOW_S - 50.0, ended_at_s=NOW_S - 49.0)
    assert order(members, [run, old, served, job("new", BERT)], policy) == ["new", "low"], (
        "its owner got machines since"
    )
    ahead = replace(old, queued_at_s=NOW_S - 201.0)
    assert order(members, [run, ahead, job("new", BERT, queued_at_s=0.0, requested_at_s=0.0)], policy)[0] == "new"


def test_a_class_that_the_policy_dropped_counts_as_the_usual_one():
    policy = QueuePolicy(classes=(PriorityClass("a"), PriorityClass("b"), PriorityClass("c")), usual="b")
    assert [policy.rank(name) for name in ("a", "b", "c", "gone")] == [0, 1, 2, 1]
    assert policy.quota_of(ANNA) == Quota()
    assert replace(policy, quotas={ANNA: Quota(1)}).quota_of(ANNA) == Quota(1)


def test_keys_of_one_machine_are_one_owner():
    key = member("k", job="", phase="joining", sponsor=ANNA)
    members = [member("a", job="run"), member("b"), key]
    jobs = [job("run", ANNA, "running"), job("q-1", PeerId("k")), job("q-2", BERT)]
    assert order(members, jobs) == ["q-2", "q-1"]


def test_small_machines_are_taken_where_a_quota_leaves_no_room_for_a_large_one():
    members = [member("a", 9 * GB), member("b", 4 * GB), member("c", 4 * GB)]
    policy = QueuePolicy(quota=Quota(memory_bytes=10 * GB))
    line = arrangement(members, [job("q-1", ANNA, need=Need(2, 8 * GB, (), "normal"))], policy).arranged()
    assert line.granted == {"q-1": {"b", "c"}}


def test_a_job_that_waits_for_its_owners_quota_keeps_nothing():
    members = [member("a", job="run"), member("b")]
    jobs = [job("run", ANNA, "running"), job("q-1", ANNA), job("q-2", BERT, need=Need(2, 0, (), "normal"))]
    line = arrangement(members, jobs, QueuePolicy(quotas={ANNA: Quota(1)})).arranged()
    assert (line.granted, line.kept) == ({}, {"b": "q-2"})


def test_members_that_leave_or_are_lost_count_for_nothing():
    members = [member("a", phase="draining", job="run"), member("b", phase="lost"), member("c")]
    line = arrangement(
        members, [job("run", BERT, "running"), job("q-1", ANNA, need=Need(2, 0, (), "normal"))]
    ).arranged()
    assert line == Line(jobs=(JobId("q-1"),))


def test_a_job_whose_turn_has_come_keeps_its_place_and_its_machines():
    jobs = [job("q-1", ANNA), job("q-2", BERT)]
    found = arrangement([member("a"), member("b"), member("c")], jobs)
    found = replace(found, turns={JobId("q-1"): frozenset({PeerId("a")})})
    line = found.arranged()
    assert line.granted == {"q-2": {"b", "c"}}, "the only one that waits"
    assert line.kept == {"a": "q-1", "b": "q-2", "c": "q-2"}
    assert set(line.jobs) == {"q-1", "q-2"}


def test_only_the_machines_of_a_turn_are_kept_for_a_job_that_has_enough():
    line = arrangement([member("a"), member("b"), member("c")], [job("q-1", ANNA), job("q-2", BERT)]).arranged()
    assert line.granted == {"q-1": {"a"}, "q-2": {"b"}}
    assert line.kept == {"a": "q-1", "b": "q-2"}


def test_a_job_that_excludes_too_many_machines_keeps_none():
    need = Need(2, 0, ("a",), "normal")
    line = arrangement(
        [member("a", job="run"), member("b")], [job("run", BERT, "running"), job("q-1", ANNA, need=need)]
    )
    assert line.arranged().kept == {}


def test_what_a_running_job_has_held_counts_among_owners_that_hold_the_same():
    members = [member("a", job="a-0"), member("b", job="b-0"), member("c", job="")]
    runs = [
        job("a-0", ANNA, "running", requested_at_s=NOW_S - 10.0),
        job("b-0", BERT, "running", requested_at_s=NOW_S - 500.0),
    ]
    queued = [job("b-1", BERT, queued_at_s=NOW_S - 5.0), job("a-1", ANNA)]
    assert order(members, [*runs, *queued]) == ["a-1", "b-1"]


def test_lenders_go_first_within_a_class_if_the_policy_says_so():
    members = [member("a", job="run-1"), member("b")]
    jobs = [job("run-1", ANNA, "running"), job("anna", ANNA), job("bert", BERT), job("carl", CARL)]
    urgent = job("urgent", CARL, need=Need(1, 0, (), "high"))
    lent = {ANNA: {BERT: LentWork(flops=5.0)}, BERT: {CARL: LentWork(flops=3.0), BERT: LentWork(flops=100.0)}}

    def found(*more: Job, **policy: object) -> list[str]:
        known = arrangement(members, [*jobs, *more], replace(QueuePolicy(), **policy))  # pyright: ignore[reportArgumentType]
        pool = replace(known.pool, ledger=Ledger(accounts=lent))
        return list(replace(known, pool=pool).order())

    assert found() == ["bert", "carl", "anna"], "by default lending makes no difference"
    assert found(lenders_first=True) == ["anna", "bert", "carl"], "work for oneself does not count"
    assert found(urgent, lenders_first=True)[0] == "urgent"
    people = {ANNA: "a", BERT: "a"}
    assert found(lenders_first=True, people=people) == ["bert", "anna", "carl"], "one person: the fair share decides"
