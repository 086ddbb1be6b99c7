"""Names, dtypes and shapes of a stage's state entries: what a complete state consists of, the same on every backend.

`model/<key>` for every parameter, buffer and constant; `optimizer/<key>/<slot>` for every trainable parameter.
Neighbours: backends check imports against this, `storage` writes the entries into checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
import numpy as np

from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.weights import initialise, pack_stored, stored_bytes
from fusionai.primitives.errors import ExecutionError, nearest
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.primitives.units import format_bytes, format_count
from fusionai.wire.messages import OptimizerSpec, StageOptions

EIGHT_BIT_BLOCK: Final = 256
"""Elements of 8-bit optimizer state that share a scale."""
SMALLEST_EIGHT_BIT: Final = 4096
"""Parameters with fewer elements (norms, biases) keep their state in their own precision, because 8 bits would save
little memory there. bitsandbytes has the same limit."""
ANCHOR: Final = "anchor"
"""Slot of the parameter value after the last synchronisation of replicas. No optimizer touches this slot or the next
three."""
OUTER_MOMENTUM: Final = "outer_momentum"
"""Slot of the momentum of the outer optimizer step."""
RESIDUAL: Final = "residual"
"""Slot of the error that compressing the last pseudo-gradient left, added to the next one."""
REPORTED: Final = "told"
"""Slot of the parameter value from which the last pseudo-gradient was taken, for stages that train on while it
travels."""
ASIDE: Final = frozenset({ANCHOR, OUTER_MOMENTUM, RESIDUAL, REPORTED})
"""Slots that belong to the synchronisation of replicas, not to the optimizer."""
OWN_FLOAT32: Final = frozenset({OUTER_MOMENTUM, RESIDUAL})
"""Slots among `ASIDE` that are float32 whatever the parameter's dtype."""
SCALE: Final = "_scale"
"""Suffix of the slot that holds the scales of an 8-bit slot."""


class ProgramSize(msgspec.Struct, frozen=True):
    """Memory that a program takes at its largest sizes, as found when it is loaded. `kept_bytes`: parameters, gradients
    and optimizer state, or weights as they are served. `in_use_bytes`: what is added when the program takes part in a
    job, which is what microbatches in flight keep, or caches."""

    kept_bytes: int = 0
    in_use_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of a stage's state. `slot` is empty for `model/<key>`."""

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
    """Return slot -> (dtype, shape) of what an optimizer keeps for a trainable parameter, sorted."""
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
        found[REPORTED] = (dtype, shape)
    return dict(sorted(found.items()))


def state_bytes_ratio(optimizer: OptimizerSpec) -> float:
    """Return bytes of optimizer state per byte of a large float32 parameter."""
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
    """Return entry name -> entry, in canonical order: sorted `model/` entries, then sorted `optimizer/` entries."""
    specs = {spec.key: spec for spec in graph.params.values()}
    entries = {f"model/{key}": _model_entry(specs[key]) for key in sorted(specs)}
    for key in sorted(specs):
        if not specs[key].trainable:
            continue
        for slot, (dtype, shape) in optimizer_slots(optimizer, specs[key].dtype, tuple(specs[key].shape)).items():
            entries[f"optimizer/{key}/{slot}"] = StateEntry(key, slot, dtype, shape)
    return entries


def saved_entries(graph: Graph, options: StageOptions) -> dict[str, StateEntry]:
    """Return the entries that a checkpoint contains: without frozen parameters if `options.base_stays`."""
    entries = state_entries(graph, options.optimizer)
    if not options.base_stays:
        return entries
    frozen = {spec.key for spec in graph.params.values() if spec.kind == "parameter" and not spec.trainable}
    return {name: entry for name, entry in entries.items() if entry.key not in frozen}


def _model_entry(spec: ParamSpec) -> StateEntry:
    """Return the entry of a parameter. A packed weight is an array of bytes."""
    if spec.stored:
        return StateEntry(spec.key, "", "uint8", (stored_bytes(spec.shape, spec.stored),))
    return StateEntry(spec.key, "", spec.dtype, tuple(spec.shape))


def initial_value(spec: ParamSpec, seed: int) -> HostTensor | None:
    """Return a parameter's initial value in the form that its state entry has; None if it has no initialisation
    rule."""
    if spec.init is None:
        return None
    values = np.asarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, seed))
    return as_stored(spec, host_tensor(spec.dtype, tuple(spec.shape), values.data))


def as_stored(spec: ParamSpec, value: HostTensor) -> HostTensor:
    """Return a parameter's value, given in its own dtype, in the form that its state entry has."""
    if not spec.stored:
        return value
    if (value.dtype, value.shape) != (spec.dtype, tuple(spec.shape)):
        raise ExecutionError(
            f"expected {spec.key!r} as {spec.dtype} {list(spec.shape)}, got {value.dtype} {list(value.shape)}."
        )
    packed = pack_stored(np.frombuffer(value.data, np.float32).reshape(spec.shape), spec.stored)
    return host_tensor("uint8", packed.shape, packed.data)


def gradient_bytes(graph: Graph) -> int:
    """Return the bytes of one gradient per trainable parameter."""
    trainable = {spec.key for spec in graph.params.values() if spec.trainable}
    return sum(entry.nbytes for entry in state_entries(graph, None).values() if entry.key in trainable)


def check_entry(entries: dict[str, StateEntry], name: str, tensor: HostTensor) -> StateEntry:
    """Return the entry `name`. Raises `ExecutionError` if there is none or `tensor` does not fit it."""
    entry = entries.get(name)
    if entry is None:
        raise ExecutionError(f"unknown state entry {name!r}; {nearest(name, entries)}")
    if tensor.dtype != entry.dtype or tensor.shape != entry.shape:
        raise ExecutionError(
            f"expected {name} as {entry.dtype} {list(entry.shape)}, got {tensor.dtype} {list(tensor.shape)}."
        )
    return entry


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """`frozen_optimizer_bytes` is optimizer state for parameters that are not trained; anything but 0 is an error."""

    parameters: int
    frozen_parameters: int
    optimizer_bytes: int
    frozen_optimizer_bytes: int

    @property
    def words(self) -> str:
        """One human-readable sentence."""
        whole = self.parameters + self.frozen_parameters
        of = f"{format_count(self.parameters)} of {format_count(whole)} parameters are trained"
        kept = f"the optimizer keeps {format_bytes(self.optimizer_bytes)} for them"
        if not self.frozen_parameters:
            return f"{of}; {kept}."
        return f"{of}; {kept} and {format_bytes(self.frozen_optimizer_bytes)} for the others."


def trained(graph: Graph, optimizer: OptimizerSpec) -> Trained:
    """Count over the whole graph, whatever stages it is cut into."""
    specs = {spec.key: spec for spec in graph.params.values() if spec.kind == "parameter"}
    learning = {key for key, spec in specs.items() if spec.trainable}
    kept = [entry for entry in state_entries(graph, optimizer).values() if entry.slot]
    return Trained(
        parameters=sum(prod(specs[key].shape) for key in learning),
        frozen_parameters=sum(prod(spec.shape) for key, spec in specs.items() if key not in learning),
        optimizer_bytes=sum(entry.nbytes for entry in kept if entry.key in learning),
        frozen_optimizer_bytes=sum(entry.nbytes for entry in kept if entry.key not in learning),
    )
