"""The driver's machine, row by row: rounds, feeding, votes, journal before commit, replay, checkpoints, plans, end."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import pytest

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.round.interface import (
    AskPlan,
    CommandFailed,
    Distrust,
    DriverEvent,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    ReportCheck,
    ReportFault,
    StageFailure,
    StopAsked,
)
from fusionai.coordination.round.verification import Check, Inspector, Opinion
from fusionai.coordination.training.driver import TABLE, DriverMachine
from fusionai.coordination.training.evaluations import Evaluation
from fusionai.coordination.training.interface import (
    AnnounceReady,
    CheckpointWritten,
    CommitJournalled,
    DecideScale,
    DriverCommand,
    Evaluate,
    EvaluationDone,
    EvidenceLost,
    FeedMicrobatch,
    GatherEvidence,
    JournalCommit,
    LossArrived,
    NameBest,
    PlanGranted,
    ProbeAnswered,
    ReportRestored,
    Rewind,
    Roles,
    ScaleDecided,
    SendAttach,
    SendCommit,
    SendProbe,
    SendResume,
    SendSnapshot,
    SnapshotStored,
    StageChecked,
    StagePrepared,
    StageReady,
    StageReported,
    StartCheck,
    StepCommitted,
    VerifierReady,
    WarnTolerant,
    WriteCheckpoint,
)
from fusionai.coordination.training.stage_interface import Resumed
from fusionai.coordination.training.state import DriverPhase, JobShape
from fusionai.coordination.training.steps import norms_hash
from fusionai.wire.messages import CommitRecord, Fence, NonFinite

FENCE = Fence(1, 1, 0)
NORMS = {0: {"b": 2.0}, 1: {"a": 1.0}}
PLACES = {0: "p0", 1: "p1"}
GUARDS = {0: "g0", 1: "g1"}
"""Of jobs with standbys; others have none."""
SHAPE = frozenset(field.name for field in dataclasses.fields(JobShape))


def plan(version: int = 1, **changes: object) -> Roles:
    fields: dict[str, object] = {
        "version": version,
        "owner": "owner",
        "places": PLACES,
        "snapshot_every": 2,
        "feed_window": 2,
        "neighbours": {0: frozenset({1}), 1: frozenset({0})},
        "fed": frozenset({0}),
    }
    return Roles(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def record(step: int, loss: float = 1.5) -> CommitRecord:
    """What `commit` leads to."""
    return CommitRecord(
        step=step,
        scale=0.4,
        learning_rate=0.5 / (step + 1),
        total_norm=2.5,
        norms_hash=norms_hash({"a": 1.0, "b": 2.0}),
        fence=FENCE,
        loss=loss,
    )


def driver(*, official: int = 0, saved: int = -1, **changes: object) -> DriverMachine:
    """`changes`: of the job's shape or of the plan."""
    fields: dict[str, object] = {"steps": 9, "microbatches": 2, "canonical_order": ("a", "b")}
    fields |= {name: value for name, value in changes.items() if name in SHAPE}
    return DriverMachine(
        shape=JobShape(**fields),  # pyright: ignore[reportArgumentType]
        roles=plan(**{name: value for name, value in changes.items() if name not in SHAPE}),  # pyright: ignore[reportArgumentType]
        incarnation=1,
        learning_rate=lambda step: 0.5 / (step + 1),
        official=official,
        records={step: record(step) for step in range(max(0, saved - 1), official)},
        saved=saved,
    )


def enlist(machine: DriverMachine, held: Mapping[str, set[tuple[int, int]]] | None = None) -> list[DriverCommand]:
    """Every member answers, with the snapshots it holds."""
    commands: list[DriverCommand] = []
    for peer in sorted({*machine.roles.places.values(), *machine.roles.standbys.values()}):
        commands += machine.handle(MemberEnlisted(peer, frozenset((held or {}).get(peer, set()))))
    return commands


def report(machine: DriverMachine, applied: int, retained_from: int = 0, **lost: int) -> list[DriverCommand]:
    """Every stage is at `applied`; `s1=-1`: but for stage 1."""
    commands: list[DriverCommand] = []
    for stage in machine.roles.stages:
        at = lost.get(f"s{stage}", applied)
        commands += machine.handle(StageReported(stage, at, at - 1, retained_from))
    return commands


def all_ready(machine: DriverMachine) -> list[DriverCommand]:
    commands: list[DriverCommand] = []
    for stage in machine.roles.stages:
        commands += machine.handle(StageReady(stage, machine.step))
    return commands


def ready(machine: DriverMachine) -> list[DriverCommand]:
    """Everybody starts without state."""
    machine.start()
    enlist(machine)
    report(machine, -1)
    assert all_ready(machine)[-1] == SendProbe(machine.step)
    commands = machine.handle(ProbeAnswered((1.5, 1.5)))
    for stage, standby in machine.roles.standbys.items():
        commands += machine.handle(SnapshotStored(stage, machine.step, standby))
    return commands


def running(**changes: object) -> DriverMachine:
    machine = driver(**changes)  # pyright: ignore[reportArgumentType]
    ready(machine)
    return machine


def has_standby(**changes: object) -> DriverMachine:
    return running(standbys=GUARDS, **changes)


def vote(machine: DriverMachine, step: int, loss: float = 1.0) -> list[DriverCommand]:
    """Every loss and every vote of a step; the commands of the last."""
    for microbatch in range(machine.shape.microbatches):
        machine.handle(LossArrived(step, microbatch, loss + microbatch))
    for stage in machine.roles.stages:
        commands = machine.handle(StagePrepared(stage, step, NORMS[stage]))
    return commands


def journalled(machine: DriverMachine, step: int, loss: float = 1.0) -> CommitRecord:
    """Vote and decide; the record to be journalled."""
    vote(machine, step, loss)
    (command,) = machine.handle(ScaleDecided(step, 2.5, 0.4))
    assert isinstance(command, JournalCommit)
    return command.record


def commit(machine: DriverMachine, step: int, loss: float = 1.0) -> list[DriverCommand]:
    return machine.handle(CommitJournalled(journalled(machine, step, loss)))


def fed(commands: list[DriverCommand]) -> list[tuple[int, int]]:
    return [(c.step, c.microbatch) for c in commands if isinstance(c, FeedMicrobatch)]


def kinds(commands: list[DriverCommand]) -> list[type]:
    return [type(command) for command in commands]


def failure(commands: list[DriverCommand]) -> str:
    (end,) = [command for command in commands if isinstance(command, EndJob)]
    assert end.failed is not None
    return end.failed


# ------------------------------------------------------------------------------------------------ every other pair

EVENTS: tuple[DriverEvent, ...] = (
    MemberEnlisted("p0"),
    StageReported(0, -1, -1),
    StageReady(0, 0),
    SnapshotStored(0, 0, "g0"),
    ProbeAnswered((1.0, 1.0)),
    LossArrived(0, 0, 1.0),
    StagePrepared(0, 0, {}),
    ScaleDecided(0, 1.0, 1.0),
    CommitJournalled(record(0)),
    CheckpointWritten(0),
    EvaluationDone(0, 1.0),
    StopAsked("enough"),
    PeerLost("p1", "gone"),
    LinkBroken("p0", "p1", "cut"),
    StageFailure(0, "no memory"),
    VerifierReady("g0", 0, 0, 2),
    EvidenceLost("p1", 1, 0),
    StageChecked(Check(0, "p0", "g0", 0, 2), Opinion()),
    PlanGranted(plan(2)),
    CommandFailed("disk full"),
)


def in_phase(phase: DriverPhase) -> DriverMachine:
    machine = driver(steps=1)
    machine.start()
    if phase in (DriverPhase.LOADING, DriverPhase.PROBING):
        enlist(machine)
        report(machine, -1)
        if phase is DriverPhase.PROBING:
            all_ready(machine)
    elif phase is DriverPhase.REPLAYING:
        enlist(machine)
        report(machine, 0)
    elif phase is DriverPhase.WAITING:
        machine.handle(PeerLost("p0", "gone"))
    elif phase is not DriverPhase.ATTACHING:
        ready(machine := driver(steps=1))
        if phase is not DriverPhase.RUNNING:
            commit(machine, 0)
        if phase is DriverPhase.ENDED:
            machine.handle(CheckpointWritten(1))
    assert machine.phase is phase
    return machine


def test_the_table_has_a_row_for_every_event_and_phase_somewhere():
    assert {event for _, event in TABLE if not issubclass(event, FollowUp)} == {type(event) for event in EVENTS}
    assert {phase for phase, _ in TABLE} == set(DriverPhase) - {DriverPhase.ENDED}


@pytest.mark.parametrize(
    ("phase", "event"),
    [pair for pair in itertools.product(DriverPhase, EVENTS) if (pair[0], type(pair[1])) not in TABLE],
    ids=str,
)
def test_what_has_no_row_comes_too_late_and_changes_nothing(phase: DriverPhase, event: DriverEvent):
    machine = in_phase(phase)
    before = (machine.phase, machine.step, machine.attempt)
    assert machine.handle(event) == []
    assert (machine.phase, machine.step, machine.attempt) == before


@pytest.mark.parametrize("phase", [phase for phase in DriverPhase if phase is not DriverPhase.ENDED])
def test_a_failed_command_ends_the_job_at_any_moment_with_its_reason(phase: DriverPhase):
    machine = in_phase(phase)
    step = machine.step
    (end,) = machine.handle(CommandFailed("disk full"))
    assert end == EndJob(step, failed="disk full")
    assert machine.phase is DriverPhase.ENDED


# -------------------------------------------------------------------------------------------------------- barriers


def test_all_status_then_resume_then_all_ready_then_work():
    machine = driver(official=3, saved=3)
    assert machine.start() == [SendAttach(FENCE, machine.roles, {})]
    machine.handle(MemberEnlisted("p0"))
    assert machine.handle(MemberEnlisted("p1")) == []
    assert machine.handle(StageReported(1, -1, -1)) == []
    assert machine.handle(StageReported(1, -1, -1)) == [], "twice is not two"
    both = frozenset({0, 1})
    assert machine.handle(StageReported(0, -1, -1)) == [
        ReportRestored(committed=3, base=3, restored=(0, 1), rollback=False),
        *[SendResume(stage, Resumed(committed=3, source="import", base=3, replaying=both)) for stage in (0, 1)],
    ]
    assert machine.phase is DriverPhase.LOADING
    assert machine.handle(StageReady(0, 3)) == []
    assert machine.handle(StageReady(0, 3)) == []
    assert machine.handle(StageReady(1, 3)) == [SendProbe(3)]
    assert machine.phase is DriverPhase.PROBING
    commands = machine.handle(ProbeAnswered((2.0, 2.0)))
    assert commands[0] == AnnounceReady(3)
    assert fed(commands) == [(3, 0), (3, 1)]


def test_a_standby_that_has_not_answered_holds_the_round_up():
    machine = driver(standbys=GUARDS)
    assert machine.start() == [SendAttach(FENCE, machine.roles, GUARDS)]
    report(machine, -1)
    for peer in ("p0", "p1", "g0"):
        assert machine.handle(MemberEnlisted(peer)) == []
    assert isinstance(machine.handle(MemberEnlisted("g1"))[0], ReportRestored)


def test_a_stage_that_is_not_of_the_plan_does_not_complete_a_barrier():
    machine = driver()
    machine.start()
    enlist(machine)
    machine.handle(StageReported(0, -1, -1))
    assert machine.handle(StageReported(99, -1, -1)) == []
    assert machine.phase is DriverPhase.ATTACHING
    machine = driver()
    machine.start()
    enlist(machine)
    report(machine, 0)
    machine.handle(StageReady(0, 0))
    assert machine.handle(StageReady(99, 0)) == []
    assert machine.phase is DriverPhase.REPLAYING


@pytest.mark.parametrize("lost", [True, False])
def test_a_stage_that_is_ready_elsewhere_ends_the_job(lost: bool):
    machine = driver(official=3, saved=3)
    machine.start()
    enlist(machine)
    report(machine, -1 if lost else 3)
    assert failure(machine.handle(StageReady(1, 2))) == "stage 1 is at step 2 instead of 3"


def test_a_stage_that_was_not_to_load_ends_the_job_if_it_says_it_did():
    machine = driver(official=3, saved=3)
    machine.start()
    enlist(machine)
    report(machine, 3, retained_from=3, s0=-1)
    assert machine.phase is DriverPhase.LOADING
    assert "stage 1" in failure(machine.handle(StageReady(1, 3)))


@pytest.mark.parametrize("losses", [(1.0, 1.0000001), (0.0, -0.0)])
def test_a_probe_that_comes_back_different_is_not_ready(losses: tuple[float, float]):
    assert "twice" in failure(in_phase(DriverPhase.PROBING).handle(ProbeAnswered(losses)))


def probing(**changes: object) -> DriverMachine:
    machine = driver(**changes)  # pyright: ignore[reportArgumentType]
    machine.start()
    enlist(machine)
    report(machine, -1)
    all_ready(machine)
    return machine


def test_a_tolerant_job_is_told_of_a_probe_that_comes_back_different():
    commands = probing(takeover="tolerant").handle(ProbeAnswered((1.0, 1.0000001)))
    assert isinstance(commands[0], WarnTolerant)
    assert commands[1] == AnnounceReady(0)


def test_a_probe_without_a_number_is_still_the_same_twice():
    assert probing().handle(ProbeAnswered((float("nan"), float("nan"))))[0] == AnnounceReady(0)


def test_a_job_is_probed_once_and_not_again_after_a_fault():
    machine = running()
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine)
    report(machine, 0)
    assert fed(all_ready(machine)) == [(0, 0), (0, 1)]
    machine = probing()
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine)
    report(machine, 0)
    assert all_ready(machine)[-1] == SendProbe(0), "it never was"


def test_a_job_whose_steps_are_all_in_the_checkpoint_ends_when_it_is_ready():
    assert ready(driver(steps=4, official=4, saved=4)) == [AnnounceReady(4), EndJob(4)]


def test_a_driver_that_died_at_the_end_saves_and_ends():
    commands = ready(driver(steps=4, official=4, saved=2))
    assert [record.step for record in running(official=4, saved=2).records.values()] == [1, 2, 3]
    assert commands == [AnnounceReady(2), FeedMicrobatch(2, 0), FeedMicrobatch(2, 1)], (
        "nobody is there: all is done again from 2"
    )
    machine = driver(steps=4, official=4, saved=2)
    machine.start()
    enlist(machine)
    report(machine, 4)
    all_ready(machine)
    commands = machine.handle(ProbeAnswered((1.0, 1.0)))
    assert commands == [AnnounceReady(4), WriteCheckpoint(4, ask=True)]
    assert machine.handle(CheckpointWritten(4)) == [EndJob(4)]


# --------------------------------------------------------------------------------------------------------- feeding


def test_feeding_stays_within_the_window_and_one_step_ahead_of_the_vote():
    machine = driver(feed_window=3)
    assert fed(ready(machine)) == [(0, 0), (0, 1), (1, 0)]
    assert fed(machine.handle(LossArrived(0, 0, 1.0))) == [(1, 1)]
    assert fed(machine.handle(LossArrived(0, 1, 1.0))) == [], "step 2 is two steps ahead of the vote"
    assert fed(machine.handle(LossArrived(1, 0, 1.0))) == []
    for stage in (0, 1):
        machine.handle(StagePrepared(stage, 0, NORMS[stage]))
    (command,) = machine.handle(ScaleDecided(0, 1.0, 1.0))
    assert isinstance(command, JournalCommit)
    assert fed(machine.handle(CommitJournalled(command.record))) == [(2, 0), (2, 1)], "three losses are known"


def test_a_loss_twice_does_not_widen_the_window_and_the_first_one_counts():
    machine = running(feed_window=2)
    assert fed(machine.handle(LossArrived(0, 0, 1.0))) == [(1, 0)]
    assert fed(machine.handle(LossArrived(0, 0, 9.0))) == []
    assert journalled_loss(machine) == 1.5


def journalled_loss(machine: DriverMachine) -> float:
    return journalled(machine, 0).loss


@pytest.mark.parametrize(("step", "microbatch"), [(0, 2), (0, 10**9), (1, 0), (3, 0), (2**40, 0)])
def test_a_loss_of_what_was_never_fed_ends_the_job(step: int, microbatch: int):
    machine = running(feed_window=2)
    (end,) = machine.handle(LossArrived(step, microbatch, 1.0))
    assert isinstance(end, EndJob)
    assert end.failed is not None
    assert "was not fed" in end.failed


def test_nothing_beyond_the_last_step_is_fed():
    machine = running(steps=1, feed_window=10)
    assert machine.handle(LossArrived(0, 0, 1.0)) == []
    assert fed(ready(driver(steps=1, feed_window=10))) == [(0, 0), (0, 1)]


# --------------------------------------------------------------------------------------------- vote, journal, commit


def test_norms_are_reduced_in_canonical_order_once_all_votes_and_losses_are_in():
    machine = running()
    assert machine.handle(StagePrepared(0, 0, NORMS[0])) == []
    assert machine.handle(StagePrepared(1, 0, NORMS[1])) == [], "no losses yet"
    machine.handle(LossArrived(0, 1, 4.0))
    assert machine.handle(LossArrived(0, 0, 3.0))[-1] == DecideScale(0, (1.0, 2.0))


def test_what_is_not_journalled_is_not_sent():
    machine = running()
    assert kinds(vote(machine, 0)) == [DecideScale]
    assert machine.handle(StagePrepared(0, 0, {"b": 7.0})) == [], "a vote can't be changed"
    (command,) = machine.handle(ScaleDecided(0, 2.5, 0.4))
    assert command == JournalCommit(
        CommitRecord(
            step=0,
            scale=0.4,
            learning_rate=0.5,
            total_norm=2.5,
            norms_hash=norms_hash({"a": 1.0, "b": 2.0}),
            fence=FENCE,
            loss=1.5,
        )
    )
    assert machine.step == 0
    commands = machine.handle(CommitJournalled(command.record))
    assert commands[:2] == [
        SendCommit(command.record, watermark=1, save=False),
        StepCommitted(command.record, (1.0, 2.0), replayed=False),
    ]
    assert machine.step == 1


def test_votes_and_losses_of_the_step_before_are_late():
    machine = running()
    commit(machine, 0)
    assert machine.handle(StagePrepared(0, 0, NORMS[0])) == []
    assert machine.handle(LossArrived(0, 0, 1.0)) == []
    assert kinds(vote(machine, 1)) == [DecideScale]


def test_a_vote_of_a_step_to_come_does_not_count():
    machine = running()
    assert machine.handle(StagePrepared(0, 1, {"b": 7.0})) == []
    commit(machine, 0)
    assert vote(machine, 1) == [DecideScale(1, (1.0, 2.0))]


def test_a_step_is_decided_once_and_for_itself():
    machine = running()
    vote(machine, 0)
    assert machine.handle(ScaleDecided(1, 2.5, 0.4)) == [], "that is another step's"
    assert kinds(machine.handle(ScaleDecided(0, 2.5, 0.4))) == [JournalCommit]
    assert DecideScale not in kinds(machine.handle(LossArrived(1, 0, 1.0))), "it is on its way to the disk"
    assert machine.handle(ScaleDecided(0, 2.5, 0.4)) == []


def test_a_vote_of_a_stranger_does_not_complete_the_step():
    machine = running()
    for microbatch in range(2):
        machine.handle(LossArrived(0, microbatch, 1.0))
    machine.handle(StagePrepared(0, 0, NORMS[0]))
    assert machine.handle(StagePrepared(7, 0, {})) == []
    assert kinds(machine.handle(StagePrepared(1, 0, NORMS[1]))) == [DecideScale]


def test_norms_of_parameters_the_model_does_not_have_end_the_job():
    machine = running()
    for microbatch in range(2):
        machine.handle(LossArrived(0, microbatch, 1.0))
    machine.handle(StagePrepared(0, 0, {"zz": 1.0}))
    (end,) = machine.handle(StagePrepared(1, 0, NORMS[1]))
    assert isinstance(end, EndJob)
    assert end.failed is not None
    assert "zz" in end.failed


# ------------------------------------------------------------------------------------------------------------ replay


def rolling_back(official: int, saved: int = -1, **changes: object) -> DriverMachine:
    """Nobody has any state: all start at the checkpoint and are voted on again."""
    return running(official=official, saved=saved, **changes)


def test_replayed_steps_use_the_journalled_record_and_are_not_journalled_again():
    machine = rolling_back(2)
    vote(machine, 0)
    commands = machine.handle(ScaleDecided(0, 99.0, 99.0))
    assert commands[:2] == [SendCommit(record(0), watermark=1, save=False), StepCommitted(record(0), (1.0, 2.0), True)]
    vote(machine, 1)
    assert machine.handle(ScaleDecided(1, 2.5, 0.4))[0] == SendCommit(record(1), watermark=2, save=False)
    vote(machine, 2)
    assert kinds(machine.handle(ScaleDecided(2, 2.5, 0.4))) == [JournalCommit]


def test_a_replay_from_a_checkpoint_begins_with_the_record_after_it():
    machine = rolling_back(3, saved=1)
    vote(machine, 1)
    assert machine.handle(ScaleDecided(1, 2.5, 0.4))[0] == SendCommit(record(1), watermark=2, save=False)


@pytest.mark.parametrize("different", ["loss", "norms"])
def test_a_replay_with_other_bits_fails_if_exact_and_warns_if_tolerant(different: str):
    for takeover in ("exact", "tolerant"):
        machine = rolling_back(1, takeover=takeover)
        if different == "loss":
            vote(machine, 0, loss=3.25)
        else:
            for microbatch in range(2):
                machine.handle(LossArrived(0, microbatch, 1.0 + microbatch))
            machine.handle(StagePrepared(0, 0, {"b": math.nextafter(2.0, 3.0)}))
            machine.handle(StagePrepared(1, 0, NORMS[1]))
        commands = machine.handle(ScaleDecided(0, 2.5, 0.4))
        if takeover == "exact":
            assert "replay is not exact" in failure(commands)
        else:
            assert kinds(commands)[:3] == [WarnTolerant, SendCommit, StepCommitted]
            assert isinstance(commands[1], SendCommit)
            assert commands[1].record == record(0), "the journal's word stands"


# ------------------------------------------------------------------------------------------------------ one stage lost


def promoted(steps: int = 3, **changes: object) -> DriverMachine:
    """Guarded; after these steps the peer of stage 1 is lost and its standby, which has snapshot 2, is in its place."""
    machine = has_standby(**changes)
    for step in range(steps):
        commit(machine, step)
        if step == 1:
            for stage, standby in GUARDS.items():
                machine.handle(SnapshotStored(stage, 2, standby))
    assert machine.handle(PeerLost("p1", "gone")) == [
        ReportFault("peer", "p1", (1,), "gone", steps),
        AskPlan(frozenset({"p1"}), "gone"),
    ]
    new = plan(2, places={0: "p0", 1: "g1"}, standbys={0: "g0"})
    assert machine.handle(PlanGranted(new)) == [SendAttach(Fence(2, 1, 1), new, {0: "g0"})]
    return machine


def test_a_lost_stage_starts_from_its_snapshot_with_the_records_and_then_its_neighbours_stream():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    replaying = frozenset({1})
    assert report(machine, 3, 2, s1=-1) == [
        ReportRestored(committed=3, base=2, restored=(1,), rollback=False),
        SendResume(
            1, Resumed(committed=3, source="snapshot", base=2, records=(machine.records[2],), replaying=replaying)
        ),
    ]
    assert machine.handle(StageReady(1, 2)) == [
        SendResume(
            0,
            Resumed(
                committed=3,
                source="keep",
                base=2,
                records=(machine.records[2],),
                replaying=replaying,
                snapshot=True,
                watermark=2,
            ),
        )
    ]
    assert machine.phase is DriverPhase.REPLAYING
    assert machine.handle(StageReady(0, 3)) == []
    assert machine.handle(StagePrepared(1, 2, NORMS[1])) == []
    assert fed(machine.handle(StageReady(1, 3))) == [(3, 0), (3, 1)]
    assert machine.phase is DriverPhase.RUNNING


def test_whoever_holds_the_snapshot_elsewhere_is_told_to_pass_it_on():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2), (1, 2)}})
    assert SendSnapshot(1, 2, "g0", "g1") in report(machine, 3, 2, s1=-1)
    commands = machine.handle(PeerLost("g0", "gone"))
    assert commands[1] == SendAttach(Fence(2, 1, 2), machine.roles, {}), "the snapshot was on its way"


def test_a_standby_nobody_waits_for_may_go_while_others_load():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    report(machine, 3, 2, s1=-1)
    assert kinds(machine.handle(PeerLost("g0", "gone"))) == [ReportFault]
    assert machine.phase is DriverPhase.LOADING


def replaying(steps: int = 8, **changes: object) -> DriverMachine:
    """Stage 0, which is fed, was lost and replays from step 0 on."""
    machine = driver(official=steps, snapshot_every=9, **changes)  # pyright: ignore[reportArgumentType]
    machine.start()
    enlist(machine)
    report(machine, steps, 0, s0=-1)
    commands = machine.handle(StageReady(0, 0))
    assert fed(commands) == [(step, microbatch) for step in range(2) for microbatch in range(2)]
    assert all(command.only == {0} for command in commands if isinstance(command, FeedMicrobatch))
    return machine


def test_a_replay_is_fed_a_little_ahead_of_the_slowest_that_replays():
    machine = replaying()
    assert fed(machine.handle(StagePrepared(0, 0, {}))) == [(2, 0), (2, 1)]
    assert machine.handle(StagePrepared(0, 0, {})) == [], "twice"
    assert machine.handle(StagePrepared(0, 5, {})) == [], "not in turn"
    assert machine.handle(StagePrepared(1, 1, {})) == [], "it does not replay"
    for step in range(1, 8):
        commands = machine.handle(StagePrepared(0, step, {}))
    assert commands == [], "nothing official is left"
    assert machine.handle(StagePrepared(0, 8, {})) == []


def test_only_stages_that_take_data_are_fed_in_a_replay():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    report(machine, 3, 2, s1=-1)
    assert fed(machine.handle(StageReady(1, 2))) == []


@pytest.mark.parametrize("takeover", ["exact", "tolerant"])
def test_each_replayed_step_must_have_the_norms_of_the_first_time(takeover: str):
    machine = promoted(takeover=takeover)
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    report(machine, 3, 2, s1=-1)
    machine.handle(StageReady(1, 2))
    commands = machine.handle(StagePrepared(1, 2, {"a": math.nextafter(1.0, 2.0)}))
    if takeover == "exact":
        assert "stage 1 replayed step 2 with another norm of a" in failure(commands)
    else:
        assert kinds(commands) == [WarnTolerant]


def test_a_driver_that_never_saw_the_norms_of_a_step_takes_the_replay_as_it_is():
    machine = replaying()
    assert EndJob not in kinds(machine.handle(StagePrepared(0, 0, {"b": 77.0})))


def test_a_stage_at_a_snapshot_of_the_official_step_is_ready_when_it_has_loaded():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 3)}})
    commands = report(machine, 3, 2, s1=-1)
    assert commands[1] == SendResume(1, Resumed(committed=3, source="snapshot", base=3, replaying=frozenset({1})))
    machine.handle(StageReady(1, 3))
    assert fed(machine.handle(StageReady(0, 3))) == [(3, 0), (3, 1)]


# ------------------------------------------------------------------------------------------ standbys, snapshots, the
# line


def test_the_line_is_the_oldest_of_the_newest_snapshots():
    machine = has_standby(snapshot_every=1)
    for step in range(2):
        commit(machine, step)
    assert machine.watermark == 0
    machine.handle(SnapshotStored(0, 2, "g0"))
    assert machine.watermark == 0, "stage 1 has none yet"
    machine.handle(SnapshotStored(1, 1, "g1"))
    assert machine.watermark == 1
    machine.handle(SnapshotStored(1, 0, "g1"))
    assert machine.watermark == 1, "it never falls"


@pytest.mark.parametrize(
    "event", [SnapshotStored(1, 1, "g0"), SnapshotStored(1, 2, "g1"), SnapshotStored(9, 1, "g1")], ids=str
)
def test_snapshots_at_strangers_or_of_steps_to_come_do_not_count(event: SnapshotStored):
    machine = has_standby(snapshot_every=1)
    commit(machine, 0)
    machine.handle(SnapshotStored(0, 1, "g0"))
    assert machine.handle(event) == []
    assert machine.watermark == 0


def test_nothing_is_fed_beyond_the_line_and_twice_the_interval():
    machine = has_standby(snapshot_every=1)
    commit(machine, 0)
    vote(machine, 1)
    assert machine.handle(LossArrived(2, 0, 1.0)) != [], "step 2 is two steps after the line and was not fed"
    machine = has_standby(snapshot_every=1)
    commit(machine, 0)
    assert fed(commit(machine, 1)) == []
    machine.handle(SnapshotStored(0, 1, "g0"))
    assert fed(machine.handle(SnapshotStored(1, 1, "g1"))) == [(2, 0), (2, 1)]


def test_an_without_standby_job_retains_nothing_and_is_fed_without_end():
    machine = running(snapshot_every=1)
    for step in range(5):
        commands = commit(machine, step)
        assert commands[0] == SendCommit(machine.records[step], watermark=step + 1, save=False)


def test_a_lost_standby_is_struck_out_without_a_round():
    machine = has_standby(snapshot_every=1)
    for step in range(2):
        commit(machine, step)
    machine.handle(SnapshotStored(1, 2, "g1"))
    attempt = machine.attempt
    commands = machine.handle(PeerLost("g0", "gone"))
    assert commands == [ReportFault("standby", "g0", (), "gone", 2), FeedMicrobatch(2, 0), FeedMicrobatch(2, 1)], (
        "it is waited for no more"
    )
    assert (machine.attempt, machine.watermark) == (attempt, 2)
    assert machine.handle(PeerLost("g0", "gone")) == [], "once"
    assert machine.handle(SnapshotStored(0, 2, "g0")) == []


def test_a_standby_lost_while_all_report_does_not_hold_the_round_up():
    machine = driver(standbys=GUARDS)
    machine.start()
    report(machine, -1)
    for peer in ("p0", "p1", "g0"):
        machine.handle(MemberEnlisted(peer))
    commands = machine.handle(PeerLost("g1", "gone"))
    assert kinds(commands)[:2] == [ReportFault, ReportRestored]


def test_a_standby_lost_while_a_plan_is_waited_for_must_not_be_in_it():
    machine = has_standby()
    machine.handle(PeerLost("p0", "gone"))
    assert machine.handle(PeerLost("g1", "too"))[1] == AskPlan(frozenset({"p0", "g1"}), "too")


def test_after_a_recovery_those_give_a_snapshot_whose_standby_has_not_the_official_step():
    machine = has_standby()
    commit(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine, {"g0": {(0, 0), (0, 1)}, "g1": {(1, 0)}})
    wanted = {c.stage: c.resume.snapshot for c in report(machine, 1) if isinstance(c, SendResume)}
    assert wanted == {0: False, 1: True}


def test_a_snapshot_of_a_step_still_to_be_done_again_does_not_count():
    machine = has_standby()
    commit(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine, {"g0": {(0, 1), (0, 2)}, "g1": {(1, 2), (0, 1)}})
    wanted = {c.stage: c.resume.snapshot for c in report(machine, 1) if isinstance(c, SendResume)}
    assert wanted == {0: False, 1: True}
    assert machine.watermark == 0


def test_a_restarted_driver_takes_the_line_from_what_standbys_hold():
    """Or it would feed nothing, far beyond a line that nobody moves."""
    machine = driver(official=6, standbys=GUARDS)
    machine.start()
    enlist(machine, {"g0": {(0, 6)}, "g1": {(1, 6)}})
    report(machine, 6, 4)
    assert machine.watermark == 6
    all_ready(machine)
    assert fed(machine.handle(ProbeAnswered((1.0, 1.0)))) == [(6, 0), (6, 1)]


def test_records_are_kept_as_long_as_a_snapshot_or_the_checkpoint_may_need_them():
    machine = has_standby(snapshot_every=1, checkpoint_every=2, feed_window=9)
    for step in range(2):
        commit(machine, step)
    machine.handle(CheckpointWritten(2))
    assert sorted(machine.records) == [0, 1]
    for stage, standby in GUARDS.items():
        machine.handle(SnapshotStored(stage, 2, standby))
    assert sorted(machine.records) == [1], "one before the newest checkpoint"


def test_a_roll_back_takes_the_line_back_and_snapshots_of_later_steps_do_not_count():
    machine = has_standby(snapshot_every=1)
    commit(machine, 0)
    for stage, standby in GUARDS.items():
        machine.handle(SnapshotStored(stage, 1, standby))
    machine.handle(PeerLost("p1", "gone"))
    machine.handle(PlanGranted(plan(2, places={0: "p0", 1: "new"}, standbys={0: "g0"}, snapshot_every=1)))
    enlist(machine, {"g0": {(0, 1)}})
    commands = report(machine, 1, 1, s1=-1)
    assert commands[0] == ReportRestored(committed=1, base=0, restored=(0, 1), rollback=True)
    assert (machine.step, machine.official, machine.watermark) == (0, 1, 0)
    assert [c.resume.snapshot for c in commands if isinstance(c, SendResume)] == [True, False]


def test_a_roll_back_to_a_checkpoint_beyond_what_standbys_hold_leaves_the_line_to_the_standbys():
    machine = has_standby(snapshot_every=1, checkpoint_every=1)
    for step in range(2):
        commit(machine, step)
        machine.handle(CheckpointWritten(step + 1))
    machine.handle(StageFailure(0, "out of memory", fatal=False))
    enlist(machine, {standby: {(stage, 0)} for stage, standby in GUARDS.items()})
    commands = report(machine, -1)
    assert [(c.resume.source, c.resume.base, c.resume.snapshot) for c in commands if isinstance(c, SendResume)] == [
        ("import", 2, True)
    ] * 2
    assert (machine.step, machine.watermark) == (2, 0), "a checkpoint is no standby's word"
    assert fed(all_ready(machine)) == [], "rule 12 holds after a roll-back as well"
    assert fed(machine.handle(SnapshotStored(0, 2, "g0"))) == []
    assert fed(machine.handle(SnapshotStored(1, 2, "g1"))) == [(2, 0), (2, 1)]
    assert machine.watermark == 2


# -------------------------------------------------------------------------------------------- checkpoints, evaluation


def test_a_checkpoint_rides_on_the_commit_and_the_next_commit_waits_for_it():
    machine = running(checkpoint_every=1)
    commands = commit(machine, 0)
    assert commands[0] == SendCommit(journal_of(commands), watermark=1, save=True)
    assert WriteCheckpoint(1, ask=False) in commands
    assert fed(machine.handle(LossArrived(1, 0, 1.0))) == [(2, 0)], "work goes on meanwhile"
    assert vote(machine, 1) == [], "but no commit overtakes the state being collected"
    assert machine.handle(CheckpointWritten(1))[-1] == DecideScale(1, (1.0, 2.0))


def journal_of(commands: list[DriverCommand]) -> CommitRecord:
    (sent,) = [command for command in commands if isinstance(command, SendCommit)]
    return sent.record


def test_checkpoints_come_at_their_steps():
    machine = running(checkpoint_every=2, official=3, saved=0)
    saves: list[int] = []
    for step in range(6):
        vote(machine, step)
        commands = machine.handle(ScaleDecided(step, 2.5, 0.4))
        if isinstance(commands[0], JournalCommit):
            commands = machine.handle(CommitJournalled(commands[0].record))
        for written in [command for command in commands if isinstance(command, WriteCheckpoint)]:
            saves.append(written.step)
            machine.handle(CheckpointWritten(written.step))
    assert saves == [2, 4, 6]


def test_the_base_is_saved_before_anything_is_fed():
    machine = driver(save_base=True)
    assert ready(machine) == [AnnounceReady(0), WriteCheckpoint(0, ask=True)]
    assert fed(machine.handle(CheckpointWritten(0))) == [(0, 0), (0, 1)]


def test_the_base_is_saved_once():
    machine = running(save_base=True)
    machine.handle(CheckpointWritten(0))
    commands = commit(machine, 0)
    assert isinstance(commands[0], SendCommit)
    assert not commands[0].save
    assert WriteCheckpoint not in kinds(commands)


def test_an_evaluation_needs_the_state_so_the_next_commit_waits():
    machine = running(evaluate_every=2)
    assert not any(isinstance(c, Evaluate) for c in commit(machine, 0))
    assert Evaluate(2) in commit(machine, 1)
    assert vote(machine, 2) == []
    assert kinds(machine.handle(EvaluationDone(2, 1.0))) == [DecideScale]


def evaluate(machine: DriverMachine, step: int, loss: float) -> list[DriverCommand]:
    """The step, its commit and what is evaluated then."""
    assert Evaluate(step) in commit(machine, step - 1)
    return machine.handle(EvaluationDone(step, loss))


def test_nothing_is_fed_over_an_evaluation_that_may_have_to_be_saved():
    machine = running(evaluate_every=2, keep_best=True, feed_window=10)
    assert fed(commit(machine, 0)) == [], "no further than the step that is evaluated"
    assert commit(machine, 1)[-1] == Evaluate(2)
    commands = machine.handle(EvaluationDone(2, 1.0))
    assert commands == [WriteCheckpoint(2, ask=True)], "nothing of the next step has begun"
    named, *rest = machine.handle(CheckpointWritten(2))
    assert named == NameBest(Evaluation(2, 1.0))
    assert fed(rest) == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_a_state_that_is_no_better_is_not_saved():
    machine = running(evaluate_every=1, keep_best=True)
    evaluate(machine, 1, 1.0)
    machine.handle(CheckpointWritten(1))
    commands = evaluate(machine, 2, 1.0)
    assert kinds(commands) == [FeedMicrobatch, FeedMicrobatch]
    assert evaluate(machine, 3, 0.9) == [WriteCheckpoint(3, ask=True)]


@pytest.mark.parametrize("saved_first", [True, False])
def test_the_best_state_in_a_checkpoint_that_was_due_anyway_is_named_once(saved_first: bool):
    machine = running(evaluate_every=1, checkpoint_every=1, keep_best=True)
    assert kinds(commit(machine, 0)) == [SendCommit, StepCommitted, WriteCheckpoint, Evaluate]
    events = [CheckpointWritten(1), EvaluationDone(1, 1.0)]
    told = [command for event in events[:: 1 if saved_first else -1] for command in machine.handle(event)]
    assert [command for command in told if isinstance(command, NameBest)] == [NameBest(Evaluation(1, 1.0))]
    assert WriteCheckpoint not in kinds(told)


def test_a_job_ends_when_evaluations_bring_nothing():
    machine = running(evaluate_every=1, keep_best=True, patience=2, minimum_improvement=0.5)
    evaluate(machine, 1, 3.0)
    machine.handle(CheckpointWritten(1))
    evaluate(machine, 2, 2.8)
    machine.handle(CheckpointWritten(2))
    assert evaluate(machine, 3, 2.9) == [WriteCheckpoint(3, ask=True)]
    assert machine.phase is DriverPhase.SAVING
    (end,) = machine.handle(CheckpointWritten(3))
    assert end == EndJob(3, early="2 evaluations without an improvement since step 1")
    assert machine.standing.best == Evaluation(2, 2.8)


def test_a_stop_during_an_evaluation_that_chooses_ends_there():
    machine = running(evaluate_every=1, checkpoint_every=1, patience=3, feed_window=10)
    assert Evaluate(1) in commit(machine, 0)
    machine.handle(CheckpointWritten(1))
    machine.handle(StopAsked("enough"))
    assert machine.handle(EvaluationDone(1, 1.0)) == [EndJob(1, stopped="enough")], "and nothing more is fed"


def test_a_driver_that_starts_again_decides_the_same():
    told = (Evaluation(1, 3.0), Evaluation(2, 3.1), Evaluation(3, 3.2))
    machine = driver(official=3, saved=3, evaluate_every=1, patience=2)
    machine.evaluations = told
    assert ready(machine)[-1] == EndJob(3, early="2 evaluations without an improvement since step 1")
    patient = driver(official=3, saved=3, evaluate_every=1, patience=3)
    patient.evaluations = told
    assert fed(ready(patient)) == [(3, 0), (3, 1)], "with more patience it goes on"


def test_an_evaluation_that_was_not_journalled_is_done_by_the_next_driver():
    machine = driver(official=2, saved=2, evaluate_every=2)
    assert Evaluate(2) in ready(machine)
    machine = driver(official=2, saved=2, evaluate_every=2)
    machine.evaluations = (Evaluation(2, 1.0),)
    assert Evaluate not in kinds(ready(machine))


def test_replayed_steps_are_not_evaluated_again_and_end_nothing():
    machine = driver(official=2, saved=0, evaluate_every=1, patience=1)
    machine.evaluations = (Evaluation(1, 1.0), Evaluation(2, 2.0))
    enlist(machine)
    report(machine, -1)
    all_ready(machine)
    machine.handle(ProbeAnswered((1.0, 1.0)))
    assert machine.step == 0
    vote(machine, 0)
    assert Evaluate not in kinds(machine.handle(ScaleDecided(0, 2.5, 0.4)))
    assert machine.phase is DriverPhase.RUNNING
    vote(machine, 1)
    assert WriteCheckpoint in kinds(machine.handle(ScaleDecided(1, 2.5, 0.4)))
    (end,) = machine.handle(CheckpointWritten(2))
    assert isinstance(end, EndJob)
    assert end.early is not None


# ----------------------------------------------------------------------------------------------------------- the end


def test_the_last_commit_saves_and_the_job_ends_when_checkpoint_and_evaluation_are_done():
    for order in itertools.permutations((CheckpointWritten(1), EvaluationDone(1, 1.0))):
        machine = running(steps=1, evaluate_every=1)
        commands = commit(machine, 0)
        assert kinds(commands) == [SendCommit, StepCommitted, WriteCheckpoint, Evaluate]
        assert machine.phase is DriverPhase.SAVING
        assert machine.handle(order[0]) == []
        assert machine.handle(order[1]) == [EndJob(1)]


def test_a_stop_before_any_work_ends_at_once():
    for phase in (
        DriverPhase.ATTACHING,
        DriverPhase.LOADING,
        DriverPhase.REPLAYING,
        DriverPhase.PROBING,
        DriverPhase.WAITING,
    ):
        machine = in_phase(phase)
        assert machine.handle(StopAsked("enough")) == [EndJob(0, stopped="enough")]


def test_a_stop_while_a_plan_is_waited_for_ends_at_once():
    machine = running()
    machine.handle(PeerLost("p1", "gone"))
    assert machine.handle(StopAsked("enough")) == [EndJob(0, stopped="enough")]
    assert machine.phase is DriverPhase.ENDED


def test_a_stop_in_a_step_finishes_it_saves_and_ends():
    machine = running(feed_window=4)
    assert machine.handle(StopAsked("enough")) == []
    commands = commit(machine, 0)
    assert fed(commands) == []
    assert kinds(commands) == [SendCommit, StepCommitted, WriteCheckpoint]
    assert machine.handle(CheckpointWritten(1)) == [EndJob(1, stopped="enough")]


def test_a_stop_feeds_what_the_step_still_needs_and_nothing_of_the_next():
    machine = running(feed_window=1)
    machine.handle(StopAsked("enough"))
    assert fed(machine.handle(LossArrived(0, 0, 1.0))) == [(0, 1)]
    assert fed(machine.handle(LossArrived(0, 1, 1.0))) == []


def test_a_stop_between_vote_and_journal_counts_the_step():
    machine = running()
    record = journalled(machine, 0)
    assert machine.handle(StopAsked("enough")) == []
    assert WriteCheckpoint(1, ask=False) in machine.handle(CommitJournalled(record))
    assert machine.handle(StopAsked("again")) == []
    assert machine.handle(CheckpointWritten(1)) == [EndJob(1, stopped="enough")]


def test_a_stop_while_a_checkpoint_is_written_ends_after_one_more_step():
    machine = running(checkpoint_every=1)
    commit(machine, 0)
    machine.handle(StopAsked("enough"))
    vote(machine, 1)
    assert kinds(machine.handle(CheckpointWritten(1))) == [DecideScale]
    (command,) = machine.handle(ScaleDecided(1, 2.5, 0.4))
    assert isinstance(command, JournalCommit)
    machine.handle(CommitJournalled(command.record))
    assert machine.handle(CheckpointWritten(2)) == [EndJob(2, stopped="enough")]


def test_the_norms_hash_depends_on_every_bit_and_on_no_order():
    assert norms_hash({"a": 1.0, "b": 2.0}) == norms_hash({"b": 2.0, "a": 1.0})
    assert norms_hash({"a": 1.0}) != norms_hash({"a": math.nextafter(1.0, 2.0)})
    assert norms_hash({"a": 1.0}) != norms_hash({"b": 1.0})
    assert norms_hash({"a": 0.0}) != norms_hash({"a": -0.0})


# ------------------------------------------------------------------------------------------------------ faults, rounds


def test_a_fault_voids_the_step_under_way_and_begins_a_round_with_a_higher_fence():
    machine = running(feed_window=4)
    machine.handle(LossArrived(0, 0, 1.0))
    machine.handle(StagePrepared(0, 0, NORMS[0]))
    commands = machine.handle(LinkBroken("p0", "p1", "cut"))
    assert commands == [ReportFault("link", "p1", (1,), "cut", 0), SendAttach(Fence(1, 1, 1), machine.roles, {})]
    enlist(machine)
    report(machine, 0)
    assert fed(all_ready(machine)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for microbatch in range(2):
        machine.handle(LossArrived(0, microbatch, 1.0))
    assert machine.handle(StagePrepared(1, 0, NORMS[1])) == [], "the vote of before does not count"


def test_a_decision_asked_for_before_a_fault_counts_no_more():
    machine = running()
    vote(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine)
    report(machine, 0)
    all_ready(machine)
    assert machine.handle(ScaleDecided(0, 2.5, 0.4)) == []


def test_a_round_waits_for_a_commit_on_its_way_to_the_disk_and_stages_learn_it_from_their_resume():
    machine = running(evaluate_every=1)
    written = journalled(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine)
    for stage in (0, 1):
        assert machine.handle(StageReported(stage, 0, 0)) == []
    told, restored, *resumes = machine.handle(CommitJournalled(written))
    assert told == StepCommitted(written, (1.0, 2.0), replayed=False)
    assert isinstance(restored, ReportRestored)
    assert (restored.committed, machine.official) == (1, 1)
    assert [r.resume.records for r in resumes if isinstance(r, SendResume)] == [(written,), (written,)]
    assert Evaluate(1) in all_ready(machine), "it has become due"


def test_a_commit_that_reaches_the_disk_while_a_plan_is_waited_for_counts():
    machine = running()
    written = journalled(machine, 0)
    machine.handle(PeerLost("p1", "gone"))
    assert kinds(machine.handle(CommitJournalled(written))) == [StepCommitted]
    assert (machine.step, machine.phase) == (1, DriverPhase.WAITING)


def again(machine: DriverMachine) -> None:
    """Through a round with everybody where it was."""
    enlist(machine)
    report(machine, machine.step)
    all_ready(machine)


def test_a_link_that_breaks_again_before_a_commit_costs_one_of_its_ends():
    machine = running()
    machine.handle(LinkBroken("p0", "p1", "cut"))
    again(machine)
    commands = machine.handle(LinkBroken("p1", "p0", "cut"))
    assert commands[-1] == AskPlan(frozenset({"p1"}), "cut")
    machine = running()
    machine.handle(LinkBroken("p0", "p1", "cut"))
    again(machine)
    commit(machine, 0)
    assert kinds(machine.handle(LinkBroken("p0", "p1", "cut"))) == [ReportFault, SendAttach], "it did carry a step"


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (LinkBroken("p0", "p0", "itself"), {}),
        (LinkBroken("p0", "nobody", "?"), {}),
        (LinkBroken("g0", "p0", "not of this plan"), {}),
    ],
    ids=["itself", "a stranger", "no standby"],
)
def test_links_of_strangers_mean_nothing(event: LinkBroken, changes: dict[str, object]):
    assert running(**changes).handle(event) == []


def test_the_owner_is_never_blamed_for_a_link_and_its_feed_counts():
    machine = running()
    assert kinds(machine.handle(LinkBroken("owner", "p0", "cut"))) == [ReportFault, SendAttach]
    again(machine)
    assert machine.handle(LinkBroken("p0", "owner", "cut"))[-1] == AskPlan(frozenset({"p0"}), "cut")


def test_the_owner_s_feed_counts_also_when_its_machine_standbys_no_more():
    machine = running(standbys={1: "owner"})
    assert machine.handle(PeerLost("owner", "gone"))[0] == ReportFault("standby", "owner", (), "gone", 0)
    assert kinds(machine.handle(LinkBroken("owner", "p0", "cut"))) == [ReportFault, SendAttach]


def test_who_has_trouble_with_several_is_blamed_and_else_who_is_with_standby():
    three = {0: "p0", 1: "p1", 2: "p2"}
    ring = {stage: frozenset({0, 1, 2} - {stage}) for stage in range(3)}
    machine = has_standby(places=three, neighbours=ring)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    machine.handle(LinkBroken("p0", "p2", "cut"))
    assert machine.handle(LinkBroken("p0", "p2", "cut"))[-1] == AskPlan(frozenset({"p0"}), "cut")
    machine = running(standbys={0: "g0"})
    machine.handle(LinkBroken("p0", "p1", "cut"))
    assert machine.handle(LinkBroken("p0", "p1", "cut"))[-1] == AskPlan(frozenset({"p0"}), "cut"), "g0 can take over"


def test_a_standby_whose_link_breaks_again_before_a_snapshot_came_through_is_struck_out():
    machine = has_standby(snapshot_every=3)
    assert kinds(machine.handle(LinkBroken("p0", "g0", "cut"))) == [ReportFault, SendAttach]
    again(machine)
    commit(machine, 0)
    assert machine.handle(LinkBroken("g0", "p0", "cut"))[0] == ReportFault("standby", "g0", (), "cut", 1)
    assert machine.phase is DriverPhase.RUNNING
    machine = has_standby(snapshot_every=3)
    machine.handle(LinkBroken("p0", "g0", "cut"))
    again(machine)
    machine.handle(SnapshotStored(0, 0, "g0"))
    assert kinds(machine.handle(LinkBroken("p0", "g0", "cut"))) == [ReportFault, SendAttach]


def test_a_standby_struck_out_for_its_link_while_all_report_does_not_hold_the_round_up():
    machine = has_standby()
    machine.handle(LinkBroken("p0", "g0", "cut"))
    for peer in ("p0", "p1", "g1"):
        machine.handle(MemberEnlisted(peer))
    report(machine, 0)
    assert kinds(machine.handle(LinkBroken("p0", "g0", "cut")))[:2] == [ReportFault, ReportRestored]


def test_a_stage_that_fails_is_retried_once_then_moved_then_the_job_fails():
    machine = running()
    assert kinds(machine.handle(StageFailure(1, "no memory"))) == [ReportFault, SendAttach]
    again(machine)
    commands = machine.handle(StageFailure(1, "no memory"))
    assert commands == [ReportFault("stage", "p1", (1,), "no memory", 0), AskPlan(frozenset({"p1"}), "no memory")]
    machine.handle(PlanGranted(plan(2, places={0: "p0", 1: "new"})))
    assert failure(machine.handle(StageFailure(1, "no memory"))) == "stage 1 failed: no memory"


def broken_vote(machine: DriverMachine, nonfinite: Mapping[int, NonFinite]) -> list[DriverCommand]:
    """All losses and votes of the present step, in which no number is finite."""
    step = machine.step
    for microbatch in range(machine.shape.microbatches):
        machine.handle(LossArrived(step, microbatch, math.nan))
    for stage in machine.roles.stages:
        norms = dict.fromkeys(NORMS[stage], math.inf)
        commands = machine.handle(StagePrepared(stage, step, norms, nonfinite.get(stage, "")))
    return commands


@pytest.mark.parametrize(
    ("nonfinite", "source"),
    [
        ({0: "forward"}, 0),
        ({0: "forward", 1: "backward"}, 0),
        ({0: "forward", 1: "forward"}, 0),
        ({1: "forward", 0: "backward"}, 1),
        ({0: "backward"}, 0),
        ({0: "backward", 1: "backward"}, 1),
        ({}, 1),
    ],
)
def test_a_step_that_is_not_finite_is_repeated_and_its_source_is_named(nonfinite: dict[int, NonFinite], source: int):
    machine = running()
    commands = broken_vote(machine, nonfinite)
    assert kinds(commands) == [ReportFault, SendAttach]
    named = f"step 0: stage {source} makes values that are not finite from finite ones"
    assert commands[0] == ReportFault("stage", f"p{source}", (source,), named, 0)
    assert machine.phase is DriverPhase.ATTACHING
    again(machine)
    assert kinds(commit(machine, 0)) == [SendCommit, StepCommitted], "the former reports do not count"


@pytest.mark.parametrize("broken", ["loss", "norm"])
def test_one_number_that_is_not_finite_prevents_the_commit(broken: str):
    machine = running()
    machine.handle(LossArrived(0, 0, 1.0))
    machine.handle(LossArrived(0, 1, math.nan if broken == "loss" else 1.0))
    machine.handle(StagePrepared(0, 0, {"b": -math.inf if broken == "norm" else 2.0}))
    commands = machine.handle(StagePrepared(1, 0, NORMS[1]))
    assert kinds(commands) == [ReportFault, SendAttach]
    assert isinstance(commands[0], ReportFault)
    assert commands[0].peer == ("p1" if broken == "loss" else "p0"), "the last stage computes the loss"


def test_a_report_without_a_number_that_is_not_finite_does_not_count():
    """Additive masks may travel between stages."""
    machine = running()
    for microbatch in range(2):
        machine.handle(LossArrived(0, microbatch, 1.0))
    machine.handle(StagePrepared(0, 0, NORMS[0], "forward"))
    assert kinds(machine.handle(StagePrepared(1, 0, NORMS[1]))) == [DecideScale]


def test_a_report_of_an_earlier_step_does_not_name_a_stage():
    machine = running()
    machine.handle(StagePrepared(0, 0, NORMS[0], "forward"))
    commit(machine, 0)
    commands = broken_vote(machine, {1: "backward"})
    assert isinstance(commands[0], ReportFault)
    assert commands[0].peer == "p1"


def test_the_first_vote_of_a_stage_says_whether_it_spoilt_the_step():
    machine = running()
    machine.handle(StagePrepared(0, 0, {"b": math.inf}))
    machine.handle(StagePrepared(0, 0, {"b": math.inf}, "forward"))
    commands = broken_vote(machine, {})
    assert isinstance(commands[0], ReportFault)
    assert commands[0].peer == "p1"


def test_a_step_that_is_not_finite_again_moves_to_another_peer_and_then_ends_the_job():
    machine = running()
    broken_vote(machine, {1: "forward"})
    again(machine)
    commands = broken_vote(machine, {1: "forward"})
    assert kinds(commands) == [ReportFault, AskPlan]
    assert commands[1] == AskPlan(
        frozenset({"p1"}), "step 0: stage 1 makes values that are not finite from finite ones"
    )
    assert machine.phase is DriverPhase.WAITING
    machine.handle(PlanGranted(plan(2, places={0: "p0", 1: "p2"})))
    again(machine)
    reason = failure(broken_vote(machine, {1: "forward"}))
    assert "step 0: stage 1 makes values that are not finite from finite ones, on two peers" in reason
    assert "lower the learning rate" in reason


def test_a_commit_forgives_steps_that_were_not_finite():
    machine = running()
    broken_vote(machine, {1: "forward"})
    again(machine)
    commit(machine, 0)
    assert kinds(broken_vote(machine, {1: "forward"})) == [ReportFault, SendAttach]


def test_a_replayed_step_that_is_not_finite_is_not_a_replay_with_other_bits():
    machine = promoted()
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    report(machine, 3, 2, s1=-1)
    machine.handle(StageReady(1, 2))
    commands = machine.handle(StagePrepared(1, 2, {"a": math.nan}))
    assert kinds(commands)[:2] == [ReportFault, SendAttach]
    assert isinstance(commands[0], ReportFault)
    assert commands[0].stages == (1,)
    assert commands[0].reason.startswith("step 2: stage 1 ")


def test_failures_are_forgiven_by_a_commit_and_fatal_ones_never():
    machine = running()
    machine.handle(StageFailure(1, "no memory"))
    again(machine)
    commit(machine, 0)
    assert kinds(machine.handle(StageFailure(1, "no memory"))) == [ReportFault, SendAttach]
    assert "nobody can" in failure(running().handle(StageFailure(1, "nobody can", fatal=True)))


def test_the_owner_s_own_stage_can_not_be_moved():
    machine = running(places={0: "p0", 1: "owner"})
    machine.handle(StageFailure(1, "no memory"))
    again(machine)
    assert "the job's own machine" in failure(machine.handle(StageFailure(1, "no memory")))


def test_strangers_and_those_already_lost_are_not_lost_again():
    machine = running()
    assert machine.handle(PeerLost("nobody", "?")) == []
    machine.handle(PeerLost("p1", "gone"))
    assert machine.handle(PeerLost("p1", "gone")) == []
    assert machine.handle(PeerLost("p0", "too"))[-1] == AskPlan(frozenset({"p0", "p1"}), "too")


# ---------------------------------------------------------------------------------------------------------------- plans


def test_a_waiting_job_takes_any_newer_plan_at_once_also_one_with_the_lost_peer():
    machine = running()
    machine.handle(PeerLost("p1", "gone"))
    assert machine.handle(PlanGranted(plan(1))) == [], "that is the one it has"
    assert machine.handle(PlanGranted(plan(2))) == [SendAttach(Fence(2, 1, 1), plan(2), {})]
    assert machine.handle(PeerLost("p1", "still gone"))[-1] == AskPlan(frozenset({"p1"}), "still gone")


def test_a_better_plan_waits_for_the_boundary_of_a_step():
    machine = running(feed_window=3)
    machine.handle(LossArrived(0, 0, 1.0))
    better = plan(2, standbys=GUARDS)
    assert machine.handle(PlanGranted(better)) == []
    assert fed(machine.handle(LossArrived(0, 1, 1.0))) == [], "the step after is begun already, no other is"
    commit(machine, 0)
    assert machine.phase is DriverPhase.RUNNING
    assert commit(machine, 1)[-1] == SendAttach(Fence(2, 1, 1), better, GUARDS)


def test_a_better_plan_lets_a_step_that_is_half_fed_be_finished():
    machine = running(feed_window=1)
    machine.handle(PlanGranted(plan(2, standbys=GUARDS)))
    assert fed(machine.handle(LossArrived(0, 0, 1.0))) == [(0, 1)]
    assert fed(machine.handle(LossArrived(0, 1, 1.0))) == []


def test_state_that_moves_goes_by_way_of_a_checkpoint():
    machine = running()
    moved = plan(2, places={0: "p0", 1: "new"})
    machine.handle(PlanGranted(moved))
    assert commit(machine, 0)[-1] == WriteCheckpoint(1, ask=True)
    assert fed(machine.handle(SnapshotStored(0, 0, "g0"))) == []
    assert machine.handle(CheckpointWritten(1)) == [SendAttach(Fence(2, 1, 1), moved, {})]


EXCHANGED = {"places": {0: "p0", 1: "g1"}, "standbys": {0: "g0", 1: "p1"}}


def warm_stages(*steps: tuple[int, int], **changes: object) -> DriverMachine:
    """After two steps, with a snapshot of these (stage, step)."""
    machine = has_standby(**changes)
    for step in range(2):
        commit(machine, step)
    for stage, step in steps:
        machine.handle(SnapshotStored(stage, step, GUARDS[stage]))
    return machine


def test_a_stage_that_changes_places_with_its_standby_needs_no_checkpoint():
    machine = warm_stages((0, 2), (1, 2))
    assert machine.warm_stages == {0, 1}
    exchanged = plan(2, **EXCHANGED)
    machine.handle(PlanGranted(exchanged))
    assert commit(machine, 2)[-1] == SendAttach(Fence(2, 1, 1), exchanged, {0: "g0", 1: "p1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"places": {0: "p0", 1: "g1"}, "standbys": {0: "g0"}},  # nobody would have it if the new place were lost
        {"places": {0: "p0", 1: "g0"}, "standbys": {0: "g1", 1: "p1"}},  # the standby of another stage
        {"places": {0: "g0", 1: "g1"}, "standbys": {0: "p0", 1: "p1"}},  # two at once may find no common step
        {**EXCHANGED, "partition": "other"},
    ],
)
def test_whatever_else_moves_goes_by_way_of_a_checkpoint(changes: dict[str, object]):
    machine = warm_stages((0, 2), (1, 2))
    machine.handle(PlanGranted(plan(2, **changes)))
    assert commit(machine, 2)[-1] == WriteCheckpoint(3, ask=True)


def test_a_standby_without_a_snapshot_or_with_that_of_the_checkpoint_changes_no_places():
    machine = warm_stages((0, 2))
    assert machine.warm_stages == {0}
    machine.handle(PlanGranted(plan(2, **EXCHANGED)))
    assert commit(machine, 2)[-1] == WriteCheckpoint(3, ask=True)
    machine = warm_stages((0, 2), (1, 0))
    machine.handle(PlanGranted(plan(2, **EXCHANGED)))
    assert commit(machine, 2)[-1] == WriteCheckpoint(3, ask=True)


def test_a_standby_lost_before_they_change_places_takes_the_plan_with_it():
    machine = warm_stages((0, 2), (1, 2))
    machine.handle(PlanGranted(plan(2, **EXCHANGED)))
    machine.handle(PeerLost("g1", "gone"))
    assert machine.warm_stages == {0}
    assert SendAttach not in kinds(commit(machine, 2))


def test_another_cut_goes_by_way_of_a_checkpoint():
    machine = running(checkpoint_every=1)
    machine.handle(PlanGranted(plan(2, partition="other")))
    assert WriteCheckpoint(1, ask=False) in commit(machine, 0), "one is due anyway"
    assert kinds(machine.handle(CheckpointWritten(1))) == [SendAttach]


def test_a_plan_waits_for_a_checkpoint_of_the_base():
    machine = driver(save_base=True)
    ready(machine)
    assert machine.handle(PlanGranted(plan(2, standbys=GUARDS))) == [], "what is being collected would be lost"
    assert kinds(machine.handle(CheckpointWritten(0))) == [SendAttach]


def test_a_plan_that_comes_when_nothing_may_be_fed_is_taken_at_once():
    machine = has_standby(snapshot_every=1)
    commit(machine, 0)
    assert fed(commit(machine, 1)) == [], "standbys hold nothing newer than the state of step 0"
    assert kinds(machine.handle(PlanGranted(plan(2, standbys={0: "g0"})))) == [SendAttach]


def test_a_plan_waits_for_an_evaluation():
    machine = running(evaluate_every=1)
    machine.handle(PlanGranted(plan(2, standbys=GUARDS)))
    assert commit(machine, 0)[-1] == Evaluate(1)
    assert kinds(machine.handle(EvaluationDone(1, 1.0))) == [SendAttach]


def test_a_plan_brings_a_lost_standby_back():
    machine = has_standby()
    machine.handle(PeerLost("g0", "gone"))
    machine.handle(PlanGranted(plan(2, standbys=GUARDS)))
    assert commit(machine, 0)[-1] == SendAttach(Fence(2, 1, 1), plan(2, standbys=GUARDS), GUARDS)
    assert machine.standbys == GUARDS
    assert machine.handle(PeerLost("g0", "again"))[0] == ReportFault("standby", "g0", (), "again", 1)
    assert machine.standbys == {1: "g1"}


def test_a_plan_overtaken_by_a_newer_one_is_dropped():
    machine = running()
    machine.handle(PlanGranted(plan(3, standbys={0: "g0"})))
    machine.handle(PlanGranted(plan(2, standbys={1: "g1"})))
    assert commit(machine, 0)[-1] == SendAttach(Fence(3, 1, 1), plan(3, standbys={0: "g0"}), {0: "g0"})


def test_a_plan_that_waits_is_taken_when_a_peer_is_lost_if_it_leaves_the_living_alone():
    machine = running()
    ready_made = plan(2, places={0: "p0", 1: "new"})
    machine.handle(PlanGranted(ready_made))
    assert machine.handle(PeerLost("p1", "gone"))[-1] == SendAttach(Fence(2, 1, 1), ready_made, {})
    for other in (plan(2, places={0: "new", 1: "other"}), plan(2, places={0: "p0", 1: "new"}, partition="other")):
        machine = running()
        machine.handle(PlanGranted(other))
        assert machine.handle(PeerLost("p1", "gone"))[-1] == AskPlan(frozenset({"p1"}), "gone"), "state would be lost"
        assert machine.handle(PlanGranted(ready_made)) == [SendAttach(Fence(2, 1, 1), ready_made, {})]


def test_a_plan_with_a_peer_that_is_lost_before_it_began_is_dropped():
    machine = has_standby()
    machine.handle(PlanGranted(plan(2, standbys={0: "g0"})))
    machine.handle(PeerLost("g0", "gone"))
    assert SendAttach not in kinds(commit(machine, 0))


# ------------------------------------------------------------------------------------------- faults in the middle of it


def test_what_a_fault_interrupted_is_taken_up_again():
    machine = running(steps=1, evaluate_every=1)
    commit(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    enlist(machine)
    report(machine, 1)
    assert all_ready(machine) == [WriteCheckpoint(1, ask=True), Evaluate(1)]
    assert machine.phase is DriverPhase.SAVING


def test_a_checkpoint_that_gets_to_the_disk_in_a_round_counts():
    machine = running(steps=1)
    commit(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "cut"))
    assert machine.handle(CheckpointWritten(1)) == []
    enlist(machine)
    report(machine, 1)
    assert all_ready(machine) == [EndJob(1)]


def test_an_evaluation_of_a_state_that_is_gone_is_not_waited_for():
    machine = running(evaluate_every=1)
    commit(machine, 0)
    machine.handle(PeerLost("p1", "gone"))
    machine.handle(PlanGranted(plan(2, places={0: "p0", 1: "new"})))
    enlist(machine)
    report(machine, 1, 1, s1=-1)
    assert not any(isinstance(command, Evaluate) for command in all_ready(machine))
    assert machine.step == 0
    vote(machine, 0)
    assert Evaluate(1) in machine.handle(ScaleDecided(0, 2.5, 0.4))


def test_an_evaluation_of_the_state_that_is_restored_is_done_again():
    machine = running(evaluate_every=1, checkpoint_every=1)
    commit(machine, 0)
    machine.handle(CheckpointWritten(1))
    machine.handle(PeerLost("p1", "gone"))
    machine.handle(PlanGranted(plan(2, partition="other")))
    enlist(machine)
    (told, *_) = report(machine, -1)
    assert told == ReportRestored(committed=1, base=1, restored=(0, 1), rollback=False)
    assert Evaluate(1) in all_ready(machine)


def test_a_stop_while_stages_are_restored_ends_when_they_are():
    machine = running()
    machine.handle(LinkBroken("p0", "p1", "cut"))
    assert machine.handle(StopAsked("enough")) == []
    enlist(machine)
    report(machine, 0)
    assert all_ready(machine) == [WriteCheckpoint(0, ask=True)]
    assert machine.handle(CheckpointWritten(0)) == [EndJob(0, stopped="enough")]


# ------------------------------------------------------------------------------------------------------- spot checks


def checked(**changes: object) -> DriverMachine:
    machine = driver(standbys=GUARDS, **changes)  # pyright: ignore[reportArgumentType]
    machine.inspector = Inspector(b"s" * 32, "owner", 2)
    ready(machine)
    return machine


def kept(machine: DriverMachine, step: int) -> list[DriverCommand]:
    """Every standby has the state of `step`; the commands of the last word."""
    for stage, standby in machine.standbys.items():
        commands = machine.handle(SnapshotStored(stage, step, standby))
    return commands


def checks(commands: list[DriverCommand]) -> dict[int, Check]:
    return {one.check.stage: one.check for one in commands if isinstance(one, StartCheck)}


def test_a_stretch_is_checked_when_all_standbys_have_what_followed_and_the_line_waits():
    machine = checked()
    commit(machine, 0)
    commit(machine, 1)
    assert checks(machine.handle(SnapshotStored(0, 2, "g0"))) == {}
    started = checks(machine.handle(SnapshotStored(1, 2, "g1")))
    assert started == {stage: Check(stage, PLACES[stage], GUARDS[stage], 0, 2) for stage in PLACES}
    assert machine.watermark == 0
    commit(machine, 2)
    assert machine.handle(StageChecked(started[0], Opinion()))[0] == ReportCheck(started[0], "valid", "")
    assert machine.watermark == 0
    commands = machine.handle(StageChecked(started[1], Opinion(void="it left")))
    assert isinstance(commands[0], ReportCheck)
    assert machine.watermark == 2
    assert 2 in machine.records


def test_a_verifier_gets_the_inputs_of_the_steps_it_was_asked_to_run_again():
    machine = checked()
    commit(machine, 0)
    commit(machine, 1)
    started = checks(kept(machine, 2))
    for void in (VerifierReady("g1", 0, 0, 2), VerifierReady("g0", 0, 0, 1), VerifierReady("g0", 0, 1, 2)):
        assert machine.handle(void) == []
        assert machine.spot_checks.check_of(void.peer, void.stage, void.first, void.below) is None
    assert machine.handle(VerifierReady("g0", 0, 0, 2)) == [GatherEvidence(started[0])]
    machine.handle(StageChecked(started[0], Opinion()))
    assert machine.handle(VerifierReady("g0", 0, 0, 2)) == []


def test_a_check_ends_without_an_opinion_when_a_neighbour_lost_what_it_sent():
    machine = checked()
    commit(machine, 0)
    commit(machine, 1)
    started = checks(kept(machine, 2))
    assert machine.handle(EvidenceLost("g0", 1, 0)) == [], "not the stage's peer"
    assert machine.handle(EvidenceLost("p1", 1, 2)) == [], "no such check"
    lost = "stage 1 no longer has everything that it sent"
    assert machine.handle(EvidenceLost("p1", 1, 0))[0] == ReportCheck(started[0], "void", lost)


def test_the_owners_check_ends_without_an_opinion_when_the_standby_lost_its_snapshots():
    machine = checked()
    commit(machine, 0)
    commit(machine, 1)
    started = checks(kept(machine, 2))
    again = checks(machine.handle(StageChecked(started[0], Opinion(own="its result"))))[0]
    assert again.verifier == "owner"
    assert machine.handle(EvidenceLost("g1", 0, 0)) == [], "it stands by for another stage"
    report = machine.handle(EvidenceLost("g0", 0, 0))[0]
    assert isinstance(report, ReportCheck)
    assert (report.check, report.outcome) == (again, "void")
    assert "the standby of stage 0 no longer has its snapshots" in report.reason


def test_a_standby_needs_links_only_while_a_stage_loads():
    machine = checked()
    assert [machine.needs_links(peer) for peer in ("p0", "owner", "g0")] == [True, True, False]
    commit(machine, 0)
    commit(machine, 1)
    kept(machine, 2)
    machine.handle(PeerLost("p0", "gone"))
    machine.handle(PlanGranted(plan(2, places={0: "q", 1: "p1"}, standbys=GUARDS)))
    enlist(machine, {"g0": {(0, 2)}, "g1": {(1, 2)}})
    report(machine, 2, s0=-1)
    assert machine.phase is DriverPhase.LOADING
    assert machine.needs_links("g0")


def test_a_round_goes_on_when_the_faulty_peer_left_before_the_commit_was_journalled():
    machine = checked()
    commit(machine, 0)
    commit(machine, 1)
    started = checks(kept(machine, 2))
    record = journalled(machine, 2)
    again = checks(machine.handle(StageChecked(started[0], Opinion(own="wrong"))))[0]
    machine.handle(StageChecked(again, Opinion()))  # its own verifier is the faulty peer
    machine.handle(PeerLost("g0", "gone"))
    machine.handle(LinkBroken("p0", "p1", "cut"))
    for peer in ("p0", "p1", "g1"):
        machine.handle(MemberEnlisted(peer))
    report(machine, 2)
    commands = machine.handle(CommitJournalled(record))
    assert Distrust("g0", "its word against another peer did not hold") in commands
    assert machine.phase is DriverPhase.LOADING


def test_while_a_check_is_open_no_more_is_fed_than_can_be_retained():
    machine = checked()
    for step in range(2):
        commit(machine, step)
    kept(machine, 2)
    for step in (2, 3):
        commands = commit(machine, step)
    assert fed(commands) == []  # rule 12, from the line at 0
    for check in list(machine.inspector.open.values()) if machine.inspector else []:
        commands = machine.handle(StageChecked(check, Opinion()))
    assert fed(commands)


def found_out(machine: DriverMachine, started: dict[int, Check], stage: int) -> list[DriverCommand]:
    """The verifier takes exception to a stage, and the owner's machine as well."""
    commands = machine.handle(StageChecked(started[stage], Opinion(own="wrong")))
    again = checks(commands)[stage]
    assert again.verifier == "owner"
    return machine.handle(StageChecked(again, Opinion(own="wrong")))


def test_a_faulty_peer_goes_and_its_steps_are_taken_back():
    machine = checked()
    for step in range(2):
        commit(machine, step)
    started = checks(kept(machine, 2))
    commit(machine, 2)
    commands = found_out(machine, started, 1)
    assert kinds(commands) == [ReportCheck, Distrust, ReportFault, Rewind, AskPlan]
    fault = commands[2]
    assert isinstance(fault, ReportFault)
    assert (fault.kind, fault.peer, fault.stages, fault.step) == ("faulty", "p1", (1,), 3)
    assert commands[3] == Rewind(0)
    assert isinstance(commands[4], AskPlan)
    assert commands[4].without == {"p1"}
    assert (machine.official, machine.step, machine.watermark, dict(machine.records)) == (0, 0, 0, {})
    assert machine.phase is DriverPhase.WAITING


def test_what_is_done_again_may_come_out_otherwise():
    machine = checked()
    for step in range(2):
        commit(machine, step)
    found_out(machine, checks(kept(machine, 2)), 1)
    machine.handle(PlanGranted(plan(2, places={0: "p0", 1: "g1"}, standbys={0: "g0"})))
    enlist(machine, {"g0": {(0, 0), (0, 2)}, "g1": {(1, 0), (1, 2)}})
    report(machine, 2, s1=-1)
    for stage in machine.roles.stages:
        machine.handle(StageReady(stage, 0))
    assert machine.phase is DriverPhase.RUNNING
    record = journalled(machine, 0, loss=7.0)
    assert record.loss == 7.5
    assert machine.handle(CommitJournalled(record))
    assert machine.records[0].loss == 7.5


def test_nobody_goes_while_a_commit_is_on_its_way_to_the_disk():
    machine = checked()
    for step in range(2):
        commit(machine, step)
    started = checks(kept(machine, 2))
    record = journalled(machine, 2)
    assert kinds(found_out(machine, started, 0)) == [ReportCheck]
    commands = machine.handle(CommitJournalled(record))
    assert Rewind(0) in commands
    assert machine.official == 0


def test_a_standby_whose_word_does_not_hold_goes_without_a_round():
    machine = checked()
    for step in range(2):
        commit(machine, step)
    started = checks(kept(machine, 2))
    again = checks(machine.handle(StageChecked(started[1], Opinion(own="wrong"))))[1]
    commands = machine.handle(StageChecked(again, Opinion()))
    assert Distrust("g1", "its word against another peer did not hold") in commands
    assert machine.phase is DriverPhase.RUNNING
    assert machine.official == 2
    assert dict(machine.standbys) == {0: "g0"}


def test_a_checkpoint_of_a_state_that_was_taken_back_is_none():
    machine = checked(checkpoint_every=2)
    for step in range(2):
        commit(machine, step)
    machine.handle(CheckpointWritten(2))
    assert machine.saved == 2
    started = checks(kept(machine, 2))
    found_out(machine, started, 1)
    assert machine.saved == -1
    machine.handle(CheckpointWritten(2))
    assert machine.saved == -1


def test_stretches_that_a_fault_fell_into_are_not_checked():
    machine = checked()
    commit(machine, 0)
    machine.handle(LinkBroken("p0", "p1", "reset"))
    enlist(machine, {standby: {(stage, 0)} for stage, standby in GUARDS.items()})
    report(machine, 1)
    all_ready(machine)
    kept(machine, 1)
    commit(machine, 1)
    assert checks(kept(machine, 2))  # from the state after the round on
    assert machine.watermark == 1


def test_the_job_ends_when_all_checks_are_answered():
    machine = checked(steps=2)
    for step in range(2):
        commit(machine, step)
    started = checks(kept(machine, 2))
    assert machine.handle(CheckpointWritten(2)) == []
    machine.handle(StageChecked(started[0], Opinion()))
    commands = machine.handle(StageChecked(started[1], Opinion()))
    assert EndJob(2) in commands


def test_what_is_taken_back_leaves_neither_norms_nor_states_nor_evaluations_of_later_steps():
    machine = checked(evaluate_every=1, checkpoint_every=1)
    machine.older, machine.saved = [0, 2, 3], 4
    machine.evaluations = (Evaluation(2, 1.0), Evaluation(3, 0.5))
    machine.votes.history = {1: {"a": 1.0}, 2: {"a": 2.0}, 3: {"a": 3.0}}
    assert machine.take_back(2) == [Rewind(2)]
    assert (sorted(machine.older), machine.saved) == ([0, 2], 2)
    assert machine.evaluations == (Evaluation(2, 1.0),)
    assert machine.votes.history == {1: {"a": 1.0}}
    assert machine.take_back(1) == [Rewind(1)]
    assert (machine.older, machine.saved) == ([0], 0)


def test_steps_that_are_taken_back_speak_for_nobody_any_more():
    machine = checked()
    inspector = machine.inspector
    assert inspector is not None
    for step in range(2):
        commit(machine, step)
    check = checks(kept(machine, 2))[1]
    assert inspector.answered(check, Opinion()) is not None
    machine.take_back(1)
    (again,) = (one for one in inspector.due(PLACES, GUARDS, 2, 4) if one.stage == 1)
    accused = inspector.answered(again, Opinion(own="other bits"))
    assert accused is not None
    assert accused.again is not None
    verdict = inspector.answered(accused.again, Opinion(own="other bits"))
    assert verdict is not None
    assert (verdict.faulty_peer, verdict.trusted) == ("p1", 1)


def test_a_driver_without_a_checker_takes_steps_back_all_the_same():
    machine = running()
    commit(machine, 0)
    assert machine.take_back(0) == [Rewind(0)]
    assert machine.official == machine.step == 0


def test_a_state_that_is_only_replayed_is_not_evaluated():
    machine = driver(official=4, saved=2, evaluate_every=2)
    machine.step = 2
    assert not machine.evaluate_if_due()
    machine.step = 4
    assert machine.evaluate_if_due()


@pytest.mark.parametrize(
    ("changes", "chooses"),
    [
        ({"evaluate_every": 1, "keep_best": True}, True),
        ({"evaluate_every": 1, "patience": 2}, True),
        ({"evaluate_every": 1}, False),
        ({"keep_best": True, "patience": 2}, False),
    ],
)
def test_only_evaluations_choose(changes: dict[str, object], chooses: bool):
    assert driver(**changes).shape.is_choosing is chooses  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("step", "stop", "is_early"), [(3, None, True), (3, "enough", False), (9, None, False), (10, None, False)]
)
def test_an_end_is_early_only_before_the_last_step_and_unasked(step: int, stop: str | None, is_early: bool):
    machine = running(evaluate_every=1, patience=1)
    machine.evaluations = (Evaluation(1, 1.0), Evaluation(2, 1.0))
    machine.step = machine.official = step
    machine.stop = stop
    (end,) = machine.end()
    assert isinstance(end, EndJob)
    assert (end.steps, end.stopped) == (step, stop)
    assert (end.early is not None) is is_early


def test_a_standby_on_the_machine_of_its_stage_checks_nothing():
    machine = checked(beside=frozenset({(0, "g0")}))
    commit(machine, 0)
    commit(machine, 1)
    assert set(checks(kept(machine, 2))) == {1}
