"""What stages say they got and gave of a text, and whether a referee's word of it agrees: marks in, an opinion out.

Decides how far two marks of a row may be apart. Token by token and all at once, on one thread or two, in one framework
or another, honest machines differ by rounding; each number format rounds as far as it does. Who is at fault is
`coordination.verification`'s to say.

Neighbours: `serving.checking` brings the words; `execution.serving_marks` and `execution.serving_referee` make them;
`training.inspection` does this for training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.coordination.verification import Opinion
from fusionai.execution.marks import SIZE
from fusionai.execution.serving_marks import Marks
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True)
class Limits:
    """How far marks may be from those they are held against, relative to these. `row`: of one row. `text`: of all rows
    of a text together, their squares added. `gain`: by how much all rows together may be longer or shorter: rounding
    has no direction, so this is known far better than rows are. `odd_rows`: part of a text's rows that are left out of
    it: where rounding decides which expert computes a row, it is another row."""

    row: float
    text: float
    gain: float = inf
    odd_rows: float = 0.0

    def of(self, moved: float) -> Limits:
        """For a stage that moves rows by so much of their size: what it rounds is what it adds."""
        return replace(self, text=max(LEAST, self.text * moved))


LEAST: Final = 1e-3
"""No less is ever held against anybody."""
WEIGHTS: Final[Mapping[str, Limits]] = {
    "fp32": Limits(1e-3, 1e-3),
    "fp16": Limits(2e-2, 4e-3, 5e-3),
    "bf16": Limits(0.15, 5e-2, 5e-3),
    "int8": Limits(0.15, 5e-2, 5e-3),
    "int4": Limits(0.15, 5e-2, 5e-3),
}
"""By the format of weights; products with packed ones round what they multiply."""
CACHE_ROW: Final[Mapping[str, float]] = {"fp32": 0.0, "fp16": 1e-3, "bf16": 3e-3}
"""By the format of keys and values: a number on the border between two falls to either side."""
ODD_ROWS: Final = 0.05
FEW: Final = 16
"""Of fewer rows the gain is not known well."""


def limits(options: ServeOptions, *, chooses: bool) -> Limits:
    """`chooses`: numbers decide what is computed. Found by `benchmarks/verification.py --part serving`."""
    known, row = WEIGHTS[options.weights], CACHE_ROW[options.cache]
    return Limits(max(known.row, row), max(known.text, row), known.gain, ODD_ROWS if chooses else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Marks of all positions of a text that are compared, [positions, SIZE]; not numbers where nobody said anything."""

    got: Marks
    gave: Marks
    """As the stage said."""
    seen: Marks
    """As whoever got its rows said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Peer ids: whose rows the stage got, and who got its."""

    before: str
    after: str


def opinion(said: Words, again: Words, limits: Limits, neighbours: Neighbours, *, selected: bool) -> Opinion:
    """`again`: the referee's. `selected`: only rows that were wanted left the stage, those that `said.seen` knows."""
    there = ~_silent(said.seen)
    rows = there & ~_silent(again.seen) if selected else np.ones(len(said.seen), bool)
    if not selected and not there.all() and not _silent(again.seen)[~there].all():
        return Opinion(void=f"{int((~there).sum())} of {len(there)} positions were not marked behind the stage")
    if not rows.any():
        return Opinion(void="nothing that left the stage was marked behind it")
    own: list[str] = []
    if (lacking := int((_silent(said.got) & ~_silent(again.got)).sum())) > 0:
        own.append(f"it says nothing of {lacking} of {len(rows)} positions")
    elif found := _off(said.got, again.got, limits):
        return Opinion(inputs=frozenset({neighbours.before}), own=found)
    # Of a text that was read anew in between, the stage behind still has rows that the stage gave the first time.
    told = rows & ~_silent(said.gave) if selected else rows
    if found := _off(said.gave[told], again.gave[told], limits):
        own.append(f"activations of {found}")
    links = _off(said.seen[rows], again.seen[rows], limits)
    return Opinion(own="; ".join(own), links=frozenset({neighbours.after}) if links else frozenset())


@dataclass(frozen=True, slots=True)
class Measured:
    """As `Limits` has them: the farthest row, all rows together, and how much larger they are."""

    row: float
    text: float
    gain: float


def measured(said: Words, again: Words) -> Measured:
    """Of what the stage gave, as it said itself; of rows that are there and numbers. For measurements."""
    there = np.isfinite(said.gave).all(axis=1) & np.isfinite(again.gave).all(axis=1)
    one, two = said.gave[there].astype(np.float64), again.gave[there].astype(np.float64)
    length = float(np.sum(two * two))
    together = (float(np.sum((one - two) ** 2)) / length) ** 0.5
    return Measured(float(_apart(one, two).max()), together, abs(float(np.sum(one * two)) / length - 1))


def _off(found: Marks, expected: Marks, limits: Limits) -> str:
    """In words, where they are farther apart than may be; else empty."""
    apart = _apart(found, expected)
    spared = np.argsort(apart)[len(apart) - int(limits.odd_rows * len(apart)) :]
    kept = np.ones(len(apart), bool)
    kept[spared] = False
    off = kept & (apart > limits.row)
    if off.any():
        most = apart[off].max()
        by = f"differ by up to {most:.2g} of their size" if np.isfinite(most) else "are not there or no numbers"
        return f"{int(off.sum())} of {len(apart)} positions {by}"
    one, two = (part[kept & np.isfinite(expected).all(axis=1)].astype(np.float64) for part in (found, expected))
    length = float(np.sum(two * two))
    if not length:
        return ""
    together = (float(np.sum((one - two) ** 2)) / length) ** 0.5
    if together > limits.text:
        return f"{len(one)} positions together differ by {together:.2g} of their size"
    gain = float(np.sum(one * two)) / length - 1
    if len(one) >= FEW and abs(gain) > limits.gain:
        return f"{len(one)} positions together are {1 + gain:.4g} times as large"
    return ""


def _apart(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of each row, the distance of two marks by the length of the second. What is no number in both is equal."""
    one, two = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        distance = np.linalg.norm(one - two, axis=1)
        length = np.linalg.norm(two, axis=1)
        apart = np.where(distance == 0, 0.0, distance / length)
    equal = (~np.isfinite(one).all(axis=1)) & (~np.isfinite(two).all(axis=1))
    return np.where(equal, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def _silent(marks: Marks) -> npt.NDArray[np.bool_]:
    silent: npt.NDArray[np.bool_] = np.all(np.isnan(marks), axis=1)
    return silent


def marks_of(tensor: HostTensor | None, positions: int) -> Marks | None:
    """None for what is no marks of so many positions."""
    if tensor is None or (tensor.dtype, tensor.shape) != ("float32", (positions, SIZE)):
        return None
    return np.frombuffer(tensor.data, np.float32).reshape(positions, SIZE)
