"""One evaluating stage on ONNX Runtime: builds a session for each set of sizes and runs forward passes without
gradients.

The operator table maps names to ONNX builders and resolves no name that it receives. A builder gets the model under
construction, then the arguments of torch's operator. Losses, and operators whose result sizes depend on the data, are
not supported. Weights are given to a session by reference, so several sessions share them. Neighbours: `building` makes
the models, `stage_base` checks calls, `backend` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from fusionai.backends.binding import bind_symbols, check_indices, first_line, largest
from fusionai.backends.interface import Call, StageProgram, Tensors
from fusionai.backends.onnxruntime.arithmetic import ARITHMETIC
from fusionai.backends.onnxruntime.building import Builder, Size, Tensor
from fusionai.backends.onnxruntime.products import DRAWING, PRODUCTS, SCANS, drawing, keys
from fusionai.backends.onnxruntime.reductions import REDUCTIONS
from fusionai.backends.onnxruntime.shaping import SHAPING
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.serving.parted import ProgramPart
from fusionai.backends.state import StateEntry
from fusionai.backends.tolerance import numbers
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.schema import Graph, Node
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import StageOptions

Array = npt.NDArray[Any]


def providers(device: str) -> list[Any]:
    """Return ONNX Runtime's execution providers for `cpu`, or a card such as `cuda:0`."""
    kind, _, number = device.partition(":")
    cards = [] if kind == "cpu" else [("CUDAExecutionProvider", {"device_id": int(number or 0)})]
    return [*cards, "CPUExecutionProvider"]


Session = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Maps values by name to the values that it makes."""


class Weights:
    """Weights by key, as ONNX Runtime holds them, and the sessions that compute with them."""

    def __init__(self, device: str, threads: int | None) -> None:
        self._device = device
        self._threads = threads
        self._values: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}

    def put(self, key: str, values: Array) -> None:
        self.arrays[key] = np.asarray(values, order="C")  # unlike ascontiguousarray, keeps a scalar's rank 0
        self._values[key] = ort.OrtValue.ortvalue_from_numpy(self.arrays[key])

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.arrays.values())

    def session(self, graph: Graph, part: ProgramPart, symbols: Mapping[str, Size]) -> Session:
        """Return the part as a function of the values `part.given` and the keys of nodes that draw random numbers
        (`products.keys`). Raises `ExecutionError` if ONNX Runtime rejects the model."""
        built = Builder(graph, symbols)
        for name in part.given:
            built.give(name)
        held: dict[str, Tensor] = {name: built.give(name) for name in part.params}
        for node in part.nodes:
            built.add(node, OPERATORS)
        model = built.model(part.makes, weights=held, inputs=part.given)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        if held:
            options.add_external_initializers(list(held), [self._values[graph.params[name].key] for name in held])
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, providers=providers(self._device))
        except Exception as error:  # ONNX Runtime raises its own exceptions, which have no common base
            raise ExecutionError(f"ONNX Runtime rejects the model: {first_line(error)}") from error
        used = {one.name for one in session.get_inputs()}
        names = [f"out:{name}" for name in part.makes]

        def run(values: Mapping[str, Array]) -> dict[str, Array]:
            fed = {name: values[name] for name in used}
            try:
                found = [np.asarray(one) for one in session.run(names, fed)]
            except Exception as error:  # as above
                raise ExecutionError(f"ONNX Runtime failed: {first_line(error)}") from error
            return dict(zip(part.makes, found, strict=True))

        return run


OPERATORS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {**ARITHMETIC, **SHAPING, **REDUCTIONS, **PRODUCTS, **SCANS, **DRAWING}
)


MOST_SESSIONS: Final = 16
"""Sessions for different sizes that are kept at a time; chosen."""
NO_TRAINING: Final = "ONNX Runtime computes forward passes only: this backend can't train."
_HINT: Final = "Let machines with backend torch or jax train."


class OnnxStageProgram(StageProgram):
    """A stage that evaluates; its training methods raise `ExecutionError`."""

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
        if options.optimizer is not None:
            raise ExecutionError(NO_TRAINING, hint=_HINT)
        self._require_room(self._state_bytes(), memory_limit_bytes)
        self._weights = Weights(device, threads)
        self._needed: dict[frozenset[str], _Needed] = {}
        """Wanted outputs -> the nodes they need. Cached, because searching a graph takes a twentieth of a block's run
        time."""
        self._sessions: dict[object, Session] = {}

    def forward(self, call: Call, inputs: Tensors, wanted: Sequence[str] | None = None) -> dict[str, HostTensor]:
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
            params = tuple(name for name in self._graph.params if name in read)
            part = ProgramPart(nodes, params, tuple(needed), tuple(sorted(outputs)), None)
            self._sessions[at] = self._weights.session(self._graph, part, symbols)
        given: dict[str, Array] = {name: np.array(numbers(inputs[name])) for name in needed}
        found = self._sessions[at]({**given, **keys(drawn, DropoutKey(self._options.seed, call.step, call.microbatch))})
        values = {name: self._graph.outputs[name] for name in names}
        return {name: _host(self._graph.values[value].dtype, found[value]) for name, value in values.items()}

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ExecutionError(NO_TRAINING, hint=_HINT)

    backward = weight_gradients = import_gradients = apply = _refuse

    def gradient_norms(self) -> dict[str, float]:
        return {}

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        for key in keys:
            self._require_trainable(key)
        return []

    @property
    def resident_bytes(self) -> int:
        return self._weights.nbytes

    def _copy(self, entry: StateEntry) -> HostTensor:
        return _host(entry.dtype, self._weights.arrays[entry.key])

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
