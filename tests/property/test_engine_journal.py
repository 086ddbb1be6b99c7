"""A journal in an engine under random losses, outages and restarts: written once, and never said otherwise."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import JournalInDoubt
from fusionai.coordination.broker.events import Fact, JobNoted
from fusionai.primitives.errors import StorageError
from fusionai.primitives.ids import PeerId
from harness.examples import examples
from harness.memory_engine import Loss, MemoryEngine

LOSSES: Final[tuple[Loss, ...]] = ("done", "not done", "unreachable")
STEPS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.sampled_from(LOSSES), max_size=3)),
    st.tuples(st.just("append, then away"), st.lists(st.sampled_from(LOSSES), max_size=1)),
    st.tuples(st.sampled_from(["away", "back", "recover", "renew", "compact", "restart"]), st.just([])),
)


class Course:
    """A broker that asks, and what it was answered."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.journal = self.opened()
        self.written: list[Fact] = []
        """What was acknowledged, or found written afterwards."""
        self.folded = 0
        self.asked = 0
        self.doubtful: list[Fact] = []

    def opened(self) -> EngineJournal:
        return EngineJournal.open(self.engine, "home", PeerId("one"), lambda _: b"k")

    def append(self, losses: list[Loss], *, then_away: bool) -> None:
        self.engine.losses.extend(losses)
        self.engine.on_append = (lambda: setattr(self.engine, "down", True)) if then_away else (lambda: None)
        self.asked += 1
        facts: list[Fact] = [JobNoted(at_s=float(self.asked), job="job-1", text=str(self.asked))] * (1 + len(losses))
        try:
            assert self.journal.append(len(self.written), facts) == len(self.written) + len(facts)
            self.written += facts
        except JournalInDoubt:
            self.doubtful = facts
        except StorageError:
            pass  # it says that nothing was written
        self.engine.losses.clear()

    def recover(self) -> None:
        with suppress(StorageError):
            if self.journal.recover():
                self.written += self.doubtful
            self.doubtful = []

    def restart(self) -> None:
        """The broker is killed: what was in doubt is there or not, and the next one finds out by reading."""
        self.engine.down = False
        self.journal = self.opened()
        found = self.journal.load()
        assert found.sequence - len(self.written) in (0, len(self.doubtful))
        if found.sequence > len(self.written):
            self.written += self.doubtful
        self.doubtful = []

    def compact(self) -> None:
        with suppress(StorageError):
            self.journal.compact(f"{len(self.written)} facts".encode())
            self.folded = len(self.written)

    def step(self, name: str, losses: list[Loss]) -> None:
        match name:
            case "append" | "append, then away":
                self.append(losses, then_away=name != "append")
            case "away" | "back":
                self.engine.down = name == "away"
            case "renew":
                with suppress(StorageError):
                    self.journal.renew()
            case _:
                getattr(self, name)()


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_what_was_acknowledged_is_there_once_and_what_was_refused_is_not(steps: list[tuple[str, list[Loss]]]):
    course = Course()
    for name, losses in steps:
        course.step(name, losses)
    course.engine.down = False
    if course.journal.outage:
        course.recover()
    found = course.journal.load()
    assert found.sequence == len(course.written)
    assert found.facts == tuple(course.written[course.folded :])
    assert course.journal.append(found.sequence, [JobNoted(at_s=0.0, job="job-1", text="last")]) == found.sequence + 1
