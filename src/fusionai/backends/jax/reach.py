"""Which values of a graph outputs depend on by way of gradients. Decides nothing; computes nothing.

Where JAX gives zeros, torch gives no gradient at all, and an optimizer leaves such a parameter alone. Neighbour:
`program`.
"""

from __future__ import annotations

from collections.abc import Collection

from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph


def reached(graph: Graph, roots: Collection[str]) -> frozenset[str]:
    """`roots`: values."""
    found = set(roots)
    for node in reversed(graph.nodes):
        if OPERATORS[node.op].differentiable and not found.isdisjoint(node.outputs):
            found.update(reads(node))
    return frozenset(found)
