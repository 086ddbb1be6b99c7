"""One evaluating stage on ONNX Runtime: forward passes without gradients.

A session is built for each set of sizes. Neighbours: `sessions` builds and runs, `stage_base` checks calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from fusionai.backends.binding import bind_symbols, check_indices, largest
from fusionai.backends.counters import DropoutKey
from fusionai.backends.interface import NOTHING_BEGUN, Call
from fusionai.backends.onnxruntime.semantic import drawing, keys
from fusionai.backends.onnxruntime.sessions import Array, Weights, require_operators, session_of
from fusionai.backends.stage_base import StageBase
from fusionai.backends.state import StateEntry
from fusionai.backends.tolerance import numbers
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.schema import Graph, Node
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import StageOptions

MOST_SESSIONS: Final = 16
"""Sessions for different sizes that are kept at a time; chosen."""
NO_TRAINING: Final = "ONNX Runtime computes forward passes only: this backend can't train."
_HINT: Final = "Let machines with backend torch or jax train."


class OnnxStageProgram(StageBase[None]):
    """Implements `backends.interface.StageProgram` without training: its training methods raise `ExecutionError`."""

    def __init__(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        device: str,
        threads: int | None,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__(graph, grad_inputs=grad_inputs, options=options)
        require_operators(graph.nodes)
        if options.optimizer is not None:
            raise ExecutionError(NO_TRAINING, hint=_HINT)
        self._require_room(self._state_bytes(), memory_limit_bytes)
        self._device = device
        self._threads = threads
        self._weights = Weights()
        self._needed: dict[frozenset[str], _Needed] = {}
        """Wanted outputs -> the nodes they need. Cached, because searching a graph takes a twentieth of a block's run
        time."""
        self._sessions: dict[object, Callable[[Mapping[str, Array]], dict[str, Array]]] = {}

    def forward(
        self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None
    ) -> dict[str, HostTensor]:
        if call.mode == "train":
            raise ExecutionError(NO_TRAINING, hint=_HINT)
        names = self._begin(call, wanted)
        if names not in self._needed:
            self._needed[names] = _needed_for(self._graph, names)
        outputs, nodes, read, needed, drawn = self._needed[names]
        symbols = {**largest(self._graph), **bind_symbols(self._graph, inputs, needed)}
        check_indices(self._graph, nodes, inputs)
        at = (names, tuple(sorted(symbols.items())))
        if at not in self._sessions:
            if len(self._sessions) >= MOST_SESSIONS:
                self._sessions.clear()
            self._sessions[at] = session_of(
                self._graph,
                nodes,
                symbols=symbols,
                given=needed,
                params=[name for name in self._graph.params if name in read],
                makes=sorted(outputs),
                weights=self._weights,
                device=self._device,
                threads=self._threads,
            )
        given: dict[str, Array] = {name: np.array(numbers(inputs[name])) for name in needed}
        found = self._sessions[at]({**given, **keys(drawn, DropoutKey(self._options.seed, call.step, call.microbatch))})
        values = {name: self._graph.outputs[name] for name in names}
        return {name: _host(self._graph.values[value].dtype, found[value]) for name, value in values.items()}

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> dict[str, HostTensor]:
        del call, gradients, begun
        raise ExecutionError(NO_TRAINING, hint=_HINT)

    def weight_gradients(self, call: Call) -> None:
        del call
        raise ExecutionError(NO_TRAINING, hint=_HINT)

    def gradient_norms(self) -> dict[str, float]:
        return {}

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        for key in keys:
            self._require_trainable(key)
        return []

    def import_gradients(self, entries: Iterable[tuple[str, HostTensor]], *, add: bool) -> None:
        del entries, add
        raise ExecutionError(NO_TRAINING, hint=_HINT)

    def apply(self, *, scale: float, learning_rate: float) -> None:
        del scale, learning_rate
        raise ExecutionError(NO_TRAINING, hint=_HINT)

    def discard(self) -> None:
        """Do nothing: no state is kept between calls."""

    @property
    def resident_bytes(self) -> int:
        return self._weights.nbytes

    def _copy(self, entry: StateEntry) -> HostTensor:
        return _host(entry.dtype, self._weights.array(entry.key))

    def _put(self, entry: StateEntry, value: HostTensor) -> None:
        self._weights.put(entry.key, np.array(numbers(value)))
        self._sessions.clear()  # they hold the old values


class _Needed(NamedTuple):
    """What some outputs depend on: graph values, nodes, all values that these read, the inputs among them, and the ids
    of nodes that draw random numbers."""

    outputs: set[str]
    nodes: tuple[Node, ...]
    read: set[str]
    inputs: list[str]
    drawing: tuple[int, ...]


def _needed_for(graph: Graph, names: frozenset[str]) -> _Needed:
    outputs = {graph.outputs[name] for name in names}
    nodes = needed_nodes(graph, outputs)
    read = {value for node in nodes for value in reads(node)} | outputs
    return _Needed(outputs, nodes, read, [name for name in graph.inputs if name in read], drawing(nodes))


def _host(dtype: str, values: Array) -> HostTensor:
    if dtype == "bfloat16":  # came as float32 whose lower half is zero
        values = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return host_tensor("int64" if dtype == "symint" else dtype, values.shape, values.tobytes())
