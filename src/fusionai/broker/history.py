"""The history of a pool, and its plain copy: the mirror, an append-only file of frames.

A history is a *base* (the pool folded up to some row, or nothing) and the rows after it. Each row carries a hash over
its content and the previous row's hash; each base carries a seal over its content. Every piece can therefore be checked
wherever it was found, and one history can be assembled from two damaged copies. If a copy shows that it once had rows
that no copy has now (`newest`), the history is refused.

    frame    magic 4, kind 1, length 4, CRC-32 4 (little-endian), payload (msgpack)
    base     the first frame: [format, pool, sequence, chain, state, seal]
    rows     what one `append` wrote: [[sequence, term, fact, chain], ...]

A frame is read completely or not at all. The mirror shares no code and no file with SQLite, so that damage to one copy
leaves the other intact. It is small, because compaction starts it anew, and is read as a whole. `table` is the other
copy; `journal` writes both and repairs one from the other.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from fusionai.primitives.errors import FusionError, StorageError
from fusionai.storage.atomic import storage_errors, sync_directory

MIRROR_FORMAT: Final = 1
MIRROR_SUFFIX: Final = ".mirror"
_MAGIC: Final = b"FJM\x1a"
_HEAD: Final = struct.Struct("<4sBII")
_BASE: Final = 0
_ROWS: Final = 1


class IncompleteHistory(FusionError):
    """Row `expected` is intact in no copy, although it or a later row was written."""

    def __init__(self, expected: int, newest: int) -> None:
        super().__init__(f"expected rows up to {newest}, found none that follows row {expected - 1}.")
        self.expected = expected
        self.newest = newest


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One fact as bytes. `chain` is the hash over everything up to and including this row."""

    sequence: int
    term: int
    fact: bytes
    chain: bytes


class Base(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The pool after the rows up to `sequence`. `state`: the encoded pool, empty for a new pool."""

    sequence: int
    chain: bytes
    state: bytes
    seal: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Content that could be read from one file, unchecked."""

    bases: tuple[Base, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict[int, Row])
    newest: int = 0
    """Number of the last row that the file had, as far as it can be determined."""
    present: bool = True


@dataclass(frozen=True, slots=True)
class PoolHistory:
    base: Base
    rows: tuple[Row, ...]

    @property
    def sequence(self) -> int:
        return self.rows[-1].sequence if self.rows else self.base.sequence

    @property
    def chain(self) -> bytes:
        return self.rows[-1].chain if self.rows else self.base.chain

    @property
    def term(self) -> int:
        """Last term in which a row was written."""
        return max((row.term for row in self.rows), default=0)


def merge(pool: str, copies: Sequence[Copy]) -> PoolHistory:
    """Return the longest history that the copies prove. Raises `IncompleteHistory` if one of them had later rows."""
    sound = [base for copy in copies for base in copy.bases if base.seal == _seal(pool, base)]
    base = max(sound, key=lambda one: one.sequence, default=origin(pool))
    rows: list[Row] = []
    last, chain = base.sequence, base.chain
    while (row := _next(copies, last, chain)) is not None:
        rows.append(row)
        last, chain = row.sequence, row.chain
    newest = max((copy.newest for copy in copies), default=0)
    if newest > last:
        raise IncompleteHistory(last + 1, newest)
    return PoolHistory(base, tuple(rows))


def origin(pool: str) -> Base:
    """Return the base before the first fact."""
    return make_base(pool, 0, hashlib.sha256(b"fusionai journal\0" + pool.encode()).digest(), b"")


def make_base(pool: str, sequence: int, chain: bytes, state: bytes) -> Base:
    unsealed = Base(sequence, chain, state, b"")
    return Base(sequence, chain, state, _seal(pool, unsealed))


def make_row(chain: bytes, sequence: int, term: int, fact: bytes) -> Row:
    """Return the row. `chain`: hash of the previous row."""
    return Row(sequence, term, fact, _link(chain, sequence, term, fact))


def _next(copies: Sequence[Copy], last: int, chain: bytes) -> Row | None:
    for copy in copies:
        row = copy.rows.get(last + 1)
        if row is not None and row.chain == _link(chain, row.sequence, row.term, row.fact):
            return row
    return None


def _link(chain: bytes, sequence: int, term: int, fact: bytes) -> bytes:
    return hashlib.sha256(chain + _number(sequence) + _number(term) + fact).digest()


def _seal(pool: str, base: Base) -> bytes:
    name = pool.encode()
    head = b"fusionai base\0" + _number(len(name)) + name + _number(base.sequence) + _number(len(base.chain))
    return hashlib.sha256(head + base.chain + base.state).digest()


def _number(value: int) -> bytes:
    """Encode any integer, because damaged files may hold any. Only those in range can match a valid hash."""
    return value.to_bytes(8, "little") if 0 <= value < 2**64 else repr(value).encode()


class _BaseFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    pool: str
    sequence: int
    chain: bytes
    state: bytes
    seal: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorCopy(Copy):
    """`pool` and `format` are None where no base frame could be read."""

    pool: str | None = None
    format: int | None = None
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
            self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            self._size = self._earlier = os.fstat(self._descriptor).st_size

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows to disk. Raises `OSError`; `cut_back` then removes the partial write."""
        frame = _frame(_ROWS, rows)
        os.lseek(self._descriptor, self._size, os.SEEK_SET)
        done = 0
        while done < len(frame):
            done += os.write(self._descriptor, frame[done:])
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
    data = _frame(_BASE, _BaseFrame(MIRROR_FORMAT, pool, base.sequence, base.chain, base.state, base.seal))
    if history.rows:
        data += _frame(_ROWS, history.rows)
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


def read_mirror(path: Path) -> MirrorCopy:
    """Read all intact frames, at any position in the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return MirrorCopy(present=False)
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
                found = msgspec.msgpack.decode(payload, type=list[Row])
                rows |= {one.sequence: one for one in found}
                last_append, last_row = found[0].sequence, found[-1].sequence
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            gaps = True
    torn = end < len(data) and _unfinished(data[end:])
    first = bases[0] if bases else None
    return MirrorCopy(
        bases=tuple(Base(one.sequence, one.chain, one.state, one.seal) for one in bases),
        rows=rows,
        newest=max([*rows, *(one.sequence for one in bases)], default=0),
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
