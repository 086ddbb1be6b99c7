"""A stretch of a file, mapped or read. Decides nothing: whoever names the stretch answers for it.

Mapped for loading, because a tensor's memory is then the file's; read for serving pieces to others, because touched
pages of a mapping count as this process's memory and a file cut short under a mapping kills the process.
Neighbours: `weight_store` and `weight_manifest` give tensors and pieces through this.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors


@dataclass(frozen=True, slots=True)
class Stretch:
    """`nbytes` of `path` from `offset` on."""

    path: Path
    offset: int
    nbytes: int

    def mapped(self) -> memoryview:
        """Read-only; the mapping lives as long as the view. Raises `StorageError`, also when the file is shorter."""
        if self.nbytes == 0:
            return memoryview(b"")
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        with storage_errors(self.path, "read"), self.path.open("rb") as handle:
            try:
                whole = mmap.mmap(
                    handle.fileno(), before + self.nbytes, access=mmap.ACCESS_READ, offset=self.offset - before
                )
            except ValueError:  # longer than the file
                raise self._short() from None
        return memoryview(whole)[before:]

    def read(self, first: int, nbytes: int) -> bytes:
        """`nbytes` from `first` on, counted within the stretch. Raises `StorageError`."""
        if not 0 <= first <= first + nbytes <= self.nbytes:
            raise ValueError(f"[{first}, {first + nbytes}) is not within {self.nbytes} bytes of {self.path}")
        with storage_errors(self.path, "read"), self.path.open("rb", buffering=0) as handle:
            handle.seek(self.offset + first)
            parts: list[bytes] = []
            while nbytes > 0:
                part = handle.read(nbytes)
                if not part:
                    raise self._short()
                parts.append(part)
                nbytes -= len(part)
        return b"".join(parts)

    def _short(self) -> StorageError:
        return StorageError(f"{self.path} is damaged: it ends within the {self.nbytes} bytes at {self.offset}.")


class Stretches:
    """Stretches of files one behind the other, as one: parts of several tensors that are one tensor."""

    def __init__(self, parts: tuple[Stretch, ...]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.nbytes for part in parts))
        self.nbytes = self._ends[-1] if parts else 0

    def mapped(self) -> memoryview:
        """Read-only, copied where they are several. Raises `StorageError`."""
        if len(self._parts) == 1:
            return self._parts[0].mapped()
        buffer = memoryview(bytearray(self.nbytes))
        for part, end in zip(self._parts, self._ends, strict=True):
            buffer[end - part.nbytes : end] = part.mapped()
        return buffer.toreadonly()

    def read(self, first: int, nbytes: int) -> bytes:
        """As `Stretch.read`."""
        if not 0 <= first <= first + nbytes <= self.nbytes:
            raise ValueError(f"[{first}, {first + nbytes}) is not within {self.nbytes} bytes")
        read: list[bytes] = []
        number = bisect_right(self._ends, first)
        while nbytes > 0:
            part = self._parts[number]
            within = first - (self._ends[number] - part.nbytes)
            count = min(nbytes, part.nbytes - within)
            read.append(part.read(within, count))
            first, nbytes, number = first + count, nbytes - count, number + 1
        return b"".join(read)
