"""The serving machine's spot checks: beside passes, by standbys that are warm; a faulty peer is lost for good, at
once."""

from __future__ import annotations

from dataclasses import replace

from fusionai.coordination.round.interface import Distrust, MemberEnlisted, PeerLost, ReportCheck, ReportFault
from fusionai.coordination.round.verification import Opinion
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.state import ServingPhase
from harness.serving_job import Job, decoding, roles, running

FINE = Opinion()
WRONG = Opinion(own="activations differ", links=frozenset({"c"}))


def over(job: Job, number: int = 1) -> tuple[interface.BeginCheck, ...]:
    """A text is over; what is to be checked of it."""
    job.batcher.submit(SessionSpec(number=number, scope="", prompt=(5,) * 6, max_tokens=1), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert job.machine.returned(job.fence, plan.number, {number: (8,)}, (), 0.0) == {number}
    return job.machine.next_checks()


def told(job: Job, command: interface.BeginCheck, opinion: Opinion) -> list[interface.ServingCommand]:
    return job.tell(interface.TextChecked(command.check, opinion, fence=job.fence))


def test_a_warm_standby_reads_the_text_again_under_the_fence_it_goes_by() -> None:
    job = running(checks=True)
    (begun,) = over(job)
    assert (begun.check.stage, begun.check.peer, begun.check.verifier) == (2, "b", "g")
    assert (begun.text.number, len(begun.text.tokens), begun.fence) == (1, 6, job.fence)
    assert job.machine.next_checks() == ()
    told(job, begun, FINE)
    (command,) = job.given
    assert isinstance(command, ReportCheck)
    assert command.outcome == "valid"
    job.tell(interface.PlanGiven(roles(2, standbys={2: "h"})))
    (brought,) = job.of(interface.EnlistStandby)
    job.tell(MemberEnlisted("h", fence=brought.fence), interface.StandbyLoaded("h", 2, fence=brought.fence))
    (begun,) = over(job, 2)
    assert (begun.check.verifier, begun.fence) == ("h", brought.fence)
    assert begun.fence != job.fence


def test_nobody_who_is_not_ready_reads_anything_and_nothing_hidden_is_read() -> None:
    assert over(running(checks=True, warm=False)) == ()
    assert over(running(checks=True, retain=False)) == ()
    assert over(running()) == ()
    job = running(checks=True)
    job.machine.roles = job.machine.roles.__class__(
        version=1, owner="me", places=job.machine.roles.places, standbys={2: "g"}, caching=job.machine.roles.caching
    )
    assert over(job) == ()


def test_what_a_standby_takes_exception_to_the_owner_reads_and_the_faulty_peer_goes_and_all_is_read_again() -> None:
    job = running(checks=True)
    (begun,) = over(job)
    computed = decoding(job, 2)
    told(job, begun, WRONG)
    (again,) = job.of(interface.BeginCheck)
    assert (again.check.verifier, again.text, again.fence) == ("me", begun.text, job.fence)
    told(job, again, WRONG)
    (distrusted,) = job.of(Distrust)
    assert distrusted.peer == "b"
    (fault,) = job.of(ReportFault)
    assert (fault.kind, fault.peer, fault.stages, fault.successors) == ("faulty", "b", (2,), {2: "g"})
    assert job.phase is ServingPhase.ENLISTING
    job.enlist()
    job.load({1: ((2, computed),), 3: ((2, computed),)})
    assert job.phase is ServingPhase.PROBING  # nothing is rebuilt from what went through it
    job.probe("y")
    assert job.phase is ServingPhase.RUNNING
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    assert [(one.session, one.start, one.length) for one in plan.segments] == [(2, 0, 7)]


def test_a_standby_whose_word_did_not_hold_goes_and_no_round_begins() -> None:
    job = running(checks=True)
    (begun,) = over(job)
    told(job, begun, WRONG)
    (again,) = job.of(interface.BeginCheck)
    told(job, again, FINE)
    assert [one.peer for one in job.of(Distrust)] == ["g"]
    (fault,) = job.of(ReportFault)
    assert (fault.kind, fault.peer, fault.stages) == ("faulty", "g", ())
    assert job.phase is ServingPhase.RUNNING
    assert 2 not in job.machine.roles.standbys


def test_no_plan_brings_a_faulty_peer_back() -> None:
    job = running(checks=True)
    (begun,) = over(job)
    told(job, begun, WRONG)
    (again,) = job.of(interface.BeginCheck)
    told(job, again, FINE)
    job.tell(interface.PlanGiven(roles(2, standbys={2: "g"}), job.machine.lost))
    assert job.machine.roles.version == 1


def test_a_round_ends_what_was_being_checked() -> None:
    job = running(roles(standbys={2: "g", 3: "h"}), checks=True)
    begun = over(job)
    assert len(begun) == 2
    job.tell(PeerLost("a", "x"))
    assert told(job, begun[0], WRONG) == []
    assert job.machine.next_checks() == ()
    assert not job.batcher.is_held(1)


def test_while_nobody_runs_nothing_is_checked() -> None:
    job = running(checks=True)
    job.batcher.submit(SessionSpec(number=1, scope="", prompt=(5,) * 6, max_tokens=1), 0.0)
    plan = job.machine.next_pass(0.0)
    assert plan is not None
    job.machine.returned(job.fence, plan.number, {1: (8,)}, (), 0.0)
    job.machine.phase = ServingPhase.PROBING
    assert job.machine.next_checks() == ()
    job.machine.phase = ServingPhase.RUNNING
    assert len(job.machine.next_checks()) == 1


def test_a_dispute_names_both_sides() -> None:
    job = running(checks=True)
    (begun,) = over(job)
    told(job, begun, Opinion(links=frozenset({"c"})))
    (report,) = job.of(ReportCheck)
    assert (report.outcome, report.check.peer, report.partners) == ("disputed", "b", ("c",))


def test_a_standby_on_the_machine_of_its_stage_checks_nothing() -> None:
    assert over(running(replace(roles(), beside=frozenset({(2, "g")})), checks=True)) == ()
