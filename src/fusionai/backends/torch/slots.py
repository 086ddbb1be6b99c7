"""Where optimizer state and weights lie between two uses: with the parameters, in a file of their own, or in the host's
memory beside an accelerator. Decides nothing about their values.

In a file, a step reads and writes state piece by piece, so that it never takes more memory than a piece. Plain reads
and writes, no mapping: mapped pages count as the process's own, and a limit on its address space as one on the file.
It has no name: the system removes it with the process. After a step nothing waits for the disk; the pages not yet
written are the system's to keep or to put away. As ZeRO-Infinity's NVMe offload (S. Rajbhandari et al., 2021, arXiv
2104.07857), for one stage and without overlap.

Neighbours: `optimizers` computes with it, `weights_away` has blocks read from it, `program` chooses.
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


class Slots(Protocol):
    """Tensors by (parameter key, slot). Pieces count elements, row-major."""

    def holds(self, key: str, slot: str) -> bool:
        """Whether it was written."""
        ...

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        """The whole, None where nothing was written. In memory it is the tensor itself, not a copy."""
        ...

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        """The whole; `value` is nobody else's from then on."""
        ...

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of what has been written; `keep` makes what was changed in it lasting."""
        ...

    def keep(self, key: str, slot: str, start: int, value: torch.Tensor) -> None: ...

    def clear(self) -> None: ...

    @property
    def resident_bytes(self) -> int:
        """On the parameters' device."""
        ...


class Shelf(Slots, Protocol):
    """Slots that lie elsewhere than the parameters."""

    def fill(self, key: str, slot: str, into: torch.Tensor) -> None:
        """Copy the whole, as it was written, into `into`: flat uint8 on the parameters' device."""
        ...


class MemorySlots:
    """In memory, on the parameters' device."""

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


class HostSlots:
    """In the host's memory, computed with on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._held: dict[tuple[str, str], torch.Tensor] = {}
        self._device = device

    def holds(self, key: str, slot: str) -> bool:
        return (key, slot) in self._held

    def read(self, key: str, slot: str) -> torch.Tensor | None:
        held = self._held.get((key, slot))
        return None if held is None else held.to(self._device, copy=True)

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        self._held[key, slot] = value.detach().to("cpu", copy=True).contiguous()

    def piece(self, key: str, slot: str, start: int, stop: int) -> torch.Tensor:
        return self._held[key, slot].view(-1)[start:stop].to(self._device, copy=True)

    def keep(self, key: str, slot: str, start: int, value: torch.Tensor) -> None:
        self._held[key, slot].view(-1)[start : start + value.numel()].copy_(value)

    def fill(self, key: str, slot: str, into: torch.Tensor) -> None:
        into.copy_(self._held[key, slot].view(-1).view(torch.uint8))

    def clear(self) -> None:
        self._held.clear()

    @property
    def resident_bytes(self) -> int:
        return 0


class DiskSlots:
    """In an unnamed file under `directory`, whose room is taken at once: a disk that is too small is an
    `ExecutionError` before the first step, not in the middle of one. `what` an error calls that which lies there."""

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
        # Not by way of numpy: torch lets no storage that was lent to it be emptied again.
        memory = (ctypes.c_ubyte * into.numel()).from_address(into.data_ptr())
        self._read(key, self._offsets[key, slot], memoryview(memory).cast("B"))

    def _read(self, key: str, place: int, into: memoryview) -> None:
        self._file.seek(place)
        if _filled(self._file, into) != len(into):
            raise ExecutionError(f"{self._what} of {key!r} can't be read back whole from its file.")

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
    """Bytes read into `into`: all of them, or what there was."""
    done = 0
    while done < len(into):
        got = cast(io.FileIO, file).readinto(into[done:])
        if not got:
            break
        done += got
    return done
