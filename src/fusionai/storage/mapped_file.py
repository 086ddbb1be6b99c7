"""Byte ranges of files, mapped or read.

Ranges are mapped for loading, because a tensor then uses the file's memory. They are read for sending pieces to others,
because touched pages of a mapping count as this process's memory and truncating a mapped file kills the process.

`weight_store` and `weight_manifest` provide tensors and pieces through this; the caller knows which range holds what.
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
    """The `nbytes` bytes of file `path` that start at `offset`."""

    path: Path
    offset: int
    nbytes: int

    def mapped(self) -> memoryview:
        """Map the range read-only.

        The mapping lives as long as the view. Raises `StorageError`, also if the file is shorter.
        """
        if self.nbytes == 0:
            return memoryview(b"")
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        with storage_errors(self.path, "read"), self.path.open("rb") as handle:
            try:
                whole = mmap.mmap(
                    handle.fileno(), before + self.nbytes, access=mmap.ACCESS_READ, offset=self.offset - before
                )
            except ValueError:  # the file is shorter than the range
                raise self._short() from None
        return memoryview(whole)[before:]

    def read(self, first: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from position `first` of the range. Raises `StorageError`."""
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
    """Consecutive ranges of files that together hold one tensor."""

    def __init__(self, parts: tuple[Stretch, ...]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.nbytes for part in parts))
        self.nbytes = self._ends[-1] if parts else 0

    def mapped(self) -> memoryview:
        """Return the bytes read-only; copied if there are several ranges. Raises `StorageError`."""
        if len(self._parts) == 1:
            return self._parts[0].mapped()
        buffer = memoryview(bytearray(self.nbytes))
        for part, end in zip(self._parts, self._ends, strict=True):
            buffer[end - part.nbytes : end] = part.mapped()
        return buffer.toreadonly()

    def read(self, first: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from position `first` of the joined ranges. Raises `StorageError`."""
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
