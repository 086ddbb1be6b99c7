"""The ledger's sums: time that jobs had machines, newest reports in the place of older ones, what is struck."""

from __future__ import annotations

from dataclasses import replace

from fusionai.coordination.broker import ledger as ledgers
from fusionai.coordination.broker.events import WorkCounted
from fusionai.coordination.broker.ledger import JOBS_KEPT, Ledger, LentWork, counted, lent_to_others, moved
from fusionai.coordination.broker.membership import Member
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import WorkShare

A, B, CARD, ANNA, BERT = (PeerId(letter * 52) for letter in "abcop")
JOB = JobId("job-1")


def member(peer: PeerId, job: JobId | None = None, phase: str | None = None, **changes: object) -> Member:
    found = Member(entity=peer, phase=phase or ("idle" if job is None else "active"), peer=peer, job=job)
    return replace(found, **changes)  # pyright: ignore[reportArgumentType]


def move(ledger: Ledger, before: Member, after: Member, at_s: float, owner: PeerId = ANNA) -> Ledger:
    return moved(ledger, {before.peer: before}, {after.peer: after}, at_s, lambda _job: owner)


def report(sequence: int, *shares: WorkShare, job: JobId = JOB, run: str = "run-1") -> WorkCounted:
    return WorkCounted(at_s=0.0, job=job, run=run, sequence=sequence, steps=9, tokens=90, shares=shares)


def sums(ledger: Ledger, at_s: float = 100.0) -> dict[tuple[str, str], LentWork]:
    return {(machine, owner): lent for machine, owner, lent in ledger.entries(at_s)}


WORKING = move(Ledger(), member(A), member(A, JOB), 10.0)


def test_a_machine_lends_while_a_job_has_it():
    assert sums(move(WORKING, member(A, JOB), member(A), 70.0)) == {(A, ANNA): LentWork(lent_s=60.0)}
    lost = move(WORKING, member(A, JOB), member(A, JOB, "lost"), 30.0)
    assert sums(lost)[A, ANNA].lent_s == 20.0, "a lost member keeps its place, but lends nothing"
    back = move(lost, member(A, JOB, "lost"), member(A, JOB), 50.0)
    drains = move(back, member(A, JOB), member(A, JOB, "draining"), 55.0)
    assert sums(move(drains, member(A, JOB, "draining"), member(A, phase="left"), 60.0))[A, ANNA].lent_s == 30.0


def test_a_clock_that_was_set_back_takes_no_time_away():
    back = move(WORKING, member(A, JOB), member(A), 5.0)
    assert sums(back) == {(A, ANNA): LentWork()}


def test_the_time_of_a_job_that_runs_counts_too():
    (entry,) = counted(WORKING, report(1)).entries(40.0)
    assert entry == (A, ANNA, LentWork(lent_s=30.0))


def test_a_newer_report_takes_the_place_of_the_older_one():
    once = counted(WORKING, report(1, WorkShare(A, 3, 30, 300.0)))
    later = counted(once, report(2, WorkShare(A, 5, 50, 500.0)))
    assert sums(counted(once, report(2, WorkShare(A, 3, 30, 300.0))), 10.0) == sums(once, 10.0)
    assert sums(later, 10.0) == {(A, ANNA): LentWork(steps=5, tokens=50, flops=500.0)}


def test_another_run_of_the_job_is_added():
    first = counted(WORKING, report(7, WorkShare(A, 3, 30, 300.0)))
    second = counted(first, report(1, WorkShare(A, 1, 10, 100.0), run="run-2"))
    assert sums(second, 10.0) == {(A, ANNA): LentWork(steps=4, tokens=40, flops=400.0)}
    assert sums(counted(second, report(2, run="run-2")), 10.0)[A, ANNA].flops == 300.0
    assert second.jobs[JOB].parts[A].earlier_flops == 300.0


def test_what_a_newer_report_leaves_out_is_struck():
    known = counted(WORKING, report(1, WorkShare(A, 3, 30, 300.0)))
    fewer = counted(known, report(2, WorkShare(A, 2, 20, 200.0)))
    none = counted(fewer, report(3))
    struck = LentWork(steps=2, tokens=20, flops=200.0, struck_steps=1, struck_tokens=10, struck_flops=100.0)
    assert sums(fewer, 10.0) == {(A, ANNA): struck}
    assert sums(none, 10.0) == {(A, ANNA): LentWork(struck_steps=3, struck_tokens=30, struck_flops=300.0)}


def test_all_keys_of_a_machine_are_one_account_and_owners_are_told_apart():
    card = member(CARD, JOB, sponsor=A)
    ledger = move(WORKING, member(CARD, sponsor=A), card, 10.0)
    ledger = move(ledger, member(B), member(B, JobId("job-2")), 10.0, BERT)
    ledger = counted(ledger, report(1, WorkShare(A, 1, 10, 100.0), WorkShare(CARD, 1, 10, 50.0)))
    ledger = counted(ledger, report(1, WorkShare(B, 2, 20, 7.0), job=JobId("job-2")))
    found = sums(ledger, 10.0)
    assert (found[A, ANNA].flops, found[B, BERT].flops) == (150.0, 7.0)


def test_work_for_jobs_of_ones_own_is_not_lent_to_others():
    ledger = counted(WORKING, report(1, WorkShare(A, 3, 30, 300.0)))
    assert lent_to_others(ledger, lambda machine: machine) == {A: 300.0}
    assert lent_to_others(ledger, lambda machine: "anna" if machine in (A, ANNA) else machine) == {}


def test_a_member_of_a_job_from_before_the_ledger_is_released():
    assert move(Ledger(), member(A, JOB), member(A), 10.0) == Ledger()


def test_the_reports_of_old_jobs_are_forgotten_and_their_sums_stay(monkeypatch):
    monkeypatch.setattr(ledgers, "JOBS_KEPT", 2)
    assert JOBS_KEPT == 2_000
    ledger = Ledger()
    for number in range(4):
        job = JobId(f"job-{number}")
        ledger = move(ledger, member(A), member(A, job), 10.0)
        ledger = counted(ledger, report(1, WorkShare(A, 1, 10, 100.0), job=job))
        ledger = move(ledger, member(A, job), member(A), 20.0)
    assert list(ledger.jobs) == ["job-2", "job-3"]
    assert sums(ledger) == {(A, ANNA): LentWork(lent_s=40.0, steps=4, tokens=40, flops=400.0)}
