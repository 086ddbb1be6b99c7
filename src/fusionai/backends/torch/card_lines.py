"""Prepares a row program for a card: which lines run together in one launch, and lines that only a card has.

Products, and attention over the cache, are launches of their own; everything between two of them is one launch. Copies
of equal pieces become one line, because every line costs a wait. Pure: holds no tensors. Neighbours: `row_plan` writes
the program, `card_program` runs the launches, `card_rows` the lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.torch.row_code import LINE, Field, Op, Unplanned
from fusionai.backends.torch.row_plan import RowPlan

MOST_CHOICES: Final = 1024
"""Elements from which a card takes the largest: it holds all of them at once."""
SPLIT_ELEMENTS: Final = 4096
"""Elements from which a run of elementwise lines is divided among groups of threads; chosen."""
_OUT_STRIDES: Final = int(Field.EXTRA) + 3


class CardOp(IntEnum):
    """Lines besides those of `row_code.Op`. `TAKE`: copy what the host sent for a row. `GIVE`: copy what it gets."""

    TAKE = 40
    GIVE = 41


@dataclass(frozen=True, slots=True)
class Run:
    """Lines [first, first + count). `parts`: groups of threads that share each row. `kept`: index of the attention
    whose keys and values are kept; -1 for none."""

    first: int
    count: int
    parts: int
    kept: int


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product, or with `experts` those with the matrices of chosen experts. `node`: whose weight it is."""

    line: int
    node: int
    experts: bool


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention number `index` over its cache."""

    line: int
    index: int


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of a parameter. `index`: the input with their numbers."""

    line: int
    table: str
    index: str


Launch = Run | Multiply | Attend | LookUp


@dataclass(frozen=True, slots=True)
class CardCode:
    """`fed`: input -> (offset, floats) in a row of what the host sends. `given`: output meaning -> the same for what it
    gets. `late`: the first launch that computes only those rows whose results are wanted."""

    code: npt.NDArray[np.int32]
    launches: tuple[Launch, ...]
    fed: dict[str, tuple[int, int]]
    given: dict[str, tuple[int, int]]
    fed_width: int
    given_width: int
    late: int


def card_code(plan: RowPlan) -> CardCode:
    """Raises `Unplanned` if the program has a line that cards don't run."""
    return _Draft(plan).finished()


class _Draft:
    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.lines: list[list[int]] = []
        self.launches: list[Launch] = []
        self.begun = 0
        """First line of the run that is being collected."""

    def finished(self) -> CardCode:
        fed, fed_width = self._copied(CardOp.TAKE, self.plan.inputs)
        late = index = 0
        for number, line in enumerate(self.plan.code.tolist()):
            match Op(line[0]):
                case Op.LINEAR | Op.EXPERTS as op:
                    self._end()
                    self.launches.append(Multiply(len(self.lines), self.plan.products[number], op is Op.EXPERTS))
                    self.lines.append(line)
                    self.begun = len(self.lines)
                case Op.TABLE:
                    self._end()
                    self.launches.append(LookUp(len(self.lines), *self.plan.tables[number]))
                    self.lines.append(line)
                    self.begun = len(self.lines)
                case Op.ATTENTION:
                    self.lines.append(line)
                    self._end(index)
                    self.launches.append(Attend(len(self.lines) - 1, index))
                    index, late = index + 1, len(self.launches)
                case Op.TOP if line[Field.DIMS + 1] > MOST_CHOICES:
                    raise Unplanned(f"the largest of more than {MOST_CHOICES}")
                case op:
                    if op <= Op.SIN:
                        _, middle, inner = line[Field.DIMS : Field.DIMS + 3]
                        line[_OUT_STRIDES : _OUT_STRIDES + 3] = [middle * inner, inner, 1]
                    if op is not Op.COPY or self.begun == len(self.lines) or not _merged(self.lines[-1], line):
                        self.lines.append(line)
        outputs = {meaning: (place, prod(shape)) for meaning, (place, shape) in self.plan.outputs.items()}
        given, given_width = self._copied(CardOp.GIVE, outputs)
        self._end()
        code = np.array(self.lines, dtype=np.int32).reshape(-1, LINE)
        return CardCode(code, tuple(self.launches), fed, given, fed_width, given_width, late)

    def _copied(self, op: CardOp, values: Mapping[str, tuple[int, int]]) -> tuple[dict[str, tuple[int, int]], int]:
        places: dict[str, tuple[int, int]] = {}
        width = 0
        for name, (place, floats) in values.items():
            line = [0] * LINE
            line[0], line[Field.DIMS] = op, floats
            line[Field.OUT], line[Field.A] = (place, width) if op is CardOp.TAKE else (width, place)
            self.lines.append(line)
            places[name] = width, floats
            width += floats
        return places, width

    def _end(self, kept: int = -1) -> None:
        """End the run of lines, if there are any."""
        own = self.lines[self.begun :]
        if own:
            self.launches.append(Run(self.begun, len(own), _parts(own), kept))
        self.begun = len(self.lines)


def _merged(last: list[int], line: Sequence[int]) -> bool:
    """Extend the copy `last` by the copy `line`, if it continues the series; return whether it does."""
    d, a, out = Field.DIMS, Field.A, Field.OUT
    count, n = last[d + 1], last[d + 2]
    alike = last[0] == line[0] and list(line[d : d + 3]) == [1, 1, n] and last[d] == 1
    if not alike or last[Field.A_ROW] != line[Field.A_ROW] or last[Field.A_STRIDES + 2] != line[Field.A_STRIDES + 2]:
        return False
    if count == 1:
        steps = line[a] - last[a], line[out] - last[out]
    else:
        steps = last[Field.A_STRIDES + 1], last[_OUT_STRIDES + 1]
        if (line[a], line[out]) != (last[a] + count * steps[0], last[out] + count * steps[1]):
            return False
    if steps[0] < 0 or steps[1] < n:
        return False
    reach = count * steps[0] + (n - 1) * line[Field.A_STRIDES + 2] + 1
    first = max(last[a], last[out])
    if last[Field.A_ROW] and first < min(last[a] + reach, last[out] + count * steps[1] + n):
        return False  # what one piece writes might be what another reads
    last[d + 1] = count + 1
    last[Field.A_STRIDES + 1], last[_OUT_STRIDES + 1] = steps
    return True


def _parts(lines: Sequence[Sequence[int]]) -> int:
    """Return among how many groups of threads these lines may be divided. Each computes some elements in all lines, so
    an element must depend on no other element that is computed here."""
    totals = {prod(line[Field.DIMS : Field.DIMS + 3]) for line in lines}
    if len(totals) > 1 or any(line[0] > Op.SIN for line in lines):
        return 1
    total = totals.pop()
    written: set[int] = set()
    read: set[int] = set()
    for line in lines:
        if line[_OUT_STRIDES : _OUT_STRIDES + 3] != _dense(line):
            return 1
        written.add(line[Field.OUT])
        for place, row, strides in _operands(line):
            if not row:
                continue
            dense = strides == _dense(line) or (line[Field.DIMS : Field.DIMS + 2] == [1, 1] and strides[2] == 1)
            if not dense:
                return 1
            read.add(place)
    ranges = sorted(written | read)
    apart = all(after - before >= total for before, after in pairwise(ranges))
    return max(1, total // SPLIT_ELEMENTS) if apart else 1


def _dense(line: Sequence[int]) -> list[int]:
    _, middle, inner = line[Field.DIMS : Field.DIMS + 3]
    return [middle * inner, inner, 1]


def _operands(line: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    fields = ((Field.A, Field.A_ROW, Field.A_STRIDES), (Field.B, Field.B_ROW, Field.B_STRIDES))
    some = fields[: 2 if line[0] <= Op.MASKED else 1]
    return [(line[place], line[row], list(line[steps : steps + 3])) for place, row, steps in some]
