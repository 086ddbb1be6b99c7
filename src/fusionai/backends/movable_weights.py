"""Which of a stage's parameters may lie elsewhere between uses, and which belong together. Decides it from the graph.

A result of some operators may lie in the memory of an operand: who reads it reads the parameter. One that leaves the
stage like that stays where it is. Buffers stay: steps rewrite them.

Neighbours: `stage_base` counts with it, `backends.torch.weights_away` has the weights of a block there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph

_SHARING: Final = frozenset({"view", "copy", "dropout"})
"""Categories of operators whose result may lie in the memory of an operand: some copies are none where nothing
changes."""


def movable_weights(graph: Graph) -> dict[str, frozenset[str]]:
    """Value -> keys of the movable parameters that it is, or whose memory it may lie in."""
    shared = {value: frozenset({spec.key}) for value, spec in graph.params.items() if spec.kind == "parameter"}
    for node in graph.nodes:
        if OPERATORS[node.op].category in _SHARING:
            keys = _of(shared, reads(node))
            shared.update(dict.fromkeys(node.outputs, keys) if keys else {})
    staying = _of(shared, [*graph.outputs.values(), *graph.state_writes]) | set(graph.state_writes.values())
    return {value: keys - staying for value, keys in shared.items() if keys - staying}


def block_weights(graph: Graph) -> dict[int, frozenset[str]]:
    """Block -> keys of the movable parameters that its nodes read."""
    shared = movable_weights(graph)
    found: dict[int, frozenset[str]] = {}
    for node in graph.nodes:
        keys = _of(shared, reads(node))
        if keys:
            found[node.block] = found.get(node.block, frozenset()) | keys
    return found


def _of(shared: dict[str, frozenset[str]], values: Iterable[str]) -> frozenset[str]:
    return frozenset[str]().union(*(shared[value] for value in values if value in shared))
