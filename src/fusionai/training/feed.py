"""The data feed of a job: inputs of one microbatch as messages, to each stage exactly those it needs.

Used by `training.driver`; `execution.training.boundary` says which stage needs what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from fusionai.execution.state import headers
from fusionai.execution.training.boundary import FEED
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import DataError
from fusionai.primitives.tensors import HostTensor
from fusionai.training.deployment import Cut
from fusionai.training.job import Batch
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
