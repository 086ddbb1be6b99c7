"""Measures how far the comparison moves when one of its numbers is wrong by a fifth.

This module chooses the cells and the numbers that are varied; a fraction (`_part`) grows to 1 at most. `analysis.cases`
has the comparison itself; the reports show both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

import msgspec

from fusionai.scheduling.analysis.cases import BEST, LLAMA_8B, LLAMA_70B, MBIT, TRAINING_OPTIMISATIONS
from fusionai.scheduling.analysis.catalogue import Device
from fusionai.scheduling.analysis.fleets import (
    INT4_BYTES,
    Assumptions,
    Fleet,
    FleetNetwork,
    Misfit,
    Optimisations,
    PredictedSpeed,
    Shape,
    forward,
    forward_in_one_box,
    generate,
    generate_in_one_box,
    train,
    train_in_one_box,
)

PART: Final = 0.2
HOME: Final = FleetNetwork(bandwidth_bytes_per_s=100 * MBIT, latency_s=0.05)
_NO_SPEED: Final = frozenset({"electricity_usd_per_kwh", "years"})
_WHOLE: Final = frozenset({"context_tokens"})

Pair = tuple[PredictedSpeed | Misfit, PredictedSpeed | Misfit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """Ratio of one cell with one number a fifth lower (`low`), unchanged (`plain`) and a fifth higher (`high`). None:
    the model does not fit."""

    what: str
    cell: str
    low: float | None
    plain: float | None
    high: float | None


def swings(fleet: Fleet, reference: Fleet, known: Assumptions) -> list[Swing]:
    """Vary every assumption and every catalogue figure that affects speed, for a few cells on home links."""
    found: list[Swing] = []
    for what, changed in _changes(fleet, reference, known):
        for cell, compute in _CELLS.items():
            found.append(
                Swing(
                    what=what,
                    cell=cell,
                    low=_ratio(compute(*changed(1 - PART))),
                    plain=_ratio(compute(fleet, reference, known)),
                    high=_ratio(compute(*changed(1 + PART))),
                )
            )
    return found


Sides = tuple[Fleet, Fleet, Assumptions]


def _changes(fleet: Fleet, reference: Fleet, known: Assumptions) -> Iterator[tuple[str, Callable[[float], Sides]]]:
    for side, name in ((fleet, "fleet"), (reference, "box")):
        for field in ("speeds", "memory_bytes", "memory_bandwidth_bytes_per_s"):
            what = {"speeds": "peak", "memory_bytes": "memory"}.get(field, "memory bandwidth")
            yield f"{side.device.name}: {what}", _device_change(fleet, reference, known, name == "fleet", field)
    for field in (f.name for f in fields(known) if f.name not in _NO_SPEED):
        yield field.replace("_", " "), _assumption_change(fleet, reference, known, field)


def _device_change(
    fleet: Fleet, reference: Fleet, known: Assumptions, ours: bool, field: str
) -> Callable[[float], Sides]:
    def changed(factor: float) -> Sides:
        side = fleet if ours else reference
        other = replace(side, device=scaled(side.device, field, factor))
        return (other, reference, known) if ours else (fleet, other, known)

    return changed


def _assumption_change(fleet: Fleet, reference: Fleet, known: Assumptions, field: str) -> Callable[[float], Sides]:
    def changed(factor: float) -> Sides:
        value = getattr(known, field) * factor
        if field.endswith("_part"):
            value = min(1.0, value)
        return fleet, reference, replace(known, **{field: round(value) if field in _WHOLE else value})

    return changed


def scaled(device: Device, field: str, factor: float) -> Device:
    """Copy of the device with one figure multiplied by `factor`; with `speeds`, all of its speeds."""
    if field == "speeds":
        speeds = tuple(msgspec.structs.replace(s, flops_per_s=s.flops_per_s * factor) for s in device.speeds)
        return msgspec.structs.replace(device, speeds=speeds)
    figure = getattr(device, field)
    return msgspec.structs.replace(device, **{field: msgspec.structs.replace(figure, value=figure.value * factor)})


def _training(fleet: Fleet, reference: Fleet, known: Assumptions) -> Pair:
    ours = train(LLAMA_8B, fleet, HOME, TRAINING_OPTIMISATIONS[BEST], known)
    return ours, train_in_one_box(LLAMA_8B, reference, known)


def _decoding(shape: Shape, optimisations: Optimisations) -> Callable[[Fleet, Fleet, Assumptions], Pair]:
    def compute(fleet: Fleet, reference: Fleet, known: Assumptions) -> Pair:
        return generate(shape, fleet, HOME, optimisations, known), generate_in_one_box(
            shape, reference, Optimisations(), known
        )

    return compute


def _forward(fleet: Fleet, reference: Fleet, known: Assumptions) -> Pair:
    return forward(LLAMA_8B, fleet, HOME, Optimisations(), known), forward_in_one_box(
        LLAMA_8B, reference, Optimisations(), known
    )


_CELLS: Final[dict[str, Callable[[Fleet, Fleet, Assumptions], Pair]]] = {
    "training 8B, all optimisations": _training,
    "decoding 8B, fp16": _decoding(LLAMA_8B, Optimisations()),
    "decoding 8B, 4-bit weights": _decoding(LLAMA_8B, Optimisations(weight_bytes=INT4_BYTES)),
    "decoding 70B, 4-bit weights": _decoding(LLAMA_70B, Optimisations(weight_bytes=INT4_BYTES)),
    "forward 8B, fp16": _forward,
}


def _ratio(pair: Pair) -> float | None:
    match pair:
        case (PredictedSpeed() as ours, PredictedSpeed() as theirs):
            return ours.tokens_per_s / theirs.tokens_per_s
        case _:
            return None
