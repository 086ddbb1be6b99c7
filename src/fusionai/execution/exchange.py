"""Local updates at a stage: how far it has come since the last agreement, and going over to the next one.

Each stage keeps what was agreed on last (`anchor`). A difference is anchor - present + what packing the last one lost
(error feedback, as F. Seide et al., "1-bit stochastic gradient descent", 2014); what packing this one loses is kept in
turn when the agreement is adopted. Where a stage trains on meanwhile it keeps what it told of (`told`), too, and how
far it has come since is added to the agreement. Everything is computed from the state alone: asked twice, a stage says
the same.

Decides nothing. Neighbours: `execution.work` calls it in the compute thread, `training.outer` is the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from fusionai.backends.interface import StageProgram
from fusionai.backends.state import ANCHOR, RESIDUAL, TOLD
from fusionai.execution.accumulate import as_array, as_bytes
from fusionai.execution.codecs import Carried, pack, unpack
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.codecs import Exchanged, packs


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
    """Of each parameter, packed, float32. `overlapped`: of what was told, not of what is there now."""
    for key in keys:
        yield key, pack(key, _difference(program, key, overlapped=overlapped)[0], codec)


def adopt(
    program: StageProgram, agreed: Mapping[str, Carried], codec: Exchanged, *, moves: bool, overlapped: bool
) -> None:
    """`agreed`: of each parameter what to take off its anchor if it `moves`, else the new anchor itself."""
    for key, carried in agreed.items():
        difference, anchor = _difference(program, key, overlapped=overlapped)
        value = as_array(unpack(carried))
        if moves:
            value = as_array(anchor) - value
        lost = as_array(difference) - as_array(unpack(pack(key, difference, codec)))
        new = host_tensor(anchor.dtype, anchor.shape, as_bytes(value, anchor.dtype))
        residual = host_tensor("float32", anchor.shape, as_bytes(lost, "float32"))
        program.import_state(
            [
                (f"model/{key}", _with_what_came_since(program, key, new) if overlapped else new),
                (f"optimizer/{key}/{ANCHOR}", new),
                (f"optimizer/{key}/{RESIDUAL}", residual),
            ]
        )


def _with_what_came_since(program: StageProgram, key: str, agreed: HostTensor) -> HostTensor:
    names = [f"model/{key}", f"optimizer/{key}/{TOLD}"]
    present, told = (as_array(tensor) for _, tensor in program.export_entries(names))
    return host_tensor(agreed.dtype, agreed.shape, as_bytes(as_array(agreed) + (present - told), agreed.dtype))


def check_values(
    values: Mapping[str, Carried], shapes: Mapping[str, tuple[int, ...]], codec: Exchanged, what: str
) -> None:
    """That these are float32 numbers of known parameters, packed as agreed. Raises `ExecutionError`."""
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
    """(difference, anchor)."""
    where = f"optimizer/{key}/{TOLD}" if overlapped else f"model/{key}"
    names = [f"optimizer/{key}/{ANCHOR}", where, f"optimizer/{key}/{RESIDUAL}"]
    anchor, present, residual = (tensor for _, tensor in program.export_entries(names))
    value = (as_array(anchor) - as_array(present)) + as_array(residual)
    return host_tensor("float32", anchor.shape, as_bytes(value.astype(np.float32, copy=False), "float32")), anchor
