from __future__ import annotations

import math
import os
import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import JobLock
from fusionai.storage.commits import _ROOT_HASH, AdoptedPlan, CommitJournal, _chained, read_commits
from fusionai.storage.rundir import RunDirectory
from fusionai.wire.messages import CommitRecord, Fence
from harness.examples import examples


def commit(step: int, loss: float = 2.5, scale: float = 1.0) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=scale,
        learning_rate=1e-3,
        total_norm=0.1 + step,
        norms_hash="ab" * 32,
        fence=Fence(1, 1, 0),
        loss=loss,
    )


def test_commits_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with CommitJournal(path) as journal:
        assert (journal.committed, journal.last, list(journal.records())) == (0, None, [])
        for step in range(5):
            journal.append(commit(step))
            assert journal.committed == step + 1
    with CommitJournal(path) as journal:
        assert journal.committed == 5
        assert journal.last == commit(4)
        assert list(journal.records()) == [commit(step) for step in range(5)]
        assert list(journal.records(3)) == [commit(3), commit(4)]
        journal.append(commit(5))
        assert list(journal.records(5)) == [commit(5)]


@given(value=st.floats(width=64))
@settings(max_examples=examples(50), deadline=None)
def test_floats_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.sqlite"
    with CommitJournal(path) as journal:
        journal.append(commit(0, loss=value, scale=value))
    with CommitJournal(path) as journal:
        assert journal.last is not None
        for got in (journal.last.loss, journal.last.scale):
            assert got.hex() == value.hex()
            assert math.copysign(1, got) == math.copysign(1, value) or math.isnan(value)


def test_a_step_is_committed_once_and_in_order(tmp_path: Path) -> None:
    with CommitJournal(tmp_path / "journal.sqlite") as journal:
        with pytest.raises(StorageError, match="step 1 can't be committed before step 0"):
            journal.append(commit(1))
        journal.append(commit(0))
        for again in (commit(0), commit(0, loss=1.0)):
            with pytest.raises(StorageError, match="step 0 is committed already; the next is 1"):
                journal.append(again)
        journal.append(commit(1))
        assert list(journal.records()) == [commit(0), commit(1)]


def test_incarnation_and_plan(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with CommitJournal(path) as journal:
        assert (journal.incarnation, journal.plan) == (0, None)
        assert journal.start_incarnation() == 1
        journal.adopt_plan(1, b'{"plan": 1}')
        journal.adopt_plan(1, b'{"plan": 1}')
        with pytest.raises(StorageError, match="versions only grow"):
            journal.adopt_plan(1, b"{}")
        journal.adopt_plan(3, b'{"plan": 3}')
        with pytest.raises(StorageError, match="plan version 2 can't follow version 3"):
            journal.adopt_plan(2, b"{}")
    with CommitJournal(path) as journal:
        assert journal.plan == AdoptedPlan(3, b'{"plan": 3}')
        assert journal.start_incarnation() == 2
        assert journal.plan == AdoptedPlan(3, b'{"plan": 3}')


def test_two_drivers_cannot_share_a_job(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with (
        CommitJournal(path) as journal,
        pytest.raises(StorageError, match=rf"{tmp_path} is in use by process {os.getpid()}\. One job has one driver"),
    ):
        CommitJournal(path)
    journal.close()
    with CommitJournal(path):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    ready, wait = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        JobLock(path)
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(StorageError, match=f"in use by process {pid}"):
        JobLock(path)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    JobLock(path).release()
    for descriptor in (*ready, *wait):
        os.close(descriptor)


def filled(path: Path) -> None:
    with CommitJournal(path) as journal:
        journal.start_incarnation()
        journal.adopt_plan(1, b"plan")
        for step in range(4):
            journal.append(commit(step))
        journal.append_evaluation(Evaluation(2, 0.5))
        journal.append_evaluation(Evaluation(4, float("nan")))


def test_evaluations_survive_and_the_first_word_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path)
    with CommitJournal(path) as journal:
        assert [found.step for found in journal.evaluations] == [2, 4]
        assert math.isnan(journal.evaluations[1].loss)
        assert journal.append_evaluation(Evaluation(2, 0.4)) == Evaluation(2, 0.5)
        assert journal.append_evaluation(Evaluation(6, 0.3)) == Evaluation(6, 0.3)
        assert len(journal.evaluations) == 2, "there is no such state"
        for step in (4, 5):
            journal.append(commit(step))
        journal.append_evaluation(Evaluation(6, 0.3))
        with pytest.raises(StorageError, match="step 5 can't be evaluated after step 6"):
            journal.append_evaluation(Evaluation(5, 0.3))
    with CommitJournal(path) as journal:
        assert [found.step for found in journal.evaluations] == [2, 4, 6]
        journal.take_back(4)
        assert [found.step for found in journal.evaluations] == [2, 4]
        journal.take_back(3)
        assert [found.step for found in journal.evaluations] == [2]
    with CommitJournal(path) as journal:
        assert [found.step for found in journal.evaluations] == [2]


def test_a_journal_of_the_layout_before_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path)
    database = sqlite3.connect(path)
    database.executescript("DROP TABLE evaluations; PRAGMA user_version = 1;")
    database.close()
    with CommitJournal(path) as journal:
        assert (journal.committed, journal.incarnation, journal.evaluations) == (4, 1, ())
        journal.append_evaluation(Evaluation(4, 0.5))
    with CommitJournal(path) as journal:
        assert journal.evaluations == (Evaluation(4, 0.5),)


def test_records_of_a_version_with_more_fields_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path)
    database = sqlite3.connect(path)
    digest = _ROOT_HASH
    for step in range(4):
        content = msgspec.msgpack.encode({**msgspec.to_builtins(commit(step)), "data_cursor": 8 * (step + 1)})
        digest = _chained(digest, content)
        database.execute("UPDATE commits SET record = ?, hash = ? WHERE step = ?", (content, digest, step))
    database.commit()
    database.close()
    with CommitJournal(path) as journal:
        assert list(journal.records()) == [commit(step) for step in range(4)]
        journal.append(commit(4))
    assert read_commits(path) == tuple(commit(step) for step in range(5))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE commits SET record = (SELECT record FROM commits WHERE step = 0) WHERE step = 2", "commit of step 2"),
        ("DELETE FROM commits WHERE step = 1", "commit of step 1"),
        ("UPDATE commits SET hash = x'00' WHERE step = 3", "commit of step 3"),
        ("UPDATE commits SET step = 9 WHERE step = 3", "commit of step 3"),
        ("UPDATE driver SET incarnation = 7", "the incarnation or plan"),
        ("UPDATE driver SET plan = x'00'", "the incarnation or plan"),
        ("UPDATE evaluations SET hash = x'00' WHERE step = 4", "the evaluation of step 4"),
        ("DELETE FROM evaluations WHERE step = 2", "the evaluation of step 4"),
        ("PRAGMA user_version = 9", "expected at most layout 3, got 9"),
    ],
)
def test_changed_rows_are_found(tmp_path: Path, statement: str, message: str) -> None:
    path = tmp_path / "journal.sqlite"
    filled(path)
    database = sqlite3.connect(path)
    database.execute(statement)
    database.commit()
    database.close()
    with pytest.raises(StorageError, match=message):
        CommitJournal(path)
    JobLock(path.with_name(path.name + ".lock")).release()


def test_no_database_and_torn_pages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(StorageError, match=r"journal\.sqlite is damaged: file is not a database"):
        CommitJournal(path)
    path.unlink()
    filled(path)
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xa5" * 4096
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is damaged"):
        CommitJournal(path)


def append_until(journal: CommitJournal, steps: int) -> None:
    while journal.committed < steps:
        journal.append(commit(journal.committed))


def test_a_full_disk_keeps_what_was_committed(tmp_path: Path) -> None:
    """SQLite's own page limit gives the same error as a disk without space."""
    path = tmp_path / "journal.sqlite"
    filled(path)
    with CommitJournal(path) as journal:
        pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
        journal._database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StorageError, match=r"no space left on the disk of .*every committed step is safe"):
            append_until(journal, 1000)
        step = journal.committed
        assert 4 < step < 1000
        with pytest.raises(StorageError, match="no space left"):
            journal.adopt_plan(2, b"x" * 100_000)
        assert journal.plan == AdoptedPlan(1, b"plan")
        journal._database.execute("PRAGMA max_page_count = 100000")
        journal.append(commit(step))
    with CommitJournal(path) as journal:
        assert journal.committed == step + 1
        assert list(journal.records()) == [commit(number) for number in range(step + 1)]


def test_run_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    assert run.tokens.is_dir()
    assert run.checkpoints.is_dir()
    assert run.kept_recipe() is None
    run.keep_recipe(b"{}")
    assert RunDirectory(run.root).kept_recipe() == b"{}"
    assert {path.parent for path in (run.journal, run.telemetry, run.tensorboard)} == {run.root}
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is a file, not a directory"):
        RunDirectory(tmp_path / "file")
    with pytest.raises(StorageError, match="can't be made"):
        RunDirectory(tmp_path / "file" / "below")


def test_what_a_faulty_peer_did_is_taken_back_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with CommitJournal(path) as journal:
        for step in range(5):
            journal.append(commit(step))
        journal.take_back(2)
        assert (journal.committed, journal.last) == (2, commit(1))
        journal.append(commit(2, loss=9.0))
    with CommitJournal(path) as journal:  # the chain of hashes holds
        assert list(journal.records()) == [commit(0), commit(1), commit(2, loss=9.0)]
        journal.take_back(0)
        assert (journal.committed, journal.last) == (0, None)
        journal.append(commit(0, loss=1.0))
