"""A job's data in and out: inputs of a microbatch as messages, to each stage those it needs, and awaited outputs.

Outputs awaited by microbatch are evaluation losses and inference logits.

Used by `training.driver`; `execution.training.boundary` says which stage needs what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from fusionai.execution.state import headers
from fusionai.execution.training.boundary import FEED
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import DataError, ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.training.deployment import Batch, Cut
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Mode


def forwards(
    cut: Cut,
    fence: Fence,
    mode: Mode,
    step: int,
    microbatch: int,
    batch: Batch,
    *,
    only: Collection[int] | None = None,
) -> Iterator[tuple[wire.Forward, tuple[HostTensor, ...]]]:
    """Yield the messages for the stages that this microbatch crosses, or for those of them in `only`. Raises
    `DataError` if the batch lacks an input of the model."""
    for number, stage in enumerate(cut.stages):
        if not stage.boundary.crosses(microbatch) or (only is not None and number not in only):
            continue
        for port in stage.boundary.receives:
            names = port.carried(mode)
            if port.other != FEED or not names:
                continue
            missing = [name for name in names if name not in batch]
            if missing:
                raise DataError(
                    f"the model needs inputs {', '.join(missing)}, but the data has only {', '.join(batch)}."
                )
            tensors = {name: batch[name] for name in names}
            message = wire.Forward(
                fence=fence,
                mode=mode,
                step=step,
                replica=stage.boundary.replica,
                microbatch=microbatch,
                producer=FEED,
                consumer=number,
                tensors=headers(tensors),
            )
            yield message, tuple(tensors.values())


class Feed:
    """Sends the inputs of one round, in order. A stage reports ready when its end of the link is up; this end may take
    longer."""

    def __init__(self, member: JobMember) -> None:
        self._member = member
        self._queue: asyncio.Queue[tuple[wire.Forward, tuple[HostTensor, ...]]] = asyncio.Queue()

    def put(self, message: wire.Forward, tensors: tuple[HostTensor, ...]) -> None:
        self._queue.put_nowait((message, tensors))

    async def run(self) -> None:
        """Send until cancelled. Inputs without a link are dropped; the member has reported the missing link."""
        linked: set[int] = set()
        while True:
            message, tensors = await self._queue.get()
            stage = message.consumer
            if stage not in linked and await self._member.linked((stage,)):
                linked.add(stage)
            if stage in linked:
                self._member.to_stage(stage, message, tensors)


_Key = tuple[Mode, int, int]


class Outputs:
    """Futures of awaited outputs. Call `expect` before feeding and `arrived` when an output comes; `drop` when a round
    ends, `fail` when no output can come any more."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, asyncio.Future[dict[str, HostTensor]]] = {}
        self._inferences = 0
        self._failed: str | None = None

    def next_inference(self) -> int:
        self._inferences += 1
        return self._inferences

    def expect(self, mode: Mode, step: int, microbatch: int) -> asyncio.Future[dict[str, HostTensor]]:
        """Return a future for an output. Raises `ExecutionError` after `fail`."""
        if self._failed is not None:
            raise ExecutionError(self._failed)
        future: asyncio.Future[dict[str, HostTensor]] = asyncio.get_running_loop().create_future()
        self._waiting[mode, step, microbatch] = future
        return future

    def arrived(self, mode: Mode, step: int, microbatch: int, tensors: dict[str, HostTensor]) -> bool:
        """Deliver an output. Return False if it was not expected, unless `fail` was called."""
        future = self._waiting.pop((mode, step, microbatch), None)
        if future is not None and not future.done():
            future.set_result(tensors)
        return future is not None or self._failed is not None

    def drop(self) -> None:
        """Cancel all waits, because what was fed under an older fence never comes back."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ExecutionError(reason))
        self._waiting.clear()
