"""Local updates at a stage: how far it has come since the last agreement, and going over to the next one.

Each stage keeps what was agreed on last (`anchor`). A difference is anchor - present + what packing the last one lost
(error feedback, as F. Seide et al., "1-bit stochastic gradient descent", 2014); what packing this one loses is kept in
turn when the agreement is adopted. What the differences come to is a gradient, and every stage takes the outer step
with it itself: so what packing loses of a gradient is not multiplied by what the momentum adds to a step. Where two
train, each is told the other's difference as it came, and nothing is packed twice. Where a stage trains on meanwhile it
keeps what it told of (`told`), too, and how far it has come since is added to the agreement. Everything is computed
from the state alone: asked twice, a stage says the same.

Parameters travel flat, their rows in one: no group ends with a row and is filled up.

Decides nothing. Neighbours: `execution.work` calls it in the compute thread, `training.outer` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from fusionai.backends.interface import StageProgram
from fusionai.backends.state import ANCHOR, OUTER_MOMENTUM, RESIDUAL, TOLD
from fusionai.execution.accumulate import as_array, as_bytes
from fusionai.execution.codecs import Carried, pack, unpack
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.codecs import Exchanged, Told, packs

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """SGD with Nesterov's momentum, in the order of torch's operations."""

    learning_rate: float
    momentum: float

    def take(self, anchor: Floats, held: Floats, gradient: Floats) -> tuple[Floats, Floats]:
        """(anchor, momentum) after it; all float32, of one shape."""
        rate, momentum = np.float32(self.learning_rate), np.float32(self.momentum)
        held = np.add(held * momentum, gradient, dtype=np.float32)
        return np.subtract(anchor, rate * (gradient + momentum * held), dtype=np.float32), held


def keep_anchor(program: StageProgram, keys: Iterable[str]) -> None:
    """What the parameters are now is what was agreed on."""
    for key in keys:
        ((_, present),) = program.export_entries([f"model/{key}"])
        program.import_state([(f"optimizer/{key}/{ANCHOR}", present)])


def keep_told(program: StageProgram, keys: Iterable[str]) -> None:
    """The next difference is of what the parameters are now, whatever they become meanwhile."""
    for key in keys:
        ((_, present),) = program.export_entries([f"model/{key}"])
        program.import_state([(f"optimizer/{key}/{TOLD}", present)])


def differences(
    program: StageProgram, keys: Iterable[str], codec: Exchanged, *, overlapped: bool
) -> Iterator[tuple[str, Carried]]:
    """Of each parameter, packed, float32 and flat. `overlapped`: of what was told, not of what is there now."""
    for key in keys:
        yield key, pack(key, _difference(program, key, overlapped=overlapped)[0], codec)


def adopt(
    program: StageProgram,
    agreed: Mapping[str, Carried],
    told: Told,
    codec: Exchanged,
    step: OuterStep,
    *,
    overlapped: bool,
) -> None:
    """`agreed`: as `carried_shapes` has it."""
    for key in sorted({_parameter(name, told) for name in agreed}):
        difference, anchor = _difference(program, key, overlapped=overlapped)
        own = as_array(unpack(pack(key, difference, codec)))
        if told == "all":
            value, held = (as_array(unpack(agreed[f"{slot}/{key}"])) for slot in (ANCHOR, OUTER_MOMENTUM))
        else:
            gradient = as_array(unpack(agreed[key]))
            if told == "other":
                gradient = (own + gradient) * np.float32(0.5)
            ((_, before),) = program.export_entries([f"optimizer/{key}/{OUTER_MOMENTUM}"])
            value, held = step.take(as_array(anchor), as_array(before), gradient)
        lost = as_array(difference) - own
        new = host_tensor(anchor.dtype, anchor.shape, as_bytes(value, anchor.dtype))
        program.import_state(
            [
                (f"model/{key}", _with_what_came_since(program, key, new) if overlapped else new),
                (f"optimizer/{key}/{ANCHOR}", new),
                (f"optimizer/{key}/{OUTER_MOMENTUM}", _float32(held, anchor.shape)),
                (f"optimizer/{key}/{RESIDUAL}", _float32(lost, anchor.shape)),
            ]
        )


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As which a parameter of this shape travels."""
    return (prod(shape),)


def carried_shapes(shapes: Mapping[str, tuple[int, ...]], told: Told) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a stage with these parameters is told."""
    if told == "all":
        return {f"{slot}/{key}": shape for slot in (ANCHOR, OUTER_MOMENTUM) for key, shape in shapes.items()}
    return {key: flat(shape) for key, shape in shapes.items()}


def _parameter(name: str, told: Told) -> str:
    return name.partition("/")[2] if told == "all" else name


def _float32(values: Floats, shape: tuple[int, ...]) -> HostTensor:
    return host_tensor("float32", shape, as_bytes(values, "float32"))


def _with_what_came_since(program: StageProgram, key: str, agreed: HostTensor) -> HostTensor:
    names = [f"model/{key}", f"optimizer/{key}/{TOLD}"]
    present, told = (as_array(tensor) for _, tensor in program.export_entries(names))
    return host_tensor(agreed.dtype, agreed.shape, as_bytes(as_array(agreed) + (present - told), agreed.dtype))


def check_values(
    values: Mapping[str, Carried], shapes: Mapping[str, tuple[int, ...]], codec: Exchanged, what: str
) -> None:
    """That these are float32 numbers of known parameters, packed as agreed. `shapes`: as they travel. Raises
    `ExecutionError`."""
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


def _difference(program: StageProgram, key: str, *, overlapped: bool) -> tuple[HostTensor, HostTensor]:
    """(difference, flat; anchor)."""
    where = f"optimizer/{key}/{TOLD}" if overlapped else f"model/{key}"
    names = [f"optimizer/{key}/{ANCHOR}", where, f"optimizer/{key}/{RESIDUAL}"]
    anchor, present, residual = (tensor for _, tensor in program.export_entries(names))
    value = (as_array(anchor) - as_array(present)) + as_array(residual)
    return _float32(value.astype(np.float32, copy=False), flat(anchor.shape)), anchor
