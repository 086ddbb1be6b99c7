"""Finds the values of a graph that outputs depend on through gradients.

Where JAX gives zero gradients, torch gives none, and an optimizer leaves such a parameter alone. Neighbour: `program`.
"""

from __future__ import annotations

from collections.abc import Collection

from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph


def reached(graph: Graph, roots: Collection[str]) -> frozenset[str]:
    """Return the values that these values (`roots`) depend on through differentiable operators."""
    found = set(roots)
    for node in reversed(graph.nodes):
        if OPERATORS[node.op].differentiable and not found.isdisjoint(node.outputs):
            found.update(reads(node))
    return frozenset(found)
