"""Compares what stages reported about a text with a verifier's recomputation: sketches in, an opinion out.

Decides how far two sketches of a row may differ. Honest machines differ by rounding, whether tokens are computed one by
one or together, on one thread or several, in one framework or another; how much depends on the number format. Guilt is
decided by `coordination.round.verification`.

Neighbours: `serving.checking` collects the sketches; `execution.serving.sketches` and `execution.serving.verifier` make
them; `training.inspection` does the same for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.coordination.round.verification import Opinion
from fusionai.execution.serving.sketches import Sketches
from fusionai.execution.tensors import SIZE
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True)
class SketchTolerance:
    """How far sketches may differ from the reference, relative to the reference's length. `row`: one row. `text`: root
    of the sum of squares over all rows of a text. `gain`: how much longer or shorter all rows together may be; rounding
    has no direction, so this is known far more precisely than single rows. `odd_rows`: fraction of a text's rows that
    is left out, because rounding can change which expert computes a row, and the row is then a different one."""

    row: float
    text: float
    gain: float = inf
    odd_rows: float = 0.0

    def of(self, moved: float) -> SketchTolerance:
        """Limits for a stage that changes rows by `moved` of their size, because it rounds only what it adds."""
        return replace(self, text=max(LEAST, self.text * moved))


LEAST: Final = 1e-3
"""Lower limit of `SketchTolerance.text`."""
WEIGHTS: Final[Mapping[str, SketchTolerance]] = {
    "fp32": SketchTolerance(1e-3, 1e-3),
    "packed": SketchTolerance(1e-3, 1e-3),
    "fp16": SketchTolerance(2e-2, 4e-3, 5e-3),
    "bf16": SketchTolerance(0.15, 5e-2, 5e-3),
    "int8": SketchTolerance(0.15, 5e-2, 5e-3),
    "int4": SketchTolerance(0.15, 5e-2, 5e-3),
}
"""Limits by format of the weights; products with quantised weights also round their other factor."""
CACHE_ROW: Final[Mapping[str, float]] = {"fp32": 0.0, "fp16": 1e-3, "bf16": 3e-3, "int8": 6e-3}
"""Limit of a row by format of the KV cache: a value between two representable numbers can round either way."""
ODD_ROWS: Final = 0.05
"""`SketchTolerance.odd_rows` of stages where values decide what is computed."""
FEW: Final = 16
"""Rows below which the gain is not checked, because it is not known precisely enough."""


def limits(options: ServeOptions, *, chooses: bool) -> SketchTolerance:
    """Limits for a stage. `chooses`: values decide what is computed. Measured with `benchmarks/verification.py --part
    serving`."""
    known, row = WEIGHTS[options.weights], CACHE_ROW[options.cache]
    return SketchTolerance(max(known.row, row), max(known.text, row), known.gain, ODD_ROWS if chooses else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchReport:
    """Sketches of all compared positions of a text, [positions, SIZE]; NaN where nothing was reported."""

    got: Sketches
    gave: Sketches
    """`got` and `gave`: the stage's report on its inputs and outputs."""
    seen: Sketches
    """Report of the peer that received the stage's outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Peer ids: `before` sent the stage its inputs, `after` received its outputs."""

    before: str
    after: str


def opinion(
    reported: SketchReport, recomputed: SketchReport, limits: SketchTolerance, neighbours: Neighbours, *, selected: bool
) -> Opinion:
    """Compare what was reported with the verifier's sketches. `selected`: only wanted rows left the stage, namely those
    in `reported.seen`."""
    there = ~_is_missing(reported.seen)
    rows = there & ~_is_missing(recomputed.seen) if selected else np.ones(len(reported.seen), bool)
    if not selected and not there.all() and not _is_missing(recomputed.seen)[~there].all():
        return Opinion(void=f"the stage's receiver sketched no rows of {int((~there).sum())} of {len(there)} positions")
    if not rows.any():
        return Opinion(void="no row that left the stage was sketched by its receiver")
    own: list[str] = []
    if (lacking := int((_is_missing(reported.got) & ~_is_missing(recomputed.got)).sum())) > 0:
        own.append(f"it reported nothing for {lacking} of {len(rows)} positions")
    elif found := _difference(reported.got, recomputed.got, limits):
        return Opinion(inputs=frozenset({neighbours.before}), own=found)
    # If the text was read again in between, the receiver still has rows from the first reading.
    given = rows & ~_is_missing(reported.gave) if selected else rows
    if found := _difference(reported.gave[given], recomputed.gave[given], limits):
        own.append(f"activations of {found}")
    links = _difference(reported.seen[rows], recomputed.seen[rows], limits)
    return Opinion(own="; ".join(own), links=frozenset({neighbours.after}) if links else frozenset())


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured differences, in the terms of `SketchTolerance`."""

    row: float
    text: float
    gain: float


def measured(reported: SketchReport, recomputed: SketchReport) -> Measured:
    """Differences in the stage's outputs, over finite rows that both sides reported. For measurements."""
    there = np.isfinite(reported.gave).all(axis=1) & np.isfinite(recomputed.gave).all(axis=1)
    one, two = reported.gave[there].astype(np.float64), recomputed.gave[there].astype(np.float64)
    length = float(np.sum(two * two))
    together = (float(np.sum((one - two) ** 2)) / length) ** 0.5
    return Measured(float(_relative_distance(one, two).max()), together, abs(float(np.sum(one * two)) / length - 1))


def _difference(found: Sketches, expected: Sketches, limits: SketchTolerance) -> str:
    """Describe the difference if it is over the limits; empty otherwise."""
    distances = _relative_distance(found, expected)
    left_out = np.argsort(distances)[len(distances) - int(limits.odd_rows * len(distances)) :]
    kept = np.ones(len(distances), bool)
    kept[left_out] = False
    over = kept & (distances > limits.row)
    if over.any():
        most = distances[over].max()
        by = f"differ by up to {most:.2g} of their size" if np.isfinite(most) else "are missing or not finite"
        return f"{int(over.sum())} of {len(distances)} positions {by}"
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


def _relative_distance(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For each row, the distance of two sketches relative to the second one's length; 0 if neither is finite."""
    one, two = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        distance = np.linalg.norm(one - two, axis=1)
        length = np.linalg.norm(two, axis=1)
        distances = np.where(distance == 0, 0.0, distance / length)
    equal = (~np.isfinite(one).all(axis=1)) & (~np.isfinite(two).all(axis=1))
    return np.where(equal, 0.0, np.where(np.isfinite(distances), distances, np.inf))


def _is_missing(sketches: Sketches) -> npt.NDArray[np.bool_]:
    silent: npt.NDArray[np.bool_] = np.all(np.isnan(sketches), axis=1)
    return silent


def sketches_of(tensor: HostTensor | None, positions: int) -> Sketches | None:
    """Read sketches from a tensor; None if it is not float32 of shape [positions, SIZE]."""
    if tensor is None or (tensor.dtype, tensor.shape) != ("float32", (positions, SIZE)):
        return None
    return np.frombuffer(tensor.data, np.float32).reshape(positions, SIZE)
