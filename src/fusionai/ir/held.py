"""What is trained stays with whoever has the first block: others are sent it, and send back its gradient.

Decides the form: each trainable parameter that a later block reads is copied in block 0, and later blocks read the
copy. A cut then routes the copies like any boundary value, once a microbatch, and their gradients back; so the stages
of later blocks have nothing to update and keep nothing of an optimizer. Changes no number.

Neighbours: `ir.partition` cuts the result, `ir.ends` keeps block 0 with the job owner, `client.preparation` calls.
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
"""No view: what is sent must not change with the parameter while it is kept for a replay."""


def held_in_front(graph: Graph) -> Graph:
    """The same computation. Node ids stay; copies get ids behind them and stand first."""
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
    """Of a graph that `held_in_front` made, what goes out for each microbatch; as much comes back."""
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
