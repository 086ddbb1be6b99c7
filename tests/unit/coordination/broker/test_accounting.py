"""Which reports of work count: the owner's, about machines that the job has had, up to what these can have done."""

from __future__ import annotations

import math

import pytest

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.ledger import LentWork
from fusionai.coordination.broker.pool import Pool, freeze, replay, thaw
from fusionai.coordination.broker.requests import Answer
from fusionai.coordination.broker.state import BrokerRules, BrokerState, Decision, recovered
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import Done, Refused, WorkShare

BROKER, ANNA, A, B = (PeerId(letter * 52) for letter in "yoab")
JOB = JobId("job-1")
RULES = BrokerRules(pool="home", broker=BROKER)
SPEED = 100.0
"""Operations per second of each machine."""


class Desk:
    """A broker in which Anna's job has the machines A and B since second 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.state: BrokerState = recovered(RULES, Pool(), 0.0)
        self.facts: list[events.Fact] = []
        for connection, peer in enumerate((ANNA, A, B), start=1):
            self.ask(requests.Invite(BROKER, peer, 1, 60.0))
            self.ask(requests.Enrol(peer, peer, "provider"))
            if peer != ANNA:
                self.ask(requests.RegisterMember(peer, connection, 1, b"", (), 1, SPEED, SPEED))
        placements = (MemberPlacement(A, (0,)), MemberPlacement(B, (1,)))
        self.ask(requests.RequestJob(ANNA, 1, JOB, "t", 5, b"plan", 0, placements))

    def ask(self, request: requests.Request) -> Decision:
        decision = handle(self.state, request, now_s=self.now_s, wall_s=self.now_s)
        self.state = decision.desk
        self.facts += decision.facts
        assert replay(self.facts) == self.state.pool
        assert thaw(freeze(self.state.pool)) == self.state.pool
        return decision

    def report(
        self, sequence: int, *shares: WorkShare, sender: PeerId = ANNA, job: JobId = JOB, run: str = "run-1"
    ) -> object:
        decision = self.ask(requests.ReportWork(sender, job, run, sequence, 10, 1000, shares))
        (answer,) = decision.commands
        assert isinstance(answer, Answer)
        return answer.message

    def refused(self, *shares: WorkShare, sender: PeerId = ANNA, job: JobId = JOB) -> tuple[str, str]:
        before, answer = self.state.pool, self.report(1, *shares, sender=sender, job=job)
        assert isinstance(answer, Refused)
        assert self.state.pool == before
        return answer.code, answer.reason

    def sums(self, machine: PeerId) -> LentWork:
        return self.state.pool.ledger.accounts[machine][ANNA]


def test_what_the_owner_reports_counts_once():
    desk = Desk()
    desk.now_s = 10.0
    share = WorkShare(A, 10, 1000, 500.0)
    assert [desk.report(number, share) for number in (1, 1, 2)] == [Done()] * 3
    assert desk.sums(A) == LentWork(steps=10, tokens=1000, flops=500.0)
    desk.report(1, WorkShare(A, 1, 1, 1.0))
    assert desk.sums(A).flops == 500.0, "an earlier report that comes late changes nothing"


def test_a_member_claims_nothing():
    for sender in (A, B, BROKER):
        code, _ = Desk().refused(WorkShare(A, 1, 1, 1.0), sender=sender)
        assert code == "not_authorised"


def test_only_machines_of_the_job_and_only_the_jobs_own_steps():
    desk = Desk()
    assert desk.refused(WorkShare(ANNA, 1, 1, 1.0))[0] == "bad_message"
    assert desk.refused(WorkShare(A, 1, 1, 1.0), job=JobId("job-2"))[0] == "unknown_job"
    assert "twice" in desk.refused(WorkShare(A, 1, 1, 1.0), WorkShare(A, 1, 1, 1.0))[1]
    for wrong in (WorkShare(A, 11, 1, 1.0), WorkShare(A, 1, 1001, 1.0), WorkShare(A, 1, 1, math.nan)):
        assert "at most the job's 10 steps and 1000 tokens" in desk.refused(wrong)[1]


def test_no_machine_gets_more_than_it_can_have_done():
    desk = Desk()
    desk.now_s = 10.0  # 1,000 operations at its measured speed, twice that with the margin
    desk.report(1, WorkShare(A, 10, 1000, 8000.0), WorkShare(B, 10, 1000, 2000.0))
    assert desk.sums(A) == LentWork(steps=2, tokens=250, flops=2000.0)
    assert desk.sums(B) == LentWork(steps=10, tokens=1000, flops=2000.0)
    notes = [note.text for note in desk.state.pool.jobs[JOB].notes if "measured speed" in note.text]
    assert len(notes) == 1
    desk.now_s = 20.0
    desk.report(2, WorkShare(A, 10, 1000, 8000.0))
    assert desk.sums(A).flops == 4000.0, "what counts grows with the time"
    again = [note.text for note in desk.state.pool.jobs[JOB].notes if "measured speed" in note.text]
    assert again == notes, "and is said once"


def test_several_runs_get_no_more_together():
    desk = Desk()
    desk.now_s = 10.0
    for run in ("run-1", "run-2", "run-3"):
        desk.report(1, WorkShare(A, 10, 1000, 1500.0), run=run)
    assert desk.sums(A).flops == 2000.0


def test_the_end_of_a_job_is_no_end_of_its_reports_but_of_its_time():
    desk = Desk()
    desk.now_s = 10.0
    desk.ask(requests.ReportJob(ANNA, 1, JOB, "done", 9, ""))
    desk.now_s = 1000.0
    assert desk.report(1, WorkShare(A, 10, 1000, 8000.0)) == Done()
    assert desk.sums(A).lent_s == 10.0
    assert desk.sums(A).flops == 2000.0


@pytest.mark.parametrize("relayed", [(5,), (5, 7)])
def test_what_is_relayed_counts_for_the_brokers_machine(relayed: tuple[int, ...]):
    desk = Desk()
    for count in relayed:
        assert desk.ask(requests.NoteRelayed(count)).commands == ()
    assert desk.state.pool.ledger.relayed_bytes == {BROKER: sum(relayed)}


def test_absurd_numbers_make_no_sums_that_cannot_be_kept():
    desk = Desk()
    desk.now_s = 10.0
    for number in range(8):
        answer = desk.ask(
            requests.ReportWork(ANNA, JOB, f"run-{number}", 1, 2**62, 2**62, (WorkShare(A, 2**62, 2**62, 0.0),))
        )
        assert answer.commands == (Answer(Done()),)
    assert desk.sums(A) == LentWork(steps=2**60, tokens=2**60)
    desk.report(1, run="run-8")
    desk.ask(requests.ReportWork(ANNA, JOB, "run-7", 2, 0, 0, ()))
    assert desk.sums(A).steps == 2**60
