"""Passes that need results at some rows only: after the last attention, only those rows are computed.

A prompt chunk fills caches at every position. The head's product, which is the largest of all, and the layer before it
are needed at the last position only. Neighbours: `ir.serving` finds where the graph can be cut, `serving` runs the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import Interpreter, compile_graph
from fusionai.backends.torch.operators import Context
from fusionai.ir.schema import Graph
from fusionai.ir.serving import SEQUENCE, row_dimension, split_behind_attention
from fusionai.ir.shapes import evaluate

Params = Callable[[Collection[str]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RowsBehind:
    """The two halves of a graph. `before` fills the caches of all its attention nodes."""

    graph: Graph
    before: Interpreter
    after: Interpreter

    @classmethod
    def of(
        cls, graph: Graph, wanted: Collection[str], device: torch.device, kernels: Mapping[int, Callable[..., Any]]
    ) -> RowsBehind | None:
        """Return the halves; None if dividing the graph would save nothing."""
        halves = split_behind_attention(graph, wanted)
        if halves is None:
            return None
        first, second = (
            compile_graph(half, frozenset(half.outputs), with_state_writes=False, device=device, kernels=kernels)
            for half in halves
        )
        return cls(graph, first, second)

    def run(
        self, context: Context, inputs: Mapping[str, Any], params: Params, rows: Sequence[int], device: torch.device
    ) -> dict[str, Any]:
        """Return the outputs at `rows`, by meaning."""
        made, _ = self.before.run(context, inputs, params(self.before.params))
        if not rows:
            return {meaning: self._nothing(meaning, device) for meaning in self.after.outputs}
        index = torch.tensor(list(rows), dtype=torch.int64, device=device)
        values = {name: self._rows(name, made.get(name, inputs.get(name)), index) for name in self.after.inputs}
        outputs, _ = self.after.run(context, values, params(self.after.params))
        return outputs

    def _rows(self, name: str, value: Any, index: torch.Tensor) -> Any:
        along = row_dimension(self.graph, name)
        return value if along is None else value.index_select(along, index)

    def _nothing(self, meaning: str, device: torch.device) -> torch.Tensor:
        spec = self.graph.values[self.graph.outputs[meaning]]
        sizes = [evaluate(dim, {**dict.fromkeys(self.graph.symbols, 1), SEQUENCE: 0}) for dim in spec.shape]
        return torch.empty(sizes, dtype=DTYPES[spec.dtype], device=device)
