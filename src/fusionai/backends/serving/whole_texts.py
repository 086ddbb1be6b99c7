"""Serving programs that compute a whole text with the evaluating program of a backend, all positions in one call.

`WholeServing` serves models that a key-value cache can't serve: layers that carry a state, and attention that capture
does not recognise, need all positions of a text. Each pass recomputes the session's whole text, so a stage keeps the
inputs of every position, in pages like a cache's. This is correct for any causal graph, on any backend that evaluates,
and gets slower as the text grows. A text is padded to one of a few lengths, because frameworks compile for each length;
causality makes the padding after a position irrelevant.

`EncoderServing` serves encoders and classifiers of texts, where a position depends on later ones too. A text comes in
one pass, at its own length: without padding there is nothing to hide from the other positions, and its bits are the
same whatever else is in the pass. Stages keep nothing of a text; after a fault the driver sends it again.

This module owns the evaluating program, its weights, lengths, the pages' layout, how a pass is divided into texts and
how rows become tensors. Neighbours: `base` checks passes, `execution.serving.loading` chooses a class where a job asks
for it, `ir.serving` makes the graph of an encoder, `capture.checking.check` checks that a graph is causal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.binding import shape_of, with_rows
from fusionai.backends.interface import Backend, Call
from fusionai.backends.serving.base import CheckedPass, ServingProgram
from fusionai.backends.serving.page_table import RowSpan, SessionTable
from fusionai.backends.state import ProgramSize
from fusionai.backends.tolerance import numbers
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import POSITIONS, SEQUENCE, row_dimension, works_by_rows
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import ServeOptions

FORMAT: Final = "fp32"
Bytes = npt.NDArray[np.uint8]


class WholeTextServing(ServingProgram):
    """A serving stage that computes whole texts. `kept_bytes`: memory that it needs besides the program's."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, backend: Backend, memory_limit_bytes: int | None, kept_bytes: int
    ) -> None:
        super().__init__(graph, options, whole=True)
        if (options.weights, options.cache) != (FORMAT, FORMAT):
            raise ExecutionError(
                f"serving without a cache keeps weights and inputs as {FORMAT}, got weights as {options.weights} "
                f"and a cache as {options.cache}."
            )
        self._longest = graph.symbols[SEQUENCE][1] if SEQUENCE in graph.symbols else options.pass_tokens
        left = None if memory_limit_bytes is None else memory_limit_bytes - kept_bytes
        if left is not None and left <= 0:
            raise ExecutionError(
                f"the inputs of {options.pages} pages take {kept_bytes} bytes; the limit is {memory_limit_bytes}.",
                hint="Use fewer pages or sessions, or lend more memory.",
            )
        self._program = backend.load(graph, grad_inputs=(), options=StageOptions(), memory_limit_bytes=left)
        inner = self._program.size
        self.size = ProgramSize(inner.kept_bytes, inner.in_use_bytes + kept_bytes)

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        if tensor.dtype != spec.dtype:
            tensor = host_tensor(spec.dtype, spec.shape, np.array(numbers(tensor), dtype=spec.dtype).tobytes())
        self._program.import_state([(f"model/{spec.key}", tensor)])

    def _evaluated(self, given: Mapping[str, HostTensor], length: int, wanted: frozenset[str]) -> dict[str, HostTensor]:
        """Return the outputs `wanted` of one text of `length` positions."""
        if POSITIONS in self._graph.inputs:
            positions = host_tensor("int64", (1, length), np.arange(length, dtype=np.int64).data)
            given = {**given, POSITIONS: positions}
        return self._program.forward(Call("eval", step=0, microbatch=0), given, sorted(wanted))

    def _joined(self, name: str, pieces: Sequence[Bytes], rows: int) -> HostTensor:
        """Return the output `name` of `rows` rows, of which each piece has some."""
        value = self._graph.outputs[name]
        spec = self._graph.values[value]
        shape = (1, rows, *row_of(self._graph, value))
        found: npt.NDArray[Any] = np.concatenate(pieces) if pieces else np.empty((0,), np.uint8)
        return host_tensor(spec.dtype, shape, np.ascontiguousarray(found).reshape(-1).data)


def row_of(graph: Graph, value: str) -> tuple[int, ...]:
    """Return the shape of one row of a value; of a value without rows, that of all of it."""
    by_rows = SEQUENCE in graph.values[value].shape
    return shape_of(graph, value, with_rows(graph, 1))[2 if by_rows else 1 :]


def row_bytes(graph: Graph, value: str) -> int:
    """Return the bytes of one row of a value."""
    return prod(row_of(graph, value)) * ITEMSIZE_BYTES[graph.values[value].dtype]


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
