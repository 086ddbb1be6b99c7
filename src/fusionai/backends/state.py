"""Names, dtypes and shapes of a stage's state entries. Decides what a complete state is, the same for every backend.

`model/<key>` for every parameter, buffer and constant; `optimizer/<key>/<slot>` for every trainable parameter.
Neighbours: backends check imports against this, `storage` writes the entries into checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.backends.binding import nearest
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, tensor_bytes
from fusionai.wire.messages import OptimizerSpec

ADAMW_SLOTS: Final = ("exp_avg", "exp_avg_sq", "step")
SGD_SLOTS: Final = ("momentum_buffer",)


@dataclass(frozen=True, slots=True)
class StateEntry:
    """`slot` is empty for `model/<key>`."""

    key: str
    slot: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def optimizer_slots(optimizer: OptimizerSpec | None) -> tuple[str, ...]:
    """Slots per trainable parameter, sorted."""
    if optimizer is None:
        return ()
    match optimizer.kind:
        case "adamw":
            return ADAMW_SLOTS
        case "sgd":
            return SGD_SLOTS if optimizer.momentum else ()


def state_entries(graph: Graph, optimizer: OptimizerSpec | None) -> dict[str, StateEntry]:
    """Entry name -> what it is, in canonical order: sorted `model/` entries, then sorted `optimizer/` entries."""
    specs = {spec.key: spec for spec in graph.params.values()}
    entries = {f"model/{key}": StateEntry(key, "", specs[key].dtype, tuple(specs[key].shape)) for key in sorted(specs)}
    for key in sorted(specs):
        if not specs[key].trainable:
            continue
        for slot in optimizer_slots(optimizer):
            counter = slot == "step"
            entries[f"optimizer/{key}/{slot}"] = StateEntry(
                key, slot, "float32" if counter else specs[key].dtype, () if counter else tuple(specs[key].shape)
            )
    return entries


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
