"""Common part of serving programs that compute a text with the evaluating program of a backend, all positions in one
call.

This module owns the evaluating program, its weights, and how rows become tensors. Neighbours: `cacheless` computes a
text again for each of its tokens, `encoder` computes it once; `base` checks passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.binding import shape_of, with_rows
from fusionai.backends.interface import Backend, Call
from fusionai.backends.serving.base import ServingProgram
from fusionai.backends.state import ProgramSize
from fusionai.backends.tolerance import numbers
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import POSITIONS, SEQUENCE
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
