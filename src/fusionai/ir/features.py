"""Features of a served model for a head that guesses tokens: the states between some of its layers, side by side.

The states become one further output, made in the last block, so that partitions carry them over all cuts to the stage
that has the model's own head (EAGLE-3, arXiv 2503.01840). Neighbours: `ir.serving` keeps the output,
`capture.models.eagle` says which layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from fusionai.ir.graph import producers, reads
from fusionai.ir.schema import Graph, ListArg, Node, Ref, ValueSpec
from fusionai.ir.serving import FEATURES, LOGITS
from fusionai.primitives.errors import GraphError


def with_features(graph: Graph, layers: Sequence[int], size: int) -> Graph:
    """Return a captured causal language model with the output `features` [b, s, layers * size]: what enters each of
    these layers, in this order. Raises `GraphError` if a layer's input of this size is not found."""
    values = [_entering(graph, layer, size) for layer in layers]
    logits = producers(graph)[graph.outputs[LOGITS]]
    joined = f"{graph.outputs[LOGITS]}:{FEATURES}"
    spec = graph.values[values[0]]
    node = Node(
        id=1 + max(one.id for one in graph.nodes),
        op="aten.cat.default",
        args=(ListArg(tuple(Ref(value) for value in values)), -1),
        outputs=(joined,),
        block=logits.block,
    )
    place = graph.nodes.index(logits)
    return msgspec.structs.replace(
        graph,
        nodes=(*graph.nodes[:place], node, *graph.nodes[place:]),
        values={**graph.values, joined: ValueSpec((*spec.shape[:-1], size * len(layers)), spec.dtype)},
        outputs={**graph.outputs, FEATURES: joined},
    )


def _entering(graph: Graph, layer: int, size: int) -> str:
    """Return the value that enters a layer: the first of the layers' width that its nodes read from elsewhere."""
    path = re.compile(rf"(?:^|\.)(?:layers|h|blocks)\.{layer}(?:\.|$)")
    inside = [node for node in graph.nodes if path.search(node.path)]
    made = {value for node in inside for value in node.outputs}
    for node in inside:
        for value in reads(node):
            if value not in made and value not in graph.params and graph.values[value].shape[2:] == (size,):
                return value
    raise GraphError(
        f"{graph.name} has no layer {layer} that reads states of {size} numbers, which the head guesses from.",
        hint="The head belongs to another model.",
    )
