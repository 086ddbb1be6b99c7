"""The deadline of a frame: what ends a connection, and what is this side's own doing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from fusionai.transport.channels.pace import FLOOR_BYTES_PER_S, LATE_S, Arrived, FramePace
from harness.in_a_loop import in_a_loop

WINDOW_S = 0.05
BEGUN = Arrived(0, 0)


@dataclass
class Side:
    """A receiving side that says what the test wants."""

    arrived: Arrived | None = BEGUN
    is_reading: bool = True
    checked: int = 0
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def incomplete(self) -> Arrived | None:
        self.checked += 1
        return self.arrived

    def reads(self) -> bool:
        return self.is_reading

    def fall_behind(self, reason: str) -> None:
        self.ended.set_result(reason)


def watched(side: Side) -> FramePace:
    pace = FramePace()
    pace.window_s = WINDOW_S
    pace.watch(side)
    return pace


async def survives(side: Side, checks: int = 4) -> None:
    """Until some windows have been judged."""
    while side.checked < checks:
        assert not side.ended.done(), side.ended.result()
        await asyncio.wait([side.ended], timeout=WINDOW_S / 5)


@in_a_loop
async def test_a_frame_below_the_floor_ends_the_connection():
    side = Side()
    watched(side)
    assert "expected at least 51 bytes of a frame within 0.05 s, got 0" in await side.ended


@in_a_loop
async def test_a_slow_frame_above_the_floor_goes_on():
    side = Side()
    pace = watched(side)
    needed = int(FLOOR_BYTES_PER_S * WINDOW_S)
    for _ in range(5):
        assert side.arrived is not None
        before = side.checked
        side.arrived = Arrived(0, side.arrived.nbytes + needed)
        while side.checked == before:
            await asyncio.wait([side.ended], timeout=WINDOW_S / 10)
    assert not side.ended.done()
    pace.end()


@in_a_loop
async def test_another_frame_has_a_window_of_its_own():
    side = Side()
    watched(side)
    side.arrived = Arrived(1, 3)
    await survives(side, 3)
    await side.ended


@pytest.mark.parametrize("excused", ["paused now", "paused meanwhile"])
@in_a_loop
async def test_this_sides_pauses_are_not_held_against_the_other(excused: str):
    side = Side(is_reading=excused != "paused now")
    pace = watched(side)
    if excused == "paused meanwhile":
        pace.excuse()
    await survives(side, 3)
    side.is_reading = True
    await side.ended


@in_a_loop
async def test_a_process_that_was_suspended_judges_nothing():
    side = Side()
    pace = FramePace()
    pace.window_s = WINDOW_S
    due_s = asyncio.get_running_loop().time() - LATE_S - 1
    pace._check(side, Arrived(0, 0), due_s, WINDOW_S)
    assert not side.ended.done()
    assert pace.watching, "the next window counts"
    pace.end()


@in_a_loop
async def test_nothing_is_watched_between_frames_and_after_the_end():
    side = Side(arrived=None)
    assert not watched(side).watching
    begun = Side()
    pace = watched(begun)
    pace.end()
    pace.end()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(begun.ended), 3 * WINDOW_S)
