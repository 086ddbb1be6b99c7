"""Offloaded weights: outside a stage's memory until a block needs them, in a file (CPU) or in host memory
(accelerator).

Only the weights of one segment are in memory at a time. A parameter remains one tensor, so that autograd sums into its
`.grad` as usual; between uses its storage is empty, as in fully sharded training (Y. Zhao et al., 2023, arXiv
2304.11277). Forward saves no weights for backward: with recomputed activations, autograd keeps only numbers, and the
weights are loaded again with the segment. The bytes read are those written, so no bit differs. Files are read as
`slots` explains, and without overlap, because that would need two segments' weights in memory.

Neighbours: `recomputation` says when a segment is entered, `slots` stores the weights, `program` owns this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch

from fusionai.backends.binding import IN_BFLOAT16
from fusionai.backends.state import StateEntry
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import Interpreter
from fusionai.backends.torch.optimizers import WEIGHT
from fusionai.backends.torch.recomputation import RecomputedSegment
from fusionai.backends.torch.slots import DiskSlots, HostSlots, Shelf
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError

EMPTIED: Final = frozenset({"cpu", "cuda"})
"""Devices on which torch can empty and refill a tensor's storage."""


class OffloadedWeights:
    """The offloaded parameters of `entries` (which have a shape and no slot), by key."""

    def __init__(self, entries: Mapping[str, StateEntry], directory: Path | None, device: torch.device) -> None:
        """`directory`: see `DiskSlots`. Raises `ExecutionError` on a device that can't offload weights, or on a disk
        that is too small."""
        if device.type not in EMPTIED:
            raise ExecutionError(
                f"weights can't be offloaded on {device.type}: torch can't empty a tensor's storage there.",
                hint='Set offload_weights = "never" in the recipe, or let machines with a CPU or CUDA run the job.',
            )
        layout = {(key, WEIGHT): (entry.dtype, entry.shape) for key, entry in entries.items()}
        self.shelf: Shelf = (
            DiskSlots(layout, directory, device, "weights") if device.type == "cpu" else HostSlots(device)
        )
        self._entries = dict(entries)
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._there: frozenset[str] = frozenset()

    @property
    def keys(self) -> Collection[str]:
        return self._entries.keys()

    def tensor(self, key: str, *, trainable: bool) -> torch.Tensor:
        """Return the parameter, empty until a segment that reads it is entered."""
        entry = self._entries[key]
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
        made.untyped_storage().resize_(0)
        self._tensors[key] = made.requires_grad_(trainable)
        return made

    def enter(self, part: RecomputedSegment, *, cast_once: bool = False) -> None:
        """Load the weights of `part` and empty all others. `cast_once`: also drop autocast's copies of earlier
        weights."""
        if cast_once:
            torch.clear_autocast_cache()
        if part.weights == self._there:
            return
        self._empty(self._there - part.weights)
        for key in sorted(part.weights - self._there):
            entry = self._entries[key]
            storage = self._tensors[key].untyped_storage()
            storage.resize_(entry.nbytes)
            if entry.nbytes:
                self.shelf.fill(key, WEIGHT, _bytes_of(storage, self._device))
        self._there = part.weights

    def leave(self) -> None:
        """Empty all weights: called before they get other values."""
        self._empty(self._there)

    def write(self, key: str, value: torch.Tensor) -> None:
        self.leave()
        self.shelf.write(key, WEIGHT, value)

    def read(self, key: str) -> torch.Tensor:
        """Return a copy of a weight that was written."""
        found = self.shelf.read(key, WEIGHT)
        assert found is not None, "the program asks for no value that is not set"
        return found

    def bytes_of(self, keys: Collection[str]) -> int:
        return sum(self._entries[key].nbytes for key in keys)

    @property
    def present_bytes(self) -> int:
        return self.bytes_of(self._there)

    def _empty(self, keys: frozenset[str]) -> None:
        for key in keys:
            self._tensors[key].untyped_storage().resize_(0)
        self._there -= keys


def cast_once(graph: Graph, interpreter: Interpreter, parts: Collection[RecomputedSegment]) -> bool:
    """Return whether autocast casts no trained weight in two of `parts`. A weight used twice normally has one cast for
    both uses, whose gradients are summed in bfloat16. With a second cast they would be summed in float32."""
    seen: set[str] = set()
    for part in parts:
        nodes = [step.node for step in interpreter.steps[part.start : part.stop]]
        cast = {
            graph.params[name].key
            for node in nodes
            if OPERATORS[node.op].category in IN_BFLOAT16
            for name in reads(node)
            if name in graph.params and graph.params[name].trainable
        }
        if seen & cast:
            return False
        seen |= cast
    return True


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return the storage as flat uint8, outside autograd."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
