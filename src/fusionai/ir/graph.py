"""Queries on a graph: which node makes a value, which nodes read it, what an output needs. Graphs are never changed.

`prune` returns the part of a graph that some outputs need. `ir.partition`, `ir.cost`, `ir.blocks` and backends use
this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod

import msgspec

from fusionai.ir.operators import IN_BFLOAT16, OPERATORS
from fusionai.ir.schema import Arg, Graph, ListArg, Node, ParamSpec, Ref
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import FLOAT_DTYPES

SYMINT = "symint"


def prune(graph: Graph, outputs: Collection[str], *, state_writes: bool = False) -> Graph:
    """Return the sub-graph that the outputs with these meanings need (and the state writes, if `state_writes`).
    Whatever they do not depend on is left out; order and ids stay. Raises `GraphError` for an unknown meaning."""
    unknown = sorted(set(outputs) - set(graph.outputs))
    if unknown:
        raise GraphError(f"graph {graph.name!r} has no output {unknown[0]!r}; it has {', '.join(graph.outputs)}.")
    kept_writes = dict(graph.state_writes) if state_writes else {}
    wanted = {meaning: value for meaning, value in graph.outputs.items() if meaning in set(outputs)}
    nodes = needed_nodes(graph, [*wanted.values(), *kept_writes])
    return restrict(graph, nodes, inputs=graph.inputs, outputs=wanted, state_writes=kept_writes)


def restrict(
    graph: Graph,
    nodes: Iterable[Node],
    *,
    inputs: Collection[str],
    outputs: Mapping[str, str],
    state_writes: Mapping[str, str],
) -> Graph:
    """Return a graph of these nodes, with only the inputs, parameters and value specs they use."""
    kept = tuple(nodes)
    read = {value for node in kept for value in reads(node)}
    written_keys = set(state_writes.values())
    params = {
        value: spec
        for value, spec in graph.params.items()
        if value in read or (spec.key in written_keys and spec.kind == "buffer")
    }
    fed = tuple(value for value in inputs if value in read)
    made = {value for node in kept for value in node.outputs}
    used = made | set(params) | set(fed)
    return msgspec.structs.replace(
        graph,
        inputs=fed,
        outputs=dict(outputs),
        values={value: spec for value, spec in graph.values.items() if value in used},
        params=params,
        state_writes=dict(state_writes),
        nodes=kept,
    )


def reads(node: Node) -> Iterator[str]:
    """Names of the values that a node reads, in argument order, with repetitions."""
    for arg in node.args:
        yield from references(arg)
    for arg in node.kwargs.values():
        yield from references(arg)


def references(arg: Arg) -> Iterator[str]:
    """Names of the values in an argument."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, ListArg):
        for item in arg.items:
            yield from references(item)


def referring(arg: Arg, name_of: Callable[[str], str]) -> Arg:
    """Return the argument with references to `name_of(value)` instead."""
    match arg:
        case Ref(name):
            return Ref(name_of(name))
        case ListArg(items):
            return ListArg(tuple(referring(item, name_of) for item in items))
        case _:
            return arg


def rewired(node: Node, name_of: Callable[[str], str]) -> Node:
    """Return the same call on the values `name_of(value)`, which is called in the order of `reads`."""
    args = tuple(referring(arg, name_of) for arg in node.args)
    kwargs = {name: referring(arg, name_of) for name, arg in node.kwargs.items()}
    return msgspec.structs.replace(node, args=args, kwargs=kwargs)


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return the same call with its operands and results renamed. Values that are not in `names` keep theirs."""
    outputs = tuple(names.get(value, value) for value in node.outputs)
    return msgspec.structs.replace(rewired(node, lambda value: names.get(value, value)), outputs=outputs)


def nodes_by_block(graph: Graph) -> list[list[Node]]:
    """Nodes of each block, in order; index: block number."""
    members: list[list[Node]] = [[] for _ in range(1 + max((node.block for node in graph.nodes), default=-1))]
    for node in graph.nodes:
        members[node.block].append(node)
    return members


def producers(graph: Graph) -> dict[str, Node]:
    """Value name -> the node that makes it, without inputs and parameters."""
    return {value: node for node in graph.nodes for value in node.outputs}


def consumers(graph: Graph) -> dict[str, tuple[Node, ...]]:
    """Value name -> the nodes that read it, in order, each once. Values without readers are absent."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(reads(node)):
            found.setdefault(value, []).append(node)
    return {value: tuple(nodes) for value, nodes in found.items()}


def needed_nodes(graph: Graph, values: Iterable[str]) -> tuple[Node, ...]:
    """The nodes that these values depend on, in graph order."""
    wanted = set(values)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            kept.append(node)
            wanted.update(reads(node))
    return tuple(reversed(kept))


def is_float(graph: Graph, value: str) -> bool:
    return graph.values[value].dtype in FLOAT_DTYPES


def needing_gradient(graph: Graph) -> frozenset[str]:
    """Values through which a gradient flows: trainable parameters, and float results of differentiable operators on
    such values."""
    found = {value for value, spec in graph.params.items() if spec.trainable}
    for node in graph.nodes:
        if OPERATORS[node.op].differentiable and any(value in found for value in reads(node)):
            found.update(value for value in node.outputs if is_float(graph, value))
    return frozenset(found)


def cheap_nodes(graph: Graph) -> frozenset[int]:
    """Ids of nodes that every stage may compute for itself: positions, masks, rotary tables, sizes.

    These nodes depend on no parameter, no float input, no written buffer and no node that does. The size of an
    activation is known to all stages, so `sym_size` is cheap as well. `fusion.dropout` on cheap values is not cheap,
    nor are random numbers: they belong to one stage.
    """
    written = set(graph.state_writes.values())
    heavy = {value for value, spec in graph.params.items() if spec.kind == "parameter" or spec.key in written}
    heavy.update(value for value in graph.inputs if is_float(graph, value))
    cheap: set[int] = set()
    for node in graph.nodes:
        operator = OPERATORS.get(node.op)
        category = None if operator is None else operator.category
        if category == "size":
            cheap.add(node.id)
        # Unknown operators in an unfinished graph may draw random numbers.
        elif category in ("dropout", None) or any(value in heavy for value in reads(node)):
            heavy.update(node.outputs)
        else:
            cheap.add(node.id)
    return frozenset(cheap)


def copied_weights(graph: Graph) -> frozenset[tuple[int, str]]:
    """Return (block, value) of the float32 weights of which training in bfloat16 makes a copy for products; each
    microbatch in flight has one, because backward reads it."""
    return frozenset(
        (node.block, value)
        for node in graph.nodes
        if OPERATORS[node.op].category in IN_BFLOAT16
        for value in reads(node)
        if value in graph.params and graph.params[value].dtype == "float32" and not graph.params[value].stored
    )


def copy_bytes(spec: ParamSpec) -> int:
    """Return the bytes of a weight's copy in bfloat16."""
    return 2 * prod(spec.shape)
