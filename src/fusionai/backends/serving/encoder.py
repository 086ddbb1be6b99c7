"""Serving of encoders and classifiers of texts: each segment is a whole text, computed once.

A position of such a model depends on later ones too, so a text comes in one pass, at its own length: without padding
there is nothing to hide from the other positions, and its bits are the same whatever else is in the pass. Stages keep
nothing of a text. After a fault the driver sends it again.

This module owns how a pass is divided into texts. Neighbours: `whole_texts` computes a text, `base` checks passes,
`execution.serving.loading` chooses this class where a job asks for it, `ir.serving` makes the graph.
"""

from __future__ import annotations

import numpy as np

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import CheckedPass
from fusionai.backends.serving.page_table import RowSpan, SessionTable
from fusionai.backends.serving.whole_texts import Bytes, WholeTextServing, row_of
from fusionai.ir.schema import Graph
from fusionai.ir.serving import row_dimension, works_by_rows
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import ServeOptions


class EncoderServing(WholeTextServing):
    """A stage of an encoder. An output without rows (scores of a text) is repeated for each row that is wanted."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, backend: Backend, memory_limit_bytes: int | None
    ) -> None:
        super().__init__(graph, options=options, backend=backend, memory_limit_bytes=memory_limit_bytes, kept_bytes=0)
        # A stage that works row by row may get the wanted rows alone, which belong to no segment.
        self._keeps = not works_by_rows(graph)
        self._table = SessionTable(options, paged=False, windows={})
        for value in graph.inputs:
            if row_dimension(graph, value) != 1:
                raise ExecutionError(f"value {value!r} of shape {list(graph.values[value].shape)} has no rows.")

    @property
    def resident_bytes(self) -> int:
        return self._program.resident_bytes

    def allocate(self) -> None:
        """There is no cache."""

    def _computed(self, work: CheckedPass) -> dict[str, HostTensor]:
        chosen, wanted = work.chosen, work.wanted
        made: dict[str, list[Bytes]] = {name: [] for name in wanted}
        spans = work.spans or (RowSpan(0, 0, 0, work.positions, (), -1),)
        for span in spans:
            if span.start:
                raise ExecutionError(f"the text of session {span.session} came in pieces, from position {span.start}.")
            if span.length > self._longest:
                raise ExecutionError(f"a text may have {self._longest} positions at most, this one has {span.length}.")
            own = [row - span.first for row in chosen if 0 <= row - span.first < span.length]
            if own and wanted:
                given = {name: self._part(name, tensor, span) for name, tensor in work.inputs.items()}
                for name, tensor in self._evaluated(given, span.length, wanted).items():
                    by_rows = row_dimension(self._graph, self._graph.outputs[name]) == 1
                    found = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1] if by_rows else 1, -1)
                    made[name].append(found[own if by_rows else [0] * len(own)])
        return {name: self._joined(name, pieces, len(chosen)) for name, pieces in made.items()}

    def _part(self, name: str, tensor: HostTensor, span: RowSpan) -> HostTensor:
        """Return the rows of the span's text."""
        if tensor.shape[1] == span.length:
            return tensor
        rows = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], -1)[span.first : span.first + span.length]
        return host_tensor(tensor.dtype, (1, span.length, *row_of(self._graph, name)), rows.reshape(-1).data)
