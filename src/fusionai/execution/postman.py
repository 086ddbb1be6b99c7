"""How a stage reaches others: the interface between a runtime and the member it belongs to.

Neighbours: `execution.member` implements it, `execution.runtime` and `execution.work` send through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


class Postman(Protocol):
    """How a runtime reaches others; `execution.member` implements it. None of these raises for a lost link."""

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def to_driver(self, message: wire.Message) -> None: ...

    def failed(self, stage: int, fence: Fence, code: wire.RefusalCode, reason: str) -> None: ...

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None: ...

    async def state(self, message: wire.StateChunk | wire.Difference, tensors: Sequence[HostTensor]) -> None:
        """Raises `TransportError`."""
        ...

    async def linked(self, stages: Sequence[int]) -> bool:
        """Whether the links to these stages and to the driver are up; if not, the driver has been told."""
        ...

    async def to_guard(
        self, guard: PeerId, addresses: Sequence[str], message: wire.Snapshot, tensors: Sequence[HostTensor]
    ) -> None:
        """Raises `TransportError`, `RefusedError`, `TrustError`."""
        ...

    def unguarded(self, guard: PeerId, reason: str) -> None:
        """Snapshots do not reach the guard, again and again."""
        ...

    async def snapshot(self, stage: int, step: int) -> Mapping[str, HostTensor]:
        """The entries of a snapshot, once it is whole here. The caller must not change them."""
        ...
