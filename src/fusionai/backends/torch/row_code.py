"""The language of row programs, which `row_plan` writes and `row_kernels` runs: instructions, and views of a row's
memory.

A line is `LINE` integers. Offsets count float32 elements, from the start of a row's own part of memory or, for operands
whose row flag is 0, from the start of memory, where the constants are. With one position every size is fixed, so a view
is an offset with a shape and strides, and a value that nothing reads any more gives its range back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

LINE: Final = 24
"""Integers of a line."""


class Op(IntEnum):
    """Operators. Up to `MASKED`: two operands, element by element; up to `SIN`: one operand, element by element; from
    `MEAN` to `SOFTMAX`: over the last dimension; from `TOP` to `EXPERTS`: for mixtures of experts. `TABLE`: rows of a
    parameter, on cards alone. `MASKED`: a number instead of the first operand where the second is not 0. `TRUTH`: 1
    where the operand is not 0, else 0."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    MINIMUM = 4
    MAXIMUM = 5
    MASKED = 6
    COPY = 7
    NEG = 8
    SQUARE = 9
    CUBE = 10
    SQRT = 11
    RSQRT = 12
    EXP = 13
    SILU = 14
    SIGMOID = 15
    RELU = 16
    TANH = 17
    GELU = 18
    GELU_TANH = 19
    TRUTH = 20
    COS = 21
    SIN = 22
    MEAN = 23
    TOTAL = 24
    LAYER_NORM = 25
    SOFTMAX = 26
    LINEAR = 27
    ATTENTION = 28
    TOP = 29
    LOOKUP = 30
    SCATTER = 31
    EXPERTS = 32
    TABLE = 33


class Form(IntEnum):
    """Storage format of numbers in caches and other memory outside the program."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3
    """Vectors of a cache: levels, and a scale in float32 behind them."""


class Factor(IntEnum):
    """Storage format of a matrix. Rows are multiplied in float32, or in bfloat16 for HALVES. The number behind INT4 is
    how many weights share a scale. LEVELS: as a quantised file holds it (`ir.levels`), with bits, weights that share a
    scale, and how many of these groups share a factor."""

    FP32 = 0
    BF16 = 1
    HALVES = 2
    FP16 = 3
    INT8 = 4
    INT4_32 = 5
    INT4_64 = 6
    INT4_128 = 7
    LEVELS4_128 = 8
    LEVELS4_64 = 9
    LEVELS4_32 = 10
    LEVELS8_128 = 11
    LEVELS8_64 = 12
    LEVELS8_32 = 13
    LEVELS4_16_16 = 14
    LEVELS4_32_8 = 15
    LEVELS8_32_8 = 16
    LEVELS8_16_16 = 17
    LEVELS_E4M3_128 = 18
    LEVELS_E4M3_64 = 19
    LEVELS_E4M3_32 = 20
    LEVELS_E5M2_32 = 21
    LEVELS_E2M1_32 = 22
    LEVELS_E2M1_16 = 23
    LEVELS_NF4_64 = 24
    LEVELS_NF4_32 = 25
    LEVELS_FP4_64 = 26
    LEVELS_FP4_32 = 27


class Field(IntEnum):
    """Positions in a line; position 0 is the `Op`. Strides belong to `DIMS`, whose last dimension is the innermost.

    `DIMS`: three for elementwise operators; groups and length for reductions; columns and summands for LINEAR; query
    heads, key heads and key width for ATTENTION; groups, length and number of chosen elements for TOP; groups, chosen
    elements and floats of each for LOOKUP; groups, chosen elements and length for SCATTER; columns, summands and
    chosen experts for EXPERTS; columns and rows for TABLE. `A` is x or q, `B` is k, or the indices of what was
    chosen. `A_STRIDES`, for EXPERTS: between the operands of two experts. `EXTRA`: number for MASKED and SCATTER;
    eps, weight, bias for LAYER_NORM; format, address, bias, address of the product for LINEAR; value width, v, scale,
    softcap, sinks, index of the cache for ATTENTION; indices, scratch, whether to sort for TOP; elements to choose
    from for LOOKUP; format, index of the first expert's address, experts, address of the product for EXPERTS.
    Constants are offsets, -1 if absent.
    """

    DIMS = 1
    OUT = 4
    A = 5
    A_ROW = 6
    B = 7
    B_ROW = 8
    A_STRIDES = 9
    B_STRIDES = 12
    EXTRA = 15


LARGEST_CONSTANT: Final = 2**20
"""Largest number of elements of a parameter that is kept as a constant. Larger ones are lookup tables; chosen."""
ALIGNMENT_FLOATS: Final = 16
"""Floats of a cache line, to whose multiples the ranges of values are rounded up."""


class Unplanned(Exception):
    """Raised with the reason why a graph can't be planned and runs operator by operator."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of memory read as a tensor, in a row's memory or (`fixed`) among the constants. `whole`: the elements
    are integers."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    fixed: bool = False
    whole: bool = False

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous and in order."""
        own = dense_strides(self.shape)
        return all(
            size == 1 or step == wanted for size, step, wanted in zip(self.shape, self.strides, own, strict=True)
        )

    def moved(self, shape: tuple[int, ...], strides: tuple[int, ...], *, ahead: int = 0) -> View:
        """Return a view of the same memory with another shape, `ahead` elements further."""
        return View(self.start + ahead, shape, strides, self.fixed, self.whole)

    def with_dim(self, at: int) -> View:
        """Return the view with a dimension of one element inserted at `at`."""
        return self.moved((*self.shape[:at], 1, *self.shape[at:]), (*self.strides[:at], 0, *self.strides[at:]))

    def without_dim(self, at: int, number: int = 0) -> View:
        """Return element `number` of dimension `at`, without that dimension."""
        return self.moved(
            (*self.shape[:at], *self.shape[at + 1 :]),
            (*self.strides[:at], *self.strides[at + 1 :]),
            ahead=number * self.strides[at],
        )

    def ordered(self, dims: Sequence[int]) -> View:
        return self.moved(tuple(self.shape[at] for at in dims), tuple(self.strides[at] for at in dims))

    def sliced(self, at: int, begin: int, end: int, step: int) -> View:
        chosen = range(self.shape[at])[begin:end:step]
        return self.moved(
            (*self.shape[:at], len(chosen), *self.shape[at + 1 :]),
            (*self.strides[:at], self.strides[at] * step, *self.strides[at + 1 :]),
            ahead=chosen.start * self.strides[at],
        )

    def broadcast(self, shape: tuple[int, ...]) -> View:
        """Return the view broadcast to a larger shape."""
        missing = len(shape) - len(self.shape)
        if missing < 0 or any(own not in (1, size) for own, size in zip(self.shape, shape[missing:], strict=True)):
            raise Unplanned(f"{self.shape} as {shape}")
        steps = tuple(0 if own == 1 else step for own, step in zip(self.shape, self.strides, strict=True))
        return self.moved(shape, (0,) * missing + steps)

    def reshaped(self, shape: tuple[int, ...]) -> View | None:
        """Return the same elements in another shape; None if they must be copied."""
        if prod(shape) != prod(self.shape):
            raise Unplanned(f"{self.shape} as {shape}")
        runs: list[tuple[int, int]] = []
        for size, step in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * step:
                runs[-1] = (runs[-1][0] * size, step)
            else:
                runs.append((size, step))
        strides: list[int] = []
        left, step = 1, 0
        for size in shape:
            if size == 1:
                strides.append(0)
                continue
            if left == 1:
                left, step = runs.pop(0)
            if left % size:
                return None
            left //= size
            strides.append(left * step)
        return self.moved(shape, tuple(strides))


@dataclass(slots=True)
class _Room:
    """Allocates a row's memory; ranges of values that are no longer read are reused."""

    size: int = 0
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take(self, floats: int) -> int:
        floats += -floats % ALIGNMENT_FLOATS
        for number, (start, length) in enumerate(self.free):
            if length >= floats:
                if length == floats:
                    del self.free[number]
                else:
                    self.free[number] = (start + floats, length - floats)
                return start
        start = self.size
        self.size += floats
        return start

    def give(self, start: int, floats: int) -> None:
        floats += -floats % ALIGNMENT_FLOATS
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self.free, (start, floats)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self.free = merged


class RowMemory:
    """Values of a plan: the view of each, the ranges of a row's memory, and the constants."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.constants: dict[int, str | float] = {}
        """Offset -> parameter or number."""
        self.fixed = 0
        """Floats of all constants."""
        self._known: dict[str | float, View] = {}
        self._room = _Room()
        self._owners: dict[str, int] = {}
        """Value -> offset of the range it refers to, if that is in a row's memory."""
        self._places: dict[int, int] = {}
        """Offset -> floats of the range."""
        self._readers: dict[int, int] = {}
        """Offset -> number of values that refer to the range and are still to be read."""

    @property
    def width(self) -> int:
        """Floats of one row."""
        return self._room.size

    def own(self, value: str, shape: tuple[int, ...], *, whole: bool = False) -> View:
        """Allocate memory for a value."""
        start = self._room.take(prod(shape))
        self._places[start] = prod(shape)
        self._readers[start] = 1
        self._owners[value] = start
        self.views[value] = View(start, shape, dense_strides(shape), whole=whole)
        return self.views[value]

    def show(self, value: str, view: View, source: str) -> None:
        """Record a value that is a view of another's memory."""
        self.views[value] = view
        if not view.fixed and source in self._owners:
            self._owners[value] = self._owners[source]
            self._readers[self._owners[value]] += 1

    def end(self, value: str) -> None:
        """Record that nothing reads the value any more."""
        start = self._owners.pop(value, None)
        if start is None:
            return
        self._readers[start] -= 1
        if self._readers[start] == 0:
            self._room.give(start, self._places.pop(start))

    def constant(self, what: str | float, shape: tuple[int, ...] = ()) -> View:
        if what not in self._known:
            if prod(shape) > LARGEST_CONSTANT:
                raise Unplanned(f"{what} is read as a table")
            self._known[what] = View(self.fixed, shape, dense_strides(shape), fixed=True)
            self.constants[self.fixed] = what
            self.fixed += prod(shape)
        return self._known[what]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


Ranges = list[tuple[int, int, int]]
"""(limit, begin, end) of what a line reads or writes, in floats."""


def refuse_beyond(code: npt.NDArray[np.int64], fixed: int, width: int) -> None:
    """Raise `Unplanned` if a line would read or write outside of a row's `width` floats or of the `fixed` floats of
    constants: compiled kernels check nothing but indices of chosen elements. Addresses of products and caches are not
    in the code yet."""
    for line in code.tolist():
        op = Op(line[0])
        dims, out, extra = line[Field.DIMS : Field.DIMS + 3], line[Field.OUT], line[Field.EXTRA :]
        constants: list[tuple[int, int]] = []  # begin, count; -1: absent
        if op <= Op.SIN:
            ranges = _elementwise(line, op, fixed, width)
        elif op <= Op.SOFTMAX:
            groups, length = dims[:2]
            ranges = [(width, line[Field.A], line[Field.A] + groups * length)]
            ranges.append((width, out, out + groups * (length if op in (Op.LAYER_NORM, Op.SOFTMAX) else 1)))
            constants = list(zip(extra[:3], (1, length, length), strict=True)) if op is Op.LAYER_NORM else []
        elif op is Op.LINEAR:
            columns, count = dims[:2]
            ranges = [(width, line[Field.A], line[Field.A] + count), (width, out, out + columns)]
            constants = [(extra[2], columns)]
        elif op is Op.ATTENTION:
            heads, kept, wide = dims
            ranges = [
                (width, line[Field.A], line[Field.A] + heads * wide),
                (width, line[Field.B], line[Field.B] + kept * wide),
                (width, extra[1], extra[1] + kept * extra[0]),
                (width, out, out + heads * extra[0]),
            ]
            constants = [(extra[2], 1), (extra[3], 1), (extra[4], heads)]
        else:
            ranges = _choosing(line, op, fixed, width)
        ranges += [(fixed, begin, begin + count) for begin, count in constants if begin != -1]
        if any(size < 0 for size in dims) or any(begin < 0 or end > limit for limit, begin, end in ranges):
            raise Unplanned(f"a line of {op.name} would leave its memory")


def _elementwise(line: list[int], op: Op, fixed: int, width: int) -> Ranges:
    dims, out = line[Field.DIMS : Field.DIMS + 3], line[Field.OUT]
    ranges = [(width, out, out + prod(dims))]
    places = ((Field.A, Field.A_ROW, Field.A_STRIDES), (Field.B, Field.B_ROW, Field.B_STRIDES))
    for place, row, first in places[: 2 if op <= Op.MASKED else 1]:
        reach = [(size - 1) * step for size, step in zip(dims, line[first : first + 3], strict=True)]
        ends = [
            line[place] + sum(min(0, one) for one in reach),
            line[place] + sum(max(0, one) for one in reach),
        ]
        ranges.append((width if line[row] else fixed, ends[0], ends[1] + (prod(dims) > 0)))
    if op is Op.MASKED:
        ranges.append((fixed, line[Field.EXTRA], line[Field.EXTRA] + 1))
    return ranges


def _choosing(line: list[int], op: Op, fixed: int, width: int) -> Ranges:
    dims, out, extra = line[Field.DIMS : Field.DIMS + 3], line[Field.OUT], line[Field.EXTRA :]
    first, indices = line[Field.A], line[Field.B]
    limit = width if line[Field.A_ROW] else fixed
    match op:
        case Op.TOP:
            groups, length, chosen = dims
            if not 0 < chosen <= length:
                raise Unplanned(f"the largest {chosen} of {length}")
            made = [(width, begin, begin + groups * chosen) for begin in (out, extra[0])]
            return [(limit, first, first + groups * length), *made, (width, extra[1], extra[1] + 2 * length)]
        case Op.LOOKUP:
            groups, chosen, floats = dims
            source = (limit, first, first + groups * extra[0] * floats)
            return [source, (width, indices, indices + groups * chosen), (width, out, out + groups * chosen * floats)]
        case Op.SCATTER:
            groups, chosen, length = dims
            number = (fixed, extra[0], extra[0] + 1)
            return [(width, indices, indices + groups * chosen), (width, out, out + groups * length), number]
        case Op.TABLE:
            return [(width, indices, indices + 1), (width, out, out + dims[0])]
        case _:
            columns, count, chosen = dims
            far = (chosen - 1) * line[Field.A_STRIDES]
            source = (limit, first + min(0, far), first + max(0, far) + count)
            return [source, (width, indices, indices + chosen), (width, out, out + chosen * columns)]
