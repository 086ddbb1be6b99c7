"""One serving stage on ONNX Runtime: a session per part, for any number of rows.

If a part's sizes are multiples of the rows (experts), it gets one session for each group size. Only float32 weights are
supported. Neighbours: `serving.parted` cuts the graph and has caches and attention, `sessions` builds and runs.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fusionai.backends.onnxruntime.building import ROWS, Size, SizesError
from fusionai.backends.onnxruntime.sessions import Array, Weights, require_operators, session_of
from fusionai.backends.serving.parted import Compute, Part, PartedServing
from fusionai.backends.tolerance import numbers
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import BATCH, SEQUENCE
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, tensor_bytes
from fusionai.wire.serving import ServeOptions

FORMATS: Final = ("fp32",)
"""Supported weight formats."""


class OnnxServingProgram(PartedServing):
    """Implements `backends.interface.ServingProgram`."""

    def __init__(
        self,
        graph: Graph,
        *,
        options: ServeOptions,
        device: str,
        threads: int | None,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__(graph, options)
        require_operators(graph.nodes)
        if options.weights not in FORMATS:
            raise ExecutionError(
                f"this backend keeps weights as {', '.join(FORMATS)}, not as {options.weights}.",
                hint="Use that format, or let machines with backend torch serve the model.",
            )
        self._device = device
        self._threads = threads
        self._check_memory(memory_limit_bytes)
        self._weights = Weights()
        self._sessions: dict[tuple[tuple[int, ...], tuple[str, ...], Size], Compute] = {}
        """(a part's nodes, what it makes, number of rows) -> session."""
        self._by_size: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
        """Parts for which a session for any number of rows can't be built."""

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        self._weights.put(spec.key, np.array(numbers(tensor), dtype=spec.dtype))

    @property
    def resident_bytes(self) -> int:
        return self._cache_bytes + self._weights.nbytes

    def _weight(self, key: str) -> Array:
        return self._weights.array(key)

    def _compiled(self, part: Part, rows: int) -> Compute:
        at = (tuple(node.id for node in part.nodes), part.makes)
        if at not in self._by_size:
            try:
                return self._session(part, ROWS)
            except SizesError:
                self._by_size.add(at)
        return self._session(part, rows)

    def _session(self, part: Part, rows: Size) -> Compute:
        at = (tuple(node.id for node in part.nodes), part.makes, rows)
        if at not in self._sessions:
            whole = set(at[0])
            sizes = [node for node in self._graph.nodes if self._is_size(node)]
            nodes = [node for node in self._graph.nodes if node.id in whole or node in sizes]
            self._sessions[at] = session_of(
                self._graph,
                nodes,
                symbols={**dict.fromkeys(self._graph.symbols, 1), SEQUENCE: rows, BATCH: 1},
                given=part.given,
                params=part.params,
                makes=part.makes,
                weights=self._weights,
                device=self._device,
                threads=self._threads,
            )
        return self._sessions[at]

    def _check_memory(self, limit_bytes: int | None) -> None:
        """Check the limit: caches, and weights twice, because sessions keep a transposed and packed copy."""
        weights_bytes = 2 * sum(tensor_bytes(spec.dtype, spec.shape) for spec in self._specs.values())
        cache_bytes = sum(shape.nbytes(self._options) for shape in self._layers)
        if limit_bytes is not None and weights_bytes + cache_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage takes {weights_bytes} bytes of weights, including packed copies, and "
                f"{cache_bytes} of caches; the limit is {limit_bytes}.",
                hint="Use fewer pages or sessions, fewer blocks here, or lend more memory.",
            )
