"""Runs ONNX models: sessions with numpy inputs and outputs. Chooses execution providers.

Weights are given to a session by reference, so several sessions share them. Neighbours: `building` makes the models,
`program` and `serving` run them.

The operator table maps names to ONNX builders and resolves no name that it receives. A builder gets the model under
construction, then the arguments of torch's operator. Losses, and operators whose result sizes depend on the data, are
not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from fusionai.backends.binding import describe, first_line
from fusionai.backends.onnxruntime.arithmetic import ARITHMETIC
from fusionai.backends.onnxruntime.building import Builder, Size, Tensor
from fusionai.backends.onnxruntime.products import PRODUCTS
from fusionai.backends.onnxruntime.reductions import REDUCTIONS
from fusionai.backends.onnxruntime.semantic import DRAWING, SCANS
from fusionai.backends.onnxruntime.shaping import SHAPING
from fusionai.ir.schema import Graph, Node
from fusionai.primitives.errors import ExecutionError

Array = npt.NDArray[Any]
PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
"""Device name in FusionAI -> ONNX Runtime's execution providers."""


class Weights:
    """Weights by key, as ONNX Runtime holds them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, Array] = {}

    def put(self, key: str, values: Array) -> None:
        self._arrays[key] = np.asarray(values, order="C")  # unlike ascontiguousarray, keeps a scalar's rank 0
        self._values[key] = ort.OrtValue.ortvalue_from_numpy(self._arrays[key])

    def array(self, key: str) -> Array:
        return self._arrays[key]

    def value(self, key: str) -> Any:
        return self._values[key]

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._arrays.values())


def require_operators(nodes: Collection[Node]) -> None:
    for node in nodes:
        if node.op not in OPERATORS and not node.op.startswith(("sym.", "aten.sym_size")):
            raise ExecutionError(f"{describe(node)}: this backend has no operator {node.op}.")


def session_of(
    graph: Graph,
    nodes: Sequence[Node],
    *,
    symbols: Mapping[str, Size],
    given: Sequence[str],
    params: Sequence[str],
    makes: Sequence[str],
    weights: Weights,
    device: str,
    threads: int | None,
) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return `nodes` as a function of the values `given` and the keys of nodes that draw random numbers
    (`semantic.keys`). Raises `ExecutionError` if an operator is not supported or ONNX Runtime rejects the model."""
    built = Builder(graph, symbols)
    for name in given:
        built.give(name)
    held: dict[str, Tensor] = {name: built.give(name) for name in params}
    for node in nodes:
        built.add(node, OPERATORS)
    model = built.model(makes, weights=held, inputs=given)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    if held:
        options.add_external_initializers(list(held), [weights.value(graph.params[name].key) for name in held])
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS[device])
    except Exception as error:  # ONNX Runtime raises its own exceptions, which have no common base
        raise ExecutionError(f"ONNX Runtime rejects the model: {first_line(error)}") from error
    used = {one.name for one in session.get_inputs()}
    names = [f"out:{name}" for name in makes]

    def run(values: Mapping[str, Array]) -> dict[str, Array]:
        fed = {name: values[name] for name in used}
        try:
            found = [np.asarray(one) for one in session.run(names, fed)]
        except Exception as error:  # as above
            raise ExecutionError(f"ONNX Runtime failed: {first_line(error)}") from error
        return dict(zip(makes, found, strict=True))

    return run


OPERATORS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {**ARITHMETIC, **SHAPING, **REDUCTIONS, **PRODUCTS, **SCANS, **DRAWING}
)
