"""Names, dtypes and shapes of a stage's state entries. Decides what a complete state is, the same for every backend.

`model/<key>` for every parameter, buffer and constant; `optimizer/<key>/<slot>` for every trainable parameter.
Neighbours: backends check imports against this, `storage` writes the entries into checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from fusionai.backends.binding import nearest
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.stored import pack_stored, stored_bytes
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.wire.messages import OptimizerSpec, StageOptions

EIGHT_BIT_BLOCK: Final = 256
"""Numbers of 8-bit state that share a scale."""
SMALLEST_EIGHT_BIT: Final = 4096
"""Parameters of fewer elements (norms, biases) keep their state in their own precision: it is worth nothing there."""
ANCHOR: Final = "anchor"
"""The slot of what was agreed on last; no optimizer touches it, nor the next three."""
OUTER_MOMENTUM: Final = "outer_momentum"
"""The slot of the outer step's momentum."""
RESIDUAL: Final = "residual"
"""The slot of what packing the last difference lost."""
TOLD: Final = "told"
"""The slot of what the last difference was taken of, where stages train on while it travels."""
ASIDE: Final = frozenset({ANCHOR, OUTER_MOMENTUM, RESIDUAL, TOLD})
"""Slots that are an exchange's, not the optimizer's."""
OWN_FLOAT32: Final = frozenset({OUTER_MOMENTUM, RESIDUAL})
"""Those of them that are float32 whatever the parameter is."""
SCALE: Final = "_scale"
"""A slot of 8-bit codes has its scales in the slot of this name behind its own."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """`slot` is empty for `model/<key>`."""

    key: str
    slot: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"optimizer/{self.key}/{self.slot}" if self.slot else f"model/{self.key}"

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def optimizer_slots(
    optimizer: OptimizerSpec | None, dtype: str, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Slot -> (dtype, shape) of what an optimizer keeps for a trainable parameter, sorted."""
    if optimizer is None:
        return {}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    match optimizer.kind:
        case "adamw":
            found["step"] = ("float32", ())
            for slot in ("exp_avg", "exp_avg_sq"):
                found |= _moment(slot, optimizer, dtype, shape)
        case "sgd" if optimizer.momentum:
            found["momentum_buffer"] = (dtype, shape)
        case "sgd":
            pass
    if optimizer.anchored:
        found |= {ANCHOR: (dtype, shape)} | dict.fromkeys(OWN_FLOAT32, ("float32", shape))
    if optimizer.overlapped:
        found[TOLD] = (dtype, shape)
    return dict(sorted(found.items()))


def state_bytes_ratio(optimizer: OptimizerSpec) -> float:
    """Bytes of state per byte of a large float32 parameter."""
    shape = (1 << 20,)
    slots = optimizer_slots(optimizer, "float32", shape).values()
    return sum(tensor_bytes(*slot) for slot in slots if slot[1]) / tensor_bytes("float32", shape)


def _moment(
    slot: str, optimizer: OptimizerSpec, dtype: str, shape: tuple[int, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    count = prod(shape)
    if optimizer.state_bits == 32 or count < SMALLEST_EIGHT_BIT or dtype != "float32":
        return {slot: (dtype, shape)}
    return {slot: ("uint8", shape), slot + SCALE: ("float32", (-(-count // EIGHT_BIT_BLOCK),))}


def state_entries(graph: Graph, optimizer: OptimizerSpec | None) -> dict[str, StateEntry]:
    """Entry name -> what it is, in canonical order: sorted `model/` entries, then sorted `optimizer/` entries."""
    specs = {spec.key: spec for spec in graph.params.values()}
    entries = {f"model/{key}": _model_entry(specs[key]) for key in sorted(specs)}
    for key in sorted(specs):
        if not specs[key].trainable:
            continue
        for slot, (dtype, shape) in optimizer_slots(optimizer, specs[key].dtype, tuple(specs[key].shape)).items():
            entries[f"optimizer/{key}/{slot}"] = StateEntry(key, slot, dtype, shape)
    return entries


def saved_entries(graph: Graph, options: StageOptions) -> dict[str, StateEntry]:
    """Those of `state_entries` that a checkpoint is made of."""
    entries = state_entries(graph, options.optimizer)
    if not options.base_stays:
        return entries
    frozen = {spec.key for spec in graph.params.values() if spec.kind == "parameter" and not spec.trainable}
    return {name: entry for name, entry in entries.items() if entry.key not in frozen}


def _model_entry(spec: ParamSpec) -> StateEntry:
    """A packed weight is its bytes."""
    if spec.stored:
        return StateEntry(spec.key, "", "uint8", (stored_bytes(spec.shape, spec.stored),))
    return StateEntry(spec.key, "", spec.dtype, tuple(spec.shape))


def as_stored(spec: ParamSpec, value: HostTensor) -> HostTensor:
    """A parameter's value in its own dtype as the entry of a state has it."""
    if not spec.stored:
        return value
    if (value.dtype, value.shape) != (spec.dtype, tuple(spec.shape)):
        raise ExecutionError(
            f"expected {spec.key!r} as {spec.dtype} {list(spec.shape)}, got {value.dtype} {list(value.shape)}."
        )
    packed = pack_stored(np.frombuffer(value.data, np.float32).reshape(spec.shape), spec.stored)
    return host_tensor("uint8", packed.shape, packed.data)


def gradient_bytes(graph: Graph) -> int:
    """Bytes of one gradient per trainable parameter."""
    trainable = trainable_keys(graph)
    return sum(entry.nbytes for entry in state_entries(graph, None).values() if entry.key in trainable)


def trainable_keys(graph: Graph) -> frozenset[str]:
    """Keys of what an optimizer updates."""
    return frozenset(spec.key for spec in graph.params.values() if spec.trainable)


def check_entry(entries: dict[str, StateEntry], name: str, tensor: HostTensor) -> StateEntry:
    """The entry `name`. Raises `ExecutionError` when there is none or `tensor` does not fit it."""
    entry = entries.get(name)
    if entry is None:
        raise ExecutionError(f"unknown state entry {name!r}{nearest(name, entries)}.")
    if tensor.dtype != entry.dtype or tensor.shape != entry.shape:
        raise ExecutionError(
            f"expected {name} as {entry.dtype} {list(entry.shape)}, got {tensor.dtype} {list(tensor.shape)}."
        )
    return entry
