"""The driver's machine, row by row: barriers, feeding, votes, journal before commit, replay, checkpoints, the end."""

from __future__ import annotations

import itertools
import math

import pytest

from fusionai.coordination.driver import (
    TABLE,
    AnnounceReady,
    CheckpointWritten,
    CommandFailed,
    CommitJournalled,
    DecideScale,
    DriverCommand,
    DriverEvent,
    DriverMachine,
    DriverPhase,
    EndJob,
    Evaluate,
    EvaluationDone,
    Feed,
    JobShape,
    JournalCommit,
    LossArrived,
    ProbeAnswered,
    ScaleDecided,
    SendAttach,
    SendCommit,
    SendProbe,
    SendResume,
    StageLost,
    StagePrepared,
    StageReady,
    StageReported,
    StepCommitted,
    StopAsked,
    WarnTolerant,
    WriteCheckpoint,
    norms_hash,
)
from fusionai.wire.messages import CommitRecord, Fence

FENCE = Fence(1, 1, 0)
NORMS = {0: {"b": 2.0}, 1: {"a": 1.0}}


def shape(**changes: object) -> JobShape:
    fields: dict[str, object] = {
        "stages": (0, 1),
        "steps": 4,
        "microbatches": 2,
        "feed_window": 2,
        "canonical_order": ("a", "b"),
    }
    return JobShape(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def driver(
    *, base: int = 0, journal: tuple[CommitRecord, ...] = (), source: str = "initialise", **changes: object
) -> DriverMachine:
    return DriverMachine(
        shape=shape(**changes),
        fence=FENCE,
        learning_rate=lambda step: 0.5 / (step + 1),
        journal=journal,
        base=base,
        source=source,  # pyright: ignore[reportArgumentType]
    )


def ready(machine: DriverMachine) -> list[DriverCommand]:
    machine.start()
    for stage in machine.shape.stages:
        machine.handle(StageReported(stage, -1, -1))
    for stage in machine.shape.stages[:-1]:
        assert machine.handle(StageReady(stage, machine.base)) == []
    assert machine.handle(StageReady(machine.shape.stages[-1], machine.base)) == [SendProbe(machine.base)]
    return machine.handle(ProbeAnswered((1.5, 1.5)))


def running(**changes: object) -> DriverMachine:
    machine = driver(**changes)  # pyright: ignore[reportArgumentType]
    ready(machine)
    return machine


def vote(machine: DriverMachine, step: int, loss: float = 1.0) -> list[DriverCommand]:
    """Every loss and every vote of a step; the commands of the last."""
    for microbatch in range(machine.shape.microbatches):
        commands = machine.handle(LossArrived(step, microbatch, loss + microbatch))
    for stage in machine.shape.stages:
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
    return [(c.step, c.microbatch) for c in commands if isinstance(c, Feed)]


def kinds(commands: list[DriverCommand]) -> list[type]:
    return [type(command) for command in commands]


# ------------------------------------------------------------------------------------------------ every other pair

EVENTS: tuple[DriverEvent, ...] = (
    StageReported(0, -1, -1),
    StageReady(0, 0),
    LossArrived(0, 0, 1.0),
    StagePrepared(0, 0, {}),
    ScaleDecided(0, 1.0, 1.0),
    CommitJournalled(
        CommitRecord(
            step=0, scale=1.0, learning_rate=1.0, total_norm=1.0, norms_hash="", data_cursor=1, fence=FENCE, loss=0.0
        )
    ),
    CheckpointWritten(0),
    EvaluationDone(0),
    StopAsked("enough"),
    StageLost(0, "gone"),
    CommandFailed("disk full"),
)


def in_phase(phase: DriverPhase) -> DriverMachine:
    machine = driver(steps=1)
    match phase:
        case DriverPhase.ATTACHING:
            machine.start()
        case DriverPhase.RESUMING:
            machine.start()
            for stage in (0, 1):
                machine.handle(StageReported(stage, -1, -1))
        case DriverPhase.PROBING:
            machine.start()
            for stage in (0, 1):
                machine.handle(StageReported(stage, -1, -1))
            for stage in (0, 1):
                machine.handle(StageReady(stage, 0))
        case DriverPhase.RUNNING:
            ready(machine)
        case DriverPhase.SAVING | DriverPhase.ENDED:
            ready(machine)
            commit(machine, 0)
            if phase is DriverPhase.ENDED:
                machine.handle(CheckpointWritten(1))
    assert machine.phase is phase
    return machine


@pytest.mark.parametrize(
    ("phase", "event"),
    [pair for pair in itertools.product(DriverPhase, EVENTS) if (pair[0], type(pair[1])) not in TABLE],
    ids=lambda value: str(value),
)
def test_what_has_no_row_comes_too_late_and_changes_nothing(phase: DriverPhase, event: DriverEvent):
    machine = in_phase(phase)
    before = (machine.phase, machine.step)
    assert machine.handle(event) == []
    assert (machine.phase, machine.step) == before


@pytest.mark.parametrize("phase", [phase for phase in DriverPhase if phase is not DriverPhase.ENDED])
@pytest.mark.parametrize("event", [StageLost(1, "cable cut"), CommandFailed("disk full")], ids=["lost", "failed"])
def test_a_lost_stage_or_a_failed_command_ends_the_job_at_any_moment_with_its_reason(
    phase: DriverPhase, event: DriverEvent
):
    machine = in_phase(phase)
    step = machine.step
    (end,) = machine.handle(event)
    assert isinstance(end, EndJob)
    assert end.steps == step
    assert end.failed is not None
    assert ("stage 1 was lost: cable cut" if isinstance(event, StageLost) else "disk full") in end.failed
    assert machine.phase is DriverPhase.ENDED


# -------------------------------------------------------------------------------------------------------- barriers


def test_all_status_then_resume_then_all_ready_then_work():
    machine = driver(base=3, source="import", steps=9)
    assert machine.start() == [SendAttach(FENCE)]
    assert machine.handle(StageReported(1, -1, -1)) == []
    assert machine.handle(StageReported(1, -1, -1)) == [], "twice is not two"
    assert machine.handle(StageReported(0, -1, -1)) == [SendResume(stage, 3, "import", None) for stage in (0, 1)]
    assert machine.handle(StageReady(0, 3)) == []
    assert machine.handle(StageReady(0, 3)) == []
    assert machine.handle(StageReady(1, 3)) == [SendProbe(3)]
    assert machine.phase is DriverPhase.PROBING
    commands = machine.handle(ProbeAnswered((2.0, 2.0)))
    assert commands[0] == AnnounceReady(3)
    assert fed(commands) == [(3, 0), (3, 1)]


def test_a_stage_that_is_not_of_the_plan_does_not_complete_a_barrier():
    machine = driver()
    machine.start()
    machine.handle(StageReported(0, -1, -1))
    assert machine.handle(StageReported(99, -1, -1)) == []
    assert machine.phase is DriverPhase.ATTACHING
    machine.handle(StageReported(1, -1, -1))
    machine.handle(StageReady(0, 0))
    assert machine.handle(StageReady(99, 0)) == []
    assert machine.phase is DriverPhase.RESUMING


def test_a_stage_that_is_ready_elsewhere_ends_the_job():
    machine = driver(base=3, source="import")
    machine.start()
    for stage in (0, 1):
        machine.handle(StageReported(stage, -1, -1))
    (end,) = machine.handle(StageReady(1, 2))
    assert isinstance(end, EndJob)
    assert end.failed == "stage 1 is at step 2 instead of 3"


def test_a_probe_that_comes_back_different_is_not_ready():
    machine = driver()
    machine.start()
    for stage in (0, 1):
        machine.handle(StageReported(stage, -1, -1))
    for stage in (0, 1):
        machine.handle(StageReady(stage, 0))
    (end,) = machine.handle(ProbeAnswered((1.0, 1.0000001)))
    assert isinstance(end, EndJob)
    assert end.failed is not None
    assert "twice" in end.failed


def test_a_tolerant_job_is_told_of_a_probe_that_comes_back_different():
    machine = driver(takeover="tolerant")
    machine.start()
    for stage in (0, 1):
        machine.handle(StageReported(stage, -1, -1))
    for stage in (0, 1):
        machine.handle(StageReady(stage, 0))
    commands = machine.handle(ProbeAnswered((1.0, 1.0000001)))
    assert isinstance(commands[0], WarnTolerant)
    assert commands[1] == AnnounceReady(0)


def test_a_probe_without_a_number_is_still_the_same_twice():
    machine = driver()
    machine.start()
    for stage in (0, 1):
        machine.handle(StageReported(stage, -1, -1))
    for stage in (0, 1):
        machine.handle(StageReady(stage, 0))
    assert machine.handle(ProbeAnswered((float("nan"), float("nan"))))[0] == AnnounceReady(0)


def test_a_job_whose_steps_are_all_in_the_checkpoint_ends_when_it_is_ready():
    assert ready(driver(base=4, source="import")) == [AnnounceReady(4), EndJob(4)]


# --------------------------------------------------------------------------------------------------------- feeding


def test_feeding_stays_within_the_window_and_one_step_ahead_of_the_vote():
    machine = driver(feed_window=3, microbatches=2)
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
            data_cursor=2,
            fence=FENCE,
            loss=1.5,
        )
    )
    assert machine.step == 0
    commands = machine.handle(CommitJournalled(command.record))
    assert commands[:2] == [
        SendCommit(command.record, line=1, save=False),
        StepCommitted(command.record, (1.0, 2.0), replayed=False),
    ]
    assert machine.step == 1


def test_votes_and_losses_of_the_step_before_are_late():
    machine = running()
    commit(machine, 0)
    assert machine.handle(StagePrepared(0, 0, NORMS[0])) == []
    assert machine.handle(LossArrived(0, 0, 1.0)) == []
    assert kinds(vote(machine, 1)) == [DecideScale]


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


def records(count: int, loss: float = 1.0) -> tuple[CommitRecord, ...]:
    machine = running()
    made: list[CommitRecord] = []
    for step in range(count):
        made.append(journalled(machine, step, loss))
        machine.handle(CommitJournalled(made[-1]))
    return tuple(made)


def test_replayed_steps_use_the_journalled_record_and_are_not_journalled_again():
    journal = records(2)
    machine = running(journal=journal)
    vote(machine, 0)
    commands = machine.handle(ScaleDecided(0, 99.0, 99.0))
    assert commands[:2] == [SendCommit(journal[0], line=1, save=False), StepCommitted(journal[0], (1.0, 2.0), True)]
    vote(machine, 1)
    assert machine.handle(ScaleDecided(1, 2.5, 0.4))[0] == SendCommit(journal[1], line=2, save=False)
    vote(machine, 2)
    assert kinds(machine.handle(ScaleDecided(2, 2.5, 0.4))) == [JournalCommit]


def test_a_replay_from_a_checkpoint_begins_with_the_record_after_it():
    journal = records(3)
    machine = running(base=1, source="import", journal=journal[1:])
    vote(machine, 1)
    assert machine.handle(ScaleDecided(1, 2.5, 0.4))[0] == SendCommit(journal[1], line=2, save=False)


@pytest.mark.parametrize("different", ["loss", "norms"])
def test_a_replay_with_other_bits_fails_if_exact_and_warns_if_tolerant(different: str):
    journal = records(1, loss=3.0) if different == "loss" else records(1)
    for takeover in ("exact", "tolerant"):
        machine = running(journal=journal, takeover=takeover)
        if different == "loss":
            vote(machine, 0, loss=3.25)
        else:
            for microbatch in range(2):
                machine.handle(LossArrived(0, microbatch, 1.0 + microbatch))
            machine.handle(StagePrepared(0, 0, {"b": math.nextafter(2.0, 3.0)}))
            machine.handle(StagePrepared(1, 0, NORMS[1]))
        commands = machine.handle(ScaleDecided(0, 2.5, 0.4))
        if takeover == "exact":
            (end,) = commands
            assert isinstance(end, EndJob)
            assert end.failed is not None
            assert "replay is not exact" in end.failed
        else:
            assert kinds(commands)[:3] == [WarnTolerant, SendCommit, StepCommitted]
            assert isinstance(commands[1], SendCommit)
            assert commands[1].record == journal[0], "the journal's word stands"


def test_a_step_whose_loss_is_not_a_number_replays_exactly():
    journal = records(1, loss=math.nan)
    machine = running(journal=journal)
    vote(machine, 0, loss=math.nan)
    assert kinds(machine.handle(ScaleDecided(0, 2.5, 0.4)))[0] is SendCommit


# -------------------------------------------------------------------------------------------- checkpoints, evaluation


def test_a_checkpoint_rides_on_the_commit_and_the_next_commit_waits_for_it():
    machine = running(checkpoint_every=1)
    commands = commit(machine, 0)
    assert commands[0] == SendCommit(journal_of(commands), line=1, save=True)
    assert WriteCheckpoint(1, ask=False) in commands
    assert fed(machine.handle(LossArrived(1, 0, 1.0))) == [(2, 0)], "work goes on meanwhile"
    assert vote(machine, 1) == [], "but no commit overtakes the state being collected"
    assert machine.handle(CheckpointWritten(1))[-1] == DecideScale(1, (1.0, 2.0))


def journal_of(commands: list[DriverCommand]) -> CommitRecord:
    (sent,) = [command for command in commands if isinstance(command, SendCommit)]
    return sent.record


def test_checkpoints_come_at_their_steps_and_not_while_replaying():
    machine = running(checkpoint_every=2, steps=9, journal=records(3))
    saves: list[int] = []
    for step in range(6):
        vote(machine, step)
        commands = machine.handle(ScaleDecided(step, 2.5, 0.4))
        if isinstance(commands[0], JournalCommit):
            commands = machine.handle(CommitJournalled(commands[0].record))
        for written in [command for command in commands if isinstance(command, WriteCheckpoint)]:
            saves.append(written.step)
            machine.handle(CheckpointWritten(written.step))
    assert saves == [4, 6]


def test_the_base_is_saved_before_anything_is_fed():
    machine = driver(save_base=True)
    assert ready(machine) == [AnnounceReady(0), WriteCheckpoint(0, ask=True)]
    assert fed(machine.handle(CheckpointWritten(0))) == [(0, 0), (0, 1)]


def test_an_evaluation_needs_the_state_so_the_next_commit_waits():
    machine = running(evaluate_every=2)
    assert not any(isinstance(c, Evaluate) for c in commit(machine, 0))
    assert Evaluate(2) in commit(machine, 1)
    assert vote(machine, 2) == []
    assert kinds(machine.handle(EvaluationDone(2))) == [DecideScale]


# ----------------------------------------------------------------------------------------------------------- the end


def test_the_last_commit_saves_and_the_job_ends_when_checkpoint_and_evaluation_are_done():
    for order in itertools.permutations((CheckpointWritten(1), EvaluationDone(1))):
        machine = running(steps=1, evaluate_every=1)
        commands = commit(machine, 0)
        assert kinds(commands) == [SendCommit, StepCommitted, WriteCheckpoint, Evaluate]
        assert machine.phase is DriverPhase.SAVING
        assert machine.handle(order[0]) == []
        assert machine.handle(order[1]) == [EndJob(1)]


def test_a_stop_before_any_work_ends_at_once():
    for phase in (DriverPhase.ATTACHING, DriverPhase.RESUMING, DriverPhase.PROBING):
        machine = in_phase(phase)
        assert machine.handle(StopAsked("enough")) == [EndJob(0, stopped="enough")]


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
