"""Storage of optimizer state and offloaded weights between uses: in device memory, in a file, or in host memory.

From a file, a step reads and writes state piece by piece, so it never needs more memory than one piece. It uses plain
reads and writes, not a mapping: mapped pages count towards the process's memory, and a limit on its address space would
limit the file. The file has no name, so the system removes it with the process. A step does not wait for the disk; the
system writes the pages when it chooses. The design is ZeRO-Infinity's NVMe offload (S. Rajbhandari et al., 2021, arXiv
2104.07857) for one stage, without overlap.

Neighbours: `optimizers` computes with it, `offloaded_weights` reads blocks from it, `program` chooses the storage.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, Protocol, cast

import torch

from fusionai.backends.torch.host import DTYPES
from fusionai.primitives.environment import scratch_directory
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.primitives.units import format_bytes

Layout = Mapping[tuple[str, str], tuple[str, tuple[int, ...]]]
"""(key, slot) -> (dtype, shape)."""


_ELSEWHERE: Final = "Free space there, or set TMPDIR to a directory on another disk."


class OptimizerSlots(Protocol):
    """Tensors by (parameter key, slot). Offsets count elements, row-major."""

    def holds(self, key: str, slot: str) -> bool:
        """Return whether the slot was written."""
        ...

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        """Return the whole slot; None if it was not written. In memory it is the tensor itself, not a copy."""
        ...

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        """Write the whole slot; the caller must not use `value` afterwards."""
        ...

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a written slot. Changes to them are lost unless `keep` is called."""
        ...

    def keep(self, key: str, slot: str, start: int, value: torch.Tensor) -> None: ...

    def clear(self) -> None: ...

    @property
    def resident_bytes(self) -> int:
        """Bytes on the parameters' device."""
        ...


class Shelf(OptimizerSlots, Protocol):
    """Slots stored elsewhere than the parameters."""

    def fill(self, key: str, slot: str, into: torch.Tensor) -> None:
        """Copy the whole slot, as it was written, into `into`: flat uint8 on the parameters' device."""
        ...


class MemorySlots:
    """Slots in memory, on the parameters' device."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], torch.Tensor] = {}

    def holds(self, key: str, slot: str) -> bool:
        return (key, slot) in self._held

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        return self._held.get((key, slot))

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        self._held[key, slot] = value

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        return self._held[key, slot].view(-1)[start:stop]

    def keep(self, key: str, slot: str, start: int, value: torch.Tensor) -> None:
        place = self._held[key, slot].view(-1)[start : start + value.numel()]
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)

    def clear(self) -> None:
        self._held.clear()

    @property
    def resident_bytes(self) -> int:
        return sum(value.untyped_storage().nbytes() for value in self._held.values())


class HostSlots(MemorySlots):
    """Slots in host memory whose values are used on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        held = super().read(key, slot)
        return None if held is None else held.to(self._device, copy=True)

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        super().write(key, slot, value.detach().to("cpu", copy=True).contiguous())

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        return super().piece(key, slot, start, stop).to(self._device, copy=True)

    def fill(self, key: str, slot: str, into: torch.Tensor) -> None:
        into.copy_(self._held[key, slot].view(-1).view(torch.uint8))

    @property
    def resident_bytes(self) -> int:
        return 0


class DiskSlots:
    """Slots in an unnamed file under `directory`. The file's space is allocated at once, so a disk that is too small
    raises `ExecutionError` before the first step, not during one. `what`: what error messages call the content."""

    def __init__(
        self, layout: Layout, directory: Path | None, device: torch.device, what: str = "optimizer state"
    ) -> None:
        self._layout = dict(layout)
        self._device = device
        self._what = what
        self._offsets: dict[tuple[str, str], int] = {}
        self._written: set[tuple[str, str]] = set()
        end = 0
        for name, (dtype, shape) in self._layout.items():
            self._offsets[name] = end
            end += tensor_bytes(dtype, shape)
        where = scratch_directory() if directory is None else directory
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
            if end and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, end)
        except OSError as error:
            raise ExecutionError(
                f"no room for {format_bytes(end)} of {what} under {where}: {error.strerror}.", hint=_ELSEWHERE
            ) from error

    def holds(self, key: str, slot: str) -> bool:
        return (key, slot) in self._written

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        if (key, slot) not in self._written:
            return None
        dtype, shape = self._layout[key, slot]
        count = tensor_bytes(dtype, shape) // DTYPES[dtype].itemsize
        return self.piece(key, slot, 0, count).reshape(shape)

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        self.keep(key, slot, 0, value)
        self._written.add((key, slot))

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        dtype = DTYPES[self._layout[key, slot][0]]
        found = torch.empty(stop - start, dtype=dtype)
        place = self._offsets[key, slot] + start * dtype.itemsize
        self._read(key, place, found.view(torch.uint8).numpy().data)
        return found.to(self._device)

    def fill(self, key: str, slot: str, into: torch.Tensor) -> None:
        # Not through numpy: torch refuses to empty a storage that was lent to it.
        memory = (ctypes.c_ubyte * into.numel()).from_address(into.data_ptr())
        self._read(key, self._offsets[key, slot], memoryview(memory).cast("B"))

    def _read(self, key: str, place: int, into: memoryview) -> None:
        self._file.seek(place)
        if _filled(self._file, into) != len(into):
            raise ExecutionError(f"{self._what} of {key!r} can't be read back completely from its file.")

    def keep(self, key: str, slot: str, start: int, value: torch.Tensor) -> None:
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


def _filled(file: IO[bytes], into: memoryview) -> int:
    """Read into `into` until it is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(into):
        got = cast(io.FileIO, file).readinto(into[done:])
        if not got:
            break
        done += got
    return done
