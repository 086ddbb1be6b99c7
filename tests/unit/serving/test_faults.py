"""What is said of faults, and how long tokens stood still: only while somebody waited for them."""

from __future__ import annotations

import pytest

from fusionai.coordination.round.interface import ReportFault
from fusionai.coordination.serving.interface import ReportRebuilding
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.interface import FaultNote
from harness.pool import peer_id
from harness.virtual_clock import VirtualClock

LOST = ReportFault(kind="peer", peer=peer_id(1), stages=(0,), successors={}, reason="it closed the connection")


class Story:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.told: list[FaultNote] = []
        self.log = ServingFaultLog({}, self.clock, self.told.append)

    @property
    def gaps_s(self) -> list[float | None]:
        return [note.gap_s for note in self.told]


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_gap_lasts_from_the_fault_to_the_next_token(story: Story):
    story.log.asked()
    story.clock.advance(5.0)
    story.log.seen(LOST)
    story.clock.advance(2.0)
    story.log.flowed()
    story.log.flowed()
    assert story.gaps_s == [None, 2.0]


def test_a_gap_begins_when_somebody_asks(story: Story):
    story.log.seen(LOST)
    story.clock.advance(70.0)
    story.log.asked()
    story.clock.advance(3.0)
    story.log.flowed()
    assert story.gaps_s == [None, 3.0]


def test_no_tokens_stood_still_where_nobody_asked_until_it_was_over(story: Story):
    story.log.seen(LOST)
    story.clock.advance(1.0)
    story.log.recovered_unnoticed()
    story.clock.advance(76.0)
    story.log.asked()
    story.clock.advance(0.9)
    story.log.flowed()
    assert story.gaps_s == [None]


def test_caches_that_are_rebuilt_are_counted_in_words(story: Story):
    story.log.rebuilding(ReportRebuilding(stages=(2,), sessions=1, positions=62))
    story.log.rebuilding(ReportRebuilding(stages=(0, 1), sessions=2, positions=384))
    assert [note.text for note in story.told] == [
        "stage 2 recomputes its cache: 62 positions of 1 generation",
        "stages 0, 1 recompute their caches: 384 positions of 2 generations",
    ]
