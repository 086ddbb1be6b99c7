"""The serving side of the backend interface: what a framework must implement to serve a stage with caches.

A stage is paged memory and a program. The caller says which session has which pages and what is dropped
(`coordination.serving.driver` decides it for the whole pipeline). Tokens of many sessions are packed along the sequence
of one call, with batch size 1. Positions follow from the segments.

Implementations: `backends.torch.serving`, `backends.parted_serving` (JAX and ONNX Runtime) and
`backends.whole_serving`; one conformance suite tests them. All calls block and come from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.serving import Segment, ServeOptions

FEW_POSITIONS: Final = 16
"""Up to this many positions of a session, after earlier ones, give the same bits together as one by one. Chosen."""
TILE_POSITIONS: Final = 32
"""Positions of a prompt whose attention is computed together, in tiles that end at multiples of this. Prompt pieces
that also end at such multiples give the same bits whatever their lengths."""


class ServingProgram(Protocol):
    """One loaded stage with its weights and caches.

    `fusion.attention` nodes append their keys and values to the cache of each segment's session and attend to all
    positions of that session up to each position. Layers with a window keep one ring per session, as long as the window
    plus a pass; other layers are paged by the session's page table. The bits of a session's rows do not depend on what
    else is in the pass, nor on whether up to `FEW_POSITIONS` positions after the session's first pass come together or
    one by one.
    """

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """Load weights, keyed by `ParamSpec.key`, in any order, each once, with the dtypes of the model's files.

        Each weight is converted, packed or quantised in turn, and its source is released. Raises `ExecutionError` on an
        unknown key, a wrong shape, or a dtype that can't be converted.
        """
        ...

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of weights that were not imported yet, sorted."""
        ...

    def allocate(self) -> None:
        """Allocate the caches. A standby stage has none until it is promoted. A second call does nothing."""
        ...

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        """Return the values `wanted` (graph output meanings) for the packed positions of `segments`.

        `inputs`: the graph's inputs except `position_ids`, with shapes [1, positions, ...]. `rows`: return only these
        positions of each result. A graph without attention keeps nothing and takes any rows; `segments` may be empty
        then. Sizes are checked before anything is allocated. Raises `ExecutionError` if a segment starts beyond the
        cached positions, if its pages do not suffice or do not exist, or if more sessions need a ring than there are
        rings.
        """
        ...

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the page tables and rings of these sessions; unknown ones are ignored."""
        ...

    def forget_all(self) -> None: ...

    @property
    def cached(self) -> dict[int, int]:
        """Session -> number of cached positions."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as they are kept, and of the caches."""
        ...


class ServingBackend(Protocol):
    """The part of a backend that serves. A backend without it takes no part in serving jobs."""

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        """Prepare a stage of a validated graph.

        The sizes of weights and caches are computed first and checked against the limit; raises `ExecutionError` if
        they exceed it. Parameters that two stages share (tied weights) are held by both.
        """
        ...
