"""Weights that lie outside a stage's memory until a block needs them: in a file beside a CPU, in the host's memory
beside an accelerator. Decides which are there at a time: those of one segment.

A parameter stays one tensor, so that autograd sums into its `.grad` as ever; between uses its storage is empty, as in
fully sharded training (Y. Zhao et al., 2023, arXiv 2304.11277). Backward finds no weight that forward saved: with
activations made again, autograd keeps numbers, and the weights come back with the segment. What is read is what was
written, so no bit differs. Plain reads for the reasons of `slots`, and without overlap: two segments' weights would be
there at once.

Neighbours: `recomputation` says when a segment is entered, `slots` is where weights lie, `program` owns this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch

from fusionai.backends.state import StateEntry
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import IN_BFLOAT16, Interpreter
from fusionai.backends.torch.optimizers import WEIGHT
from fusionai.backends.torch.recomputation import Segment
from fusionai.backends.torch.slots import DiskSlots, HostSlots, Shelf
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError

EMPTIED: Final = frozenset({"cpu", "cuda"})
"""Devices on which torch empties and refills a tensor's storage."""


class WeightsAway:
    """The parameters of `entries` (those with a shape and no slot), by key."""

    def __init__(self, entries: Mapping[str, StateEntry], directory: Path | None, device: torch.device) -> None:
        """`directory`: see `DiskSlots`. Raises `ExecutionError` on a device that can't, or a disk that is too small."""
        if device.type not in EMPTIED:
            raise ExecutionError(
                f"on {device.type} weights can't be put elsewhere between uses.",
                hint='Take offload_weights = "never" in the recipe, or let machines with a CPU or CUDA run the job.',
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
        """The parameter, empty until a segment that reads it is entered."""
        entry = self._entries[key]
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=self._device)
        made.untyped_storage().resize_(0)
        self._tensors[key] = made.requires_grad_(trainable)
        return made

    def enter(self, part: Segment, *, cast_once: bool = False) -> None:
        """Have the weights of `part` there, and no others. `cast_once`: nor what autocast made of those before."""
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
        """Have none there: before they get other values."""
        self._empty(self._there)

    def write(self, key: str, value: torch.Tensor) -> None:
        self.leave()
        self.shelf.write(key, WEIGHT, value)

    def read(self, key: str) -> torch.Tensor:
        """A copy. Only of what was written."""
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


def cast_once(graph: Graph, interpreter: Interpreter, parts: Collection[Segment]) -> bool:
    """Whether no weight that is trained is cast by autocast in two of `parts`. One that is has one cast for both uses,
    whose gradients are summed in bfloat16: with a second cast they would be summed in float32."""
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
    """Flat uint8, no tensor of autograd's."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
