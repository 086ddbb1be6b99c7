"""What is fed into a job: one microbatch's inputs as messages, each stage getting exactly those it needs.

Decides nothing. Neighbours: `training.driver` feeds, `execution.boundary` says who needs what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fusionai.execution.boundary import FEED
from fusionai.execution.state import headers
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
    """`only`: for these stages. Raises `DataError` where the batch has not what the model needs."""
    for number, stage in enumerate(cut.stages):
        if only is not None and number not in only:
            continue
        for port in stage.boundary.receives:
            names = port.carried(mode)
            if port.other != FEED or not names:
                continue
            missing = [name for name in names if name not in batch]
            if missing:
                raise DataError(f"the model needs inputs {', '.join(missing)}, the data has {', '.join(batch)}.")
            tensors = {name: batch[name] for name in names}
            message = wire.Forward(
                fence=fence,
                mode=mode,
                step=step,
                replica=0,
                microbatch=microbatch,
                producer=FEED,
                consumer=number,
                tensors=headers(tensors),
            )
            yield message, tuple(tensors.values())
