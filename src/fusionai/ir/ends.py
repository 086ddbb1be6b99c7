"""The ends of a model that a job may keep with its owner: how many blocks, and that nothing else betrays them.

Decides the counts from the graph alone. At the front: what comes before the first layer, which reads the job's inputs
(a model that has nothing before its layers keeps the first of them). At the back: the loss, and everything from where
the logits are made; without logits by name, the block before the loss. What lies between must read no input of the job
but where its texts begin and end (and, served, through which adapter they go), and make none of its outputs, so that
neither token ids nor logits leave: checked on the cut itself.

Neighbours: `ir.blocks` numbers, `ir.partition` cuts, `scheduling.ends` plans with the counts.
"""

from __future__ import annotations

from typing import Final

from fusionai.ir.blocks import LOGITS
from fusionai.ir.graph import producers
from fusionai.ir.partition import FEED, cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.primitives.errors import GraphError

TOLD: Final = FROM_SEGMENTS | {"position_ids", "attention_mask"}
"""Inputs that layers may read: they tell where a text begins and ends and which adapter it goes through, not what it
says."""
HIDDEN: Final = "hidden"
"""Of a serving graph: what goes into the head, and crosses to the owner anyway."""


def ends(graph: Graph, *, first_layers: int = 0, last_layers: int = 0, training: bool = True) -> tuple[int, int]:
    """Blocks at the front and at the back that stay, so many layers among them. `training`: whether the graph has its
    loss. Raises `GraphError` where too little is left between, or where that reads or makes what must not leave."""
    count = 1 + max((node.block for node in graph.nodes), default=-1)
    first = 1 + first_layers
    last = count - _tail_start(graph, count, training) + last_layers
    if first + last >= count:
        raise GraphError(
            f"the model has {count} blocks, and {first + last} of them would stay with the job owner: nothing is left "
            "for the pool.",
            hint="Keep fewer layers, or choose the privacy level `encrypted`.",
        )
    _check(graph, first, count - last, count)
    return first, last


def _tail_start(graph: Graph, count: int, training: bool) -> int:
    maker = producers(graph)
    logits = graph.outputs.get(LOGITS)
    made = [] if logits is None or logits not in maker else [maker[logits].block]
    # Logits may be made under another name, or handed to the loss as they are.
    return min([*made, count - 2 if training else count - 1])


def _check(graph: Graph, first: int, end: int, count: int) -> None:
    partition = cut_blocks(graph, [(0, first), (first, end), (end, count)])
    fed = [route.value for route in partition.routes if route.producer == FEED and 1 in route.consumers]
    betrayed = [value for value in fed if value not in TOLD]
    if betrayed:
        raise GraphError(
            f"layers between the model's ends read {', '.join(betrayed)} of the job's data, so it would leave the job "
            "owner.",
            hint="Choose the privacy level `encrypted`, at which peers see it, or `trusted`.",
        )
    middle = partition.stages[1].graph
    inner = {value for node in middle.nodes for value in node.outputs}
    made = [name for name, value in graph.outputs.items() if value in inner and name != HIDDEN]
    if made:
        raise GraphError(
            f"the output {', '.join(made)} is made between the model's ends, so it would leave a peer.",
            hint="Choose the privacy level `encrypted`, at which peers see it, or `trusted`.",
        )
