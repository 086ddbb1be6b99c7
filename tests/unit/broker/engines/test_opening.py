"""Opening and moving a home's journal: no second truth begins by mistake, and a move loses nothing."""

from __future__ import annotations

import stat
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from fusionai.broker.engines import opening
from fusionai.broker.engines.interface import PoolJournal
from fusionai.broker.engines.opening import PLACE_FILE, JournalHome, kept_place, open_journal
from fusionai.broker.journal import Journal
from fusionai.coordination.broker.events import JobNoted
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.primitives.ids import PeerId
from harness.memory_engine import MemoryEngine

KEY = b"k" * 32
NOTES = tuple(JobNoted(at_s=float(number), job="job-1", text=f"note {number}") for number in range(5))


class Machines:
    """Engines by URL."""

    def __init__(self) -> None:
        self.engines: dict[str, MemoryEngine] = {}

    def at(self, url: str) -> MemoryEngine:
        return self.engines.setdefault(url, MemoryEngine(name=url.replace("secret", "***")))


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    machines = Machines()
    monkeypatch.setattr(opening, "engine_at", machines.at)
    return machines


@pytest.fixture
def home(tmp_path: Path, machines: Machines) -> JournalHome:
    return home_at(tmp_path)


def home_at(directory: Path, key: bytes = KEY) -> JournalHome:
    return JournalHome(
        directory=directory, pool="home", identity=lambda: PeerId("one"), authority_key=lambda is_new: key
    )


@pytest.fixture
def said() -> list[str]:
    return []


def opened(
    home: JournalHome, place: str | None = None, source: str | None = None, said: list[str] | None = None
) -> PoolJournal:
    return open_journal(home, place, source, (said if said is not None else []).append)


def filled(home: JournalHome, place: str | None = None, source: str | None = None) -> None:
    with closing(opened(home, place, source)) as journal:
        journal.append(0, NOTES[:3])
        journal.compact(b"state")
        journal.append(3, NOTES[3:])


def content(home: JournalHome, place: str | None = None) -> tuple[int, bytes, tuple[object, ...]]:
    with closing(opened(home, place)) as journal:
        found = journal.load()
        return found.sequence, found.state, found.facts


WHOLE = (5, b"state", NOTES[3:])


def test_without_a_word_the_journal_is_in_files(home: JournalHome):
    filled(home)
    assert content(home) == WHOLE
    assert kept_place(home.directory) is None


def test_a_home_keeps_its_journals_place_as_a_secret(home: JournalHome):
    filled(home, "etcd://secret@one")
    assert content(home) == WHOLE, "no flag is needed again"
    assert stat.S_IMODE((home.directory / PLACE_FILE).stat().st_mode) == 0o600
    assert not home.file.exists()


@pytest.mark.parametrize(("first", "then"), [("sqlite", "etcd://a"), ("etcd://a", "etcd://b"), ("etcd://a", "sqlite")])
def test_a_move_takes_everything_and_ends_the_old_journal(home: JournalHome, said: list[str], first: str, then: str):
    filled(home, first)
    with closing(opened(home, then, first, said)) as journal:
        moved = journal.load()
        assert (moved.sequence, moved.state, moved.facts) == WHOLE
        assert journal.append(5, NOTES[:1]) == 6
    assert len(said) == 1
    assert "Moved 2 rows" in said[0]
    assert "both end with row 5, hash" in said[0]
    assert content(home)[0] == 6
    with pytest.raises(UsageError):
        opened(home, first)
    with closing(opened(home, then, first, said)):
        assert said[-1].startswith("The journal has been moved already")


def test_a_journal_moved_away_and_back_is_whole(home: JournalHome, machines: Machines):
    filled(home)
    opened(home, "etcd://a", "sqlite").close()
    opened(home, "sqlite", "etcd://a").close()
    assert content(home) == WHOLE
    with pytest.raises(UsageError, match="has a journal already"):
        opened(home, "etcd://a", "sqlite")
    assert content(home) == WHOLE


def test_terms_go_on_after_a_move(home: JournalHome):
    filled(home)
    before = opened(home)
    before.close()
    with closing(opened(home, "etcd://a", "sqlite")) as after:
        assert after.term > before.term


def test_a_new_place_without_a_move_is_refused(home: JournalHome):
    filled(home)
    with pytest.raises(UsageError, match=r"has no journal, and the one of this home is in .*journal\.sqlite"):
        opened(home, "etcd://a")
    opened(home, "etcd://a", "sqlite").close()
    with pytest.raises(UsageError, match="the one of this home is in etcd://a"):
        opened(home, "etcd://b")
    with pytest.raises(UsageError, match="the journal of this home is at etcd://a, not in files"):
        opened(home, "sqlite")
    assert content(home) == WHOLE


def test_a_home_whose_files_have_no_facts_may_begin_elsewhere(home: JournalHome):
    opened(home).close()
    filled(home, "etcd://a")
    assert content(home) == WHOLE


def test_another_url_of_the_same_journal_is_taken(home: JournalHome, machines: Machines):
    filled(home, "etcd://a")
    machines.engines["etcd://a,b"] = machines.engines["etcd://a"]
    assert content(home, "etcd://a,b") == WHOLE
    assert kept_place(home.directory) == "etcd://a,b"


@pytest.mark.parametrize(
    ("place", "source", "match"),
    [
        ("etcd://a", "sqlite", "no journal to move: .*does not exist"),
        ("etcd://a", "etcd://b", "no journal to move: etcd://b has none"),
        ("etcd://a", "etcd://a", "two different places"),
    ],
)
def test_a_move_of_nothing_is_refused(home: JournalHome, machines: Machines, place: str, source: str, match: str):
    with pytest.raises(UsageError, match=match):
        opened(home, place, source)
    assert machines.at("etcd://a").store.head is None
    assert kept_place(home.directory) is None


def test_a_move_needs_an_empty_place(home: JournalHome, tmp_path: Path):
    filled(home)
    filled(home_at(tmp_path / "other"), "etcd://a")
    with pytest.raises(UsageError, match="etcd://a has a journal already"):
        opened(home, "etcd://a", "sqlite")
    assert content(home) == WHOLE


def test_a_copy_that_is_not_the_journal_leaves_the_old_one_in_use(home: JournalHome, machines: Machines):
    filled(home)
    engine = machines.at("etcd://a")
    create = engine.create

    def wrong(head, history) -> bool:
        create(head, history)
        row = engine.store.rows[5]
        engine.store.rows[5] = msgspec.structs.replace(row, fact=b"other")
        return True

    engine.create = wrong
    with pytest.raises(StorageError, match="etcd://a is damaged"):
        opened(home, "etcd://a", "sqlite")
    assert content(home) == WHOLE


def test_files_that_can_not_be_written_leave_the_engine_in_use(home: JournalHome, monkeypatch: pytest.MonkeyPatch):
    filled(home, "etcd://a")

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(opening.tables, "write_table", full)
        with pytest.raises(StorageError, match="the disk is full"):
            opened(home, "sqlite", "etcd://a")
    assert not list(home.directory.glob("journal.mirror*"))
    assert content(home) == WHOLE


def test_a_second_broker_on_the_same_home_is_refused(home: JournalHome):
    with closing(opened(home, "etcd://a")), pytest.raises(UsageError, match="another broker is running"):
        opened(home)
    with closing(opened(home)):
        pass


def test_a_home_without_the_pools_key_can_not_move_its_journal(tmp_path: Path, machines: Machines):
    home = home_at(tmp_path, key=b"")
    with closing(Journal.open(home.file, "home")) as journal:
        journal.append(0, NOTES)
    with pytest.raises(UsageError, match="has no key of the pool"):
        opened(home, "etcd://a", "sqlite")
