"""Sketches of the rows a serving stage received and sent, so that each text can be checked afterwards.

The sketch of a row (one position of a text) consists of `SIZE` random projections: sums of its numbers under signs
drawn from the text's key and the value's name, 64 bytes in float32. For a difference D of two rows X, the distance of
their sketches divided by the length of one is about |D| / |X|, within a factor of 2.5 in all but one of ten thousand
cases. Each text has its own key, so revealing one reveals no other.

A row's sketch has the same bits whatever rows are sketched with it, on every machine: every sum adds a row's numbers
one by one in ascending order, which a matrix product library does not. The product of a sign and a number is exact, so
a fused multiply-add rounds the same as two operations.

When tokens are computed one at a time, making sketches would cost a good part of a pass. Rows therefore wait until
there are `TOGETHER` of them, or until sketches are asked for; then all rows of a text are sketched in one call.

Texts are kept in the order of their last addition; the oldest is dropped when there are too many positions, or no room
in the machine's memory. What has no room even then is not sketched, and can't be checked. A position that is computed
again replaces everything known from there on. The signs of a text take 64 bytes for each number of a row, so that those
of texts without new rows are drawn again when they are needed.

Source: activation fingerprints of DiFR (arXiv 2511.20621). `execution.serving.stage` adds rows,
`execution.serving.verifier` sketches recomputed rows, `serving.checking` compares. `execution.tensors` makes the
sketches of training, which cover whole microbatches."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.execution.serving.boundary import RowSpec
from fusionai.execution.tensors import SIZE, as_array, step_key
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor
from fusionai.scheduling.kernels.compiled import available, compiled
from fusionai.wire.messages import Segment

Sketches = npt.NDArray[np.float32]
"""Shape [rows, SIZE]."""
Rows = npt.NDArray[np.float32]
"""Shape [rows, numbers of a row]."""
TOGETHER: Final = 128
"""Largest number of rows that wait; they are held in memory as they are (chosen)."""

SIGNS_BYTES: Final = 2**25
"""Bytes that the signs of a stage's texts may take (chosen): of 64 texts, for rows of 4,096 numbers."""


def drawing_bytes(specs: Sequence[RowSpec]) -> int:
    """Return the bytes that a `Projection` of these values takes while its signs are drawn."""
    widths = [int(np.prod(spec.row, dtype=np.int64)) for spec in specs]
    return SIZE * (4 * sum(widths) + 2 * max(widths, default=0))


def text_key(secret: bytes, session: int) -> bytes:
    """Return the key for a stage's sketches of this text."""
    return step_key(secret, session)


class Projection:
    """Projects the rows of several values together, under one key."""

    def __init__(self, specs: Sequence[RowSpec], key: bytes) -> None:
        self._signs = {spec.name: _signs_of(spec, key) for spec in specs}

    @property
    def nbytes(self) -> int:
        return sum(drawn.nbytes for drawn in self._signs.values())

    def sketches(self, tensors: Mapping[str, HostTensor]) -> Sketches:
        """Return the sketches of tensors [1, rows, ...], one per value."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.of({name: _rows(tensors[name]) for name in self._signs})

    def of(self, rows: Mapping[str, Rows]) -> Sketches:
        """Return the sketches of these rows of all values. numpy warns of overflow unless the caller suppresses it."""
        first, *others = (_signed_sums(rows[name], drawn) for name, drawn in self._signs.items())
        for part in others:
            first += part
        return first


def _signed_sums(rows: Rows, drawn: npt.NDArray[np.float32]) -> Sketches:
    sums = np.zeros((len(rows), SIZE), np.float32)
    if available():
        # One array type: numba compiles again for arrays that are read-only or not contiguous.
        compiled(signed_sums)(np.require(rows, requirements=["C", "W"]), drawn, sums)
        return sums
    # Same order as the kernel, one number of every row at a time.
    for at, sign in enumerate(drawn):
        sums += rows[:, at, None] * sign
    return sums


def _signs_of(spec: RowSpec, key: bytes) -> npt.NDArray[np.float32]:
    seed = hashlib.blake2b(spec.name.encode(), key=key, digest_size=16, person=b"marks of rows").digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    width = int(np.prod(spec.row, dtype=np.int64))
    count = width * SIZE
    # The values of `execution.tensors.signs`, without its copies: a row may have millions of numbers.
    drawn = np.unpackbits(np.frombuffer(generator.bytes(-(-count // 8)), np.uint8), count=count).astype(np.float32)
    drawn *= 2
    drawn -= 1
    return drawn.reshape(width, SIZE)


def _rows(tensor: HostTensor, *, own: bool = False) -> Rows:
    values = as_array(tensor) if tensor.dtype in FLOAT_DTYPES else np.frombuffer(tensor.data, tensor.dtype)
    return values.reshape(tensor.shape[1], -1).astype(np.float32, copy=own)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive positions from `start`. NaN marks a position whose row did not pass through."""

    start: int
    got: Sketches | None
    gave: Sketches | None
    length: int

    def before(self, position: int) -> _Run:
        kept = position - self.start
        return _Run(self.start, _part(self.got, slice(kept)), _part(self.gave, slice(kept)), kept)


def _part(sketches: Sketches | None, which: slice) -> Sketches | None:
    return None if sketches is None else sketches[which]


@dataclass(slots=True)
class _Text:
    """Sketches of one text."""

    runs: list[_Run] = field(default_factory=list[_Run])
    positions: int = 0


class SketchBook:
    """Sketches of one stage's texts. `received`, `sent`: the values to sketch; empty if not sketched. `capacity`:
    positions of all texts together. `room_bytes` returns how much more memory the book may take."""

    def __init__(
        self,
        secret: bytes,
        received: Sequence[RowSpec],
        sent: Sequence[RowSpec],
        capacity: int,
        *,
        room_bytes: Callable[[], int],
    ) -> None:
        self.secret = secret
        self._received = tuple(received)
        self._sent = tuple(sent)
        self._capacity = capacity
        self._room_bytes = room_bytes
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._projections: OrderedDict[int, tuple[Projection | None, Projection | None]] = OrderedDict()
        """Session -> what sketches its received and its sent rows."""
        self._signs_bytes = 0
        self._positions = 0
        self._waiting: list[_Passed] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._position_bytes = 4 * SIZE * (bool(received) + bool(sent))
        if received or sent:
            # Compiled now, so that no pass waits for the compiler.
            _signed_sums(np.zeros((1, 1), np.float32), np.ones((1, SIZE), np.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of sketches, signs, and rows that wait."""
        return self._positions * self._position_bytes + self._signs_bytes + self._waiting_bytes

    def clear(self) -> None:
        self._texts.clear()
        self._projections.clear()
        self._waiting.clear()
        self._positions = self._waiting_rows = self._waiting_bytes = self._signs_bytes = 0

    def add(
        self,
        segments: Sequence[Segment],
        wanted: Sequence[int],
        got: Mapping[str, HostTensor],
        gave: Mapping[str, HostTensor],
    ) -> None:
        """Add a pass. Tensors have the rows of all `segments`, or only the `wanted` ones; they are empty if nothing was
        received or sent."""
        total = sum(segment.length for segment in segments)
        self._waiting_rows += total
        rows_bytes = 4 * sum(prod(tensor.shape) for tensor in (*got.values(), *gave.values()))
        waits = self._waiting_rows < TOGETHER and rows_bytes <= self._room_bytes()
        self._waiting_bytes += rows_bytes if waits else 0
        came = _Packed.of(self._received, got, total, own=waits)
        went = _Packed.of(self._sent, gave, total, own=waits)
        self._waiting.append(_Passed(tuple(segments), tuple(wanted), came, went))
        if not waits:
            self._settle()

    def _projected(self, session: int) -> tuple[Projection | None, Projection | None]:
        """Return what sketches a text's rows; its signs are drawn if they are not here."""
        found = self._projections.pop(session, None)
        if found is None:
            key = text_key(self.secret, session)
            found = (
                Projection(self._received, key) if self._received else None,
                Projection(self._sent, key) if self._sent else None,
            )
            self._signs_bytes += _bytes_of(found)
        self._projections[session] = found
        while self._signs_bytes > SIGNS_BYTES and len(self._projections) > 1:
            self._drop_signs()
        return found

    def _drop_signs(self) -> None:
        _, gone = self._projections.popitem(last=False)
        self._signs_bytes -= _bytes_of(gone)

    def _has_room(self, session: int, positions: int) -> bool:
        """Return whether this many positions of a text can be sketched, after dropping signs and older texts if they
        can't be beside those."""
        needed_bytes = positions * self._position_bytes
        if session not in self._projections:
            needed_bytes += drawing_bytes(self._received) + drawing_bytes(self._sent)
        while self._room_bytes() < needed_bytes:
            if session in self._projections:
                self._projections.move_to_end(session)
            if self._projections and next(iter(self._projections)) != session:
                self._drop_signs()
            elif oldest := next((one for one in self._texts if one != session), None):
                self._positions -= self._texts.pop(oldest).positions
            else:
                return False
        return True

    def _settle(self) -> None:
        """Sketch the rows that wait."""
        waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        self._waiting_bytes = 0
        came, went = _joined([passed.came for passed in waiting]), _joined([passed.went for passed in waiting])
        with np.errstate(invalid="ignore", over="ignore"):
            for session, part in _by_text(waiting).items():
                if not self._has_room(session, part.length):
                    continue
                text = self._texts.setdefault(session, _Text())
                self._texts.move_to_end(session)
                receives, sends = self._projected(session)
                got = _sketched(receives, came, part.came, part.length)
                gave = _sketched(sends, went, part.went, part.length)
                for (start, first), end in zip(
                    part.runs, [*(one for _, one in part.runs[1:]), part.length], strict=True
                ):
                    which = slice(first, end)
                    self._note(text, _Run(start, _part(got, which), _part(gave, which), end - first))
                self._forget()

    def _note(self, text: _Text, run: _Run) -> None:
        before = text.positions
        while text.runs and text.runs[-1].start + text.runs[-1].length > run.start:
            last = text.runs.pop()
            text.positions -= last.length
            if last.start < run.start:
                text.runs.append(last.before(run.start))
                text.positions += text.runs[-1].length
        text.runs.append(run)
        text.positions += run.length
        self._positions += text.positions - before

    def _forget(self) -> None:
        while self._positions > self._capacity and len(self._texts) > 1:
            _, gone = self._texts.popitem(last=False)
            self._positions -= gone.positions

    def of_positions(self, session: int, start: int, length: int) -> tuple[Sketches, Sketches]:
        """Return (received, sent) sketches of these positions; NaN where nothing is known."""
        got, gave = (np.full((length, SIZE), np.nan, np.float32) for _ in range(2))
        self._settle()
        text = self._texts.get(session)
        for run in () if text is None else text.runs:
            begin, end = max(start, run.start), min(start + length, run.start + run.length)
            if begin >= end:
                continue
            for whole, part in ((got, run.got), (gave, run.gave)):
                if part is not None:
                    whole[begin - start : end - start] = part[begin - run.start : end - run.start]
        return got, gave


def _bytes_of(projections: tuple[Projection | None, Projection | None]) -> int:
    return sum(one.nbytes for one in projections if one is not None)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows of a pass: of all its positions, or of the wanted ones."""

    rows: Mapping[str, Rows]
    count: int
    whole: bool

    @classmethod
    def of(
        cls, specs: Sequence[RowSpec], tensors: Mapping[str, HostTensor], total: int, *, own: bool
    ) -> _Packed | None:
        """`own`: copy the rows into separate memory."""
        if not specs or not tensors:
            return None
        rows = {spec.name: _rows(tensors[spec.name], own=own) for spec in specs}
        count = len(next(iter(rows.values())))
        return cls(rows, count, count == total)


@dataclass(frozen=True, slots=True)
class _Passed:
    """A pass whose rows are not sketched yet."""

    segments: tuple[Segment, ...]
    wanted: tuple[int, ...]
    came: _Packed | None
    went: _Packed | None


@dataclass(slots=True)
class _Found:
    """Rows of one text: their ascending indices among all waiting rows, and which of the text's positions they are."""

    rows: list[int] = field(default_factory=list[int])
    places: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Share:
    """Waiting positions of one text: `length` of them, in the order in which they passed."""

    came: _Found = field(default_factory=_Found)
    went: _Found = field(default_factory=_Found)
    runs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Where positions are not consecutive: (position in the text, index here)."""
    length: int = 0
    end: int = -1
    """The position after the last one."""


def _by_text(waiting: Sequence[_Passed]) -> dict[int, _Share]:
    """Group waiting rows by text, ending with the text added to last. The loop runs for every position, so it makes few
    objects."""
    shares: dict[int, _Share] = {}
    came_before = went_before = 0
    for passed in waiting:
        first = chosen = 0
        for segment in passed.segments:
            length, until = segment.length, bisect_left(passed.wanted, first + segment.length, chosen)
            share = shares.pop(segment.session, None) or _Share()
            shares[segment.session] = share
            if segment.start != share.end:
                share.runs.append((segment.start, share.length))
            for packed, found, before in (
                (passed.came, share.came, came_before),
                (passed.went, share.went, went_before),
            ):
                if packed is None:
                    continue
                if packed.whole:
                    found.rows += range(before + first, before + first + length)
                    found.places += range(share.length, share.length + length)
                else:
                    found.rows += range(before + chosen, before + until)
                    found.places += [share.length + row - first for row in passed.wanted[chosen:until]]
            share.length += length
            share.end = segment.start + length
            first, chosen = first + length, until
        came_before += 0 if passed.came is None else passed.came.count
        went_before += 0 if passed.went is None else passed.went.count
    return shares


def _joined(packs: Sequence[_Packed | None]) -> Mapping[str, Rows]:
    """Return all waiting rows, one pass after the other."""
    rows = [packed.rows for packed in packs if packed is not None]
    if len(rows) < 2:
        return rows[0] if rows else {}
    return {name: np.concatenate([one[name] for one in rows]) for name in rows[0]}


def _sketched(projection: Projection | None, rows: Mapping[str, Rows], found: _Found, length: int) -> Sketches | None:
    """Return the sketches of a text's positions, NaN where there is no row; None if there is nothing to sketch."""
    if projection is None or not found.rows:
        return None
    first, last = found.rows[0], found.rows[-1]
    which = slice(first, last + 1) if last - first + 1 == len(found.rows) else found.rows
    made = projection.of({name: values[which] for name, values in rows.items()})
    if len(found.places) == length:
        return made
    sketches = np.full((length, SIZE), np.nan, np.float32)
    sketches[found.places] = made
    return sketches


def signed_sums(rows: Any, signs: Any, sums: Any) -> None:
    """Write sums float32 [count, 16]: rows float32 [count, width] times signs float32 [width, 16] of 1 and -1."""
    count, width = rows.shape
    lanes = signs.shape[1]
    totals = np.empty((4, lanes), np.float32)
    row = 0
    while row < count:
        last = count - 1
        # If fewer than four rows are left, the last row is repeated in place of the missing ones.
        a, b, c, d = row, min(row + 1, last), min(row + 2, last), min(row + 3, last)
        totals[:] = np.float32(0.0)
        for at in range(width):
            first, second, third, fourth = rows[a, at], rows[b, at], rows[c, at], rows[d, at]
            for lane in range(lanes):
                sign = signs[at, lane]
                totals[0, lane] += first * sign
                totals[1, lane] += second * sign
                totals[2, lane] += third * sign
                totals[3, lane] += fourth * sign
        for number in range(min(4, count - row)):
            for lane in range(lanes):
                sums[row + number, lane] = totals[number, lane]
        row += 4
