"""Counts the memory that tensors take on a device, and its peak: by storages on a processor, by statistics on a card.

A processor's allocator keeps no figures, so every operator's results are watched until they are freed. What a kernel
takes inside and what tensors share with other memory (inputs of a stage on a processor) is not seen there.

Neighbours: `self_test` compares the peak with the estimate of `compiled_stage`, which counts tensors without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class LiveBytes:
    """Bytes of the tensors that were made since the count began, now and at most."""

    now_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def counted_memory(device: torch.device) -> Generator[LiveBytes]:
    """Count the memory of tensors made on `device`. On a card the figures are there when the block ends. Raises
    `NotImplementedError` on Apple's devices, which keep no peak."""
    match device.type:
        case "cpu" | "meta":
            storages = _Storages()
            with WatchedStorages(device.type, storages.see):
                yield storages.count
        case "cuda":
            torch.cuda.synchronize(device)
            before_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            count = LiveBytes()
            yield count
            torch.cuda.synchronize(device)
            count.now_bytes = torch.cuda.memory_allocated(device) - before_bytes
            count.peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
        case _:
            raise NotImplementedError(f"{device} keeps no peak of its memory")


class WatchedStorages(TorchDispatchMode):
    """Shows every storage that operators make on a kind of device, also those that live inside one operator only.
    `see`: gets the storage and its operator; may get a storage several times."""

    def __init__(self, kind: str, see: Callable[[torch.UntypedStorage, object], None]) -> None:
        super().__init__()
        self._kind = kind
        self._see = see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Hide nothing from torch's compiler, which is not used: hiding would load it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor) and value.device.type == self._kind:
                self._see(value.untyped_storage(), func)
        return made


class _Storages:
    """Counts storages until they are freed."""

    def __init__(self) -> None:
        self.count = LiveBytes()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, storage: torch.UntypedStorage, by: object) -> None:
        del by
        address, nbytes, count = storage._cdata, storage.nbytes(), self.count
        if address in self._made:
            return

        def free(_: object) -> None:
            if self._made.pop(address, None) is not None:
                count.now_bytes -= nbytes

        self._made[address] = weakref.ref(storage, free)
        count.now_bytes += nbytes
        count.peak_bytes = max(count.peak_bytes, count.now_bytes)
