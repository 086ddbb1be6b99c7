"""Boundary tensors that a stage has sent, kept so that a neighbour can replay (recovery rule 10).

They are kept until the retention line (the oldest step that a recovery can start from) passes them, and are resent step
by step, microbatch by microbatch. `receiver` and `sender` say which stages a message goes to and claims to come from.
Used by `execution.training.runtime` and `execution.training.member`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.execution.training.boundary import Boundary
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

Sent = wire.Forward | wire.Backward | wire.SharedGradient
_Key = tuple[int, int, int, int, int]
"""(step, microbatch, kind of message, receiver, part), which is the order of resending."""
AFTER_ALL_MICROBATCHES: Final = 2**62
"""Microbatch number in the sort key of messages that are sent once per step, after all microbatches."""


@dataclass(slots=True)
class RetainedMessages:
    """Sent messages of one stage. Running a step again replaces what it sent before with the same bits."""

    _sent: dict[_Key, tuple[Sent, tuple[HostTensor, ...]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self._sent.values() for tensor in tensors)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({step for step, *_ in self._sent}))

    def keep(self, message: Sent, tensors: Sequence[HostTensor]) -> None:
        self._sent[_key(message)] = (message, tuple(tensors))

    def drop_below(self, line: int) -> None:
        self._sent = {key: sent for key, sent in self._sent.items() if key[0] >= line}

    def is_whole(self, boundary: Boundary, microbatches: int, to: int, first: int, below: int) -> bool:
        """Return whether everything that stage `to` received in these steps, of `microbatches` each, is kept."""
        forward = any(port.other == to for port in boundary.sends)
        back = any(port.other == to for port in boundary.returns)
        shares = to in boundary.totals_to | boundary.parts_to
        kinds = Counter((key[0], min(key[2], 2)) for key in self._sent if key[3] == to)
        return all(
            kinds[step, 0] == forward * microbatches
            and kinds[step, 1] == back * microbatches
            and (kinds[step, 2] > 0 or not shares)
            for step in range(first, below)
        )

    def again(
        self, fence: Fence, to: Collection[int], first: int, below: int
    ) -> Iterator[tuple[int, Sent, tuple[HostTensor, ...]]]:
        """Yield (receiver, message under `fence`, tensors) of steps `first` to `below` - 1."""
        for key in sorted(self._sent):
            step, _, _, receiver, _ = key
            if first <= step < below and receiver in to:
                message, tensors = self._sent[key]
                yield receiver, msgspec.structs.replace(message, fence=fence), tensors


def _key(message: Sent) -> _Key:
    match message:
        case wire.Forward():
            return message.step, message.microbatch, 0, message.consumer, 0
        case wire.Backward():
            return message.step, message.microbatch, 1, message.producer, 0
        case wire.SharedGradient():
            what = 2 + (message.phase == "total")
            return message.step, AFTER_ALL_MICROBATCHES, what, message.receiver, message.part


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
