"""Snapshots that can't be made or sent are counted, whatever the reason: a line that stands still must be known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from fusionai.backends.interface import StageProgram
from fusionai.execution.host import ComputeThread
from fusionai.execution.training.snapshots import FAILURES_TOLD, Chunk, Entries, SnapshotCopier, StateCopy
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor


class Program:
    """A state of two entries, each a chunk of its own; the second can't be copied while `broken`."""

    def __init__(self, *, broken: bool) -> None:
        self.broken = broken

    def export_entries(self, names: Sequence[str]) -> list[tuple[str, HostTensor]]:
        if self.broken and "model/b" in names:
            raise MemoryError("no room")
        return [(name, host_tensor("float32", (1,), bytearray(4))) for name in names]


async def told_of(program: Program, *, applied: bool, send_fails: bool = False) -> tuple[list[str], list[int]]:
    """What is told after `FAILURES_TOLD` snapshots one after the other, and which steps arrived whole."""
    told: list[str] = []
    whole: list[int] = []
    compute = ComputeThread()

    async def send(copy: StateCopy, part: int, chunk: Chunk | None) -> None:
        del part
        if send_fails:
            raise RuntimeError("the sender broke")
        if chunk is None:
            whole.append(copy.step)

    entries = Entries(fixed=[], moving=["model/a", "model/b"])
    copies = SnapshotCopier(0, cast(StageProgram, program), entries, compute, send, told.append)
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


def test_what_never_changes_is_sent_once_until_something_goes_wrong():
    sent: list[tuple[int, int | None, list[str]]] = []
    trouble = False

    async def main() -> None:
        nonlocal trouble
        compute = ComputeThread()

        async def send(copy: StateCopy, part: int, chunk: Chunk | None) -> None:
            del part
            if trouble:
                raise ExecutionError("the standby is gone")
            if chunk is not None:
                sent.append((copy.step, copy.rest_of, [name for name, _ in chunk]))

        entries = Entries(fixed=["model/frozen"], moving=["model/a"])
        copies = SnapshotCopier(0, cast(StageProgram, Program(broken=False)), entries, compute, send, [].append)

        async def snapshot(step: int) -> None:
            copies.begin(step)
            assert copies._sender is not None
            await copies._sender

        await snapshot(2)
        await snapshot(4)
        trouble = True
        await snapshot(6)
        trouble = False
        await snapshot(8)
        copies.abandon()  # another round: perhaps another standby
        await snapshot(8)
        await copies.close()
        compute.close()

    asyncio.run(main())
    everything, moving = [["model/a"], ["model/frozen"]], [["model/a"]]
    by_step = [(2, None, everything), (4, 2, moving), (8, None, everything), (8, None, everything)]
    assert sent == [(step, rest, names) for step, rest, parts in by_step for names in parts]
