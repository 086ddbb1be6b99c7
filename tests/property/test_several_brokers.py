"""Several brokers on one engine, with split brains, slow and lost answers: nothing acknowledged is lost, nothing
refused is done, no broker answers from an old pool, and one decides soon after the last fault.

A course is replayed by its seed: the message of a failure names it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusionai.broker import growth
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import EngineHead
from fusionai.broker.history import Row
from fusionai.primitives.errors import FusionError
from harness.examples import examples
from harness.memory_engine import MemoryEngine
from harness.several_brokers import Course, Violation

STEPS = 100


@pytest.fixture(autouse=True)
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are compacted in each course."""
    monkeypatch.setattr(growth, "COMPACT_ROWS", 10)


def play(directory: Path, seeds: Sequence[int]) -> int:
    for seed in seeds:
        course = Course(directory, seed)
        try:
            course.run(STEPS)
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from violation
    return len(seeds)


def any_head_fits(self: MemoryEngine, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
    """An append that compares neither term nor row."""
    self.store.head = new
    self.store.rows |= {row.sequence: row for row in rows}
    return True


def no_new_term(self: EngineJournal) -> bool | None:
    """A recovery after which a late write of the old term still fits."""
    self._engine.connect()
    head = self._engine.head()
    if head is None or head.owner != self._owner:
        raise self._taken(head)
    return self._settled(head, head)


def not_asked(self: EngineJournal, lost: FusionError, *, at_once: bool) -> bool:
    """A lost answer counts as a yes."""
    del lost, at_once
    assert self._doubt is not None
    self._head, self._doubt = self._doubt.after, None
    return True


def whoever_holds_the_lease(self: MemoryEngine, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
    """A broker that begins its term while another one's lease runs."""
    if self.store.head != old:
        return False
    self.store.head, self.store.lease = new, new.owner if lease_s else ""
    return True


BROKEN = {
    "the engine compares no head": (MemoryEngine, "append", any_head_fits),
    "a recovery begins no term": (EngineJournal, "_resolve", no_new_term),
    "a lost answer counts as written": (EngineJournal, "_asked", not_asked),
    "a broker answers after its lease": (EngineJournal, "lapsed", property(lambda _: False)),
    "a lease holds nobody off": (MemoryEngine, "take", whoever_holds_the_lease),
}


def test_no_course_breaks_what_is_promised(tmp_path: Path):
    assert play(tmp_path, range(examples(400)))


@pytest.mark.long
def test_no_course_of_ten_thousand_breaks_what_is_promised(tmp_path: Path):
    first = int(os.environ.get("FUSION_CHAOS_SEED", "1000"))
    assert play(tmp_path, range(first, first + 10_000)) == 10_000


@pytest.mark.parametrize("broken", BROKEN)
def test_what_protects_the_pool_is_missed_when_it_is_taken_away(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    owner, name, replacement = BROKEN[broken]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(Violation, match="seed"):
        play(tmp_path, range(400))
