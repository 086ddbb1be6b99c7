"""Checks indices that are inputs of a stage before compiled code uses them.

Compiled code returns NaN for an index outside a table. An error is clearer, and possible if the indices are an input of
the stage. Used by backends whose own code can't raise such errors. Neighbours: `backends.jax`, `backends.onnxruntime`,
`parted_serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from fusionai.backends.binding import describe
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor

TABLES: Final = {
    "aten.embedding.default": (0, 1),
    "aten.index_select.default": (0, 2),
    "fusion.expert_linear": (1, 2),
}
"""Operator -> positions of its table and of its indices among the arguments. Indices refer to the table's first
dimension, or to dimension `args[1]` of index_select."""


def check_indices(graph: Graph, nodes: Sequence[Node], inputs: Mapping[str, HostTensor]) -> None:
    """Raise `ExecutionError` naming the node and the first index out of range."""
    for node in nodes:
        places = TABLES.get(node.op)
        if places is None or len(node.args) <= max(places):
            continue
        table, indices = node.args[places[0]], node.args[places[1]]
        if not isinstance(table, Ref) or not isinstance(indices, Ref) or indices.name not in inputs:
            continue
        dim = node.args[1] if node.op == "aten.index_select.default" else 0
        size = graph.values[table.name].shape[dim] if isinstance(dim, int) else None
        given = inputs[indices.name]
        if not isinstance(size, int) or not given.nbytes or given.dtype not in ("int64", "int32"):
            continue
        values = np.frombuffer(given.data, given.dtype)
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            raise ExecutionError(f"{describe(node)}: expected indices from 0 to {size - 1}, got {int(outside[0])}.")
