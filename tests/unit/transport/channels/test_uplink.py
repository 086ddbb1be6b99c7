"""Bulk of one machine goes one after the other where it shares a line, and nobody waits for who gets nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fusionai.transport.channels import uplink as module
from fusionai.transport.channels.uplink import UplinkScheduler
from harness.in_a_loop import in_a_loop

LINE = 2.5e6


def of_line() -> UplinkScheduler:
    turns = UplinkScheduler()
    turns.measured(LINE)
    return turns


async def waits(taking: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(taking)
    await asyncio.sleep(0)
    assert not task.done()
    return task


@in_a_loop
async def test_one_after_the_other_in_the_order_they_came():
    turns = of_line()
    await turns.take("a", None)
    later = [await waits(turns.take(name, None)) for name in "bc"]
    assert turns.has_waiting
    turns.release("a")
    await later[0]
    assert not later[1].done()
    turns.release("b")
    await later[1]
    assert not turns.has_waiting


@in_a_loop
async def test_before_the_line_is_measured_nobody_waits():
    turns = UplinkScheduler()
    for name in "abc":
        await turns.take(name, None)
    turns.seen(queues=True, held=True)
    assert turns.uplink_bytes_per_s is None


@in_a_loop
async def test_who_uses_little_of_the_line_has_company():
    turns = of_line()
    await turns.take("slow", 0.1 * LINE)
    await turns.take("slow too", 0.2 * LINE)
    await turns.take("fast", LINE)
    await waits(turns.take("late", 0.1 * LINE))


@in_a_loop
async def test_who_gives_up_waiting_loses_nothing_for_others():
    turns = of_line()
    await turns.take("a", None)
    one, other = await waits(turns.take("b", None)), await waits(turns.take("c", None))
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    turns.release("a")
    await other


@in_a_loop
async def test_who_gives_up_in_the_moment_of_its_turn_gives_it_back():
    turns = of_line()
    await turns.take("a", None)
    one, other = await waits(turns.take("b", None)), await waits(turns.take("c", None))
    turns.release("a")
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    await other


@in_a_loop
async def test_a_turn_that_nobody_has_is_given_back_in_vain():
    turns = of_line()
    turns.release("nobody")
    await turns.take("a", None)
    turns.release("nobody")
    await waits(turns.take("b", None))


def seen(turns: UplinkScheduler, looks: int, *, queues: bool, held: bool = True) -> float:
    for _ in range(looks):
        turns.seen(queues=queues, held=held)
    assert turns.uplink_bytes_per_s is not None
    return turns.uplink_bytes_per_s


def test_a_queue_that_stands_makes_the_line_slower_within_bounds():
    turns = of_line()
    assert seen(turns, module.QUEUE_SAMPLES - 1, queues=True) == LINE, "a burst"
    assert seen(turns, 1, queues=True) < LINE
    assert seen(turns, 1000, queues=True) == pytest.approx(module.LEAST * LINE)


def test_a_line_without_a_queue_is_found_to_be_faster_but_only_by_who_fills_it():
    turns = of_line()
    assert seen(turns, 100, queues=False, held=False) == LINE
    assert LINE < seen(turns, module.CALM_SAMPLES - 1, queues=False) < 1.1 * LINE
    assert seen(turns, 50, queues=False) > 3 * LINE, "another line than was measured"
    turns.measured(LINE)
    assert turns.uplink_bytes_per_s == LINE
