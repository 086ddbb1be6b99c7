"""Cacheless recompute: serving of models that a key-value cache can't serve. Each pass recomputes the session's whole
text.

Layers that carry a state, and attention that capture does not recognise, need all positions of a text. So a stage keeps
the inputs of every position, in pages like a cache's, and runs its graph over the whole text for every new token. This
is correct for any causal graph, on any backend that evaluates, and gets slower as the text grows. A text is padded to
one of a few lengths, because frameworks compile for each length; causality makes the padding after a position
irrelevant.

This module owns lengths and the pages' layout. Neighbours: `base` checks passes, `execution.serving.loading`
chooses this class where a job asks for it, `capture.checking.check` checks that a graph is causal.
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
from fusionai.backends.serving.page_table import RowSpan
from fusionai.backends.state import ProgramSize
from fusionai.backends.tolerance import numbers
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import POSITIONS, SEQUENCE, row_dimension
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import ServeOptions

SHORTEST: Final = 16
"""Shortest padded length of a text, in positions."""
DOUBLED: Final = 128
"""Padded lengths double from `SHORTEST` up to this length and then grow in steps of it. Both are chosen."""
_FORMAT: Final = "fp32"
Bytes = npt.NDArray[np.uint8]


class WholeServing(ServingProgram):
    """A serving stage that computes whole texts with the evaluating program of any backend."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, backend: Backend, memory_limit_bytes: int | None
    ) -> None:
        super().__init__(graph, options, whole=True)
        if (options.weights, options.cache) != (_FORMAT, _FORMAT):
            raise ExecutionError(
                f"serving without a cache keeps weights and inputs as {_FORMAT}, got weights as {options.weights} "
                f"and a cache as {options.cache}."
            )
        self._longest = graph.symbols[SEQUENCE][1] if SEQUENCE in graph.symbols else options.pass_tokens
        self._rows = {name: self._row_of(name) for name in graph.inputs if name != POSITIONS}
        for value in (*self._rows, *graph.outputs.values()):
            if row_dimension(graph, value) != 1:
                raise ExecutionError(f"value {value!r} of shape {list(graph.values[value].shape)} has no rows.")
        self._cache_bytes = options.pages * options.page_tokens * sum(self._row_bytes(name) for name in self._rows)
        left = None if memory_limit_bytes is None else memory_limit_bytes - self._cache_bytes
        if left is not None and left <= 0:
            raise ExecutionError(
                f"the inputs of {options.pages} pages take {self._cache_bytes} bytes; the limit is "
                f"{memory_limit_bytes}.",
                hint="Use fewer pages or sessions, or lend more memory.",
            )
        self._program = backend.load(graph, grad_inputs=(), options=StageOptions(), memory_limit_bytes=left)
        self._pages: dict[str, Bytes] | None = None
        inner = self._program.size
        self.size = ProgramSize(inner.kept_bytes, inner.in_use_bytes + self._cache_bytes)

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        if tensor.dtype != spec.dtype:
            tensor = host_tensor(spec.dtype, spec.shape, np.array(numbers(tensor), dtype=spec.dtype).tobytes())
        self._program.import_state([(f"model/{spec.key}", tensor)])

    @property
    def resident_bytes(self) -> int:
        return self._program.resident_bytes + (0 if self._pages is None else self._cache_bytes)

    def allocate(self) -> None:
        if self._pages is None:
            size = (self._options.pages, self._options.page_tokens)
            self._pages = {name: np.zeros((*size, self._row_bytes(name)), np.uint8) for name in self._rows}

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
        if POSITIONS in self._graph.inputs:
            given[POSITIONS] = host_tensor("int64", (1, length), np.arange(length, dtype=np.int64).data)
        return self._program.forward(Call("eval", step=0, microbatch=0), given, sorted(wanted))

    def _length(self, end: int) -> int:
        if end > self._longest:
            raise ExecutionError(f"a text may have {self._longest} positions at most, this one has {end}.")
        size = SHORTEST
        while size < end:
            size += size if size < DOUBLED else DOUBLED
        return min(size, self._longest)

    def _joined(self, name: str, pieces: Sequence[Bytes], rows: int) -> HostTensor:
        value = self._graph.outputs[name]
        spec = self._graph.values[value]
        shape = (1, rows, *self._row_of(value))
        found: npt.NDArray[Any] = np.concatenate(pieces) if pieces else np.empty((0,), np.uint8)
        return host_tensor(spec.dtype, shape, np.ascontiguousarray(found).reshape(-1).data)

    def _row_of(self, value: str) -> tuple[int, ...]:
        return shape_of(self._graph, value, with_rows(self._graph, 1))[2:]

    def _row_bytes(self, name: str) -> int:
        return prod(self._rows[name]) * ITEMSIZE_BYTES[self._graph.values[name].dtype]
