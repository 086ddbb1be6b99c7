"""The journal over an engine that loses answers: written once or not at all, and never said otherwise."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.broker import growth
from fusionai.broker.engines import engine_journal as engine_journals
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import JournalHeld, JournalInDoubt, JournalTaken
from fusionai.coordination.broker.events import JobNoted
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.primitives.ids import PeerId
from harness.memory_engine import Loss, MemoryEngine

KEY = b"k" * 32
ONE, OTHER = PeerId("one"), PeerId("other")


def note(number: int) -> JobNoted:
    return JobNoted(at_s=float(number), job="job-1", text=f"note {number}")


def opened(engine: MemoryEngine, identity: PeerId = ONE) -> EngineJournal:
    return EngineJournal.open(engine, "home", identity, lambda _: KEY)


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def journal(engine: MemoryEngine) -> EngineJournal:
    journal = opened(engine)
    journal.append(0, [note(0)])
    engine.writes = 0
    return journal


@pytest.mark.parametrize(("loss", "writes"), [("done", 1), ("not done", 2), ("unreachable", 2)])
def test_a_lost_answer_is_resolved_before_the_append_returns(
    engine: MemoryEngine, journal: EngineJournal, loss: Loss, writes: int
):
    engine.lose(loss)
    assert journal.append(1, [note(1), note(2)]) == 3
    assert engine.writes == writes
    assert journal.term == 2
    assert journal.append(3, [note(3)]) == 4
    assert journal.load().facts == tuple(note(number) for number in range(4))


def test_an_append_that_is_lost_twice_is_refused_and_was_not_done(engine: MemoryEngine, journal: EngineJournal):
    engine.lose("not done", "not done")
    with pytest.raises(StorageError, match="has not been done"):
        journal.append(1, [note(1)])
    assert journal.outage
    assert journal.recover() is None
    assert journal.load().facts == (note(0),)


@pytest.mark.parametrize("loss", ["done", "not done"])
def test_an_append_in_doubt_stays_so_until_the_engine_answers(engine: MemoryEngine, journal: EngineJournal, loss: Loss):
    noticed: list[str] = []
    journal.on_outage = lambda: noticed.append(journal.outage)
    engine.lose(loss)
    engine.on_append = lambda: setattr(engine, "down", True)
    with pytest.raises(JournalInDoubt, match="not known yet whether what was asked has been done"):
        journal.append(1, [note(1)])
    assert noticed == ["memory gave no answer"]
    with pytest.raises(StorageError, match="can't be used now") as refused:
        journal.append(1, [note(2)])
    assert not isinstance(refused.value, JournalInDoubt)
    with pytest.raises(StorageError, match="can't be reached"):
        journal.recover()
    engine.down = False
    assert journal.recover() is (loss == "done")
    assert journal.outage == ""
    assert journal.load().facts == ((note(0), note(1)) if loss == "done" else (note(0),))


def test_a_slow_engine_is_not_asked_while_the_broker_waits(
    engine: MemoryEngine, journal: EngineJournal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_journals, "INLINE_S", 0.0)
    engine.lose("done")
    before = engine.connections
    with pytest.raises(JournalInDoubt):
        journal.append(1, [note(1)])
    assert engine.connections == before
    assert journal.recover() is True


def test_another_broker_that_took_over_meanwhile_is_noticed(engine: MemoryEngine, journal: EngineJournal):
    engine.lose("not done")

    def taken_over() -> None:
        engine.store.lease = ""
        engine.on_append = lambda: None
        opened(MemoryEngine(engine.store), OTHER)

    engine.on_append = taken_over
    with pytest.raises(JournalTaken, match="another broker has taken over"):
        journal.append(1, [note(1)])
    with pytest.raises(JournalTaken):
        journal.renew()
    with pytest.raises(JournalTaken):
        journal.compact(b"state")


def test_renewals_and_compactions_go_on_over_a_new_connection(engine: MemoryEngine, journal: EngineJournal):
    journal.compact(b"state")
    assert journal.load().state == b"state"
    engine.down = True
    with pytest.raises(StorageError, match="The broker tries again"):
        journal.renew()
    engine.down = False
    with pytest.raises(StorageError, match="can't be used now"):
        journal.renew()
    assert journal.recover() is None
    journal.renew()


def test_compaction_is_due_after_many_rows(journal: EngineJournal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "COMPACT_ROWS", 3)
    journal.load()
    assert not journal.compaction_due
    journal.append(1, [note(1), note(2)])
    assert journal.compaction_due
    journal.postpone_compaction()
    assert not journal.compaction_due
    journal.append(3, [note(3), note(4), note(5)])
    assert journal.compaction_due


def test_another_brokers_lease_is_waited_for(engine: MemoryEngine, journal: EngineJournal):
    with pytest.raises(JournalHeld, match=r"its lease ends in 5\.0 s") as held:
        opened(MemoryEngine(engine.store), OTHER)
    assert held.value.lasts_s == 5.0
    assert opened(MemoryEngine(engine.store)).term == journal.term + 1, "the same broker, started again"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"format": 9}, StorageError, "journal format 1"),
        ({"owner": "moved to etcd://host/fusionai"}, UsageError, "was moved to etcd"),
        ({"pool": "away"}, UsageError, "found that of 'away'"),
        ({"authority": b"another"}, UsageError, "has not the key of pool"),
    ],
)
def test_a_journal_that_is_not_this_brokers_is_refused(
    engine: MemoryEngine, journal: EngineJournal, change: dict[str, object], error: type[Exception], match: str
):
    journal.close()
    assert engine.store.head is not None
    engine.store.head = before = msgspec.structs.replace(engine.store.head, **change)
    with pytest.raises(error, match=match):
        opened(engine)
    assert engine.store.head == before


def test_an_engine_that_never_answers_is_given_up(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MemoryEngine, "take", lambda *_: False)
    with pytest.raises(StorageError, match="changes while it is opened"):
        opened(engine)


def test_what_is_too_large_is_refused_before_it_is_sent(
    engine: MemoryEngine, journal: EngineJournal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_journals, "MAX_FACT_BYTES", 10)
    with pytest.raises(StorageError, match="a fact of at most 10 bytes"):
        journal.append(1, [note(1)])
    monkeypatch.undo()
    monkeypatch.setattr(engine_journals, "MAX_APPEND_BYTES", 50)
    with pytest.raises(StorageError, match="at most 50 bytes in one append"):
        journal.append(1, [note(1), note(2)])
    assert engine.writes == 0


def test_a_broker_that_could_not_renew_its_lease_knows_that_it_may_be_replaced(
    engine: MemoryEngine, journal: EngineJournal, monkeypatch: pytest.MonkeyPatch
):
    assert not journal.lapsed
    monkeypatch.setattr(engine_journals, "LEASE_S", -1.0)
    other = opened(engine)
    assert other.lapsed
    monkeypatch.undo()
    other.renew()
    assert not other.lapsed
    monkeypatch.setattr(engine_journals, "LEASE_S", -1.0)
    engine.down = True
    with pytest.raises(StorageError):
        other.renew()
    engine.down = False
    other.recover()
    assert other.lapsed
    monkeypatch.undo()
    other.load()
    assert not other.lapsed, "reading a long journal must not end the lease"
