"""Storage of optimizer state and of offloaded weights between uses: in device memory, in a file, or in host memory.

From a file, a step reads and writes state piece by piece, so it never needs more memory than one piece. It uses plain
reads and writes, not a mapping: mapped pages count towards the process's memory, and a limit on its address space would
limit the file. The file has no name, so the system removes it with the process. A step does not wait for the disk; the
system writes the pages when it chooses. The design is ZeRO-Infinity's NVMe offload (S. Rajbhandari et al., 2021, arXiv
2104.07857) for one stage, without overlap, because that would need two segments' weights in memory.

Only the weights of one segment are in memory at a time. A parameter remains one tensor, so that autograd sums into its
`.grad` as usual; between uses its storage is empty, as in fully sharded training (Y. Zhao et al., 2023, arXiv
2304.11277). With recomputed activations, autograd keeps only numbers, and the weights are loaded again with the
segment. Neighbours: `optimizers` computes with the state, `recomputation` says when a segment is entered, `program`
chooses the storage.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Collection, Mapping
from typing import IO, Final, cast

import torch
from torch import Tensor

from fusionai.backends.state import StateEntry
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.recomputation import RecomputedSegment
from fusionai.primitives.environment import scratch_directory
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.primitives.units import format_bytes

WEIGHT: Final = "weight"
"""Slot of a parameter itself if it is offloaded too."""
Layout = Mapping[tuple[str, str], tuple[str, tuple[int, ...]]]
"""(key, slot) -> (dtype, shape)."""


_ELSEWHERE: Final = "Free space there, or set TMPDIR to a directory on another disk."


class MemorySlots:
    """Tensors by (parameter key, slot), in memory on the parameters' device. Offsets count elements, row-major."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def holds(self, key: str, slot: str) -> bool:
        """Return whether the slot was written."""
        return (key, slot) in self._held

    def read(self, key: str, slot: str) -> Tensor | None:
        """Return the whole slot; None if it was not written. In memory it is the tensor itself, not a copy."""
        return self._held.get((key, slot))

    def write(self, key: str, slot: str, value: Tensor) -> None:
        """Write the whole slot; the caller must not use `value` afterwards."""
        self._held[key, slot] = value

    def piece(self, key: str, slot: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a written slot. Changes to them are lost unless `keep` is called."""
        return self._held[key, slot].view(-1)[start:stop]

    def keep(self, key: str, slot: str, start: int, value: Tensor) -> None:
        place = self._held[key, slot].view(-1)[start : start + value.numel()]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)

    def clear(self) -> None:
        self._held.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes on the parameters' device."""
        return sum(value.untyped_storage().nbytes() for value in self._held.values())


class HostSlots(MemorySlots):
    """Slots in host memory whose values are used on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def read(self, key: str, slot: str) -> Tensor | None:
        held = super().read(key, slot)
        return None if held is None else held.to(self._device, copy=True)

    def write(self, key: str, slot: str, value: Tensor) -> None:
        super().write(key, slot, value.detach().to("cpu", copy=True).contiguous())

    def piece(self, key: str, slot: str, start: int, stop: int) -> Tensor:
        return super().piece(key, slot, start, stop).to(self._device, copy=True)

    def fill(self, key: str, slot: str, into: Tensor) -> None:
        """Copy the whole slot, as it was written, into `into`: flat uint8 on the parameters' device."""
        into.copy_(self._held[key, slot].view(-1).view(torch.uint8))

    @property
    def resident_bytes(self) -> int:
        return 0


class DiskSlots:
    """Slots in an unnamed file in the scratch directory. The file's space is allocated at once, so a disk that is too
    small raises `ExecutionError` before the first step, not during one. `what`: what error messages call the
    content."""

    def __init__(self, layout: Layout, device: torch.device, what: str = "optimizer state") -> None:
        self._layout = dict(layout)
        self._device = device
        self._what = what
        self._offsets: dict[tuple[str, str], int] = {}
        self._written: set[tuple[str, str]] = set()
        end = 0
        for name, (dtype, shape) in self._layout.items():
            self._offsets[name] = end
            end += tensor_bytes(dtype, shape)
        where = scratch_directory()
        try:
            free_bytes = shutil.disk_usage(where).free
            if end > free_bytes:
                raise ExecutionError(
                    f"the file of a stage's {what} takes {format_bytes(end)} under {where}, where "
                    f"{format_bytes(free_bytes)} are free: {format_bytes(end - free_bytes)} are missing.",
                    hint=_ELSEWHERE,
                )
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - open while the stage is loaded
            weakref.finalize(self, self._file.close)
            if end and sys.platform == "linux":
                os.posix_fallocate(self._file.fileno(), 0, end)
        except OSError as error:
            raise ExecutionError(
                f"no room for {format_bytes(end)} of {what} under {where}: {error.strerror}.", hint=_ELSEWHERE
            ) from error

    def holds(self, key: str, slot: str) -> bool:
        return (key, slot) in self._written

    def read(self, key: str, slot: str) -> Tensor | None:
        if (key, slot) not in self._written:
            return None
        dtype, shape = self._layout[key, slot]
        count = tensor_bytes(dtype, shape) // DTYPES[dtype].itemsize
        return self.piece(key, slot, 0, count).reshape(shape)

    def write(self, key: str, slot: str, value: Tensor) -> None:
        self.keep(key, slot, 0, value)
        self._written.add((key, slot))

    def piece(self, key: str, slot: str, start: int, stop: int) -> Tensor:
        dtype = DTYPES[self._layout[key, slot][0]]
        found = torch.empty(stop - start, dtype=dtype)
        place = self._offsets[key, slot] + start * dtype.itemsize
        self._read(key, place, found.view(torch.uint8).numpy().data)
        return found.to(self._device)

    def fill(self, key: str, slot: str, into: Tensor) -> None:
        # Not through numpy: torch refuses to empty a storage that was lent to it.
        memory = (ctypes.c_ubyte * into.numel()).from_address(into.data_ptr())
        self._read(key, self._offsets[key, slot], memoryview(memory).cast("B"))

    def _read(self, key: str, place: int, into: memoryview) -> None:
        self._file.seek(place)
        if _filled(self._file, into) != len(into):
            raise ExecutionError(f"{self._what} of {key!r} can't be read back completely from its file.")

    def keep(self, key: str, slot: str, start: int, value: Tensor) -> None:
        data = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
        place = self._offsets[key, slot] + start * value.element_size()
        try:
            self._file.seek(place)
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise ExecutionError(f"{self._what} can't be written to its file: {error.strerror}.") from error

    def clear(self) -> None:
        self._written.clear()

    @property
    def resident_bytes(self) -> int:
        return 0


OptimizerSlots = MemorySlots | DiskSlots
Shelf = HostSlots | DiskSlots
"""Slots stored elsewhere than the parameters."""


def _filled(file: IO[bytes], into: memoryview) -> int:
    """Read into `into` until it is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(into):
        got = cast(io.FileIO, file).readinto(into[done:])
        if not got:
            break
        done += got
    return done


EMPTIED: Final = frozenset({"cpu", "cuda"})
"""Devices on which torch can empty and refill a tensor's storage."""


class OffloadedWeights:
    """The offloaded parameters of `entries` (which have a shape and no slot), by key."""

    def __init__(self, entries: Mapping[str, StateEntry], device: torch.device) -> None:
        """Raises `ExecutionError` on a device that can't offload weights, or on a disk that is too small."""
        if device.type not in EMPTIED:
            raise ExecutionError(
                f"weights can't be offloaded on {device.type}: torch can't empty a tensor's storage there.",
                hint='Set offload_weights = "never" in the recipe, or let machines with a CPU or CUDA run the job.',
            )
        layout = {(key, WEIGHT): (entry.dtype, entry.shape) for key, entry in entries.items()}
        self.shelf: Shelf = DiskSlots(layout, device, "weights") if device.type == "cpu" else HostSlots(device)
        self._entries = dict(entries)
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._there: frozenset[str] = frozenset()

    @property
    def keys(self) -> Collection[str]:
        return self._entries.keys()

    def tensor(self, key: str, *, trainable: bool) -> Tensor:
        """Return the parameter, empty until a segment that reads it is entered."""
        entry = self._entries[key]
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
        made.untyped_storage().resize_(0)
        self._tensors[key] = made.requires_grad_(trainable)
        return made

    def enter(self, part: RecomputedSegment, *, cast_once: bool = False) -> None:
        """Load the weights of `part` and empty all others. `cast_once`: also drop autocast's copies of earlier
        weights."""
        if cast_once:
            torch.clear_autocast_cache()
        if part.weights == self._there:
            return
        self._empty(self._there - part.weights)
        for key in sorted(part.weights - self._there):
            entry = self._entries[key]
            storage = self._tensors[key].untyped_storage()
            storage.resize_(entry.nbytes)
            if entry.nbytes:
                self.shelf.fill(key, WEIGHT, _bytes_of(storage, self._device))
        self._there = part.weights

    def leave(self) -> None:
        """Empty all weights: called before they get other values."""
        self._empty(self._there)

    def write(self, key: str, value: Tensor) -> None:
        self.leave()
        self.shelf.write(key, WEIGHT, value)

    def read(self, key: str) -> Tensor:
        """Return a copy of a weight that was written."""
        found = self.shelf.read(key, WEIGHT)
        assert found is not None, "the program asks for no value that is not set"
        return found

    @property
    def present_bytes(self) -> int:
        return sum(self._entries[key].nbytes for key in self._there)

    def _empty(self, keys: frozenset[str]) -> None:
        for key in keys:
            self._tensors[key].untyped_storage().resize_(0)
        self._there -= keys


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return the storage as flat uint8, outside autograd."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
