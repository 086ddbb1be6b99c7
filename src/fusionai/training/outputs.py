"""Job outputs that are awaited by microbatch: evaluation losses and inference logits. Used by `training.driver`."""

from __future__ import annotations

import asyncio

from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Mode

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
