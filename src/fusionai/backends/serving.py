"""What a framework must do to serve a stage with caches: generation's side of the backend interface.

A stage is paged memory and a program. Which session has which pages, and what is dropped, is told by the caller
(`coordination.serving` decides it for the whole pipeline); nothing here decides. Tokens of many sessions are packed
along the sequence of one call, batch size 1. Positions follow from the segments.

Implementations: `backends.torch.serving`. One conformance suite. All calls block and come from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.serving import Segment, ServeOptions

FEW_POSITIONS: Final = 16
"""So many positions of a session, behind others, have the same bits together as one by one."""
TILE_POSITIONS: Final = 32
"""Attention of a prompt is computed by so many positions at a time, which end at multiples: pieces that end there too
leave bits alone, whatever their lengths."""


class ServingProgram(Protocol):
    """One loaded stage with its weights and caches.

    `fusion.attention` nodes append their keys and values to the cache of each segment's session and attend to all of
    that session up to each position. Layers with a window keep a ring per session of the window plus a pass; others
    are paged by the session's page table. Bits of a session's rows do not depend on what else is in the pass, nor on
    whether `FEW_POSITIONS` or fewer behind its first pass come together or one by one.
    """

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """Entries by `ParamSpec.key`, in any order, each once; dtypes as in the model's files. Converted, packed or
        quantised here, one at a time; the source is let go. Raises `ExecutionError` on an unknown key, a wrong shape,
        a dtype that can't become the wanted one."""
        ...

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys not imported yet, sorted."""
        ...

    def allocate(self) -> None:
        """Get the caches: a stage that stands by does without them until it is promoted. Harmless twice."""
        ...

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        """Values `wanted` (graph output names or meanings) for the packed positions of `segments`.

        `inputs`: the graph's inputs but `position_ids`, shapes [1, positions, ...]. `rows`: of every result only these
        positions. A graph without attention keeps nothing and takes any rows: `segments` may be empty then. Sizes are
        checked before anything is allocated. Raises `ExecutionError` where a segment starts beyond the cache, its
        pages do not suffice or are not there, or too many sessions have a ring."""
        ...

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop their page tables and rings; unknown ones are ignored."""
        ...

    def forget_all(self) -> None: ...

    @property
    def cached(self) -> dict[int, int]:
        """Session -> positions in the cache."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Weights as kept, and caches."""
        ...


class ServingBackend(Protocol):
    """The part of a backend that serves. A backend without it takes no part in serving jobs."""

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        """Prepare a stage of a validated graph. Sizes of weights and caches are computed first and checked against
        the limit: `ExecutionError`. Parameters that two stages share (tied weights) are simply in both."""
        ...
