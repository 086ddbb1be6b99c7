"""Snapshots that can't be made or sent are counted, whatever the reason: a line that stands still must be known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from fusionai.backends.interface import StageProgram
from fusionai.execution.compute import ComputeThread
from fusionai.execution.copies import FAILURES_TOLD, Chunk, Copies
from fusionai.primitives.tensors import HostTensor, host_tensor


class Program:
    """A state of two entries, each a chunk of its own; the second can't be copied while `broken`."""

    def __init__(self, *, broken: bool) -> None:
        self.broken = broken

    def export_state(self, parts: Any) -> Iterator[tuple[str, HostTensor]]:
        del parts
        yield "model/a", host_tensor("float32", (1,), bytearray(4))
        if self.broken:
            raise MemoryError("no room")
        yield "model/b", host_tensor("float32", (1,), bytearray(4))


async def told_of(program: Program, *, applied: bool, send_fails: bool = False) -> tuple[list[str], list[int]]:
    """What is told after `FAILURES_TOLD` snapshots one after the other, and which steps arrived whole."""
    told: list[str] = []
    whole: list[int] = []
    compute = ComputeThread()

    async def send(step: int, part: int, chunk: Chunk | None) -> None:
        del part
        if send_fails:
            raise RuntimeError("the sender broke")
        if chunk is None:
            whole.append(step)

    copies = Copies(0, cast(StageProgram, program), compute, send, told.append)
    for step in range(FAILURES_TOLD):
        copies.begin(step)
        if applied:
            await compute.run(copies.complete)
        assert copies._sender is not None
        await copies._sender
    await copies.close()
    compute.close()
    return told, whole


@pytest.mark.parametrize("applied", [True, False], ids=["before an apply", "while sending"])
def test_a_state_that_cant_be_copied_is_told_and_never_sent_as_whole(applied: bool):
    told, whole = asyncio.run(told_of(Program(broken=True), applied=applied))
    assert len(told) == 1
    assert "no room" in told[0]
    assert whole == []


def test_a_sender_that_breaks_is_told_too():
    told, whole = asyncio.run(told_of(Program(broken=False), applied=False, send_fails=True))
    assert (len(told), whole) == (1, [])
    assert "the sender broke" in told[0]


def test_a_state_that_arrives_is_no_failure():
    assert asyncio.run(told_of(Program(broken=False), applied=True)) == ([], [0, 1])
