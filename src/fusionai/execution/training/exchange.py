"""A stage's side of local updates: its parameter difference since the last outer update, and adopting the next outer
update.

Each stage keeps the parameters agreed on last (`anchor`). A difference is anchor - present + the packing error of the
previous difference (error feedback, as in F. Seide et al., "1-bit stochastic gradient descent", 2014). The packing
error of this difference is stored when the outer update is adopted. The mean of all differences acts as a gradient for
an outer step, which every stage takes itself, so that momentum does not multiply the packing error: SGD with Nesterov
momentum (DiLoCo, A. Douillard et al. 2023, arXiv 2311.08105; it waits for all replicas in every round, here a late one
catches up). A stage that continues training meanwhile also keeps the parameters it reported (`REPORTED`), and adds its
progress since then to the outer update. Everything is computed from stored state, so asking a stage twice gives the
same bits.

Parameters travel flattened, so that groups of a codec run across rows and only the last group needs padding.

`execution.training.twins` and `newcomers` call this module in the compute thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.interface import StageProgram
from fusionai.backends.state import ANCHOR, OUTER_MOMENTUM, REPORTED, RESIDUAL
from fusionai.coordination.training.twin_round import Span
from fusionai.execution.tensors import as_array, as_bytes
from fusionai.execution.training.codecs import Carried, pack, unpack
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged, packs

Floats = npt.NDArray[np.float32]

AGREED_SLOTS: Final = (ANCHOR, OUTER_MOMENTUM)
"""What all replicas have the same bits of after an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD with Nesterov momentum, in torch's order of operations."""

    learning_rate: float
    momentum: float

    def take(self, anchor: Floats, held: Floats, gradient: Floats) -> tuple[Floats, Floats]:
        """Return (anchor, momentum) after the step. All arrays are float32 of one shape."""
        rate, momentum = np.float32(self.learning_rate), np.float32(self.momentum)
        held = np.add(held * momentum, gradient, dtype=np.float32)
        return np.subtract(anchor, rate * (gradient + momentum * held), dtype=np.float32), held


def keep(program: StageProgram, keys: Iterable[str], slot: str) -> None:
    """Store the present parameters: as the last outer update (`ANCHOR`), or as the ones the next difference is computed
    from, whatever they become meanwhile (`REPORTED`)."""
    for key in keys:
        ((_, present),) = program.export_entries([f"model/{key}"])
        program.import_state([(f"optimizer/{key}/{slot}", present)])


@dataclass(frozen=True, slots=True)
class DifferenceForm:
    """How a stage makes its differences. `codec`: packs them. `overlapped`: they are computed from the stored
    parameters (`REPORTED`), because the stage trains on during the exchange."""

    codec: Exchanged
    overlapped: bool


def divided_difference(
    program: StageProgram, key: str, divided: Sequence[Span], own: int, form: DifferenceForm
) -> dict[int, Carried]:
    """Return one parameter's difference, packed in pieces: member -> the piece of its share. The own share is not
    packed, and neither are empty ones."""
    values = as_array(_pseudo_gradient(program, key, overlapped=form.overlapped)[0])
    return {
        member: pack(key, _float32(values[first:below], (below - first,)), form.codec)
        for member, (first, below) in enumerate(divided)
        if member != own and first < below
    }


def share_mean(
    program: StageProgram, key: str, span: Span, own: int, others: Mapping[int, Carried], form: DifferenceForm
) -> tuple[Carried, Floats]:
    """Sum the differences of one share in the order of the members, and divide by their number. Return (packed mean,
    mean). `others`: member -> its piece."""
    first, below = span
    pieces = {member: as_array(unpack(piece)) for member, piece in others.items()}
    pieces[own] = as_array(_pseudo_gradient(program, key, overlapped=form.overlapped)[0])[first:below]
    total = np.zeros(below - first, np.float32)
    for member in sorted(pieces):
        total += pieces[member]
    mean = total * np.float32(1 / len(pieces))
    return pack(key, _float32(mean, mean.shape), form.codec), mean


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedUpdate:
    """What a stage adopts for one parameter. `sent`: member -> this stage's difference of that member's share, as
    packed; `means`: member -> the packed mean of its share; `wanted`: the own share's mean before packing."""

    divided: Sequence[Span]
    own: int
    sent: Mapping[int, Carried]
    means: Mapping[int, Carried]
    wanted: Floats | None


def adopt_divided(
    program: StageProgram, key: str, update: DividedUpdate, form: DifferenceForm, step: OuterOptimizer
) -> None:
    """Adopt an outer update that the replicas summed in shares. What packing lost of the own share's mean is kept with
    what it lost of the own differences, times the number of members, because the next mean divides it again."""
    tensor, anchor = _pseudo_gradient(program, key, overlapped=form.overlapped)
    difference = as_array(tensor)
    gradient, lost = np.zeros_like(difference), np.zeros_like(difference)
    for member, (first, below) in enumerate(update.divided):
        if first == below:
            continue
        piece = slice(first, below)
        gradient[piece] = as_array(unpack(update.means[member]))
        if member != update.own:
            lost[piece] = difference[piece] - as_array(unpack(update.sent[member]))
        elif update.wanted is not None:
            lost[piece] = (update.wanted - gradient[piece]) * np.float32(len(update.divided))
    ((_, before),) = program.export_entries([f"optimizer/{key}/{OUTER_MOMENTUM}"])
    value, held = step.take(as_array(anchor), as_array(before), gradient)
    new = host_tensor(anchor.dtype, anchor.shape, as_bytes(value, anchor.dtype))
    program.import_state(
        [
            (f"model/{key}", _with_what_came_since(program, key, new) if form.overlapped else new),
            (f"optimizer/{key}/{ANCHOR}", new),
            (f"optimizer/{key}/{OUTER_MOMENTUM}", _float32(held, anchor.shape)),
            (f"optimizer/{key}/{RESIDUAL}", _float32(lost, anchor.shape)),
        ]
    )


def agreed_piece(program: StageProgram, key: str, span: Span) -> dict[str, HostTensor]:
    """Return part of what the replicas have agreed on for one parameter, float32 and flat: slot -> values."""
    first, below = span
    entries = program.export_entries([f"optimizer/{key}/{slot}" for slot in AGREED_SLOTS])
    return {
        slot: _float32(as_array(tensor)[first:below], (below - first,))
        for slot, (_, tensor) in zip(AGREED_SLOTS, entries, strict=True)
    }


Agreed = Mapping[str, Sequence[HostTensor]]
"""One parameter as other replicas have agreed on it: slot -> pieces, in order."""


def begin_from(program: StageProgram, key: str, agreed: Agreed) -> None:
    """Begin with a parameter as other replicas have agreed on it."""
    ((_, initial),) = program.export_entries([f"model/{key}"])
    _take_over(program, key, agreed, initial, np.zeros(prod(initial.shape), np.float32), overlapped=False)


def catch_up(program: StageProgram, key: str, agreed: Agreed, form: DifferenceForm) -> None:
    """Continue from a parameter as other replicas have agreed on it without this one. Its difference is kept like a
    packing error, so that it counts in the next exchange."""
    difference, anchor = _pseudo_gradient(program, key, overlapped=form.overlapped)
    _take_over(program, key, agreed, anchor, as_array(difference), overlapped=form.overlapped)


def _take_over(
    program: StageProgram, key: str, agreed: Agreed, like: HostTensor, residual: Floats, *, overlapped: bool
) -> None:
    anchor, momentum = (np.concatenate([as_array(piece) for piece in agreed[slot]]) for slot in AGREED_SLOTS)
    new = host_tensor(like.dtype, like.shape, as_bytes(anchor, like.dtype))
    program.import_state(
        [
            (f"model/{key}", _with_what_came_since(program, key, new) if overlapped else new),
            (f"optimizer/{key}/{ANCHOR}", new),
            (f"optimizer/{key}/{OUTER_MOMENTUM}", _float32(momentum, like.shape)),
            (f"optimizer/{key}/{RESIDUAL}", _float32(residual, like.shape)),
        ]
    )


def keys_of(twin: wire.TwinStage, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters that a stage of another replica also holds. `keys`: those of this stage, sorted. Raises
    `ExecutionError` if it is said to hold others."""
    if any(not first < below <= len(keys) for first, below in twin.keys):
        raise ExecutionError(
            f"stage {twin.stage} of {twin.job} is said to hold more than the {len(keys)} parameters here."
        )
    return tuple(key for first, below in twin.keys for key in keys[first:below])


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a parameter of this shape travels."""
    return (prod(shape),)


def _float32(values: Floats, shape: tuple[int, ...]) -> HostTensor:
    return host_tensor("float32", shape, as_bytes(np.ascontiguousarray(values), "float32"))


def _with_what_came_since(program: StageProgram, key: str, agreed: HostTensor) -> HostTensor:
    names = [f"model/{key}", f"optimizer/{key}/{REPORTED}"]
    present, form = (as_array(tensor) for _, tensor in program.export_entries(names))
    return host_tensor(agreed.dtype, agreed.shape, as_bytes(as_array(agreed) + (present - form), agreed.dtype))


def check_values(
    values: Mapping[str, Carried], shapes: Mapping[str, tuple[int, ...]], codec: Exchanged, what: str
) -> None:
    """Check that these are float32 values of known parameters, packed as agreed. `shapes`: the shapes in which they
    travel. Raises `ExecutionError`."""
    for key, carried in values.items():
        shape = shapes.get(key)
        if shape is None:
            raise ExecutionError(f"{what} names {key!r}, which is no parameter of this stage.")
        was = carried if isinstance(carried, HostTensor) else carried.was
        found = "none" if isinstance(carried, HostTensor) else carried.was.codec
        expected = codec if packs(codec, "float32", shape) else "none"
        if (was.dtype, was.shape, found) != ("float32", shape, expected):
            raise ExecutionError(
                f"expected {what} of {key} as float32 {list(shape)} packed as {expected}, "
                f"got {was.dtype} {list(was.shape)} packed as {found}."
            )


def _pseudo_gradient(program: StageProgram, key: str, *, overlapped: bool) -> tuple[HostTensor, HostTensor]:
    """Return (difference, flat; anchor)."""
    where = f"optimizer/{key}/{REPORTED}" if overlapped else f"model/{key}"
    names = [f"optimizer/{key}/{ANCHOR}", where, f"optimizer/{key}/{RESIDUAL}"]
    anchor, present, residual = (tensor for _, tensor in program.export_entries(names))
    value = (as_array(anchor) - as_array(present)) + as_array(residual)
    return _float32(value.astype(np.float32, copy=False), flat(anchor.shape)), anchor
