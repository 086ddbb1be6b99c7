"""What a serving job is, whoever runs it: frozen, complete, and enough to start its engine.

Neighbours: `client.serve` builds it from a model, `serving.deployment` cuts it for a plan, `serving.engine` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import ServeOptions, WeightSpec


class WeightReader(Protocol):
    """The owner's copy of the model's tensors: `storage.weights.ModelDirectory` or a captured model's state."""

    def read(self, name: str) -> HostTensor:
        """Mapped where it can be; the caller must not change it. Raises `StorageError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """`graph`: the captured one, loss and all (the engine cuts it away). Block numbers in plans are the graph's."""

    job: JobId
    owner: PeerId
    model: str
    """What people call it."""
    graph: Graph
    options: ServeOptions
    weights: Mapping[str, WeightSpec]
    """By `ParamSpec.key`, of every parameter that the graph without its loss reads."""
    reader: WeightReader
    """Reads them by the same keys."""
    vocabulary: int
    context_tokens: int
    """Longest prompt plus answer."""
    stop_tokens: frozenset[int] = frozenset()
    prefix_cache: bool = True
    """Off where layers have windows: their rings are per session."""
    chunk_tokens: int = 256
    """Prompts are read in pieces of so many positions, counted from their start."""
