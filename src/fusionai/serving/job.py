"""What a serving job is, whoever runs it: frozen, complete, and enough to start its engine.

Neighbours: `client.serve` builds it from a model, `serving.deployment` cuts it for a plan, `serving.engine` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.serving.speculating import Speculate
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """`graph`: the captured one, loss and all (the engine cuts it away). Block numbers in plans are the graph's."""

    job: JobId
    owner: PeerId
    model: str
    """What people call it."""
    graph: Graph
    options: ServeOptions
    weights: ModelWeights
    """Of every `ParamSpec.key` that the graph without its loss reads (`serving.graph.weight_keys`)."""
    vocabulary: int
    context_tokens: int
    """Longest prompt plus answer."""
    stop_tokens: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    """Names of the adapters beside it, in the order of their numbers."""
    prefix_cache: bool = True
    """Off where layers have windows: their rings are per session."""
    in_flight: int = 0
    """Passes under way at a time; 0: as many as machines have stages."""
    queue: int = 256
    """Generations that may wait for a place."""
    speculate: Speculate = "off"
    """How many guesses passes carry."""
    secret: bytes = b""
    """32 bytes that no peer learns, by which spot checks are drawn and marks made; empty: nothing is checked."""
    chunk_tokens: int = 256
    """Prompts are read in pieces of so many positions at most."""
    tile_tokens: int | None = None
    """What lengths of pieces are multiples of, as stages' times suggest; None: all pieces are as long as may be. For
    stages whose bits do not depend on it."""
    balance_tokens: float = inf
    """Positions that attention must look at for one position to take twice the operations."""
