"""Finds which blocks stay with the job owner (embedding and head), and checks that peers get no job data.

Decides the counts from the graph alone. At the front: everything before the first layer, which reads the job's inputs
(or the first layer, if nothing comes before it). At the back: the loss and everything from the computation of the
logits on; if no output is named logits, the block before the loss.

Neither token ids nor logits may leave the owner. So the blocks between may not read the job's inputs, except where
texts begin and end (and, in serving, which adapter they use), and may not compute the job's outputs. This is checked on
the actual cut.

`ir.blocks` numbers blocks, `ir.partition` cuts, `scheduling.problem.embedding_and_head` plans with the counts.
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
"""Inputs that layers may read: they say where a text begins and ends and which adapter it uses, but not its content."""
HIDDEN: Final = "hidden"
"""Output of a serving graph that goes into the head. It is sent to the owner anyway."""


def ends(graph: Graph, *, first_layers: int = 0, last_layers: int = 0, training: bool = True) -> tuple[int, int]:
    """Return the number of blocks at the front and at the back that stay with the owner.

    `first_layers` and `last_layers` are the layers among them. `training`: whether the graph has its loss. Raises
    `GraphError` if no block is left between, or if the blocks between read or compute what must stay.
    """
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
    # Logits may be made under another name, or passed to the loss directly.
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
