"""The journal's second copy: an append-only file of frames, and how a damaged one is read.

    frame    magic 4, kind 1, length 4, CRC-32 4 (little-endian), payload (msgpack)
    base     the first frame: [format, pool, sequence, chain, state, seal]
    rows     what one `append` wrote: [[sequence, term, fact, chain], ...]

A frame is read completely or not at all. The mirror shares no code and no file with SQLite, so that damage to one copy
leaves the other intact. The file is small, because compaction starts it anew, and is read as a whole. `history` decides
which rows are true; `journal` writes both copies and repairs one from the other.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fusionai.broker.history import Base, Copy, PoolHistory, Row
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, sync_directory

FORMAT: Final = 1
SUFFIX: Final = ".mirror"
_MAGIC: Final = b"FJM\x1a"
_HEAD: Final = struct.Struct("<4sBII")
_BASE: Final = 0
_ROWS: Final = 1


class _BaseFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    pool: str
    sequence: int
    chain: bytes
    state: bytes
    seal: bytes


class _RowFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sequence: int
    term: int
    fact: bytes
    chain: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReading:
    """`pool` and `format` are None where no base frame could be read."""

    copy: Copy
    pool: str | None = None
    format: int | None = None
    present: bool = True
    damaged: bool = False
    """Part of the file is not as it was written. An unfinished last frame does not count."""
    torn: bool = False
    """The last frame is unfinished."""
    last_append: int = 0
    """First row of the last frame, whose rows may not have been acknowledged."""
    last_row: int = 0
    """Last row according to the last frame; 0 if the file does not end with a complete frame."""


class Mirror:
    """The file opened for appending, after `replace_mirror` or a reading without damage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path):
            self._descriptor = os.open(path, os.O_RDWR)
            self._size = self._earlier = os.fstat(self._descriptor).st_size

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows to disk. Raises `OSError`; `cut_back` then removes the partial write."""
        frame = _frame(_ROWS, [_RowFrame(row.sequence, row.term, row.fact, row.chain) for row in rows])
        done = 0
        while done < len(frame):
            done += os.pwrite(self._descriptor, frame[done:], self._size + done)
        os.fsync(self._descriptor)
        self._earlier = self._size
        self._size += len(frame)

    def take_back(self) -> None:
        """Undo the last `append`. Raises `OSError`."""
        self._size = self._earlier
        self.cut_back()

    def cut_back(self) -> None:
        """Remove the partial write of a failed `append`. Raises `OSError`."""
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def replace_mirror(path: Path, pool: str, history: PoolHistory) -> Mirror:
    """Write the file anew, atomically. Raises `StorageError` and leaves the old file unchanged."""
    base = history.base
    data = _frame(_BASE, _BaseFrame(FORMAT, pool, base.sequence, base.chain, base.state, base.seal))
    if history.rows:
        data += _frame(_ROWS, [_RowFrame(row.sequence, row.term, row.fact, row.chain) for row in history.rows])
    partial = path.with_name(path.name + ".partial")
    with storage_errors(path):
        try:
            descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    return Mirror(path)


def read_mirror(path: Path) -> MirrorReading:
    """Read all intact frames, at any position in the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return MirrorReading(copy=Copy(), present=False)
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror}.") from error
    bases: list[_BaseFrame] = []
    rows: dict[int, Row] = {}
    last_append = last_row = end = 0
    gaps = False
    for start, stop, kind, payload in _frames(data):
        gaps = gaps or start != end or (start == 0) != (kind == _BASE)
        end = stop
        try:
            if kind == _BASE:
                bases.append(msgspec.msgpack.decode(payload, type=_BaseFrame))
                last_row = bases[-1].sequence
            else:
                found = msgspec.msgpack.decode(payload, type=list[_RowFrame])
                rows |= {one.sequence: Row(one.sequence, one.term, one.fact, one.chain) for one in found}
                last_append, last_row = found[0].sequence, found[-1].sequence
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            gaps = True
    torn = end < len(data) and _unfinished(data[end:])
    first = bases[0] if bases else None
    return MirrorReading(
        copy=Copy(
            bases=tuple(Base(one.sequence, one.chain, one.state, one.seal) for one in bases),
            rows=rows,
            newest=max([*rows, *(one.sequence for one in bases)], default=0),
        ),
        pool=None if first is None else first.pool,
        format=None if first is None else first.format,
        damaged=gaps or first is None or (end < len(data) and not torn),
        torn=torn,
        last_append=last_append,
        last_row=last_row if end == len(data) else 0,
    )


def _frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (start, stop, kind, payload) of every frame with a valid checksum. Other bytes are skipped."""
    position = data.find(_MAGIC)
    while position >= 0:
        stop = position + 1
        if position + _HEAD.size <= len(data):
            _, kind, length, crc = _HEAD.unpack_from(data, position)
            payload = data[position + _HEAD.size : position + _HEAD.size + length]
            if len(payload) == length and kind in (_BASE, _ROWS) and crc == _checksum(kind, payload):
                stop = position + _HEAD.size + length
                yield position, stop, kind, payload
        position = data.find(_MAGIC, stop)


def _unfinished(rest: bytes) -> bool:
    """Return whether the bytes can be the beginning of a frame, from an interrupted write."""
    if not _MAGIC.startswith(rest[: len(_MAGIC)]):
        return False
    return len(rest) < _HEAD.size or len(rest) < _HEAD.size + _HEAD.unpack_from(rest)[2]


def _frame(kind: int, content: object) -> bytes:
    payload = msgspec.msgpack.encode(content)
    return _HEAD.pack(_MAGIC, kind, len(payload), _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, kind)
