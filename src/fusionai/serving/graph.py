"""The graph that is served: the captured one without its loss, its outputs the logits and what the head reads.

Decides which value is the head's input. Block numbers stay. Neighbours: `serving.deployment` cuts it, `client.serve`
asks which weights it needs.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fusionai.execution.serving_boundary import POSITIONS
from fusionai.ir.graph import producers, prune, reads
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import GraphError

LOGITS: Final = "logits"
HIDDEN: Final = "hidden"
HEADS: Final = ("aten.linear.default", "aten.mm.default", "aten.matmul.default", "aten.addmm.default")


def serving_graph(graph: Graph) -> Graph:
    """Outputs `logits` and `hidden`. Raises `GraphError` for a graph that is none of a causal language model."""
    if LOGITS not in graph.outputs:
        raise GraphError(f"graph {graph.name!r} has no logits: it can't be served.")
    wanted = {LOGITS: graph.outputs[LOGITS], HIDDEN: _head_input(graph)}
    served = prune(msgspec.structs.replace(graph, outputs=wanted), tuple(wanted))
    if unknown := set(served.inputs) - {"input_ids", POSITIONS}:
        raise GraphError(
            f"graph {graph.name!r} needs {', '.join(sorted(unknown))} beside tokens: it can't be served.",
            hint="Only causal language models of text are served.",
        )
    return served


def weight_keys(graph: Graph) -> tuple[str, ...]:
    """Keys of all parameters that serving `graph` reads, sorted."""
    return tuple(sorted({spec.key for spec in serving_graph(graph).params.values()}))


def _head_input(graph: Graph) -> str:
    """What the last product with a weight before the logits reads: walks back through casts, scales and caps."""
    made_by, value = producers(graph), graph.outputs[LOGITS]
    while value in made_by:
        node = made_by[value]
        read = [name for name in reads(node) if name not in graph.params]
        if node.op in HEADS and len(read) < len([*reads(node)]) and read:
            return read[-1]
        if not read:
            break
        value = read[0]
    raise GraphError(f"graph {graph.name!r} has no product with a weight before its logits.")
