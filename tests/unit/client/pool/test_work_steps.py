"""The work of a training job by member, from its journal: who ran which steps, what is disputed, who was faulty."""

from __future__ import annotations

from pathlib import Path

from fusionai.client.pool.work import CommittedWork, StepWork, committed_work
from fusionai.ir.cost import BlockCost
from fusionai.storage.commits import CommitJournal, DisputedSteps, StagePlace, StepPlaces
from fusionai.wire.messages import CommitRecord, Fence, WorkShare

OWNER, A, B, C = "o" * 52, "a" * 52, "b" * 52, "c" * 52


def block(number: int, flops: float) -> BlockCost:
    figures = {"parameter_bytes": 0, "trainable_bytes": 0, "activation_bytes": 0, "output_bytes": 0}
    return BlockCost(block=number, forward_flops=flops, backward_flops=2 * flops, gradient_bytes=0, **figures)


BLOCKS = (block(0, 1.0), block(1, 10.0), block(2, 100.0))
STEP = StepWork(OWNER, BLOCKS, microbatches=4, tokens_per_microbatch=8)
FIRST = (StagePlace(A, 0, 1), StagePlace(B, 1, 2), StagePlace(OWNER, 2, 3))
SECOND = (StagePlace(A, 0, 1), StagePlace(C, 1, 2), StagePlace(OWNER, 2, 3))


def test_each_member_gets_the_steps_it_ran_and_the_owner_lends_nothing():
    done = committed_work(STEP, 5, (StepPlaces(0, FIRST), StepPlaces(3, SECOND)), ())
    assert done == CommittedWork(
        5,
        160,
        (WorkShare(A, 5, 160, 5 * 4 * 3.0), WorkShare(B, 3, 96, 3 * 4 * 30.0), WorkShare(C, 2, 64, 2 * 4 * 30.0)),
    )


def test_a_member_of_one_replica_gets_that_ones_microbatches():
    step = StepWork(OWNER, BLOCKS, microbatches=3, tokens_per_microbatch=8, replicas=2)
    places = (StagePlace(A, 0, 3, 0), StagePlace(B, 0, 2, 1), StagePlace(C, 2, 3, 1))
    done = committed_work(step, 1, (StepPlaces(0, places),), ())
    assert done.shares == (WorkShare(A, 1, 16, 666.0), WorkShare(B, 1, 8, 33.0), WorkShare(C, 1, 8, 300.0))
    assert done.tokens == 24


def test_disputed_steps_count_for_neither_side_and_a_faulty_peer_gets_nothing():
    records = (StepPlaces(0, FIRST), DisputedSteps(2, 4, (A, B)), DisputedSteps(3, 5, (B, C)), StepPlaces(5, SECOND))
    done = committed_work(STEP, 6, records, {C})
    assert [(one.peer, one.steps) for one in done.shares] == [(A, 4), (B, 2)]
    assert done.steps == 6


def test_steps_whose_machines_are_not_known_have_no_shares():
    assert committed_work(STEP, 3, (), ()) == CommittedWork(3, 96, ())
    assert committed_work(STEP, 3, (StepPlaces(2, FIRST),), ()).shares[0] == WorkShare(A, 1, 32, 12.0)
    assert committed_work(STEP, 2, (StepPlaces(2, FIRST),), ()).shares == ()


def test_the_journal_keeps_places_once_and_forgets_what_is_taken_back(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    with CommitJournal(path) as journal:
        for step in range(6):
            journal.append(record(step), FIRST if step < 3 else SECOND)
        journal.dispute(0, 2, (A, B))
        journal.dispute(2, 4, (A, C))
    with CommitJournal(path) as journal:
        assert journal.work == (
            StepPlaces(0, FIRST),
            StepPlaces(3, SECOND),
            DisputedSteps(0, 2, (A, B)),
            DisputedSteps(2, 4, (A, C)),
        )
        journal.take_back(3)
        journal.append(record(3), FIRST)
        assert journal.work == (StepPlaces(0, FIRST), DisputedSteps(0, 2, (A, B)))
        journal.append(record(4), SECOND)
        assert journal.work[-1] == StepPlaces(4, SECOND)


def record(step: int) -> CommitRecord:
    return CommitRecord(
        step=step, scale=1.0, learning_rate=0.1, total_norm=1.0, norms_hash="", fence=Fence(1, 1, 0), loss=2.0
    )
