"""The broker's journal on a real disk: order, fencing, damage, a full disk, one process at a time."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fusionai.broker.journal import Journal, Superseded
from fusionai.coordination.events import JobNoted
from fusionai.primitives.errors import StorageError, UsageError


def note(number: int, size: int = 0) -> JobNoted:
    return JobNoted(at_s=float(number), job="job-1", text=f"note {number}{'x' * size}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "broker" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal.open(path, "home")) as opened:
        yield opened


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def filled(path: Path, count: int = 5) -> None:
    with closing(Journal.open(path, "home")) as journal:
        journal.append(0, [note(number) for number in range(count)])


def load(path: Path) -> tuple[int, tuple[object, ...]]:
    with closing(Journal.open(path, "home")) as journal:
        return journal.load()


def test_a_new_journal_is_empty_and_private(journal: Journal, path: Path):
    assert journal.load() == (0, ())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_facts_come_back_in_order_over_restarts(path: Path):
    filled(path, 3)
    with closing(Journal.open(path, "home")) as journal:
        assert journal.append(3, [note(3), note(4)]) == 5
    assert load(path) == (5, tuple(note(number) for number in range(5)))


def test_every_opening_is_a_new_term(path: Path):
    terms = []
    for _ in range(3):
        with closing(Journal.open(path, "home")) as journal:
            terms.append(journal.term)
    assert terms == [1, 2, 3]


def test_an_append_elsewhere_in_the_order_is_refused_and_writes_nothing(journal: Journal):
    journal.append(0, [note(0)])
    for wrong in (0, 2):
        with pytest.raises(Superseded):
            journal.append(wrong, [note(9)])
    assert journal.load() == (1, (note(0),))


def test_an_older_term_is_refused(journal: Journal):
    journal._connection.execute("UPDATE head SET term = term + 1")
    with pytest.raises(Superseded, match="another broker has written"):
        journal.append(0, [note(0)])
    assert journal.load() == (0, ())


def test_two_brokers_on_one_journal_are_told_so(journal: Journal, path: Path):
    with pytest.raises(UsageError, match="another broker is running"):
        Journal.open(path, "home")
    journal.append(0, [note(0)])


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE journal SET fact = (SELECT fact FROM journal WHERE sequence = 1) WHERE sequence = 3",
        "UPDATE journal SET term = 7 WHERE sequence = 3",
        "DELETE FROM journal WHERE sequence = 3",
        "DELETE FROM journal WHERE sequence = 5",
        "DELETE FROM journal",
        "INSERT INTO journal SELECT 6, term, fact, chain FROM journal WHERE sequence = 5",
        "UPDATE head SET sequence = 4",
        "UPDATE head SET chain = zeroblob(32)",
        "DELETE FROM head",
        "DROP TABLE journal",
    ],
)
def test_damaged_rows_are_found_and_the_message_says_what_to_do(path: Path, damage: str):
    filled(path)
    change(path, damage)
    with pytest.raises(StorageError) as caught:
        load(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_flipped_bytes_in_the_file_are_found(path: Path):
    filled(path, 200)
    path.write_bytes(path.read_bytes().replace(b"note 150", b"nope 150"))
    with pytest.raises(StorageError, match="damaged: row 151"):
        load(path)


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_file_cut_off_or_foreign_is_found(path: Path, size: int):
    filled(path, 200)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StorageError, match="damaged"):
        load(path)
    path.write_bytes(b"something else entirely" * size)
    with pytest.raises(StorageError, match="damaged"):
        load(path)


def test_what_was_not_committed_is_gone_and_the_rest_stays(path: Path):
    """A write torn in the middle: SQLite drops the incomplete end of the write-ahead log."""
    with closing(Journal.open(path, "home")) as journal:
        journal.append(0, [note(0)])
        journal.append(1, [note(1)])
        log = path.with_name(path.name + "-wal")
        copies = path.read_bytes(), log.read_bytes()
    path.write_bytes(copies[0])
    log.write_bytes(copies[1][:-100])
    assert load(path) == (1, (note(0),))


def test_a_full_disk_writes_nothing_and_says_so(journal: Journal):
    journal.append(0, [note(0)])
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="disk is full") as caught:
        journal.append(1, [note(1, 4000) for _ in range(20)])
    assert caught.value.hint
    assert journal.load() == (1, (note(0),))
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    assert journal.append(1, [note(1)]) == 2


def test_a_journal_of_another_pool_or_program_is_left_alone(path: Path, tmp_path: Path):
    filled(path)
    with pytest.raises(UsageError, match=r"'away'.*'home'"):
        Journal.open(path, "away")
    other = tmp_path / "other.sqlite"
    change(other, "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(StorageError, match="no broker's journal"):
        Journal.open(other, "home")
    assert load(path)[0] == 5


def test_a_newer_format_is_not_guessed_at(path: Path):
    filled(path)
    change(path, "UPDATE head SET format = 2")
    with pytest.raises(StorageError, match="format 1"):
        load(path)


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not use"):
        Journal.open(tmp_path / "file" / "journal.sqlite", "home")


def test_a_fact_that_could_not_be_read_back_is_never_written(journal: Journal):
    with pytest.raises(ValueError, match="4096"):
        journal.append(0, [note(0, 10_000)])
    assert journal.load() == (0, ())
