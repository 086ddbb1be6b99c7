"""Marks of a serving stage's rows: by what it got and gave of each text can be checked afterwards. Decides no outcome.

A row, one position of a text, is told in `SIZE` random projections: the sums of its numbers under signs that follow
from the text's key and the value's name, 64 bytes in float32. For a difference D between two rows X, the distance of
their marks by the length of one is about |D| / |X|, within a factor of two and a half but for one case in ten thousand.
Each text has a key of its own: telling one gives no other away.

A token at a time, making marks would cost as much as a good part of the pass: rows wait until there are `TOGETHER` of
their text, or somebody asks.

Texts are kept in the order in which they were last added to, and the longest forgotten goes when there are too many
positions. A position that is computed again replaces what was known from there on.

Source: activation fingerprints of DiFR (arXiv 2511.20621). Neighbours: `execution.serving_stage` adds what passes by,
`execution.serving_referee` makes marks of what is computed again, `serving.checking` compares; `execution.marks` has
the marks of training, of whole microbatches.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.execution.accumulate import as_array
from fusionai.execution.marks import SIZE, signs, step_key
from fusionai.execution.serving_boundary import RowSpec
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor
from fusionai.wire.messages import Segment

Marks = npt.NDArray[np.float32]
"""[rows, SIZE]."""
Rows = npt.NDArray[np.float32]
"""[rows, numbers of a row]."""
ROW_BYTES: Final = 2 * 4 * SIZE
"""Of a position in a book: got and gave."""
TOGETHER: Final = 16
"""Rows of a text that are marked in one product."""
MOST_WAITING: Final = 256
"""Rows of all texts: they are held whole, and an ended text's would wait for ever."""


def text_key(secret: bytes, session: int) -> bytes:
    """What a stage makes its marks of this text under."""
    return step_key(secret, session)


class Projection:
    """Rows of some values, together, under one key."""

    def __init__(self, specs: Sequence[RowSpec], key: bytes) -> None:
        self._signs = {spec.name: _signs_of(spec, key) for spec in specs}

    def marks(self, tensors: Mapping[str, HostTensor]) -> Marks:
        """Of tensors [1, rows, ...] of all values."""
        return self.of({name: _rows(tensors[name]) for name in self._signs})

    def of(self, rows: Mapping[str, Rows]) -> Marks:
        """Of these rows of all values."""
        with np.errstate(invalid="ignore", over="ignore"):
            first, *others = (rows[name] @ drawn for name, drawn in self._signs.items())
            for part in others:
                first += part
        return first


def _signs_of(spec: RowSpec, key: bytes) -> npt.NDArray[np.float32]:
    seed = hashlib.blake2b(spec.name.encode(), key=key, digest_size=16, person=b"marks of rows").digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    width = int(np.prod(spec.row, dtype=np.int64))
    return signs(generator, width * SIZE).reshape(width, SIZE).astype(np.float32)


def _rows(tensor: HostTensor) -> Rows:
    values = as_array(tensor) if tensor.dtype in FLOAT_DTYPES else np.frombuffer(tensor.data, tensor.dtype)
    return values.reshape(tensor.shape[1], -1).astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions from `start` on, one after the other. Not numbers where a row did not pass by."""

    start: int
    got: Marks | None
    gave: Marks | None
    length: int

    def before(self, position: int) -> _Run:
        kept = position - self.start
        got, gave = (None if one is None else one[:kept] for one in (self.got, self.gave))
        return _Run(self.start, got, gave, kept)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a segment, of all values; `at`: which of its positions they are."""

    rows: Mapping[str, Rows]
    at: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`length` positions from `start` on, not marked yet."""

    start: int
    length: int
    got: _Part | None
    gave: _Part | None


@dataclass(slots=True)
class _Text:
    got: Projection | None
    gave: Projection | None
    runs: list[_Run] = field(default_factory=list[_Run])
    positions: int = 0
    waiting: list[_Waiting] = field(default_factory=list[_Waiting])

    @property
    def waiting_rows(self) -> int:
        return sum(one.length for one in self.waiting)


class MarkBook:
    """One stage's. `received`, `sent`: the values that come and go; empty for what is not marked. `capacity`: positions
    of all texts together."""

    def __init__(self, secret: bytes, received: Sequence[RowSpec], sent: Sequence[RowSpec], capacity: int) -> None:
        self.secret = secret
        self._received = tuple(received)
        self._sent = tuple(sent)
        self._capacity = capacity
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._positions = 0
        self._waiting_rows = 0

    def clear(self) -> None:
        self._texts.clear()
        self._positions = self._waiting_rows = 0

    def add(
        self,
        segments: Sequence[Segment],
        wanted: Sequence[int],
        got: Mapping[str, HostTensor],
        gave: Mapping[str, HostTensor],
    ) -> None:
        """A pass went through. Tensors have the rows of all `segments`, or of those that are `wanted` of them; none
        where nothing came or went."""
        total = sum(segment.length for segment in segments)
        came, went = _Packed.of(self._received, got, total), _Packed.of(self._sent, gave, total)
        first = chosen = 0
        for segment in segments:
            text, end = self._of(segment.session), first + segment.length
            until = bisect_left(wanted, end, chosen)
            share = _Share(first, segment.length, chosen, tuple(row - first for row in wanted[chosen:until]))
            waits = segment.length < TOGETHER
            got = None if text.got is None else share.part(came, own=waits)
            gave = None if text.gave is None else share.part(went, own=waits)
            text.waiting.append(_Waiting(segment.start, segment.length, got, gave))
            self._waiting_rows += segment.length
            if text.waiting_rows >= TOGETHER:
                self._settle(text)
            first, chosen = end, until
        self._forget()
        if self._waiting_rows > MOST_WAITING:
            for text in tuple(self._texts.values()):
                self._settle(text)

    def _of(self, session: int) -> _Text:
        text = self._texts.get(session)
        if text is None:
            key = text_key(self.secret, session)
            text = self._texts[session] = _Text(
                Projection(self._received, key) if self._received else None,
                Projection(self._sent, key) if self._sent else None,
            )
        self._texts.move_to_end(session)
        return text

    def _settle(self, text: _Text) -> None:
        """Marks what waits."""
        waiting, text.waiting = text.waiting, []
        got = _marked(text.got, [(one.length, one.got) for one in waiting])
        gave = _marked(text.gave, [(one.length, one.gave) for one in waiting])
        first = 0
        for one in waiting:
            self._waiting_rows -= one.length
            share = slice(first, first + one.length)
            own = (None if marks is None else marks[share] for marks in (got, gave))
            self._note(text, _Run(one.start, *own, one.length))
            first += one.length

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
        while self._positions + self._waiting_rows > self._capacity and len(self._texts) > 1:
            _, gone = self._texts.popitem(last=False)
            self._positions -= gone.positions
            self._waiting_rows -= gone.waiting_rows

    def told(self, session: int, start: int, length: int) -> tuple[Marks, Marks]:
        """(got, gave) of these positions; not numbers where nothing is known."""
        got, gave = (np.full((length, SIZE), np.nan, np.float32) for _ in range(2))
        text = self._texts.get(session)
        if text is not None:
            self._settle(text)
        for run in () if text is None else text.runs:
            begin, end = max(start, run.start), min(start + length, run.start + run.length)
            if begin >= end:
                continue
            for whole, part in ((got, run.got), (gave, run.gave)):
                if part is not None:
                    whole[begin - start : end - start] = part[begin - run.start : end - run.start]
        return got, gave


@dataclass(frozen=True, slots=True)
class _Packed:
    """Rows of a pass: of all its positions, or of those that were wanted."""

    rows: Mapping[str, Rows]
    whole: bool

    @classmethod
    def of(cls, specs: Sequence[RowSpec], tensors: Mapping[str, HostTensor], total: int) -> _Packed | None:
        if not specs or not tensors:
            return None
        rows = {spec.name: _rows(tensors[spec.name]) for spec in specs}
        return cls(rows, len(next(iter(rows.values()))) == total)


@dataclass(frozen=True, slots=True)
class _Share:
    """A segment's part of a pass: `length` positions from `first` on; of what was wanted its `rows`, from the
    `chosen`th on."""

    first: int
    length: int
    chosen: int
    rows: tuple[int, ...]

    def part(self, packed: _Packed | None, *, own: bool) -> _Part | None:
        """Of what a pass had; `own`: in memory of its own."""
        if packed is None or not (packed.whole or self.rows):
            return None
        which = slice(self.first, self.first + self.length)
        if not packed.whole:
            which = slice(self.chosen, self.chosen + len(self.rows))
        rows = {name: values[which].copy() if own else values[which] for name, values in packed.rows.items()}
        return _Part(rows, range(self.length) if packed.whole else self.rows)


def _marked(projection: Projection | None, parts: Sequence[tuple[int, _Part | None]]) -> Marks | None:
    """Of (length of a segment, rows of it), one after the other; not numbers where there are none."""
    there = [part for _, part in parts if part is not None]
    if projection is None or not there:
        return None
    made = projection.of({name: np.concatenate([part.rows[name] for part in there]) for name in there[0].rows})
    marks = np.full((sum(length for length, _ in parts), SIZE), np.nan, np.float32)
    marks[_places(parts)] = made
    return marks


def _places(parts: Sequence[tuple[int, _Part | None]]) -> list[int]:
    """Where the rows belong among all positions."""
    places: list[int] = []
    first = 0
    for length, part in parts:
        places += () if part is None else (first + at for at in part.at)
        first += length
    return places
