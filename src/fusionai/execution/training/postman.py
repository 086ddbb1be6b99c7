"""Interface through which a stage runtime sends messages.

`execution.training.member` implements it; `execution.training.runtime` and `execution.training.work` send through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


class Postman(Protocol):
    """Sends a runtime's messages. Methods report lost links instead of raising, except where they say otherwise."""

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None: ...

    def to_driver(self, message: wire.Message) -> None: ...

    def failed(self, stage: int, fence: Fence, code: wire.RefusalCode, reason: str) -> None: ...

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None: ...

    async def state(self, message: wire.StateChunk | wire.Difference, tensors: Sequence[HostTensor]) -> None:
        """Send on the driver's state connection. Raises `TransportError`."""
        ...

    async def linked(self, stages: Sequence[int]) -> bool:
        """Wait for the links to these stages and the driver; return whether all are up. Reports a missing one
        itself."""
        ...

    async def to_guard(
        self, guard: PeerId, addresses: Sequence[str], message: wire.Snapshot, tensors: Sequence[HostTensor]
    ) -> None:
        """Send part of a snapshot to a guard. Raises `TransportError`, `RefusedError`, `TrustError`."""
        ...

    def unguarded(self, guard: PeerId, reason: str) -> None:
        """Report that consecutive snapshots did not reach the guard."""
        ...

    async def snapshot(self, stage: int, step: int) -> Mapping[str, HostTensor]:
        """Wait until the snapshot is complete here and return its entries, which the caller must not change."""
        ...
