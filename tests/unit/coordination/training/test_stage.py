"""The stage's machine, row by row: order of work, credit, votes, commits, fences, what is held and what is dropped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from fusionai.coordination.machine import FollowUp
from fusionai.coordination.training.exchanges import Exchanges
from fusionai.coordination.training.stage import EVERY_STEP, TABLE, StageMachine, StagePhase
from fusionai.coordination.training.stage_interface import (
    Attached,
    BackwardArrived,
    Committed,
    Compute,
    Detached,
    DropHeld,
    DropRetained,
    DropSums,
    ExportAsked,
    ForwardArrived,
    LoadSnapshot,
    OuterUpdateArrived,
    Refuse,
    ReportApplied,
    ReportPrepared,
    ReportReady,
    ReportStatus,
    Resumed,
    SendRetained,
    SharedArrived,
    StageCommand,
    StageEvent,
    StageWork,
    StateArrived,
    TakeSnapshot,
    WorkDone,
    WorkFailed,
)
from fusionai.coordination.training.step import StageShape
from fusionai.wire.messages import CommitRecord, Fence

FIRST = Fence(1, 1, 0)
SECOND = Fence(1, 2, 0)
FEED = -1


def shape(**changes: object) -> StageShape:
    fields: dict[str, object] = {
        "stage": 1,
        "microbatches": 3,
        "in_flight": 2,
        "producers": {"train": frozenset({0}), "eval": frozenset({0}), "infer": frozenset({0})},
        "consumers": frozenset({2}),
    }
    return StageShape(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def record(step: int, scale: float = 1.0) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=scale,
        learning_rate=0.1,
        total_norm=1.0,
        norms_hash="",
        fence=FIRST,
        loss=1.0,
    )


def work_of(commands: Iterable[StageCommand]) -> StageWork | None:
    found = [command.work for command in commands if isinstance(command, Compute)]
    assert len(found) <= 1
    return found[0] if found else None


def refusal(commands: list[StageCommand]) -> str:
    (only,) = [command for command in commands if isinstance(command, Refuse)]
    return only.reason


def running(at: int = 0, **changes: object) -> StageMachine:
    """A stage that has imported the state of step `at`."""
    machine = StageMachine(shape(**changes))
    machine.handle(Attached(FIRST))
    machine.handle(Resumed(at, "import", at))
    assert ReportReady(at) in machine.handle(StateArrived(at))
    return machine


def forward(machine: StageMachine, microbatch: int, step: int = 0, producer: int = 0) -> list[StageCommand]:
    return machine.handle(ForwardArrived("train", step, microbatch, producer))


def backward(machine: StageMachine, microbatch: int, step: int = 0, consumer: int = 2) -> list[StageCommand]:
    return machine.handle(BackwardArrived(step, microbatch, consumer))


def done(machine: StageMachine, work: StageWork) -> list[StageCommand]:
    return machine.handle(WorkDone(work))


def prepare(machine: StageMachine, step: int = 0) -> list[StageCommand]:
    """All microbatches forward and backward, and the norms."""
    for microbatch in range(machine.shape.microbatches):
        work = work_of(forward(machine, microbatch, step))
        assert work == StageWork("forward", step, microbatch)
        done(machine, work)
        work = work_of(backward(machine, microbatch, step))
        assert work == StageWork("backward", step, microbatch)
        last = done(machine, work)
    assert work_of(last) == StageWork("norms", step)
    return done(machine, StageWork("norms", step))


# ------------------------------------------------------------------------------------------------- every pair refused

EVENTS: tuple[StageEvent, ...] = (
    Attached(SECOND),
    Resumed(0, "initialise", 0),
    StateArrived(0),
    ForwardArrived("train", 0, 0, 0),
    BackwardArrived(0, 0, 2),
    SharedArrived(0, 2, "partial"),
    Committed(record(0), 0),
    OuterUpdateArrived(0),
    ExportAsked(0),
    WorkDone(StageWork("initialise")),
    WorkFailed(StageWork("forward")),
    Detached("over"),
)


def in_phase(phase: StagePhase) -> StageMachine:
    machine = StageMachine(shape())
    if phase is StagePhase.DETACHED:
        return machine
    machine.handle(Attached(FIRST))
    if phase is StagePhase.ATTACHED:
        return machine
    if phase is StagePhase.REPLAYING:
        machine.handle(Resumed(1, "import", 0, (record(0),), frozenset({1})))
        machine.handle(StateArrived(0))
        return machine
    machine.handle(Resumed(0, "import", 0))
    if phase is StagePhase.RESTORING:
        return machine
    machine.handle(StateArrived(0))
    return machine


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(StagePhase, EVENTS)), ids=lambda value: str(value))
def test_a_pair_outside_the_table_is_refused_and_changes_nothing(phase: StagePhase, event: StageEvent):
    machine = in_phase(phase)
    assert machine.phase is phase
    before = (machine.phase, machine.fence, machine.applied, machine.prepared, machine.retained.watermark)
    commands = machine.handle(event)
    if (phase, type(event)) in TABLE:
        assert not any(isinstance(c, Refuse) and "can't take" in c.reason for c in commands)
    else:
        assert "can't take" in refusal(commands)
        assert (machine.phase, machine.fence, machine.applied, machine.prepared, machine.retained.watermark) == before


@pytest.mark.parametrize("phase", list(StagePhase))
def test_an_attach_with_a_higher_fence_is_obeyed_in_every_phase(phase: StagePhase):
    machine = in_phase(phase)
    assert isinstance(machine.handle(Attached(SECOND))[-1], ReportStatus)
    assert machine.accepts(SECOND)
    assert machine.phase is StagePhase.ATTACHED


@pytest.mark.parametrize("phase", list(StagePhase))
def test_a_detach_is_obeyed_in_every_phase(phase: StagePhase):
    machine = in_phase(phase)
    assert machine.handle(Detached("over")) == [DropSums(), DropHeld(), DropRetained(EVERY_STEP)]
    assert (machine.phase, machine.applied) == (StagePhase.DETACHED, -1)


def test_the_table_has_a_row_for_every_event_and_phase_somewhere():
    assert {event for _, event in TABLE if not issubclass(event, FollowUp)} == {type(event) for event in EVENTS}
    assert {phase for phase, _ in TABLE} == set(StagePhase)


# --------------------------------------------------------------------------------------------------- order and credit


def test_credit_is_never_exceeded_and_returns_with_each_backward():
    machine = running(in_flight=2)
    assert work_of(forward(machine, 0)) == StageWork("forward", 0, 0)
    assert work_of(forward(machine, 1)) is None, "one piece of work at a time"
    assert work_of(done(machine, StageWork("forward", 0, 0))) == StageWork("forward", 0, 1)
    assert work_of(forward(machine, 2)) is None
    assert work_of(done(machine, StageWork("forward", 0, 1))) is None, "two are in flight"
    assert machine.microbatches.in_flight == 2
    assert work_of(backward(machine, 0)) == StageWork("backward", 0, 0)
    assert work_of(done(machine, StageWork("backward", 0, 0))) == StageWork("forward", 0, 2)


def test_backward_comes_before_forward():
    machine = running(in_flight=3)
    forward(machine, 0)
    done(machine, StageWork("forward", 0, 0))
    assert work_of(forward(machine, 1)) == StageWork("forward", 0, 1)
    forward(machine, 2)
    backward(machine, 0)
    assert work_of(done(machine, StageWork("forward", 0, 1))) == StageWork("backward", 0, 0)


def test_backwards_that_come_in_a_bunch_hold_up_no_forward():
    """Stages behind wait for it, and for a bunch they would wait long."""
    machine = running(in_flight=3, microbatches=5)
    for microbatch in range(5):
        forward(machine, microbatch)
    for microbatch in range(2):
        done(machine, StageWork("forward", 0, microbatch))
    for microbatch in range(2):
        backward(machine, microbatch)
    order = [work_of(done(machine, StageWork("forward", 0, 2)))]
    backward(machine, 2)
    while len(order) < 5:
        before = order[-1]
        assert before is not None
        order.append(work_of(done(machine, before)))
    assert [(one.kind, one.microbatch) for one in order if one] == [
        ("backward", 0), ("forward", 3), ("backward", 1), ("forward", 4), ("backward", 2)
    ]  # fmt: skip


def test_microbatches_run_in_strict_order_however_they_arrive():
    machine = running(in_flight=3)
    assert work_of(forward(machine, 2)) is None
    assert work_of(forward(machine, 1)) is None
    assert work_of(forward(machine, 0)) == StageWork("forward", 0, 0)
    assert work_of(done(machine, StageWork("forward", 0, 0))) == StageWork("forward", 0, 1)
    assert work_of(done(machine, StageWork("forward", 0, 1))) == StageWork("forward", 0, 2)
    assert work_of(done(machine, StageWork("forward", 0, 2))) is None
    assert work_of(backward(machine, 2)) is None
    assert work_of(backward(machine, 1)) is None
    assert work_of(backward(machine, 0)) == StageWork("backward", 0, 0)
    assert work_of(done(machine, StageWork("backward", 0, 0))) == StageWork("backward", 0, 1)


def test_a_forward_waits_for_all_its_producers_and_a_backward_for_all_its_consumers():
    machine = running(producers={"train": frozenset({FEED, 0})}, consumers=frozenset({2, 3}))
    assert work_of(forward(machine, 0, producer=FEED)) is None
    assert work_of(forward(machine, 0, producer=0)) == StageWork("forward", 0, 0)
    done(machine, StageWork("forward", 0, 0))
    assert work_of(backward(machine, 0, consumer=3)) is None
    assert work_of(backward(machine, 0, consumer=2)) == StageWork("backward", 0, 0)


def test_without_consumers_a_backward_follows_its_forward_at_once():
    machine = running(consumers=frozenset())
    forward(machine, 0)
    forward(machine, 1)
    assert work_of(done(machine, StageWork("forward", 0, 0))) == StageWork("backward", 0, 0)


def both_ways(machine: StageMachine, microbatch: int) -> list[StageCommand]:
    forward(machine, microbatch)
    done(machine, StageWork("forward", 0, microbatch))
    backward(machine, microbatch)
    return done(machine, StageWork("backward", 0, microbatch))


def test_without_producers_a_stage_runs_its_microbatches_and_not_one_more():
    machine = StageMachine(shape(producers={"train": frozenset()}, microbatches=2, in_flight=9))
    machine.handle(Attached(FIRST))
    machine.handle(Resumed(0, "import", 0))
    assert work_of(machine.handle(StateArrived(0))) == StageWork("forward", 0, 0)
    assert work_of(done(machine, StageWork("forward", 0, 0))) == StageWork("forward", 0, 1)
    assert work_of(done(machine, StageWork("forward", 0, 1))) is None


def test_weight_gradients_put_off_fill_a_pause_in_their_order():
    machine = running(weight_lag=2)
    assert work_of(both_ways(machine, 0)) == StageWork("weights", 0, 0), "there is nothing better to do"
    forward(machine, 1)
    assert work_of(done(machine, StageWork("weights", 0, 0))) == StageWork("forward", 0, 1)


def test_weight_gradients_are_put_off_no_further_than_allowed():
    machine = running(weight_lag=1, in_flight=3, microbatches=5)
    for microbatch in range(3):
        forward(machine, microbatch)
    for microbatch in range(2):
        done(machine, StageWork("forward", 0, microbatch))
    backward(machine, 0)
    assert work_of(done(machine, StageWork("forward", 0, 2))) == StageWork("backward", 0, 0)
    for microbatch in (1, 2):
        backward(machine, microbatch)
    assert work_of(done(machine, StageWork("backward", 0, 0))) == StageWork("backward", 0, 1), (
        "a neighbour waits for it"
    )
    forward(machine, 3)
    assert work_of(done(machine, StageWork("backward", 0, 1))) == StageWork("weights", 0, 0), "before another forward"
    assert work_of(done(machine, StageWork("weights", 0, 0))) == StageWork("forward", 0, 3)


def test_no_vote_before_every_weight_gradient_is_summed():
    machine = running(weight_lag=9, microbatches=1)
    assert work_of(both_ways(machine, 0)) == StageWork("weights", 0, 0)
    assert work_of(done(machine, StageWork("weights", 0, 0))) == StageWork("norms", 0)


def test_weight_gradients_put_off_die_with_the_fence():
    machine = running(weight_lag=2)
    both_ways(machine, 0)
    machine.handle(Attached(SECOND))
    assert DropSums() in done(machine, StageWork("weights", 0, 0))
    machine.handle(Resumed(0, "keep", 0))
    assert work_of(forward(machine, 0)) == StageWork("forward", 0, 0)


# ------------------------------------------------------------------------------------------------- votes and commits


def test_a_stage_votes_when_all_microbatches_are_summed_and_applies_only_on_commit():
    machine = running()
    commands = prepare(machine)
    assert commands == [ReportPrepared(0)]
    assert (machine.applied, machine.prepared) == (0, 0)
    assert work_of(machine.handle(Committed(record(0), watermark=1))) == StageWork("apply", 0, record=record(0))
    assert machine.applied == 0, "not before the work is done"
    assert done(machine, StageWork("apply", 0, record=record(0))) == [ReportApplied(0)]
    assert (machine.applied, machine.prepared, machine.retained.watermark) == (1, 0, 1)


def test_a_commit_of_the_step_after_the_prepared_one_is_refused():
    machine = running()
    prepare(machine)
    assert "can't apply a commit of step 1" in refusal(machine.handle(Committed(record(1), watermark=2)))
    assert work_of(machine.handle(Committed(record(0), watermark=1))) == StageWork("apply", 0, record=record(0))


@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_commit_of_a_step_that_is_not_prepared_is_refused(step: int):
    machine = running()
    forward(machine, 0)
    assert f"can't apply a commit of step {step}" in refusal(
        machine.handle(Committed(record(step), watermark=step + 1))
    )
    assert machine.retained.watermark == 0


def test_a_commit_counts_once_before_during_and_after_its_application():
    machine = running()
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1, save=True))
    assert machine.handle(Committed(record(0), watermark=1, save=True)) == [], "while it is being applied"
    commands = done(machine, StageWork("apply", 0, record=record(0)))
    assert work_of(commands) == StageWork("export", 1)
    assert machine.handle(Committed(record(0), watermark=1, save=True)) == [], "after it was applied"
    assert work_of(done(machine, StageWork("export", 1))) is None, "saved once"
    assert machine.applied == 1


def test_another_record_for_the_step_being_applied_is_refused():
    machine = running()
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1))
    assert "can't apply" in refusal(machine.handle(Committed(record(0, scale=0.5), watermark=1)))


def test_the_line_only_rises_and_drops_what_is_retained_below_it():
    machine = running()
    prepare(machine)
    assert DropRetained(1) in machine.handle(Committed(record(0), watermark=1))
    done(machine, StageWork("apply", 0, record=record(0)))
    prepare(machine, 1)
    assert not any(isinstance(c, DropRetained) for c in machine.handle(Committed(record(1), watermark=0)))
    assert machine.retained.watermark == 1


# -------------------------------------------------------------------------------------------------- what is held


def test_a_tensor_of_the_next_step_waits_until_the_commit_is_applied():
    machine = running()
    assert work_of(forward(machine, 0, step=1)) is None
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1))
    assert work_of(done(machine, StageWork("apply", 0, record=record(0)))) == StageWork("forward", 1, 0)


@pytest.mark.parametrize(
    "event",
    [
        ForwardArrived("train", 4, 0, 0),
        ForwardArrived("train", 8, 0, 0),
        ForwardArrived("train", 2**40, 0, 0),
        ForwardArrived("train", 5, 3, 0),
        ForwardArrived("train", 5, 0, 7),
        ForwardArrived("eval", 4, 0, 0),
        ForwardArrived("eval", 8, 0, 0),
        ForwardArrived("infer", 5, 0, FEED),
        BackwardArrived(5, 0, 2),
        BackwardArrived(4, 0, 2),
        BackwardArrived(6, 0, 2),
        SharedArrived(5, 2, "partial"),
    ],
    ids=repr,
)
def test_what_no_work_can_use_is_dropped_and_counted(
    event: ForwardArrived | BackwardArrived | SharedArrived,
):
    machine = running(at=5)
    assert not machine.wants(event)
    assert machine.handle(event) == []
    assert machine.dropped == 1


def test_inputs_of_the_two_steps_that_follow_are_held():
    """The driver feeds one step ahead of its vote, and may itself be one commit ahead of this stage."""
    machine = running(at=5)
    for step in (5, 6, 7):
        assert machine.wants(ForwardArrived("train", step, 0, 0))


def test_duplicates_are_dropped_before_during_and_after_their_work():
    machine = running(in_flight=3, producers={"train": frozenset({0, FEED})})
    again = ForwardArrived("train", 0, 0, 0)
    assert machine.wants(again)
    machine.handle(again)
    assert not machine.wants(again), "one producer has delivered"
    assert work_of(forward(machine, 0, producer=FEED)) == StageWork("forward", 0, 0)
    assert not machine.wants(again), "under way"
    done(machine, StageWork("forward", 0, 0))
    assert not machine.wants(again), "done"
    gradient = BackwardArrived(0, 0, 2)
    assert machine.wants(gradient)
    machine.handle(gradient)
    assert not machine.wants(gradient), "under way"
    done(machine, StageWork("backward", 0, 0))
    assert not machine.wants(gradient), "done"
    machine.handle(again)
    machine.handle(gradient)
    assert machine.dropped == 2


@pytest.mark.parametrize("phase", [StagePhase.DETACHED, StagePhase.ATTACHED])
def test_before_a_stage_is_told_to_resume_it_wants_no_tensor(phase: StagePhase):
    assert not in_phase(phase).wants(ForwardArrived("train", 0, 0, 0))


# ------------------------------------------------------------------------------------------ evaluation and inference


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_side_forwards_run_on_exactly_their_state_and_leave_no_trace(mode: str):
    machine = running(microbatches=1)
    side = StageWork("forward", 0, 9, mode)  # pyright: ignore[reportArgumentType]
    assert work_of(machine.handle(ForwardArrived(side.mode, 0, 9, 0))) == side
    later = ForwardArrived(side.mode, 1, 4, 0)
    machine.handle(later)
    assert work_of(done(machine, side)) is None
    assert machine.microbatches.in_flight == 0
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1))
    assert work_of(done(machine, StageWork("apply", 0, record=record(0)))) == StageWork("forward", 1, 4, side.mode)


def test_a_backward_that_is_due_comes_before_evaluation_and_that_before_a_forward():
    machine = running(in_flight=3)
    forward(machine, 0)
    forward(machine, 1)
    machine.handle(ForwardArrived("eval", 0, 0, 0))
    assert work_of(done(machine, StageWork("forward", 0, 0))) == StageWork("forward", 0, 0, "eval")
    backward(machine, 0)
    assert work_of(done(machine, StageWork("forward", 0, 0, "eval"))) == StageWork("backward", 0, 0)


def test_side_work_of_a_state_that_is_gone_is_forgotten():
    producers = {"train": frozenset({0}), "eval": frozenset({0, FEED})}
    machine = running(microbatches=1, producers=producers)
    machine.handle(ForwardArrived("eval", 0, 0, 0))  # its other producer never delivers
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1))
    assert DropHeld(below=1) in done(machine, StageWork("apply", 0, record=record(0)))
    assert not machine.wants(ForwardArrived("eval", 0, 0, FEED))


def test_side_work_that_waits_is_bounded_and_takes_no_place_from_training():
    machine = running(producers={"train": frozenset({0}), "eval": frozenset({0, FEED})})
    for index in range(1024):
        assert machine.handle(ForwardArrived("eval", 1, index, 0)) == []
    assert "holds 1024 microbatches beside training" in refusal(machine.handle(ForwardArrived("eval", 1, 1024, 0)))
    assert machine.handle(ForwardArrived("eval", 1, 7, FEED)) == [], "the other half of one that is held"
    assert work_of(forward(machine, 0)) == StageWork("forward", 0, 0)


# -------------------------------------------------------------------------------------------------------- exporting


def test_save_rides_on_the_commit_and_comes_before_any_forward():
    machine = running()
    prepare(machine)
    forward(machine, 0, step=1)
    machine.handle(Committed(record(0), watermark=1, save=True))
    assert work_of(done(machine, StageWork("apply", 0, record=record(0)))) == StageWork("export", 1)
    assert work_of(done(machine, StageWork("export", 1))) == StageWork("forward", 1, 0)


def test_an_export_is_of_the_present_state_and_before_anything_of_the_step_has_begun():
    machine = running(at=3)
    assert "can't export step 2" in refusal(machine.handle(ExportAsked(2)))
    assert work_of(machine.handle(ExportAsked(3))) == StageWork("export", 3)
    assert "can't export" in refusal(machine.handle(ExportAsked(3))), "asked twice"
    done(machine, StageWork("export", 3))
    forward(machine, 0, step=3)
    assert "can't export" in refusal(machine.handle(ExportAsked(3))), "a forward is under way"
    done(machine, StageWork("forward", 3, 0))
    assert "can't export" in refusal(machine.handle(ExportAsked(3))), "a forward is done"


# --------------------------------------------------------------------------------------------------- attach and fence


def test_only_exactly_the_own_fence_counts():
    machine = running()
    assert machine.accepts(FIRST)
    for other in (Fence(1, 1, 1), Fence(1, 0, 0), Fence(2, 0, 0)):
        assert not machine.accepts(other)
    assert "already obeys" in refusal(machine.handle(Attached(FIRST)))
    assert machine.phase is StagePhase.RUNNING


def test_an_attach_while_busy_waits_and_reports_of_the_old_fence_die_with_it():
    machine = running(microbatches=1, consumers=frozenset())
    forward(machine, 0)
    done(machine, StageWork("forward", 0, 0))
    done(machine, StageWork("backward", 0, 0))
    assert machine.handle(Attached(SECOND)) == [], "norms are being taken"
    assert machine.accepts(FIRST)
    commands = done(machine, StageWork("norms", 0))
    assert ReportPrepared(0) not in commands
    assert commands == [DropHeld(), ReportStatus(applied=0, prepared=0, retained_from=1)]
    assert machine.accepts(SECOND)


def test_two_attaches_while_busy_lose_nothing_of_the_newer():
    machine = running()
    forward(machine, 0)
    machine.handle(Attached(Fence(1, 3, 0)))
    machine.handle(Attached(SECOND))
    commands = done(machine, StageWork("forward", 0, 0))
    assert [type(command) for command in commands] == [DropSums, DropHeld, ReportStatus, Refuse]
    assert machine.accepts(Fence(1, 3, 0))


def test_a_stale_attach_while_busy_is_refused_at_once_and_takes_no_report_with_it():
    machine = StageMachine(shape())
    machine.handle(Attached(SECOND))
    machine.handle(Resumed(0, "initialise", 0))
    assert "already obeys" in refusal(machine.handle(Attached(FIRST)))
    assert "already obeys" in refusal(machine.handle(Attached(SECOND))), "once"
    assert done(machine, StageWork("initialise")) == [ReportReady(0)]


def test_a_detach_while_busy_waits_for_the_work():
    machine = running()
    forward(machine, 0)
    assert machine.handle(Detached("over")) == []
    assert machine.phase is StagePhase.RUNNING
    assert DropSums() in done(machine, StageWork("forward", 0, 0))
    assert machine.phase is StagePhase.DETACHED
    assert machine.applied == -1


def test_a_stage_without_a_state_has_no_sums_to_keep():
    machine = StageMachine(shape())
    status = ReportStatus(applied=-1, prepared=-1, retained_from=0)
    assert machine.handle(Attached(FIRST)) == [DropSums(), DropHeld(), status]


def test_sums_of_a_step_under_way_are_not_those_of_the_step_prepared_before_it():
    machine = running(at=5)
    prepare(machine, 5)
    machine.handle(Committed(record(5), watermark=6))
    done(machine, StageWork("apply", 5, record=record(5)))
    forward(machine, 0, step=6)
    done(machine, StageWork("forward", 6, 0))
    assert machine.handle(Attached(SECOND)) == [DropSums(), DropHeld(), ReportStatus(6, 5, 7)]
    machine.handle(Resumed(6, "keep", 6))
    assert work_of(forward(machine, 0, step=6)) == StageWork("forward", 6, 0)


def test_partial_sums_die_with_the_fence():
    machine = running()
    forward(machine, 0)
    done(machine, StageWork("forward", 0, 0))
    forward(machine, 1, step=1)
    commands = machine.handle(Attached(SECOND))
    assert commands == [DropSums(), DropHeld(), ReportStatus(applied=0, prepared=-1, retained_from=1)]
    machine.handle(Resumed(0, "keep", 0))
    assert machine.microbatches.in_flight == 0
    assert work_of(forward(machine, 0)) == StageWork("forward", 0, 0), "from the first microbatch on"


def test_what_is_prepared_survives_an_attach_and_is_applied_by_the_record_in_resume():
    machine = running()
    prepare(machine)
    assert machine.handle(Attached(SECOND)) == [DropHeld(), ReportStatus(applied=0, prepared=0, retained_from=1)]
    assert work_of(machine.handle(Resumed(1, "keep", 0, (record(0),)))) == StageWork("apply", 0, record=record(0))
    assert done(machine, StageWork("apply", 0, record=record(0))) == [ReportReady(1)]
    assert machine.applied == 1


def test_what_was_prepared_and_not_committed_is_dropped_at_resume():
    machine = running()
    prepare(machine)
    machine.handle(Attached(SECOND))
    assert machine.handle(Resumed(0, "keep", 0)) == [DropSums(), ReportReady(0)]
    assert prepare(machine) == [ReportPrepared(0)]


@pytest.mark.parametrize(
    ("committed", "given", "prepared"),
    [
        (0, (), False),
        (1, (), False),
        (1, (0,), False),
        (1, (5,), False),
        (2, (1,), False),
        (1, (), True),
        (1, (5,), True),
        (2, (0,), True),
        (2, (0, 1), True),
    ],
)
def test_a_stage_that_can_not_keep_its_state_says_where_it_is(committed: int, given: tuple[int, ...], prepared: bool):
    machine = running(at=0 if committed else 1)
    if prepared:
        prepare(machine)
    machine.handle(Attached(SECOND))
    resumed = Resumed(committed, "keep", committed, tuple(record(step) for step in given))
    assert f"can't keep its state and be at {committed}" in refusal(machine.handle(resumed))
    assert machine.phase is StagePhase.ATTACHED


def test_initialise_makes_state_zero_and_import_takes_the_step_that_was_asked_for():
    machine = StageMachine(shape())
    machine.handle(Attached(FIRST))
    commands = machine.handle(Resumed(0, "initialise", 0))
    assert commands == [DropSums(), DropRetained(EVERY_STEP), Compute(StageWork("initialise"))]
    assert not machine.expects_state
    assert done(machine, StageWork("initialise")) == [ReportReady(0)]

    machine = StageMachine(shape())
    machine.handle(Attached(FIRST))
    assert machine.handle(Resumed(8, "import", 8)) == [DropSums(), DropRetained(EVERY_STEP)]
    assert machine.expects_state
    assert "expected the state of step 8, got that of step 7" in refusal(machine.handle(StateArrived(7)))
    assert machine.phase is StagePhase.ATTACHED


def test_only_a_state_that_the_driver_gives_is_expected_from_it():
    machine = StageMachine(shape())
    machine.handle(Attached(FIRST))
    machine.handle(Resumed(8, "snapshot", 8))
    assert machine.phase is StagePhase.RESTORING
    assert not machine.expects_state, "it lies on this machine"

    machine = running()
    prepare(machine)
    machine.handle(Attached(SECOND))
    machine.handle(Resumed(1, "keep", 1, (record(0),)))
    assert machine.phase is StagePhase.RESTORING
    assert not machine.expects_state, "it has one, and applies the last commit"


def test_inputs_that_come_while_a_state_is_restored_are_held():
    machine = running()
    prepare(machine)
    machine.handle(Attached(SECOND))
    machine.handle(Resumed(1, "keep", 1, (record(0),)))
    assert machine.phase is StagePhase.RESTORING
    assert forward(machine, 0, step=1) == []
    assert work_of(done(machine, StageWork("apply", 0, record=record(0)))) == StageWork("forward", 1, 0)


def test_going_back_to_a_checkpoint_lowers_the_line_and_drops_what_was_sent_beyond_it():
    machine = running(at=5)
    prepare(machine, 5)
    machine.handle(Committed(record(5), watermark=6))
    done(machine, StageWork("apply", 5, record=record(5)))
    machine.handle(Attached(SECOND))
    assert DropRetained(EVERY_STEP) in machine.handle(Resumed(2, "import", 2))
    machine.handle(StateArrived(2))
    prepare(machine, 2)
    assert DropRetained(3) in machine.handle(Committed(record(2), watermark=3)), "or replayed steps would pile up"


def test_whoever_loses_its_state_has_nothing_prepared():
    machine = running()
    prepare(machine)
    machine.handle(Attached(SECOND))
    machine.handle(Resumed(0, "import", 0))
    machine.handle(Attached(Fence(1, 3, 0)))
    assert (machine.applied, machine.prepared) == (-1, -1)


# ------------------------------------------------------------------------------------------------------ shared weights


def summed(machine: StageMachine) -> list[StageCommand]:
    """One microbatch, forward and backward."""
    forward(machine, 0)
    done(machine, StageWork("forward", 0, 0))
    backward(machine, 0)
    return done(machine, StageWork("backward", 0, 0))


def test_the_home_of_a_shared_weight_waits_for_every_partial_sum():
    machine = running(microbatches=1, sums_of=frozenset({3, 4}), totals_to=frozenset({3, 4}))
    machine.handle(SharedArrived(0, 4, "partial"))
    assert work_of(summed(machine)) is None
    assert work_of(machine.handle(SharedArrived(0, 3, "partial"))) == StageWork("total", 0)
    assert not machine.wants(SharedArrived(0, 3, "partial")), "once"
    assert work_of(done(machine, StageWork("total", 0))) == StageWork("norms", 0)


def test_away_from_home_the_partial_sum_goes_out_and_the_total_comes_before_the_norms():
    machine = running(microbatches=1, summed_by=frozenset({0}), parts_to=frozenset({0}))
    assert not machine.wants(SharedArrived(0, 0, "total")), "nothing was sent yet"
    assert work_of(summed(machine)) == StageWork("share", 0)
    assert work_of(done(machine, StageWork("share", 0))) is None
    assert not machine.wants(SharedArrived(0, 0, "partial")), "this is not the home"
    assert work_of(machine.handle(SharedArrived(0, 0, "total"))) == StageWork("norms", 0)
    assert not machine.wants(SharedArrived(0, 0, "total")), "once"


def test_a_home_that_got_gradients_with_each_microbatch_sends_totals_without_waiting():
    machine = running(microbatches=1, totals_to=frozenset({3}))
    assert work_of(summed(machine)) == StageWork("total", 0)
    assert work_of(done(machine, StageWork("total", 0))) == StageWork("norms", 0)


def test_whose_gradients_went_with_each_microbatch_waits_for_the_total_alone():
    machine = running(microbatches=1, summed_by=frozenset({0}))
    assert machine.wants(SharedArrived(1, 0, "total")), "the home may be a step ahead"
    assert machine.wants(SharedArrived(0, 0, "total"))
    assert work_of(summed(machine)) is None
    assert work_of(machine.handle(SharedArrived(0, 0, "total"))) == StageWork("norms", 0)


def test_shared_sums_of_another_step_or_of_strangers_are_dropped():
    machine = running(microbatches=1, sums_of=frozenset({3}), totals_to=frozenset({3}))
    for event in (SharedArrived(3, 3, "partial"), SharedArrived(0, 2, "partial"), SharedArrived(0, 3, "total")):
        assert machine.handle(event) == []
    assert machine.dropped == 3
    assert work_of(summed(machine)) is None


def test_another_replica_may_have_summed_the_next_step_before_this_home_applied_the_last_one():
    """Nothing of it waits for this stage; what comes is not sent again, and the home would wait for ever."""
    machine = running(microbatches=1, sums_of=frozenset({3}), totals_to=frozenset({3}))
    machine.handle(SharedArrived(0, 3, "partial"))
    assert work_of(summed(machine)) == StageWork("total", 0)
    done(machine, StageWork("total", 0))
    done(machine, StageWork("norms", 0))
    assert work_of(machine.handle(Committed(record(0), watermark=1))) == StageWork("apply", 0, record=record(0))
    assert machine.handle(SharedArrived(1, 3, "partial")) == []
    done(machine, StageWork("apply", 0, record=record(0)))
    forward(machine, 0, step=1)
    done(machine, StageWork("forward", 1, 0))
    backward(machine, 0, step=1)
    assert work_of(done(machine, StageWork("backward", 1, 0))) == StageWork("total", 1)


def test_a_total_dies_with_the_sums_that_were_prepared():
    """Or the home would vote again without summing anew, and one of the sharers would wait for ever."""
    for lost in (False, True):
        machine = running(microbatches=1, sums_of=frozenset({3}), totals_to=frozenset({3}))
        machine.handle(SharedArrived(0, 3, "partial"))
        summed(machine)
        done(machine, StageWork("total", 0))
        done(machine, StageWork("norms", 0))
        machine.handle(Attached(SECOND))
        machine.handle(Resumed(0, "import" if lost else "keep", 0))
        if lost:
            machine.handle(StateArrived(0))
        assert machine.wants(SharedArrived(0, 3, "partial"))
        assert work_of(summed(machine)) is None, "the other part is missing again"
        assert work_of(machine.handle(SharedArrived(0, 3, "partial"))) == StageWork("total", 0)


def test_a_stage_may_sum_some_weights_and_have_others_summed_by_several():
    machine = running(
        microbatches=1,
        sums_of=frozenset({3}),
        totals_to=frozenset({3}),
        summed_by=frozenset({0, 2}),
        parts_to=frozenset({0, 2}),
    )
    assert machine.shape.shares_with == {0, 2, 3}
    machine.handle(SharedArrived(0, 3, "partial"))
    assert work_of(summed(machine)) == StageWork("share", 0), "others wait for it"
    assert work_of(done(machine, StageWork("share", 0))) == StageWork("total", 0)
    assert machine.wants(SharedArrived(0, 0, "total"))
    assert work_of(done(machine, StageWork("total", 0))) is None
    assert work_of(machine.handle(SharedArrived(0, 2, "total"))) is None
    assert not machine.wants(SharedArrived(0, 2, "total")), "once"
    assert not machine.wants(SharedArrived(0, 3, "total")), "it sums nothing for this stage"
    assert work_of(machine.handle(SharedArrived(0, 0, "total"))) == StageWork("norms", 0)


# -------------------------------------------------------------------------------------------------------- replicas


def test_a_stage_of_a_replica_runs_its_microbatches_by_their_numbers_in_the_step():
    machine = running(microbatches=2, replica=1, replicas=3, in_flight=1)
    for foreign in (0, 2, 3, 7):  # 7 would be its third
        assert not machine.wants(ForwardArrived("train", 0, foreign, 0))
    assert work_of(forward(machine, 4)) is None, "1 comes first"
    assert work_of(forward(machine, 1)) == StageWork("forward", 0, 1)
    assert not machine.wants(ForwardArrived("train", 0, 1, 0)), "under way"
    assert not machine.wants(BackwardArrived(0, 4, 2)), "not forwarded"
    assert not machine.wants(BackwardArrived(0, 0, 2)), "another replica's"
    assert work_of(done(machine, StageWork("forward", 0, 1))) is None, "its credit is spent"
    assert work_of(backward(machine, 1)) == StageWork("backward", 0, 1)
    assert work_of(done(machine, StageWork("backward", 0, 1))) == StageWork("forward", 0, 4)
    assert not machine.wants(BackwardArrived(0, 1, 2)), "returned"
    done(machine, StageWork("forward", 0, 4))
    assert work_of(backward(machine, 4)) == StageWork("backward", 0, 4)
    assert work_of(done(machine, StageWork("backward", 0, 4))) == StageWork("norms", 0)


# --------------------------------------------------------------------------------------------------- local updates


def agreeing(at: int = 0, **changes: object) -> StageMachine:
    """Every second step ends in an exchange."""
    return running(at, microbatches=1, exchanges=Exchanges(every=2, steps=8), **changes)


def voted(machine: StageMachine, step: int) -> None:
    forward(machine, 0, step)
    done(machine, StageWork("forward", step, 0))
    backward(machine, 0, step)
    done(machine, StageWork("backward", step, 0))
    assert ReportPrepared(step) in done(machine, StageWork("norms", step))


def test_a_step_that_ends_in_an_exchange_counts_once_the_agreement_is_adopted():
    machine = agreeing()
    voted(machine, 0)
    apply = StageWork("apply", 0, record=record(0))
    assert work_of(machine.handle(Committed(record(0), 0))) == apply
    assert ReportApplied(0) in done(machine, apply), "the first step ends in none"
    voted(machine, 1)
    apply = StageWork("apply", 1, record=record(1))
    assert work_of(machine.handle(Committed(record(1), 0))) == apply
    assert work_of(done(machine, apply)) == StageWork("difference", 1)
    assert machine.applied == 1
    assert done(machine, StageWork("difference", 1)) == []
    assert machine.wants(ForwardArrived("train", 2, 0, 0))
    assert work_of(forward(machine, 0, 2)) is None, "of the state that is still to come"
    assert work_of(machine.handle(OuterUpdateArrived(1))) == StageWork("adopt", 1)
    commands = done(machine, StageWork("adopt", 1))
    assert ReportApplied(1) in commands
    assert work_of(commands) == StageWork("forward", 2, 0)


def test_an_agreement_that_nobody_needs_is_dropped():
    machine = agreeing(at=4)
    for step in (3, 4, 6):  # gone, and two that end in none
        assert machine.handle(OuterUpdateArrived(step)) == []
    assert machine.dropped == 3
    machine.handle(OuterUpdateArrived(5))
    machine.handle(OuterUpdateArrived(5))
    assert machine.dropped == 4, "once"


def test_a_fault_during_an_exchange_has_the_difference_sent_again_and_takes_no_second_step():
    machine = agreeing(at=1)
    voted(machine, 1)
    machine.handle(Committed(record(1), 0))
    done(machine, StageWork("apply", 1, record=record(1)))
    done(machine, StageWork("difference", 1))
    assert ReportStatus(1, 1, 2) in machine.handle(Attached(SECOND))
    commands = machine.handle(Resumed(2, "keep", 2, (record(1),)))
    assert work_of(commands) == StageWork("difference", 1)
    done(machine, StageWork("difference", 1))
    assert work_of(machine.handle(OuterUpdateArrived(1))) == StageWork("adopt", 1)
    assert ReportReady(2) in done(machine, StageWork("adopt", 1))


def test_a_replay_adopts_what_it_is_given_and_says_nothing_again():
    machine = StageMachine(shape(microbatches=1, exchanges=Exchanges(every=2, steps=8)))
    machine.handle(Attached(FIRST))
    machine.handle(Resumed(2, "import", 1, (record(1),)))
    machine.handle(StateArrived(1))
    machine.handle(OuterUpdateArrived(1))
    forward(machine, 0, 1)
    done(machine, StageWork("forward", 1, 0))
    backward(machine, 0, 1)
    done(machine, StageWork("backward", 1, 0))
    apply = StageWork("apply", 1, record=record(1))
    assert work_of(done(machine, StageWork("norms", 1))) == apply
    assert work_of(done(machine, apply)) == StageWork("adopt", 1)
    assert ReportReady(2) in done(machine, StageWork("adopt", 1))


def test_an_adoption_that_failed_leaves_no_state():
    machine = agreeing(at=1)
    voted(machine, 1)
    machine.handle(Committed(record(1), 0))
    done(machine, StageWork("apply", 1, record=record(1)))
    done(machine, StageWork("difference", 1))
    machine.handle(OuterUpdateArrived(1))
    assert DropSums() in machine.handle(WorkFailed(StageWork("adopt", 1)))
    assert machine.applied == -1


def training_on(at: int = 0) -> StageMachine:
    """Every third step's end is told, and counts with the second step after it."""
    return running(at, microbatches=1, exchanges=Exchanges(every=3, lag=2, steps=9))


def taken(machine: StageMachine, step: int) -> list[StageCommand]:
    """A step up to what follows the optimizer's."""
    voted(machine, step)
    apply = StageWork("apply", step, record=record(step))
    assert work_of(machine.handle(Committed(record(step), 0))) == apply
    return done(machine, apply)


def test_steps_go_on_while_a_difference_travels():
    machine = training_on(at=2)
    commands = taken(machine, 2)
    assert ReportApplied(2) in commands, "it does not wait"
    assert work_of(commands) == StageWork("difference", 2)
    done(machine, StageWork("difference", 2))
    assert ReportApplied(3) in taken(machine, 3)
    assert ReportApplied(4) not in taken(machine, 4), "so far it may go alone"
    assert machine.outer_updates.wants(2, machine.applied)
    assert work_of(forward(machine, 0, 5)) is None
    assert work_of(machine.handle(OuterUpdateArrived(2))) == StageWork("adopt", 2)
    commands = done(machine, StageWork("adopt", 2))
    assert ReportApplied(4) in commands
    assert work_of(commands) == StageWork("forward", 5, 0)
    assert not machine.outer_updates.wants(2, machine.applied)


def test_an_agreement_that_comes_early_waits_for_its_step():
    machine = training_on(at=2)
    taken(machine, 2)
    done(machine, StageWork("difference", 2))
    assert machine.handle(OuterUpdateArrived(2)) == []
    assert ReportApplied(3) in taken(machine, 3)
    assert work_of(taken(machine, 4)) == StageWork("adopt", 2)
    assert ReportApplied(4) in done(machine, StageWork("adopt", 2))


def test_after_the_last_step_nobody_trains_on():
    machine = training_on(at=8)
    assert work_of(taken(machine, 8)) == StageWork("difference", 8)
    assert machine.applied == 8
    done(machine, StageWork("difference", 8))
    assert work_of(machine.handle(OuterUpdateArrived(8))) == StageWork("adopt", 8)
    assert ReportApplied(8) in done(machine, StageWork("adopt", 8))


def test_a_fault_while_a_difference_travels_has_it_sent_again():
    machine = training_on(at=2)
    taken(machine, 2)
    done(machine, StageWork("difference", 2))
    taken(machine, 3)
    assert ReportStatus(4, 3, 4) in machine.handle(Attached(SECOND))
    assert work_of(machine.handle(Resumed(4, "keep", 4, (record(3),)))) == StageWork("difference", 2)
    done(machine, StageWork("difference", 2))
    machine.handle(OuterUpdateArrived(2))
    assert work_of(taken(machine, 4)) == StageWork("adopt", 2)


# ------------------------------------------------------------------------------------------------ retained, the line


def has_standby(at: int = 0, *, every: int = 2, snapshot: bool = False, **changes: object) -> StageMachine:
    machine = StageMachine(shape(**changes))
    machine.handle(Attached(FIRST, retain=True, snapshot_every=every))
    machine.handle(Resumed(at, "import", at, snapshot=snapshot))
    machine.handle(StateArrived(at))
    return machine


def step_done(machine: StageMachine, step: int, watermark: int) -> list[StageCommand]:
    prepare(machine, step)
    machine.handle(Committed(record(step), watermark=watermark))
    return done(machine, StageWork("apply", step, record=record(step)))


def retained_from(machine: StageMachine, fence: Fence, *, retain: bool = True) -> int:
    commands = machine.handle(Attached(fence, retain=retain, snapshot_every=2))
    (status,) = [command for command in commands if isinstance(command, ReportStatus)]
    return status.retained_from


def test_what_is_sent_is_retained_from_the_watermark_on():
    machine = has_standby()
    for step, watermark in ((0, 0), (1, 0), (2, 2)):
        step_done(machine, step, watermark)
    assert retained_from(machine, SECOND) == 2


def test_what_is_sent_while_no_stage_has_a_standby_is_not_retained():
    machine = running()
    assert retained_from(machine, SECOND, retain=False) == 0, "nothing was sent"
    machine.handle(Resumed(0, "keep", 0))
    forward(machine, 0)
    done(machine, StageWork("forward", 0, 0))
    assert retained_from(machine, Fence(1, 3, 0)) == 1
    machine.handle(Resumed(0, "keep", 0))
    step_done(machine, 0, watermark=0)
    assert retained_from(machine, Fence(1, 4, 0)) == 0, "this step was done anew, and retained"


def test_evaluation_sends_nothing_that_would_be_missed():
    machine = running()
    machine.handle(ForwardArrived("eval", 0, 0, 0))
    done(machine, StageWork("forward", 0, 0, "eval"))
    assert retained_from(machine, SECOND) == 0


def test_a_round_without_standbys_takes_nothing_away_that_it_may_need():
    """The last standby was promoted: what its neighbours retained is what it replays from."""
    machine = has_standby()
    for step in range(3):
        step_done(machine, step, 0)
    commands = machine.handle(Attached(SECOND, retain=False))
    assert not any(isinstance(command, DropRetained) for command in commands)
    assert ReportStatus(3, 2, 0) in commands
    resumed = machine.handle(Resumed(3, "keep", 1, (record(2),), frozenset({2})))
    assert SendRetained(frozenset({2}), 1, 3) in resumed
    prepare(machine, 3)
    assert DropRetained(4) in machine.handle(Committed(record(3), watermark=4)), "it goes with the next line"


def test_retained_tensors_go_to_neighbours_that_replay_and_to_nobody_else():
    machine = has_standby(sums_of=frozenset({7}), totals_to=frozenset({7}))
    for step in range(2):
        machine.handle(SharedArrived(step, 7, "partial"))
        forward_and_total(machine, step)
    machine.handle(Attached(SECOND, retain=True, snapshot_every=2))
    (sent,) = [
        command
        for command in machine.handle(Resumed(2, "keep", 1, (record(1),), frozenset({0, 2, 7, 9})))
        if isinstance(command, SendRetained)
    ]
    assert sent == SendRetained(frozenset({0, 2, 7}), 1, 2)
    machine.handle(Attached(Fence(1, 3, 0), retain=True))
    none = machine.handle(Resumed(2, "keep", 1, (record(1),), frozenset({9})))
    assert not any(isinstance(command, SendRetained) for command in none)


@pytest.mark.parametrize(("replaying", "dropped"), [(2, 1), (9, 3)])
def test_the_line_of_a_resume_stops_at_what_a_neighbour_that_replays_still_needs(replaying: int, dropped: int):
    machine = has_standby()
    for step in range(3):
        step_done(machine, step, 0)
    machine.handle(Attached(SECOND, retain=True, snapshot_every=2))
    commands = machine.handle(Resumed(3, "keep", 1, (record(2),), frozenset({replaying}), watermark=3))
    assert [c for c in commands if isinstance(c, DropRetained)] == [DropRetained(dropped)]
    assert machine.retained.watermark == dropped


def forward_and_total(machine: StageMachine, step: int) -> None:
    for microbatch in range(machine.shape.microbatches):
        forward(machine, microbatch, step)
        done(machine, StageWork("forward", step, microbatch))
        backward(machine, microbatch, step)
        done(machine, StageWork("backward", step, microbatch))
    done(machine, StageWork("total", step))
    done(machine, StageWork("norms", step))
    machine.handle(Committed(record(step), watermark=0))
    done(machine, StageWork("apply", step, record=record(step)))


def test_a_stage_refuses_to_stream_what_it_no_longer_has():
    machine = has_standby()
    for step, watermark in ((0, 0), (1, 0), (2, 2)):
        step_done(machine, step, watermark)
    machine.handle(Attached(SECOND, retain=True, snapshot_every=2))
    reason = refusal(machine.handle(Resumed(3, "keep", 1, (record(2),), frozenset({2}))))
    assert "retains steps from 2, not from 1" in reason
    assert machine.phase is StagePhase.ATTACHED


def test_whoever_is_restored_at_the_official_step_needs_nothing_retained():
    machine = running(microbatches=1)
    prepare(machine)
    machine.handle(Attached(SECOND))
    commands = machine.handle(Resumed(0, "keep", 0, (), frozenset({2})))
    assert ReportReady(0) in commands
    assert machine.phase is StagePhase.RUNNING


# ---------------------------------------------------------------------------------------------------------- snapshots


def test_snapshots_come_on_multiples_of_the_interval():
    machine = has_standby(every=2)
    assert not any(isinstance(c, TakeSnapshot) for c in step_done(machine, 0, 0))
    assert TakeSnapshot(2) in step_done(machine, 1, 0)
    assert not any(isinstance(c, TakeSnapshot) for c in step_done(machine, 2, 0))
    assert TakeSnapshot(4) in step_done(machine, 3, 2)


@pytest.mark.parametrize(("every", "given"), [(0, []), (1, [TakeSnapshot(0)])])
def test_a_stage_without_a_standby_gives_no_snapshot_at_a_resume(every: int, given: list[StageCommand]):
    machine = StageMachine(shape())
    machine.handle(Attached(FIRST, retain=True, snapshot_every=every))
    machine.handle(Resumed(0, "import", 0, snapshot=True))
    assert machine.handle(StateArrived(0)) == [ReportReady(0), *given]


def test_a_stage_without_a_standby_gives_no_snapshot_even_if_it_is_asked():
    machine = has_standby(every=0, snapshot=True)
    assert not any(isinstance(c, TakeSnapshot) for c in step_done(machine, 0, 1))


def test_after_a_recovery_a_snapshot_is_given_at_once_and_once():
    machine = has_standby(at=3)
    commands = machine.handle(Attached(SECOND, retain=True, snapshot_every=2))
    assert machine.handle(Resumed(3, "keep", 3, snapshot=True))[-2:] == [ReportReady(3), TakeSnapshot(3)]
    machine.handle(Attached(Fence(1, 3, 0), retain=True, snapshot_every=2))
    commands = machine.handle(Resumed(3, "keep", 3))
    assert not any(isinstance(command, TakeSnapshot) for command in commands)


def test_a_commit_that_was_missed_is_applied_before_the_snapshot_is_given():
    machine = has_standby()
    prepare(machine)
    machine.handle(Attached(SECOND, retain=True, snapshot_every=2))
    assert work_of(machine.handle(Resumed(1, "keep", 1, (record(0),), snapshot=True))) is not None
    assert done(machine, StageWork("apply", 0, record=record(0))) == [ReportReady(1), TakeSnapshot(1)]


# ---------------------------------------------------------------------------------------------------------- replaying


def replaying(first: int = 2, below: int = 4, others: frozenset[int] = frozenset(), **changes: object) -> StageMachine:
    machine = StageMachine(shape(microbatches=1, **changes))
    machine.handle(Attached(FIRST, retain=True, snapshot_every=2))
    records = tuple(record(step) for step in range(first, below))
    resumed = Resumed(below, "snapshot", first, records, others | {1}, snapshot=True)
    assert LoadSnapshot(first) in machine.handle(resumed)
    assert machine.handle(StateArrived(first)) == [ReportReady(first)]
    assert machine.phase is StagePhase.REPLAYING
    return machine


def test_a_replay_uses_the_records_and_asks_nobody():
    machine = replaying()
    for step in (2, 3):
        assert work_of(forward(machine, 0, step)) == StageWork("forward", step, 0)
        done(machine, StageWork("forward", step, 0))
        assert work_of(backward(machine, 0, step)) == StageWork("backward", step, 0)
        assert work_of(done(machine, StageWork("backward", step, 0))) == StageWork("norms", step)
        commands = done(machine, StageWork("norms", step))
        assert commands[0] == ReportPrepared(step)
        assert work_of(commands) == StageWork("apply", step, record=record(step))
        assert machine.phase is StagePhase.REPLAYING
        commands = done(machine, StageWork("apply", step, record=record(step)))
    assert commands == [ReportReady(4), TakeSnapshot(4)], "no report of a commit, no snapshot on the way"
    assert machine.phase is StagePhase.RUNNING
    assert retained_from(machine, SECOND) == 2, "what a replay sends is retained"


def test_a_replay_takes_all_that_is_streamed_at_once_and_nothing_beyond():
    machine = replaying(2, 9)
    assert machine.wants(ForwardArrived("train", 8, 0, 0))
    assert machine.wants(BackwardArrived(8, 0, 2)), "gradients may come before the forward"
    assert not machine.wants(ForwardArrived("train", 9, 0, 0))
    assert not machine.wants(BackwardArrived(9, 0, 2))
    assert not machine.wants(ForwardArrived("train", 1, 0, 0))
    machine.handle(BackwardArrived(2, 0, 2))
    assert not machine.wants(BackwardArrived(2, 0, 2)), "once"
    assert not machine.wants(BackwardArrived(2, 1, 2)), "there is one microbatch"
    forward(machine, 0, 2)
    done(machine, StageWork("forward", 2, 0))
    done(machine, StageWork("backward", 2, 0))
    assert not machine.wants(BackwardArrived(2, 0, 2)), "it has been used"


def test_gradients_of_later_steps_are_wanted_whatever_of_this_one_has_returned():
    machine = StageMachine(shape(microbatches=2))
    machine.handle(Attached(FIRST, retain=True, snapshot_every=2))
    machine.handle(Resumed(4, "snapshot", 2, (record(2), record(3)), frozenset({1})))
    machine.handle(StateArrived(2))
    forward(machine, 0, 2)
    done(machine, StageWork("forward", 2, 0))
    backward(machine, 0, 2)
    done(machine, StageWork("backward", 2, 0))
    assert machine.wants(BackwardArrived(3, 0, 2))
    assert not machine.wants(BackwardArrived(2, 0, 2))
    assert not machine.wants(BackwardArrived(3, 0, 7)), "that is no consumer"


def test_the_home_of_a_shared_weight_takes_no_total_not_even_in_a_replay():
    machine = replaying(sums_of=frozenset({0}), totals_to=frozenset({0}))
    assert not machine.wants(SharedArrived(2, 0, "total"))
    assert machine.wants(SharedArrived(3, 0, "partial"))


def test_gradients_that_came_early_wait_for_their_forward():
    machine = replaying()
    assert work_of(backward(machine, 0, 2)) is None
    assert work_of(forward(machine, 0, 2)) == StageWork("forward", 2, 0)
    assert work_of(done(machine, StageWork("forward", 2, 0))) == StageWork("backward", 2, 0)


def test_a_replay_sends_only_to_those_that_replay_with_it():
    machine = replaying(others=frozenset({2}))
    assert machine.sends_to(2, 2)
    assert not machine.sends_to(0, 3)
    assert machine.sends_to(0, 4), "that is no replay any more"
    assert running().sends_to(0, 0)


def test_totals_may_come_before_the_part_they_answer_in_a_replay():
    machine = replaying(summed_by=frozenset({0}), parts_to=frozenset({0}))
    assert machine.wants(SharedArrived(3, 0, "total"))
    machine.handle(SharedArrived(2, 0, "total"))
    assert not machine.wants(SharedArrived(2, 0, "total"))
    forward(machine, 0, 2)
    done(machine, StageWork("forward", 2, 0))
    backward(machine, 0, 2)
    assert work_of(done(machine, StageWork("backward", 2, 0))) == StageWork("share", 2)
    assert work_of(done(machine, StageWork("share", 2))) == StageWork("norms", 2)


def test_a_replay_without_all_its_records_is_refused():
    machine = StageMachine(shape())
    machine.handle(Attached(FIRST))
    assert "steps [1] without" in refusal(machine.handle(Resumed(3, "import", 0, (record(0), record(2)))))
    assert machine.phase is StagePhase.ATTACHED


@pytest.mark.parametrize("kind", ["forward", "apply", "initialise"])
def test_after_a_failure_a_stage_stands_and_only_half_changed_states_are_forgotten(kind: str):
    machine = running()
    if kind == "initialise":
        machine = StageMachine(shape())
        machine.handle(Attached(FIRST))
        machine.handle(Resumed(0, "initialise", 0))
    elif kind == "apply":
        prepare(machine)
        machine.handle(Committed(record(0), watermark=0))
    else:
        forward(machine, 0)
    commands = machine.handle(WorkFailed(StageWork(kind)))  # pyright: ignore[reportArgumentType]
    assert machine.phase is StagePhase.ATTACHED
    assert machine.applied == (0 if kind == "forward" else -1)
    assert commands == ([] if kind == "forward" else [DropSums(), DropRetained(EVERY_STEP)])
    assert machine.handle(Attached(SECOND)) != [], "it is not busy any more"
    assert machine.accepts(SECOND)


def test_after_a_failure_in_a_replay_a_stage_stands_too():
    machine = replaying()
    forward(machine, 0, 2)
    assert machine.handle(WorkFailed(StageWork("forward", 2, 0))) == []
    assert (machine.phase, machine.applied) == (StagePhase.ATTACHED, 2)


def test_a_state_may_be_asked_for_while_the_commit_that_leads_to_it_is_applied():
    machine = running(microbatches=1)
    prepare(machine)
    machine.handle(Committed(record(0), watermark=1))
    assert "can't export step 0" in refusal(machine.handle(ExportAsked(0)))
    assert machine.handle(ExportAsked(1)) == []
    assert "can't export step 1" in refusal(machine.handle(ExportAsked(1))), "once"
    forward(machine, 0, step=1)
    assert work_of(done(machine, StageWork("apply", 0, record=record(0)))) == StageWork("export", 1)
