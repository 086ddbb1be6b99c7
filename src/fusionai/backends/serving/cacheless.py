"""Cacheless recompute: serving of models that a key-value cache can't serve. Each pass recomputes the session's whole
text.

Layers that carry a state, and attention that capture does not recognise, need all positions of a text. So a stage keeps
the inputs of every position, in pages like a cache's, and runs its graph over the whole text for every new token. This
is correct for any causal graph, on any backend that evaluates, and gets slower as the text grows. A text is padded to
one of a few lengths, because frameworks compile for each length; causality makes the padding after a position
irrelevant.

This module owns lengths and the pages' layout. Neighbours: `whole_texts` computes a text, `base` checks passes,
`execution.serving.loading` chooses this class where a job asks for it, `capture.checking.check` checks that a graph is
causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import CheckedPass
from fusionai.backends.serving.page_table import RowSpan
from fusionai.backends.serving.whole_texts import Bytes, WholeTextServing, row_bytes, row_of
from fusionai.ir.schema import Graph
from fusionai.ir.serving import POSITIONS, row_dimension
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import ServeOptions

SHORTEST: Final = 16
"""Shortest padded length of a text, in positions."""
DOUBLED: Final = 128
"""Padded lengths double from `SHORTEST` up to this length and then grow in steps of it. Both are chosen."""


class WholeServing(WholeTextServing):
    """A serving stage that computes whole texts with the evaluating program of any backend."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, backend: Backend, memory_limit_bytes: int | None
    ) -> None:
        kept = [name for name in graph.inputs if name != POSITIONS]
        for value in (*kept, *graph.outputs.values()):
            if row_dimension(graph, value) != 1:
                raise ExecutionError(f"value {value!r} of shape {list(graph.values[value].shape)} has no rows.")
        self._rows = {name: row_of(graph, name) for name in kept}
        self._cache_bytes = options.pages * options.page_tokens * sum(row_bytes(graph, name) for name in kept)
        super().__init__(
            graph,
            options=options,
            backend=backend,
            memory_limit_bytes=memory_limit_bytes,
            kept_bytes=self._cache_bytes,
        )
        self._pages: dict[str, Bytes] | None = None

    @property
    def resident_bytes(self) -> int:
        return self._program.resident_bytes + (0 if self._pages is None else self._cache_bytes)

    def allocate(self) -> None:
        if self._pages is None:
            size = (self._options.pages, self._options.page_tokens)
            self._pages = {name: np.zeros((*size, row_bytes(self._graph, name)), np.uint8) for name in self._rows}

    def _computed(self, work: CheckedPass) -> dict[str, HostTensor]:
        chosen, wanted = work.chosen, work.wanted
        made: dict[str, list[Bytes]] = {name: [] for name in wanted}
        for span in work.spans:
            self._keep(span, work.inputs)
            own = [row - span.first for row in chosen if 0 <= row - span.first < span.length]
            if own and wanted:
                for name, tensor in self._whole(span, wanted).items():
                    found = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], -1)
                    made[name].append(found[[span.start + row for row in own]])
        return {name: self._joined(name, pieces, len(chosen)) for name, pieces in made.items()}

    def _keep(self, span: RowSpan, fed: Mapping[str, HostTensor]) -> None:
        """Store the inputs of the span's positions in its pages."""
        assert self._pages is not None
        size = self._options.page_tokens
        for name, pages in self._pages.items():
            came = np.frombuffer(fed[name].data, np.uint8).reshape(-1, pages.shape[2])
            for position in range(span.start, span.end):
                row = came[span.first + position - span.start]
                pages[span.pages[position // size], position % size] = row

    def _whole(self, span: RowSpan, wanted: frozenset[str]) -> dict[str, HostTensor]:
        """Return the outputs `wanted` of the padded text up to the end of the span."""
        assert self._pages is not None
        length = self._length(span.end)
        given: dict[str, HostTensor] = {}
        for name, pages in self._pages.items():
            text = np.zeros((length, pages.shape[2]), np.uint8)
            text[: span.end] = pages[list(span.pages)].reshape(-1, pages.shape[2])[: span.end]
            given[name] = host_tensor(
                self._graph.values[name].dtype, (1, length, *self._rows[name]), text.reshape(-1).data
            )
        return self._evaluated(given, length, wanted)

    def _length(self, end: int) -> int:
        if end > self._longest:
            raise ExecutionError(f"a text may have {self._longest} positions at most, this one has {end}.")
        size = SHORTEST
        while size < end:
            size += size if size < DOUBLED else DOUBLED
        return min(size, self._longest)
