"""The stage a message between members is addressed to, and the stage it claims to come from. Used by
`execution.training.member`.
"""

from __future__ import annotations

from fusionai.primitives.errors import ExecutionError
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


def receiver(message: wire.Message) -> tuple[int, Fence]:
    """Return the receiving stage and the fence. Raises `ExecutionError` for a message that addresses no stage."""
    match message:
        case wire.Forward(consumer=stage, fence=fence) | wire.Backward(producer=stage, fence=fence):
            return stage, fence
        case wire.SharedGradient(receiver=stage, fence=fence):
            return stage, fence
        case wire.Commit(stage=stage, fence=fence) | wire.Resume(stage=stage, fence=fence):
            return stage, fence
        case wire.Export(stage=stage, fence=fence):
            return stage, fence
        case _:
            raise ExecutionError(f"a {type(message).__name__} has no place on a connection between members of a job.")


def sender(message: wire.Message) -> int | None:
    """Return the stage that a tensor message claims to come from, None for other messages."""
    match message:
        case wire.Forward(producer=stage) | wire.Backward(consumer=stage) | wire.SharedGradient(sender=stage):
            return stage
        case wire.Output(stage=stage):
            return stage
        case _:
            return None
