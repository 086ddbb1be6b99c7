"""Indices that come in from outside, checked before compiled code reads with them. Decides what is outside.

Compiled code gives NaN for a place outside of a table; an honest error is better, and possible where the indices are
an input of the stage. For backends whose own code would not say. Neighbours: `backends.jax`, `parted_serving`.
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
"""Operator -> positions of its table, along the first dimension, and of its indices."""


def check_indices(graph: Graph, nodes: Sequence[Node], inputs: Mapping[str, HostTensor]) -> None:
    """Raises `ExecutionError` naming the node and the first index that is outside."""
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
