"""Finds the parameters of a stage that may be offloaded between uses, and those that a block needs together.

The result of some operators may share memory with an operand, so a node that reads such a result reads the parameter. A
parameter stays in place if a value that shares its memory leaves the stage. Buffers stay in place because steps rewrite
them.

Neighbours: `stage_base` counts memory with it, `backends.torch.weights_away` offloads the weights of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph

_SHARING: Final = frozenset({"view", "copy", "dropout"})
"""Categories of operators whose result may share memory with an operand. Some copies are included, because they return
their operand where nothing changes."""


def movable_weights(graph: Graph) -> dict[str, frozenset[str]]:
    """Return value -> keys of the movable parameters that the value is, or whose memory it may share."""
    shared = {value: frozenset({spec.key}) for value, spec in graph.params.items() if spec.kind == "parameter"}
    for node in graph.nodes:
        if OPERATORS[node.op].category in _SHARING:
            keys = _of(shared, reads(node))
            shared.update(dict.fromkeys(node.outputs, keys) if keys else {})
    staying = _of(shared, [*graph.outputs.values(), *graph.state_writes]) | set(graph.state_writes.values())
    return {value: keys - staying for value, keys in shared.items() if keys - staying}


def block_weights(graph: Graph) -> dict[int, frozenset[str]]:
    """Return block -> keys of the movable parameters that its nodes read."""
    shared = movable_weights(graph)
    found: dict[int, frozenset[str]] = {}
    for node in graph.nodes:
        keys = _of(shared, reads(node))
        if keys:
            found[node.block] = found.get(node.block, frozenset()) | keys
    return found


def _of(shared: dict[str, frozenset[str]], values: Iterable[str]) -> frozenset[str]:
    return frozenset[str]().union(*(shared[value] for value in values if value in shared))
