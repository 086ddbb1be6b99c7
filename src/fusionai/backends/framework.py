"""What the backends of all frameworks share: which operators they have, and loading stages that need no others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import ClassVar

from fusionai.backends.interface import ServingProgram, StageProgram, WorksIn
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import ServeOptions


class FrameworkBackend:
    """The framework-independent part of `backends.interface.Backend` and `backends.interface.ServingBackend`.

    `operators`: names of the operators it has. `stage` and `served`: make the programs of a stage in training and of a
    stage in serving, from the arguments of `load` and `serve`.
    """

    _works_on_cpu: ClassVar[WorksIn] = "caller"

    def __init__(
        self,
        device: str,
        operators: Container[str],
        stage: Callable[..., StageProgram],
        served: Callable[..., ServingProgram],
    ) -> None:
        self.device = device
        self._operators = operators
        self._stage = stage
        self._served = served

    @property
    def works_in(self) -> WorksIn:
        return self._works_on_cpu if self.device == "cpu" else "device"

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({op for op in ops if op not in self._operators}))

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> StageProgram:
        self._require_operators(graph)
        return self._stage(graph, grad_inputs=grad_inputs, options=options, memory_limit_bytes=memory_limit_bytes)

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        self._require_operators(graph)
        return self._served(graph, options=options, memory_limit_bytes=memory_limit_bytes)

    def _require_operators(self, graph: Graph) -> None:
        if missing := self.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(f"this backend has no operator {', '.join(missing)}.")
