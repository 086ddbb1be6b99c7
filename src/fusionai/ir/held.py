"""Keeps trainable parameters in block 0, so that only the stage with block 0 updates them.

Each trainable parameter that a later block reads is copied in block 0, and the later blocks read the copy. A cut then
sends the copies like any boundary value, once per microbatch, and their gradients return. So the stages of later blocks
update nothing and hold no optimizer state. The computed numbers stay the same.

`ir.partition` cuts the result, `ir.ends` keeps block 0 with the job owner, `client.training.preparation` calls this.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import msgspec

from fusionai.ir.graph import reads
from fusionai.ir.schema import Arg, Graph, ListArg, Node, Ref, ValueSpec
from fusionai.primitives.tensors import tensor_bytes

COPY: Final = "aten.clone.default"
"""An operator that is not a view: a copy kept for a replay must not change with the parameter."""


def held_in_front(graph: Graph) -> Graph:
    """Return a graph of the same computation. Node ids stay; the copies have higher ids and come first."""
    learning = {value for value, spec in graph.params.items() if spec.trainable}
    readers: dict[str, Node] = {}
    for node in graph.nodes:
        for value in reads(node):
            if node.block > 0 and value in learning:
                readers.setdefault(value, node)
    names = {value: _free(f"{value}_sent", graph.values) for value in readers}
    first = 1 + max((node.id for node in graph.nodes), default=-1)
    copies = [
        Node(id=first + number, op=COPY, args=(Ref(value),), outputs=(names[value],), path=node.path, block=0)
        for number, (value, node) in enumerate(readers.items())
    ]
    later = [_renamed(node, names) if node.block > 0 else node for node in graph.nodes]
    values = {names[value]: ValueSpec(graph.values[value].shape, graph.values[value].dtype) for value in readers}
    return msgspec.structs.replace(graph, nodes=(*copies, *later), values={**graph.values, **values})


def sent_bytes(graph: Graph) -> int:
    """Return the bytes of the copies that a graph of `held_in_front` sends per microbatch.

    The same amount returns as gradients.
    """
    copied = [value for node in graph.nodes if node.op == COPY and node.block == 0 for value in reads(node)]
    specs = [graph.params[value] for value in copied if value in graph.params and graph.params[value].trainable]
    return sum(tensor_bytes(spec.dtype, spec.shape) for spec in specs if prod(spec.shape))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    return msgspec.structs.replace(
        node,
        args=tuple(_arg(arg, names) for arg in node.args),
        kwargs={name: _arg(arg, names) for name, arg in node.kwargs.items()},
    )


def _arg(arg: Arg, names: Mapping[str, str]) -> Arg:
    match arg:
        case Ref(name):
            return Ref(names.get(name, name))
        case ListArg(items):
            return ListArg(tuple(_arg(item, names) for item in items))
        case _:
            return arg


def _free(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name
