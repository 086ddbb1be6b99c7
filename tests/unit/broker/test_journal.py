"""The broker's journal on a real disk: order, fencing, two copies that heal each other, a full disk, one process."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fusionai.broker import growth
from fusionai.broker.journal import Journal, JournalTaken, Remembered, mirror_path
from fusionai.coordination.broker.events import JobNoted
from fusionai.primitives.errors import StorageError, UsageError


def note(number: int, size: int = 0) -> JobNoted:
    return JobNoted(at_s=float(number), job="job-1", text=f"note {number}{'x' * size}")


NOTES = tuple(note(number) for number in range(5))


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


def kept(journal: Journal) -> tuple[int, tuple[object, ...]]:
    found = journal.load()
    assert found.state == b""
    return found.sequence, found.facts


def load(path: Path) -> tuple[int, tuple[object, ...]]:
    """After a restart that has nothing to mend."""
    with closing(Journal.open(path, "home")) as journal:
        assert journal.healed == ()
        return kept(journal)


def healed(path: Path) -> tuple[str, ...]:
    """What a start mends; afterwards all five notes are there and there is nothing more to mend."""
    with closing(Journal.open(path, "home")) as journal:
        said = journal.healed
        assert kept(journal) == (5, NOTES)
    assert load(path) == (5, NOTES)
    return said


def without_mirror(path: Path) -> None:
    mirror_path(path).unlink()


def test_a_new_journal_is_empty_and_private(journal: Journal, path: Path):
    assert kept(journal) == (0, ())
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
        with pytest.raises(JournalTaken):
            journal.append(wrong, [note(9)])
    assert kept(journal) == (1, (note(0),))


def test_an_older_term_is_refused(journal: Journal):
    journal._table.connection.execute("UPDATE head SET term = term + 1")
    with pytest.raises(JournalTaken, match="another broker has written"):
        journal.append(0, [note(0)])
    assert kept(journal) == (0, ())


def test_two_brokers_on_one_journal_are_told_so(journal: Journal, path: Path):
    with pytest.raises(UsageError, match="another broker is running"):
        Journal.open(path, "home")
    journal.append(0, [note(0)])


DAMAGE = [
    "UPDATE journal SET fact = (SELECT fact FROM journal WHERE sequence = 1) WHERE sequence = 3",
    "UPDATE journal SET term = 7 WHERE sequence = 3",
    "DELETE FROM journal WHERE sequence = 3",
    "DELETE FROM journal WHERE sequence = 5",
    "DELETE FROM journal",
    "INSERT INTO journal SELECT 6, term, fact, chain FROM journal WHERE sequence = 5",
    "UPDATE head SET sequence = 4",
    "UPDATE head SET sequence = 4000",
    "UPDATE head SET chain = zeroblob(32)",
    "UPDATE head SET pool = 'hone'",
    "UPDATE head SET format = 18",
    "DELETE FROM head",
    "DROP TABLE journal",
    "DROP TABLE head",
    "UPDATE base SET chain = zeroblob(32)",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_found_and_healed_from_the_mirror(path: Path, damage: str):
    filled(path)
    change(path, damage)
    [line] = healed(path)
    assert line.startswith("journal.sqlite was damaged")
    assert line.endswith("written anew from journal.mirror, nothing is lost.")


@pytest.mark.parametrize("damage", [one for one in DAMAGE if "base" not in one and "INSERT" not in one])
def test_without_the_mirror_damaged_rows_are_refused_and_the_message_says_what_to_do(path: Path, damage: str):
    filled(path)
    change(path, damage)
    without_mirror(path)
    before = path.read_bytes()
    with pytest.raises((StorageError, UsageError)) as caught:
        load(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert path.read_bytes() == before, "what could not be mended is left as it was"


def test_flipped_bytes_in_the_file_are_found_in_either_copy(path: Path):
    with closing(Journal.open(path, "home")) as journal:
        journal.append(0, [note(number) for number in range(200)])
    for file in (path, mirror_path(path)):
        changed = file.read_bytes().replace(b"note 150", b"nope 150")
        file.write_bytes(changed)
        with closing(Journal.open(path, "home")) as journal:
            assert len(journal.healed) == 1
            assert journal.healed[0].startswith(f"{file.name} was damaged")
            assert kept(journal)[0] == 200


def test_a_schema_that_is_no_text_any_more_is_damage_like_any_other(path: Path):
    filled(path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE head", b"CR\xc5ATE TABLE head"))
    assert healed(path)[0].startswith("journal.sqlite was damaged")


def test_two_copies_damaged_in_different_places_heal_each_other(path: Path):
    for sequence in range(5):
        with closing(Journal.open(path, "home")) as journal:
            journal.append(sequence, [note(sequence)])
    for file, number in ((path, b"1"), (mirror_path(path), b"3")):
        file.write_bytes(file.read_bytes().replace(b"note " + number, b"nope " + number))
    said = healed(path)
    assert [line.split()[0] for line in said] == ["journal.sqlite", "journal.mirror"]
    assert all("from what was left of both" in line for line in said)


def test_two_copies_damaged_in_the_same_place_are_refused(path: Path):
    filled(path)
    for file in (path, mirror_path(path)):
        file.write_bytes(file.read_bytes().replace(b"note 3", b"nope 3"))
    before = path.read_bytes(), mirror_path(path).read_bytes()
    for _ in range(2):
        with pytest.raises(StorageError, match="both damaged") as caught:
            load(path)
        assert caught.value.hint
    assert (path.read_bytes(), mirror_path(path).read_bytes()) == before


def cut_to(path: Path, rows: int) -> None:
    """The database as if what was written after row `rows` had never been."""
    change(
        path,
        f"DELETE FROM journal WHERE sequence > {rows}",
        f"UPDATE head SET sequence = {rows}, chain = (SELECT chain FROM journal WHERE sequence = {rows})",
    )


def test_a_copy_cut_off_while_the_other_is_damaged_is_not_taken_for_the_whole(path: Path):
    with closing(Journal.open(path, "home")) as journal:
        for sequence in range(5):
            journal.append(sequence, [note(sequence)])
    saved = mirror_path(path).read_bytes()
    cut_to(path, 3)
    mirror_path(path).write_bytes(saved.replace(b"note 1", b"nope 1"))
    # The mirror's later rows still verify, so both together are whole.
    assert len(healed(path)) == 2
    cut_to(path, 3)
    mirror_path(path).write_bytes(saved.replace(b"note 3", b"nope 3"))
    with pytest.raises(StorageError, match="both damaged: row 4 of 5"):
        load(path)


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_a_file_cut_off_foreign_or_gone_is_healed_from_the_other(path: Path, size: int):
    filled(path)
    for file in (path, mirror_path(path)):
        file.write_bytes(file.read_bytes()[: min(size, file.stat().st_size - 1)])
        assert len(healed(path)) == 1
        file.write_bytes(b"something else entirely" * (size + 1))
        assert len(healed(path)) == 1
        file.unlink()
        assert healed(path)[0].startswith(f"{file.name} was missing")


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_both_cut_off_or_foreign_are_refused(path: Path, size: int):
    with closing(Journal.open(path, "home")) as journal:
        journal.append(0, [note(number) for number in range(200)])
    for damaged in (path.read_bytes()[:size], b"something else entirely" * size):
        path.write_bytes(damaged)
        mirror_path(path).write_bytes(damaged)
        with pytest.raises(StorageError, match="damaged"):
            load(path)


def test_a_write_that_reached_only_the_mirror_counts_and_is_no_news(path: Path):
    """The broker was killed between the two: nobody was told of it, and it is kept."""
    filled(path, 4)
    before = path.read_bytes()
    with closing(Journal.open(path, "home")) as journal:
        journal.append(4, [note(4)])
    path.write_bytes(before)
    assert load(path) == (5, NOTES)


@pytest.mark.slow
def test_a_write_that_only_began_in_the_mirror_is_dropped_and_is_no_news(path: Path):
    filled(path)
    whole = mirror_path(path).read_bytes()
    with closing(Journal.open(path, "home")) as journal:
        journal.append(5, [note(5)])
    begun = mirror_path(path).read_bytes()
    for cut in range(len(whole) + 1, len(begun)):
        mirror_path(path).write_bytes(begun[:cut])
        cut_to(path, 5)
        assert load(path) == (5, NOTES)


def test_a_journal_of_the_first_format_is_taken_over(path: Path):
    filled(path)
    change(path, "DROP TABLE base", "UPDATE head SET format = 1")
    without_mirror(path)
    [line] = healed(path)
    assert line.startswith("journal.mirror was missing")


def test_what_was_damaged_is_kept_beside(path: Path):
    filled(path)
    path.write_bytes(b"something else entirely" * 100)
    healed(path)
    assert path.with_name("journal.sqlite.damaged").read_bytes().startswith(b"something else")
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in path.parent.iterdir())


# ------------------------------------------------------------------------------------------------------ compaction


def test_a_compacted_journal_begins_with_the_state_and_goes_on(path: Path):
    filled(path)
    with closing(Journal.open(path, "home")) as journal:
        journal.compact(b"the pool")
        journal.append(5, [note(5)])
        assert journal.load() == Remembered(6, b"the pool", (note(5),))
    with closing(Journal.open(path, "home")) as journal:
        assert journal.healed == ()
        assert journal.load() == Remembered(6, b"the pool", (note(5),))
        journal.compact(b"the pool later")
        assert journal.load() == Remembered(6, b"the pool later", ())


@pytest.mark.parametrize("which", [0, 1])
def test_either_copy_of_a_compacted_journal_is_healed_too(path: Path, which: int):
    filled(path)
    with closing(Journal.open(path, "home")) as journal:
        journal.compact(b"the pool" * 1000)
        journal.append(5, [note(5)])
    file = (path, mirror_path(path))[which]
    for damaged in (file.read_bytes().replace(b"poolthe", b"loopthe"), b"", None):
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        with closing(Journal.open(path, "home")) as journal:
            assert len(journal.healed) == 1
            assert journal.load() == Remembered(6, b"the pool" * 1000, (note(5),))


def test_a_broker_killed_within_a_compaction_loses_nothing(path: Path):
    filled(path)
    before = path.read_bytes()
    with closing(Journal.open(path, "home")) as journal:
        journal.compact(b"the pool")
    path.write_bytes(before)  # the mirror was compacted, the database not yet
    with closing(Journal.open(path, "home")) as journal:
        assert journal.healed == ()
        journal.append(5, [note(5)])
    for file in (path, mirror_path(path)):
        saved = file.read_bytes()
        file.unlink()
        with closing(Journal.open(path, "home")) as journal:
            assert journal.load().sequence == 6
            assert journal.load().facts[-1] == note(5)
        assert saved


def test_compaction_is_due_after_many_rows_or_bytes_and_keeps_files_small(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "COMPACT_ROWS", 20)
    monkeypatch.setattr(growth, "COMPACT_BYTES", 8_000)
    sizes: list[int] = []
    with closing(Journal.open(path, "home")) as journal:
        last = 0
        for number in range(200):
            last = journal.append(last, [note(number, 1000 if number % 2 else 0)])
            if journal.compaction_due:
                assert journal.load().sequence == last
                journal.compact(b"x" * 100)
                assert not journal.compaction_due
            sizes.append(mirror_path(path).stat().st_size)
        assert max(sizes) < 20_000
        assert len(journal.load().facts) < 20


def test_a_compaction_that_fails_loses_nothing_and_is_put_off(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "COMPACT_ROWS", 5)
    journal.append(0, NOTES)
    journal.postpone_compaction()
    assert not journal.compaction_due
    with monkeypatch.context() as patched:
        patched.setattr("fusionai.broker.history.os.fsync", _no_space)
        with pytest.raises(StorageError, match="disk is full"):
            journal.compact(b"state")
    assert kept(journal) == (5, NOTES)
    assert journal.append(5, [note(5)]) == 6
    assert not list(journal.path.parent.glob("*.partial"))


# ------------------------------------------------------------------------------------------------- a failing disk


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_mirror_that_cannot_grow_keeps_the_fact_out_of_both(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    journal.append(0, [note(0)])
    size = mirror_path(journal.path).stat().st_size
    really = os.write

    def short_of_space(descriptor: int, data: bytes) -> int:
        if os.lseek(descriptor, 0, os.SEEK_CUR) > size:
            _no_space()
        return really(descriptor, data[:7])

    with monkeypatch.context() as patched:
        patched.setattr("fusionai.broker.history.os.write", short_of_space)
        with pytest.raises(StorageError, match="disk is full"):
            journal.append(1, [note(1)])
    assert kept(journal) == (1, (note(0),))
    assert mirror_path(journal.path).stat().st_size == size
    assert journal.append(1, [note(1)]) == 2


def test_a_database_that_cannot_commit_keeps_the_fact_out_of_both(path: Path):
    """What stands in the mirror already is taken back before the refusal is said."""

    class Refusing:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self.connection.execute(statement, *parameters)

        def __getattr__(self, name: str) -> object:
            return getattr(self.connection, name)

    with closing(Journal.open(path, "home")) as journal:
        journal.append(0, [note(0)])
        real = journal._table.connection
        journal._table.connection = Refusing(real)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StorageError, match="could not use"):
            journal.append(1, [note(9)])
        journal._table.connection = real
        assert kept(journal) == (1, (note(0),))
        assert journal.append(1, [note(1)]) == 2
    assert load(path) == (2, (note(0), note(1)))


def test_a_mirror_that_cannot_even_be_cut_back_ends_the_writing(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    journal.append(0, [note(0)])

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("fusionai.broker.history.os.fsync", fails)
        with pytest.raises(StorageError, match="could not use"):
            journal.append(1, [note(1)])
    with pytest.raises(StorageError, match="can't be cut back"):
        journal.append(1, [note(1)])


@pytest.mark.slow
def test_a_log_cut_off_is_made_up_for_by_the_mirror(path: Path):
    """Cut anywhere, SQLite takes the end of its write-ahead log for a write that never happened."""
    with closing(Journal.open(path, "home")) as journal:
        for sequence in range(5):
            journal.append(sequence, [note(sequence)])
        log = path.with_name(path.name + "-wal")
        copies = path.read_bytes(), log.read_bytes()
    mirror = mirror_path(path).read_bytes()
    for cut in range(0, len(copies[1]), 997):
        path.write_bytes(copies[0])
        log.write_bytes(copies[1][:cut])
        mirror_path(path).write_bytes(mirror)
        with closing(Journal.open(path, "home")) as journal:
            assert kept(journal) == (5, NOTES)


def test_a_full_disk_writes_nothing_and_says_so(journal: Journal):
    journal.append(0, [note(0)])
    pages = journal._table.connection.execute("PRAGMA page_count").fetchone()[0]
    journal._table.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="disk is full") as caught:
        journal.append(1, [note(1, 4000) for _ in range(20)])
    assert caught.value.hint
    assert kept(journal) == (1, (note(0),))
    journal._table.connection.execute("PRAGMA max_page_count = 1000000")
    assert journal.append(1, [note(1)]) == 2


def test_a_journal_of_another_pool_or_program_is_left_alone(path: Path, tmp_path: Path):
    filled(path)
    with pytest.raises(UsageError, match=r"'away'.*'home'"):
        Journal.open(path, "away")
    other = tmp_path / "elsewhere" / "other.sqlite"
    other.parent.mkdir()
    change(other, "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(StorageError, match="no broker's journal"):
        Journal.open(other, "home")
    assert load(path)[0] == 5


def test_another_pools_database_beside_this_pools_mirror_is_not_thrown_away(path: Path, tmp_path: Path):
    filled(path)
    other = tmp_path / "other" / "journal.sqlite"
    with closing(Journal.open(other, "away")) as journal:
        journal.append(0, [note(0)])
    path.write_bytes(other.read_bytes())
    with pytest.raises(UsageError, match=r"'home'.*'away'"):
        Journal.open(path, "home")


def test_a_newer_format_is_not_guessed_at(path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(path)
    with monkeypatch.context() as patched:
        patched.setattr("fusionai.broker.history.MIRROR_FORMAT", 2)
        mirror_path(path).unlink()
        healed(path)
    with pytest.raises(StorageError, match="mirror format 1"):
        load(path)
    without_mirror(path)
    change(path, "UPDATE head SET format = 3")
    with pytest.raises(StorageError, match="format 2"):
        load(path)


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not use"):
        Journal.open(tmp_path / "file" / "journal.sqlite", "home")


def test_a_fact_that_could_not_be_read_back_is_never_written(journal: Journal):
    with pytest.raises(ValueError, match="4096"):
        journal.append(0, [note(0, 10_000)])
    assert kept(journal) == (0, ())
