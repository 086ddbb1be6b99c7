"""Reads and writes safetensors files without a framework. Decides the byte layout and its checks.

Format: https://huggingface.co/docs/safetensors/index#format. bfloat16 is kept as raw bits. Headers are not trusted:
sizes are checked against the file before a tensor is read. `checkpoint` writes and reads shards, `weights` reads model
directories of other programs.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.storage.atomic import storage_errors, write_synced

MAX_HEADER_BYTES: Final = 100_000_000
"""Upper limit on the header's size, the same as in the reference implementation."""
_ALIGNMENT_BYTES: Final = 8
_CODE: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_RAW: Final = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
"""Types of quantised files, which are read as bytes."""
_DTYPE: Final = {**{code: dtype for dtype, code in _CODE.items()}, **dict.fromkeys(_RAW, "uint8")}
_METADATA: Final = "__metadata__"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=16)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


_METADATA_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY_DECODER: Final = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, slots=True)
class Written:
    """Hash and size of a written file."""

    sha256: str
    size_bytes: int


def write_safetensors(path: Path, tensors: Mapping[str, HostTensor]) -> Written:
    """Write a new file with the tensors sorted by name. Durable on return. Raises `StorageError`."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        end = offset + tensor.nbytes
        header[name] = {"dtype": _CODE[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    digest = hashlib.sha256()

    def parts() -> Iterator[bytes | memoryview]:
        for part in (len(text).to_bytes(8, "little"), text, *(tensors[name].data for name in sorted(tensors))):
            digest.update(part)
            yield part

    with storage_errors(path):
        write_synced(path, parts())
    return Written(digest.hexdigest(), 8 + len(text) + offset)


class SafetensorsFile:
    """Names and tensors of a file. A tensor's memory is the mapped file, read on access. The mapping lives as long as
    any tensor of it."""

    def __init__(self, path: Path) -> None:
        """Raises `StorageError` if the header does not match the file."""
        self._path = path
        with storage_errors(path, "read"), path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise self._damaged(f"its header of {length} bytes does not fit a file of {size}")
            text = handle.read(length)
            self._map = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        self._start = 8 + length
        self._entries = self._parsed(text, size - self._start)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._entries))

    def read(self, name: str) -> HostTensor:
        """Return a tensor without copying. Raises `StorageError` for an unknown name."""
        entry = self._entries.get(name)
        if entry is None:
            raise StorageError(f"{self._path}: no tensor {name!r}.")
        first, end = entry.data_offsets
        return host_tensor(_DTYPE[entry.dtype], entry.shape, self._map[self._start + first : self._start + end])

    def span(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        """Return (dtype, shape, offset in the file, bytes), for readers that must not map. Raises `StorageError`."""
        tensor = self.read(name)
        return tensor.dtype, tensor.shape, self._start + self._entries[name].data_offsets[0], tensor.nbytes

    def raw(self, name: str) -> tuple[str, tuple[int, ...], ByteRange]:
        """Return (dtype, shape, place of the bytes); the dtype may be an 8-bit float. Raises `StorageError`."""
        dtype, shape, offset, nbytes = self.span(name)
        return _RAW.get(self._entries[name].dtype, dtype), shape, ByteRange(self._path, offset, nbytes)

    def __iter__(self) -> Iterator[tuple[str, HostTensor]]:
        return ((name, self.read(name)) for name in self.names)

    def _parsed(self, text: bytes, data_bytes: int) -> dict[str, _Entry]:
        try:
            raw = _METADATA_DECODER.decode(text)
            entries = {name: _ENTRY_DECODER.decode(value) for name, value in raw.items() if name != _METADATA}
        except msgspec.DecodeError as problem:
            raise self._damaged(f"its header can't be decoded ({problem})") from None
        expected = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            first, end = entry.data_offsets
            if entry.dtype not in _DTYPE:
                raise StorageError(f"{self._path}: tensor {name!r} has the unsupported type {entry.dtype!r}.")
            if first != expected or end - first != tensor_bytes(_DTYPE[entry.dtype], entry.shape):
                raise self._damaged(f"tensor {name!r} has offsets that do not match its shape")
            expected = end
        if expected != data_bytes:
            raise self._damaged(f"its tensors take {expected} bytes, but {data_bytes} bytes follow the header")
        return entries

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{self._path} is damaged: {what}.")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The `nbytes` bytes of file `path` that start at `offset`."""

    path: Path
    offset: int
    nbytes: int

    def mapped(self) -> memoryview:
        """Map the range read-only. The mapping lives as long as the view. Raises `StorageError`, also if the file is
        shorter."""
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


class ByteRanges:
    """Consecutive ranges of files that together hold one tensor."""

    def __init__(self, parts: tuple[ByteRange, ...]) -> None:
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


SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class WeightIndex(msgspec.Struct, frozen=True):
    """Content of `model.safetensors.index.json`: tensor name -> file."""

    weight_map: dict[str, str]
    metadata: dict[str, object] = {}
